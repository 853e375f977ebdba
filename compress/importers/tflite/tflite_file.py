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
from compress.importers.common import verification
from compress.importers.common.layer_calls import NOT_MADE
from compress.importers.common.unsupported import Refused, unsupported
from compress.importers.common.verification import TOLERANCE, Parity, Runs
from compress.importers.tflite.network import TfliteNetwork, build_network
from compress.importers.tflite.ops.layers import RULES
from compress.ir import keras_graph as networks
from compress.ir.keras_graph import LayerOutput, tensors_in
from compress.tflite import comparison, dilation, float_graph, graph
from compress.tflite.float_graph import Plain
from compress.tflite.graph import Graph

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class TfliteFile:
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
    imported: TfliteNetwork | None = None

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


def read(path: Path) -> TfliteFile:
    """Reads a file, and finds out what can be done with it; without TensorFlow.

    Raises:
        ModelError: it is no .tflite file, is damaged, or makes no sense.
    """
    parsed = graph.read(path)
    if not float_graph.is_float(parsed):
        return TfliteFile(path, parsed)
    try:
        plain = float_graph.plain(parsed)
        return TfliteFile(path, parsed, plain, build_network(_joined(plain), RULES))
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


def load(file: TfliteFile, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, Parity]:
    """Rebuild a float file as a Keras model, and compare it with the file in the TFLite runtime.

    Args:
        file: a file without problems.
        samples: real samples [n, ...] for the comparison, in addition to random ones.

    Raises:
        ModelError: an operator has no counterpart, or the outputs differ.
    """
    assert file.plain is not None  # the caller has checked that the file is float
    assert file.imported is not None
    if file.problems:
        raise unsupported(file.problems, str(file.path))
    found = file.imported
    needed = networks.subnetwork(found.network, list(tensors_in(found.network.outputs)))
    network = replace(needed, name="model", outputs=found.network.outputs)
    shapes = [found.plain.graph.tensors[index].shape for index in found.plain.graph.inputs]
    runs = [*verification.random_inputs(shapes), *_batches(shapes, samples)]
    try:
        model = verification.build_model(network)
        parity = _compare(model, file.plain.graph, runs, len(runs) * file.batch)
    except ModelError as error:
        error.where = str(file.path)
        raise
    if not parity.max_rel <= TOLERANCE:
        raise verification.too_different(parity, str(file.path), _first_difference(found, runs))
    return model, parity


def _batches(shapes: list[tuple[int, ...]], samples: NDArray[np.float32] | None) -> list[list[NDArray[np.float32]]]:
    """Return the samples in batches of the file's size, if its input has their shape."""
    if samples is None or len(shapes) != 1 or samples.shape[1:] != shapes[0][1:]:
        return []
    batch = shapes[0][0]
    starts = range(0, len(samples) - batch + 1, batch)
    return [[np.asarray(samples[start : start + batch])] for start in starts]


def _compare(model: Any, original: Graph, runs: Runs, samples: int) -> Parity:
    """Compare the outputs of the model with those of the file."""
    runner = comparison.Runner(original)
    expected = [_flat(runner.run(inputs)) for inputs in runs]
    actual = [_flat(verification.run_model(model, inputs)) for inputs in runs]
    differences = verification.compare_runs(expected, actual)
    return verification.summarize(differences, verification.runtime_version("ai-edge-litert"), samples)


def _flat(outputs: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values in order: a network may have its batch before the first dimension of the file's tensor."""
    return [np.asarray(output).reshape(-1) for output in outputs]


def _first_difference(found: TfliteNetwork, runs: Runs) -> str:
    """Return the first operator whose result differs, with its number in the file."""
    graph = found.plain.graph
    largest = _intermediate_differences(found, runs)
    for operator, number in zip(graph.operators, found.plain.numbers, strict=True):
        relative = max((largest.get(index, 0.0) for index in operator.outputs), default=0.0)
        if relative > TOLERANCE:
            return f"{float_graph.operator_title(operator, number, graph)}, by {relative:.2g}"
    return "no operator alone"


def _intermediate_differences(found: TfliteNetwork, runs: Runs) -> dict[int, float]:
    """Return the largest relative difference of every intermediate tensor, by its index in the file."""
    observed = _places(found)
    model = networks.build(networks.subnetwork(found.network, list(observed.values())))
    runner = comparison.Runner(found.plain.graph, keep=True)
    largest = dict.fromkeys(observed, 0.0)
    for inputs in runs:
        expected = runner.run(inputs, list(observed))
        actual = verification.run_model(model, inputs)
        for index, one, other in zip(observed, expected, actual, strict=True):
            relative = verification.compare_output(one.reshape(-1), other.reshape(-1)).relative
            largest[index] = max(largest[index], relative)
    return largest


def _places(found: TfliteNetwork) -> Mapping[int, LayerOutput]:
    """Return the tensor of the network for each output of an operator that the network has."""
    outputs = [index for operator in found.plain.graph.operators for index in operator.outputs]
    return {index: found.values[index].tensor for index in outputs if index in found.values}
