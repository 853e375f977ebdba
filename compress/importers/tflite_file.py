""".tflite files as models to work on: what a file is, and a float one as a Keras model.

A float file is rebuilt with Keras layers (`tflite_rules`), and the rebuilt model must then
answer as the file does in the TFLite runtime. What a file is can be told without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.refused import Refused, carrying
from compress.importers.tflite_network import Imported, imported
from compress.importers.tflite_rules import RULES
from compress.tflite import floats, graph, proof
from compress.tflite.graph import Graph
from compress.training import network as networks
from compress.training import tensorflow
from compress.training.network import Network, Tensor, tensors_in

if TYPE_CHECKING:
    import keras

TOLERANCE = 1e-4
"""Largest difference of a tensor, relative to the largest number in it."""
RANDOM_SAMPLES = 2
Feeds = Sequence[Sequence[NDArray[np.float32]]]
"""For each run one array for each input."""


@dataclass(frozen=True)
class File:
    """What a .tflite file is to a pipeline.

    Attributes:
        path: the file.
        graph: as it was read.
        imported: the network it became; None for a file that is quantized, or holds no floats.
    """

    path: Path
    graph: Graph
    imported: Imported | None

    @property
    def problems(self) -> tuple[Refused, ...]:
        """The operators of a float file that have no counterpart in Keras."""
        return self.imported.problems if self.imported else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What of a float file is not as it was, in words."""
        return self.imported.plain.notes if self.imported else ()

    @property
    def batch(self) -> int:
        """How many samples it takes at once."""
        return self.graph.tensors[self.graph.inputs[0]].shape[0]


def read(path: Path) -> File:
    """Reads a file, and finds out what can be done with it; without TensorFlow.

    Raises:
        ModelError: it is no .tflite file, is damaged, or makes no sense.
    """
    parsed = graph.read(path)
    if not floats.is_float(parsed):
        return File(path, parsed, None)
    try:
        return File(path, parsed, imported(floats.plain(parsed), RULES))
    except ModelError as error:
        error.where = str(path)
        raise


def load(file: File, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, float]:
    """A float file as a Keras model, and the largest difference of their outputs.

    Args:
        file: one without problems.
        samples: real samples [n, ...] that both are run on, beside random ones.

    Raises:
        ModelError: an operator has no counterpart, or the model answers differently.
    """
    assert file.imported is not None  # the caller has looked
    if file.problems:
        what = f"{len(file.problems)} operators cannot become layers of Keras: {'; '.join(map(str, file.problems))}"
        raise carrying(ModelError(what, where=str(file.path)), file.problems)
    found = file.imported
    needed = networks.observed(found.network, list(tensors_in(found.network.outputs)))
    network = replace(needed, name="model", outputs=found.network.outputs)
    feeds = [*_random(found), *_real(found, samples)]
    try:
        model = _built(network)
        apart = _difference(model, found, feeds)
    except ModelError as error:
        error.where = str(file.path)
        raise
    if apart > TOLERANCE:
        where = _first_difference(found, feeds)
        raise ModelError(
            f"rebuilt in Keras it answers differently, by {apart:.2g} of the largest output; first at {where}",
            where=str(file.path),
            allowed=f"{TOLERANCE:g}",
            todo="please report it, with the file",
        )
    return model, apart


def _built(network: Network) -> keras.Model:
    """The network as a Keras model.

    Raises:
        ModelError: Keras does not take it, or makes tensors of other shapes than the file says.
    """
    import tensorflow as tf

    own = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RuntimeError)
    try:
        model = networks.build(network)
        shapes = networks.read(model).shapes
    except (*own, ValueError, TypeError, tf.errors.OpError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"Keras does not take it: {first[:300]}") from error
    for tensor, shape in network.shapes.items():
        if shapes.get(tensor, shape) != shape:
            raise ModelError(f"layer {tensor.layer!r} makes {list(shapes[tensor])} in Keras, and {list(shape)} here")
    return model


def _random(found: Imported) -> list[list[NDArray[np.float32]]]:
    """Samples between 0 and 1, and normal ones."""
    generator = np.random.default_rng(0)
    shapes = [found.plain.graph.tensors[index].shape for index in found.plain.graph.inputs]
    draws = (generator.random, generator.standard_normal)
    return [[np.asarray(draw(shape), np.float32) for shape in shapes] for draw in draws for _ in range(RANDOM_SAMPLES)]


def _real(found: Imported, samples: NDArray[np.float32] | None) -> list[list[NDArray[np.float32]]]:
    """Samples in batches as the file has them."""
    shapes = [found.plain.graph.tensors[index].shape for index in found.plain.graph.inputs]
    if samples is None or len(shapes) != 1 or samples.shape[1:] != shapes[0][1:]:
        return []
    batch = shapes[0][0]
    return [[np.asarray(samples[at : at + batch])] for at in range(0, len(samples) - batch + 1, batch)]


def _difference(model: Any, found: Imported, feeds: Feeds) -> float:
    """The largest difference of the outputs."""
    runner = proof.Runner(found.plain.graph)
    apart = 0.0
    for feed in feeds:
        for wanted, made in zip(runner.run(feed), _answers(model, feed), strict=True):
            apart = max(apart, relative(wanted, made))
    return apart


def _answers(model: Any, feed: Sequence[NDArray[np.float32]]) -> list[NDArray[Any]]:
    import tensorflow as tf

    try:
        made = model(list(feed) if len(feed) > 1 else feed[0], training=False)
    except (tf.errors.OpError, ValueError, MemoryError) as error:
        raise ModelError(f"Keras cannot run it: {str(error).strip().splitlines()[0][:300]}") from error
    return [np.asarray(value) for value in tensorflow.keras().tree.flatten(made)]


def relative(wanted: NDArray[Any], made: NDArray[Any]) -> float:
    """The largest difference, relative to the largest finite number that is wanted."""
    if wanted.size != made.size:
        return float("inf")
    wanted, made = wanted.reshape(-1).astype(np.float64), made.reshape(-1).astype(np.float64)
    same = (wanted == made) | (np.isnan(wanted) & np.isnan(made))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(wanted - made))
    scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)) / max(scale, 1e-6)


def _first_difference(found: Imported, feeds: Feeds) -> str:
    """The first operator whose result differs, by its number in the file."""
    places = _places(found)
    model = networks.build(networks.observed(found.network, list(places.values())))
    runner = proof.Runner(found.plain.graph, keep=True)
    apart = dict.fromkeys(places, 0.0)
    for feed in feeds:
        for index, wanted, made in zip(places, runner.run(feed, list(places)), _answers(model, feed), strict=True):
            apart[index] = max(apart[index], relative(wanted, made))
    parsed = found.plain.graph
    producers = zip(parsed.operators, found.plain.numbers, strict=True)
    named = [
        (op, number, worst)
        for op, number in producers
        if (worst := max((apart.get(index, 0.0) for index in op.outputs), default=0.0)) > TOLERANCE
    ]
    if not named:
        return "no operator alone"
    operator, number, worst = named[0]
    return f"{floats.title(operator, number, parsed)}, by {worst:.2g}"


def _places(found: Imported) -> Mapping[int, Tensor]:
    """Where the network has what each operator makes."""
    made = [index for operator in found.plain.graph.operators for index in operator.outputs]
    return {index: found.values[index].tensor for index in made if index in found.values}
