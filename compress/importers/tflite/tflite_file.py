""".tflite files as models to work on: what a file is, and a float one as a Keras model.

A float file is rebuilt with Keras layers (`tflite_rules`), and the rebuilt model must then
answer as the file does in the TFLite runtime. What a file is can be told without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.common import verification
from compress.importers.common.layer_calls import NOT_MADE
from compress.importers.common.unsupported import Refused, carrying
from compress.importers.common.verification import TOLERANCE, Feeds, answers, built, relative
from compress.importers.tflite.network import Imported, imported
from compress.importers.tflite.ops.layers import RULES
from compress.ir import keras_graph as networks
from compress.ir.keras_graph import Tensor, tensors_in
from compress.tflite import comparison, dilation, float_graph, graph
from compress.tflite.float_graph import Plain
from compress.tflite.graph import Graph

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class File:
    """What a .tflite file is to a pipeline.

    Attributes:
        path: the file.
        graph: as it was read.
        plain: a float one in its plain form, which the rebuilt model must answer as; None for a file that is quantized,
            or holds no floats.
        imported: the network it became, likewise.
    """

    path: Path
    graph: Graph
    plain: Plain | None = None
    imported: Imported | None = None

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
    if not float_graph.is_float(parsed):
        return File(path, parsed)
    try:
        plain = float_graph.plain(parsed)
        return File(path, parsed, plain, imported(_joined(plain), RULES))
    except ModelError as error:
        error.where = str(path)
        raise


def _joined(plain: Plain) -> Plain:
    """The same with dilated convolutions as one operator: of batches of any size the converter makes three or five."""
    numbers = {op.outputs[:1]: number for op, number in zip(plain.graph.operators, plain.numbers, strict=True)}
    edited = plain.graph
    while (changed := _with_a_dilation(edited)) is not None:
        edited = changed
    following, found = 0, list[int]()
    for operator in reversed(edited.operators):  # what was put in has the number of what it was put in for
        following = numbers.get(operator.outputs[:1], following)
        found.append(following)
    return Plain(edited, tuple(reversed(found)), plain.notes)


def _with_a_dilation(found: Graph) -> Graph | None:
    """One more of them joined, if there is one."""
    for operator in found.operators:
        if operator.name == "SPACE_TO_BATCH_ND":
            for rewrite in (dilation.dilated_convolution, dilation.dilated_row):
                try:
                    for edit in rewrite(operator, found):
                        return edit.graph()
                except (ModelError, *NOT_MADE):
                    continue  # it makes no sense, and is refused as an operator
    return None


def load(file: File, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, float]:
    """A float file as a Keras model, and the largest difference of their outputs.

    Args:
        file: one without problems.
        samples: real samples [n, ...] that both are run on, beside random ones.

    Raises:
        ModelError: an operator has no counterpart, or the model answers differently.
    """
    assert file.plain is not None  # the caller has looked
    assert file.imported is not None
    if file.problems:
        what = f"{len(file.problems)} operators cannot become layers of Keras: {'; '.join(map(str, file.problems))}"
        raise carrying(ModelError(what, where=str(file.path)), file.problems)
    found = file.imported
    needed = networks.observed(found.network, list(tensors_in(found.network.outputs)))
    network = replace(needed, name="model", outputs=found.network.outputs)
    sides = [found.plain.graph.tensors[index].shape for index in found.plain.graph.inputs]
    feeds = [*verification.random(sides), *_real(sides, samples)]
    try:
        model = built(network)
        apart = _difference(model, file.plain.graph, feeds)
    except ModelError as error:
        error.where = str(file.path)
        raise
    if apart > TOLERANCE:
        where = _first_difference(found, feeds)
        raise verification.too_far(apart, str(file.path), where)
    return model, apart


def _real(shapes: list[tuple[int, ...]], samples: NDArray[np.float32] | None) -> list[list[NDArray[np.float32]]]:
    """Samples in batches as the file has them."""
    if samples is None or len(shapes) != 1 or samples.shape[1:] != shapes[0][1:]:
        return []
    batch = shapes[0][0]
    return [[np.asarray(samples[at : at + batch])] for at in range(0, len(samples) - batch + 1, batch)]


def _difference(model: Any, original: Graph, feeds: Feeds) -> float:
    """The largest difference of the outputs."""
    runner = comparison.Runner(original)
    apart = 0.0
    for feed in feeds:
        for wanted, made in zip(runner.run(feed), answers(model, feed), strict=True):
            apart = max(apart, relative(wanted, made))
    return apart


def _first_difference(found: Imported, feeds: Feeds) -> str:
    """The first operator whose result differs, by its number in the file."""
    places = _places(found)
    model = networks.build(networks.observed(found.network, list(places.values())))
    runner = comparison.Runner(found.plain.graph, keep=True)
    apart = dict.fromkeys(places, 0.0)
    for feed in feeds:
        for index, wanted, made in zip(places, runner.run(feed, list(places)), answers(model, feed), strict=True):
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
    return f"{float_graph.title(operator, number, parsed)}, by {worst:.2g}"


def _places(found: Imported) -> Mapping[int, Tensor]:
    """Where the network has what each operator makes."""
    made = [index for operator in found.plain.graph.operators for index in operator.outputs]
    return {index: found.values[index].tensor for index in made if index in found.values}
