"""A signature of a SavedModel as a function of one sample, and its outputs for random samples, in TensorFlow.

This code runs in the child process of `conversion`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from compress.importers.common import verification
from compress.importers.common.guarded_calls import first_line
from compress.importers.saved_model.saved_model_folder import port_order

SAMPLES = 4
"""Number of random samples of inputs whose first dimension is open or 1."""
MOST_COMPARED = 16
"""Largest number of samples of a fixed batch that are compared."""


class BatchError(Exception):
    """The first axis of an input is not a batch; the message is the reason."""


@dataclass(frozen=True)
class Signature:
    """A signature as TensorFlow loads it.

    Attributes:
        function: the function.
        inputs: names of its inputs, in the order of the folder.
        outputs: names of its outputs, in the order of the folder.
        specs: types and shapes of the inputs.
        batch: number of samples that it computes at once; None for any number.
    """

    function: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    specs: tuple[Any, ...]
    batch: int | None

    @classmethod
    def of(cls, function: Any) -> Self:
        """Return a loaded signature.

        Raises:
            BatchError: the first dimensions of its inputs contradict each other.
        """
        specs = function.structured_input_signature[1]
        inputs = sorted(specs, key=port_order)
        outputs = sorted(function.structured_outputs, key=port_order)
        firsts = {name: specs[name].shape[0] for name in inputs if specs[name].shape.rank}
        sizes = set(firsts.values()) - {1}
        if len(sizes) > 1:
            listed = ", ".join(f"{name} has {'any' if size is None else size}" for name, size in firsts.items())
            raise BatchError(f"the first dimensions of its inputs are not those of one batch: {listed}")
        batch = sizes.pop() if sizes else 1
        return cls(function, tuple(inputs), tuple(outputs), tuple(specs[name] for name in inputs), batch)

    def __call__(self, tensors: Any) -> list[NDArray[Any]]:
        """Return the outputs for one array for each input."""
        import tensorflow as tf

        results = self.function(**dict(zip(self.inputs, map(tf.constant, tensors), strict=True)))
        return [results[name].numpy() for name in self.outputs]

    def for_one_sample(self) -> Any:
        """Return a concrete function of one sample, with inputs input_0, input_1, … and a list of the outputs.

        Raises:
            BatchError: the graph works only with its fixed batch.
        """
        import tensorflow as tf

        specs = [
            tf.TensorSpec([1, *spec.shape[1:]][: spec.shape.rank], spec.dtype, f"input_{index}")
            for index, spec in enumerate(self.specs)
        ]
        function = self.function if self.batch in (None, 1) else self._with_free_batch()

        @tf.function(input_signature=specs, autograph=False)  # type: ignore[untyped-decorator]
        def run(*tensors: Any) -> Any:
            outputs = function(**dict(zip(self.inputs, tensors, strict=True)))
            return [outputs[name] for name in self.outputs]

        return run.get_concrete_function()

    def _with_free_batch(self) -> Any:
        """Return the function for inputs with another first dimension: its graph, with its shapes inferred again."""
        import tensorflow as tf
        from tensorflow.python.framework import convert_to_constants

        frozen = convert_to_constants.convert_variables_to_constants_v2(self.function, lower_control_flow=False)
        placeholders = dict(zip(sorted(self.inputs), frozen.inputs, strict=True))  # TensorFlow's order is by name
        results = [tensor.name for tensor in frozen.outputs]

        def call(**tensors: Any) -> dict[str, Any]:
            replaced = {placeholders[name].name: tensor for name, tensor in tensors.items()}
            try:
                outputs = tf.graph_util.import_graph_def(
                    frozen.graph.as_graph_def(), input_map=replaced, return_elements=results, name=""
                )
            except ValueError as error:
                raise BatchError(f"{self.fixed}, which other operators need: {first_line(error)}") from error
            return dict(zip(sorted(self.outputs), outputs, strict=True))

        return call

    @property
    def fixed(self) -> str:
        """The inputs with a fixed batch, for a message."""
        names = [name for name, spec in zip(self.inputs, self.specs, strict=True) if spec.shape[:1] == [self.batch]]
        return f"its input {', '.join(map(repr, names))} has a fixed first dimension of {self.batch}"


@dataclass(frozen=True)
class _Run:
    """One sample: the inputs, the outputs of the SavedModel, and its outputs for inputs with changed last bits."""

    inputs: list[NDArray[Any]]
    outputs: list[NDArray[Any]]
    repeated: list[NDArray[Any]]


def run_samples(signature: Signature, function: Any) -> dict[str, list[list[NDArray[Any]]]]:
    """Return the inputs, the outputs and the repeated outputs of random samples (`conversion.Converted`).

    The signature computes all samples of a batch at once: they are different, so an operation over the first axis
    changes the result.

    Args:
        signature: the signature.
        function: the function of one sample.

    Raises:
        BatchError: the outputs of several samples are not those of each sample alone.
    """
    import tensorflow as tf

    generator = np.random.default_rng(0)
    rows = SAMPLES if signature.batch is None else signature.batch
    try:
        runs = _run_together(signature, function, generator, rows)
    except tf.errors.OpError:
        if signature.batch is not None:
            raise
        rows = 1  # the dimension is open, but the graph takes one sample only
        runs = _run_together(signature, function, generator, rows)
    while rows == 1 and len(runs) < SAMPLES:
        runs += _run_together(signature, function, generator, rows)
    return {
        "inputs": [run.inputs for run in runs],
        "outputs": [run.outputs for run in runs],
        "repeated": [run.repeated for run in runs],
    }


def _run_together(signature: Signature, function: Any, generator: np.random.Generator, rows: int) -> list[_Run]:
    """Return the runs of some samples that the signature computes at once."""
    import tensorflow as tf

    is_split = [spec.shape.rank and spec.shape[0] != 1 for spec in signature.specs]
    inputs = [
        _random(generator, (rows, *spec.shape[1:]) if split else tuple(spec.shape), spec.dtype)
        for spec, split in zip(signature.specs, is_split, strict=True)
    ]
    (changed,) = verification.change_last_bits([inputs])
    outputs, repeated = signature(inputs), signature(changed)
    runs, differences = [], []
    for row in np.linspace(0, rows - 1, min(rows, MOST_COMPARED)).astype(int):
        sample = [array[row : row + 1] if split else array for array, split in zip(inputs, is_split, strict=True)]
        alone = [tensor.numpy() for tensor in function(*map(tf.constant, sample))]
        runs.append(
            _Run(
                sample,
                *(
                    [_part(*pair, row, rows) for pair in zip(whole, alone, strict=True)]
                    for whole in (outputs, repeated)
                ),
            )
        )
        differences.append(verification.compare_runs([runs[-1].outputs], [alone]))
    _check_independent(signature, runs, differences)
    return runs


def _part(whole: NDArray[Any], alone: NDArray[Any], row: int, rows: int) -> NDArray[Any]:
    """Return the part of an output that belongs to one sample; all of an output that has no batch."""
    return whole[row : row + 1] if whole.shape[:1] == (rows,) and alone.shape[:1] == (1,) else whole


def _check_independent(
    signature: Signature, runs: list[_Run], differences: list[list[verification.OutputDifference]]
) -> None:
    """Check that the outputs of several samples are those of each sample alone.

    Raises:
        BatchError: they are not.
    """
    outputs = [run.outputs for run in runs]
    allowed, _ = verification.allowed_differences(outputs, [run.repeated for run in runs])
    for limit, by_output in zip(allowed, differences, strict=True):
        for name, difference in zip(signature.outputs, by_output, strict=True):
            if not difference.relative <= limit:
                start = f"{signature.fixed}, and it is not a batch" if signature.batch else "its first axis is no batch"
                how = f"by {difference.relative:.2g} of its largest value"
                how = how if np.isfinite(difference.relative) else "in shape, or is not finite"
                raise BatchError(
                    f"{start}: for several different samples at once, the output {name!r} differs {how} from that for "
                    "each sample alone"
                )


def _random(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return standard normal values, every value of an 8-bit integer, or 0 and 1 for other integers."""
    kind = np.dtype(dtype.as_numpy_dtype)
    values: NDArray[Any]
    if dtype.is_floating:
        values = generator.standard_normal(shape)
    elif kind.itemsize == 1 and dtype.is_integer:
        values = generator.integers(dtype.min, dtype.max, shape, endpoint=True)
    else:
        values = generator.integers(0, 2, shape)
    return values.astype(kind)
