"""Comparison of a rebuilt model with its original: both run on the same inputs.

Tolerance policy: the largest difference of an output, divided by the largest finite value that is expected in it, is at
most `TOLERANCE`. A runtime computes some outputs to an absolute precision (shares of 1, for example); a minimum scale
says so. Where the original itself changes more when the last bits of its inputs change, more is allowed
(`allowed_differences`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError, cause_of
from compress.model.ir import keras_graph, tensorflow
from compress.model.ir.keras_graph import Network

if TYPE_CHECKING:
    import keras

TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest expected value in it."""
MINIMUM_SCALE = 1e-6
"""Smallest value that differences are taken relative to."""
SENSITIVITY_FACTOR = 32
"""Allowed difference as a multiple of the change that the last bits of the inputs cause, if above the tolerance."""
MAXIMUM_TOLERANCE = 1e-2
"""Limit of the allowed difference, however sensitive the original is."""
RANDOM_SAMPLES = 2
"""Random samples of each distribution."""
OPEN_DIMENSION = 32
"""Size used for an open dimension of an input."""

Arrays = Sequence[NDArray[Any]]
"""One array for each input or output."""
Runs = Sequence[Arrays]
"""The inputs or outputs of several runs."""
RunT = TypeVar("RunT")
IndexT = TypeVar("IndexT")


@dataclass(frozen=True)
class OutputDifference:
    """The largest difference of one output.

    Attributes:
        absolute: infinite for different shapes, or where only one value is finite.
        relative: absolute difference divided by the scale of the expected values.
    """

    absolute: float
    relative: float


@dataclass(frozen=True)
class Parity:
    """The largest differences of all outputs over all samples.

    Attributes:
        against: runtime that computed the expected outputs, with its version.
        own: sensitivity of the original, measured only where the differences exceed the tolerance: its largest
            relative change when the last bits of its inputs change.
    """

    max_abs: float
    max_rel: float
    against: str
    samples: int
    own: float | None = None


def compare_output(expected: Any, actual: Any, minimum_scale: float = MINIMUM_SCALE) -> OutputDifference:
    """Return the difference of one output; equal infinities and NaNs do not differ."""
    expected = np.asarray(expected)
    actual = np.asarray(actual)
    if expected.shape != actual.shape:
        return OutputDifference(float("inf"), float("inf"))
    equal = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
    with np.errstate(invalid="ignore"):
        differences = np.abs(np.subtract(expected, actual, dtype=np.float64))
    differences = np.nan_to_num(np.where(equal, 0.0, differences), nan=np.inf)
    absolute = float(differences.max(initial=0.0))
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    return OutputDifference(absolute, absolute / max(scale, minimum_scale))


def compare_outputs(expected: Arrays, actual: Arrays) -> list[OutputDifference]:
    """Return the differences of the outputs of one run."""
    return [compare_output(*pair) for pair in zip(expected, actual, strict=True)]


def largest_relative(differences: Iterable[OutputDifference]) -> float:
    """Return the largest relative difference; 0 if there is no output."""
    return max((difference.relative for difference in differences), default=0.0)


def summarize(
    differences: Sequence[OutputDifference], against: str, samples: int, sensitivity: float | None = None
) -> Parity:
    """Return the parity over all outputs."""
    largest = max((difference.absolute for difference in differences), default=0.0)
    return Parity(largest, largest_relative(differences), against, samples, sensitivity)


def allowed_differences(expected: Runs, repeated: Runs) -> tuple[list[float], float]:
    """Return the allowed relative difference of each run, and the sensitivity of the original.

    The logarithm of the difference of two large values is sensitive: two correct runtimes differ there as much as one
    runtime does for two inputs that are nearly equal. `repeated` are the outputs of the original for the same inputs
    with their last bits changed.
    """
    changes = [largest_relative(compare_outputs(*outputs)) for outputs in zip(expected, repeated, strict=True)]
    allowed = [max(TOLERANCE, min(SENSITIVITY_FACTOR * change, MAXIMUM_TOLERANCE)) for change in changes]
    return allowed, max(changes)


def verified(
    runs: Sequence[RunT],
    by_run: Sequence[Sequence[OutputDifference]],
    expected: Runs,
    with_last_bits_changed: Callable[[], Runs],
    runtime: str,
    samples: int,
) -> tuple[Parity, list[RunT]]:
    """Return the comparison of a rebuilt model, and the inputs of the runs that differ by more than is allowed.

    `by_run` has the differences of the outputs of each run, and `expected` the outputs of the original. Only if a
    difference exceeds the tolerance, the original runs again, on inputs with their last bits changed. `runtime` is the
    distribution that ran the original.
    """
    differences = [*chain.from_iterable(by_run)]
    allowed, sensitivity = [TOLERANCE] * len(runs), None
    if largest_relative(differences) > TOLERANCE:
        allowed, sensitivity = allowed_differences(expected, with_last_bits_changed())
    parity = summarize(differences, runtime_version(runtime), samples, sensitivity)
    pairs = zip(runs, by_run, allowed, strict=True)
    return parity, [inputs for inputs, run, limit in pairs if not largest_relative(run) <= limit]


def too_different(parity: Parity, where: str, first: str = "") -> ModelError:
    """Return the error for a rebuilt model whose outputs differ.

    `first` is the first operator of the file whose result differs, if it is known.
    """
    located = f"; first at {first}" if first else ""
    return ModelError(
        f"the outputs of the rebuilt Keras model differ by {parity.max_rel:.2g} of the largest output{located}",
        where=where,
        allowed=f"{TOLERANCE:g}",
        hint="please report it, with the file",
    )


def first_difference(operators: Iterable[tuple[str, Sequence[IndexT]]], largest: Mapping[IndexT, float]) -> str:
    """Return the first operator whose result differs: `operators` are titles and outputs, `largest` differences."""
    for title, outputs in operators:
        relative = max((largest.get(output, 0.0) for output in outputs), default=0.0)
        if relative > TOLERANCE:
            return f"{title}, by {relative:.2g}"
    return "no operator alone"


def build_model(network: Network) -> keras.Model:
    """Build the layers of a network that its outputs need, as a Keras model.

    Raises:
        ModelError: Keras rejects a layer, or its tensors have other shapes than in the file.
    """
    tensorflow.keras()  # before TensorFlow itself is imported: it reads environment variables then
    import tensorflow as tf

    network = keras_graph.without_unused_calls(network)
    library_errors = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError)
    try:
        model = keras_graph.build(network)
        shapes = keras_graph.read(model).shapes
    except (*library_errors, RuntimeError, ValueError, TypeError, tf.errors.OpError) as error:
        raise ModelError(f"Keras rejects the layer: {cause_of(error)}") from error
    for tensor, shape in network.shapes.items():
        if shapes.get(tensor, shape) != shape:
            raise ModelError(
                f"layer {tensor.layer!r} has the output shape {list(shapes[tensor])} in Keras, but {list(shape)} in "
                "the file"
            )
    return model


def run_model(model: Any, inputs: Arrays) -> list[NDArray[Any]]:
    """Return the outputs of a Keras model, without state of earlier runs."""
    import tensorflow as tf

    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            layer.reset_state()
    try:
        outputs = model(_as_called(model, inputs), training=False)
    except (tf.errors.OpError, ValueError, MemoryError) as error:
        raise ModelError(f"Keras cannot run it: {cause_of(error)}") from error
    return [np.asarray(output) for output in tensorflow.keras().tree.flatten(outputs)]


def _as_called(model: Any, inputs: Arrays) -> Any:
    """Return inputs in the structure that the model was built with: one array, or a list or a map, even of one."""
    functional = getattr(model, "_functional", model)  # of a sequential model
    structure = getattr(functional, "input", None)
    if structure is None:
        return list(inputs) if len(inputs) > 1 else inputs[0]
    return tensorflow.keras().tree.pack_sequence_as(structure, list(inputs))


def compare_keras_models(model: keras.Model, other: keras.Model) -> Parity:
    """Compare two Keras 3 models on random inputs."""
    shapes = [(1, *(OPEN_DIMENSION if size is None else size for size in tensor.shape[1:])) for tensor in model.inputs]
    runs = random_inputs(shapes, [tensor.dtype for tensor in model.inputs])
    by_run = [compare_outputs(run_model(model, inputs), run_model(other, inputs)) for inputs in runs]
    return summarize([*chain.from_iterable(by_run)], runtime_version("keras"), len(runs))


def random_inputs(shapes: Sequence[Sequence[int]], dtypes: Sequence[str] | None = None) -> list[list[NDArray[Any]]]:
    """Return uniform samples in [0, 1), then standard normal ones; 0 and 1 for inputs of integers."""
    generator = np.random.default_rng(0)
    dtypes = dtypes or ["float32"] * len(shapes)
    runs = []
    for draw in (generator.random, generator.standard_normal):
        for _ in range(RANDOM_SAMPLES):
            arrays = []
            for shape, dtype in zip(shapes, dtypes, strict=True):
                if "float" in dtype:
                    arrays.append(np.asarray(draw(shape), np.float32))
                else:
                    arrays.append(generator.integers(0, 2, shape).astype(dtype))
            runs.append(arrays)
    return runs


def change_last_bits(runs: Runs) -> list[list[NDArray[Any]]]:
    """Return the same inputs with the last bit of every float32 value changed, up or down at random."""
    generator = np.random.default_rng(1)
    directions = (np.float32(-np.inf), np.float32(np.inf))

    def change(array: NDArray[Any]) -> NDArray[Any]:
        if not np.issubdtype(array.dtype, np.floating):
            return array
        return np.asarray(np.nextafter(array, generator.choice(directions, array.shape)))

    return [list(map(change, inputs)) for inputs in runs]


def runtime_version(distribution: str) -> str:
    """Return the name and version of a runtime."""
    return f"{distribution} {importlib.metadata.version(distribution)}"
