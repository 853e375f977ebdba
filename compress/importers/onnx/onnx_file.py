""".onnx files as models to work on: rebuilt with Keras layers, and compared with onnxruntime.

What a file is, and what is in the way of rebuilding it, can be told without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.common import verification
from compress.importers.common.unsupported import Refused, unsupported
from compress.importers.common.verification import MINIMUM_SCALE, TOLERANCE, Arrays, OutputDifference, Parity, Runs
from compress.importers.onnx import child_processes, onnx_graph
from compress.importers.onnx.layout import OnnxValue
from compress.importers.onnx.network import OnnxNetwork, build_network
from compress.importers.onnx.network_builder import FLOAT
from compress.importers.onnx.onnx_graph import OnnxGraph
from compress.importers.onnx.onnx_inputs import Shapes
from compress.importers.onnx.ops.rules import RULES
from compress.ir import keras_graph as networks
from compress.ir.keras_graph import tensors_in

if TYPE_CHECKING:
    import keras

WHOLE_TYPES = {
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
DRAWN = {"UINT8": 256, "BOOL": 2}
"""How many whole numbers, from 0 on, are drawn for an input of such."""
DRAWN_ELSE = 8


@dataclass(frozen=True)
class OnnxFile:
    """What an .onnx file is to a pipeline.

    Attributes:
        path: the file.
        graph: as it was read.
        imported: the network it became; None where operators are refused for what they are.
    """

    path: Path
    graph: OnnxGraph
    imported: OnnxNetwork | None

    @property
    def problems(self) -> tuple[Refused, ...]:
        """The operators that cannot become layers of Keras, all of them."""
        return self.imported.problems if self.imported else self.graph.refused

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was in the file, in words."""
        return self.imported.notes if self.imported else self.graph.notes


def read(path: Path, shapes: Shapes = MappingProxyType({})) -> OnnxFile:
    """Reads a file, and finds out what can be done with it; without TensorFlow.

    Args:
        path: the file.
        shapes: by input its sides, where the file leaves some open.

    Raises:
        ModelError: it is no ONNX model, is damaged, or makes no sense.
    """
    child_processes.check_readable(path, shapes)
    graph = onnx_graph.read(path, RULES, shapes)
    if graph.refused and not graph.nodes:
        return OnnxFile(path, graph, None)
    try:
        return OnnxFile(path, graph, build_network(graph, RULES))
    except ModelError as error:
        error.where = str(path)
        raise


def load(file: OnnxFile, samples: NDArray[np.float32] | None = None) -> tuple[keras.Model, Parity]:
    """Rebuild the file as a Keras model, and compare it with the file in onnxruntime.

    Args:
        file: a file without problems.
        samples: real samples [n, ...] as the Keras model takes them, in addition to random ones.

    Raises:
        ModelError: an operator has no counterpart, or the outputs differ.
    """
    if file.problems or file.imported is None:
        raise unsupported(file.problems, str(file.path))
    found = file.imported
    needed = networks.subnetwork(found.network, list(tensors_in(found.network.outputs)))
    network = replace(needed, name="model", outputs=found.network.outputs)
    try:
        runs = [*_random(found), *_real(found, samples)]
        expected = _expected_outputs(found.graph, found, runs, found.graph.outputs)
        model = verification.build_model(network)
        return model, _verify(model, found, runs, expected)
    except ModelError as error:
        error.where = str(file.path)
        raise


def _verify(model: keras.Model, found: OnnxNetwork, runs: Runs, expected: Runs) -> Parity:
    """Compare the outputs of the model with those of onnxruntime.

    Raises:
        ModelError: they differ by more than is allowed.
    """
    by_run = []
    for inputs, outputs in zip(runs, expected, strict=True):
        actual = verification.run_model(model, [array[None] for array in inputs])
        triples = zip(found.outputs, outputs, actual, strict=True)
        by_run.append([_difference(found, *each) for each in triples])
    differences = [each for run in by_run for each in run]
    allowed = [TOLERANCE] * len(runs)
    sensitivity = None
    if verification.largest_relative(differences) > TOLERANCE:
        allowed, sensitivity = verification.allowed_differences(expected, _outputs_with_last_bits_changed(found, runs))
    runtime = verification.runtime_version("onnxruntime")
    parity = verification.summarize(differences, runtime, len(runs), sensitivity)
    relative = [verification.largest_relative(run) for run in by_run]
    exceeding = [inputs for inputs, one, limit in zip(runs, relative, allowed, strict=True) if one > limit]
    if exceeding:
        raise verification.too_different(parity, "", _first_difference(found, exceeding))
    return parity


def _outputs_with_last_bits_changed(found: OnnxNetwork, runs: Runs) -> Runs:
    """Return the outputs of the file for nearly the same inputs; integer inputs stay as they are."""
    changed = []
    for before, after in zip(runs, verification.change_last_bits(runs), strict=True):
        arrays = zip(_kinds(found), before, after, strict=True)
        changed.append([original if kind in WHOLE_TYPES else other for kind, original, other in arrays])
    return _expected_outputs(found.graph, found, changed, found.graph.outputs)


def _kinds(found: OnnxNetwork) -> list[str]:
    """The type that the file takes each input in."""
    return [found.graph.types[name] for name in found.inputs]


def _random(found: OnnxNetwork) -> list[Arrays]:
    """Random samples; whole numbers where the file takes such, which are the same to the network."""
    counts = [_count(found.graph, name) if found.graph.types[name] in WHOLE_TYPES else 0 for name in found.inputs]
    return [
        [np.floor(np.abs(array) * count) % count if count else array for array, count in zip(feed, counts, strict=True)]
        for feed in verification.random_inputs([value.sides for value in found.inputs.values()])
    ]


def _count(graph: OnnxGraph, name: str) -> int:
    """How many whole numbers are drawn for an input: no more than there are rows in tables that it may pick from."""
    seen, counts = {name}, [DRAWN.get(graph.types[name], DRAWN_ELSE)]
    for node in graph.nodes:
        if node.operator == "Gather" and node.inputs[0] in graph.constants:
            counts += [len(graph.constants[node.inputs[0]])] if node.inputs[1] in seen else []
        elif seen.intersection(node.inputs):
            seen.update(node.outputs)
    return min(counts)


def _real(found: OnnxNetwork, samples: NDArray[np.float32] | None) -> list[Arrays]:
    """Samples one by one, if the model takes such; rounded where the file takes whole numbers."""
    sides = [value.sides for value in found.inputs.values()]
    if samples is None or len(sides) != 1 or samples.shape[1:] != sides[0]:
        return []
    (kind,) = _kinds(found)
    if kind in WHOLE_TYPES:
        low, high = (0, 1) if kind == "BOOL" else (np.iinfo(WHOLE_TYPES[kind]).min, np.iinfo(WHOLE_TYPES[kind]).max)
        samples = np.rint(samples).clip(low, high)
    return [[np.asarray(sample, np.float32)] for sample in samples]


def _expected_outputs(
    graph: OnnxGraph, found: OnnxNetwork, runs: Runs, outputs: Sequence[str]
) -> list[list[NDArray[Any]]]:
    """Return the outputs of onnxruntime for the inputs of the network."""
    unused = {
        name: np.zeros(graph.shapes[name], _dtype(graph, name)) for name in graph.inputs if name not in found.inputs
    }
    feeds = []
    for arrays in runs:
        inputs = zip(found.inputs.items(), arrays, strict=True)
        feeds.append({name: _graph_input(graph, name, value, array) for (name, value), array in inputs} | unused)
    try:
        return child_processes.run_model(graph.model, feeds, outputs)
    except child_processes.OnnxRuntimeFailedError as error:
        raise ModelError(str(error), todo="run the file in onnxruntime, and export it again") from error


def _dtype(graph: OnnxGraph, name: str) -> Any:
    return WHOLE_TYPES.get(graph.types[name], np.float32)


def _graph_input(graph: OnnxGraph, name: str, value: OnnxValue, array: NDArray[Any]) -> NDArray[Any]:
    """Return an input of the network in the layout and type of the graph."""
    ordered = np.empty(array.size, np.float32)
    ordered[value.positions] = array.reshape(-1)
    return ordered.reshape(value.shape).astype(_dtype(graph, name))


def _difference(found: OnnxNetwork, value: OnnxValue, expected: NDArray[Any], actual: NDArray[Any]) -> OutputDifference:
    """Compare a tensor of the graph with the same tensor of the network, in the network's layout."""
    if expected.size != actual.size:
        return OutputDifference(float("inf"), float("inf"))
    minimum_scale = 1.0 if _is_share(found, value) else MINIMUM_SCALE
    return verification.compare_output(expected.reshape(-1)[value.positions], actual.reshape(-1), minimum_scale)


def _is_share(found: OnnxNetwork, value: OnnxValue) -> bool:
    """Whether it is made by a sigmoid or a softmax: runtimes compute these to so much of 1, however small they are."""
    layer = found.network.layers[value.tensor.layer]
    while layer.kind in ("Reshape", "Flatten", "Permute", "Identity"):
        layer = found.network.layers[layer.inputs()[0].layer]
    return layer.kind == "Softmax" or layer.config.get("activation") in ("sigmoid", "softmax")


def _first_difference(found: OnnxNetwork, runs: Runs) -> str:
    """Return the first operator whose result differs, with its name in the file."""
    largest = _intermediate_differences(found, runs)
    for node in found.graph.nodes:
        relative = max((largest.get(name, 0.0) for name in node.outputs), default=0.0)
        if relative > TOLERANCE:
            return f"{node.operator} {node.name!r}, by {relative:.2g}"
    return "no operator alone"


def _intermediate_differences(found: OnnxNetwork, runs: Runs) -> dict[str, float]:
    """Return the largest relative difference of every intermediate tensor, by its name in the file."""
    observed = _places(found)
    model = networks.build(networks.subnetwork(found.network, [value.tensor for value in observed.values()]))
    graph = replace(found.graph, model=_showing(found.graph, list(observed)))
    expected = _expected_outputs(graph, found, runs, list(observed))
    largest = dict.fromkeys(observed, 0.0)
    for inputs, outputs in zip(runs, expected, strict=True):
        actual = verification.run_model(model, [array[None] for array in inputs])
        for name, one, other in zip(observed, outputs, actual, strict=True):
            largest[name] = max(largest[name], _difference(found, observed[name], one, other).relative)
    return largest


def _places(found: OnnxNetwork) -> Mapping[str, OnnxValue]:
    """How the network has what each operator makes, where it still has that; each of its tensors once."""
    places: dict[str, OnnxValue] = {}
    seen = set()
    for node in found.graph.nodes:
        for name in node.outputs:
            value = found.values.get(name)
            if value is not None and value.tensor not in seen and found.graph.types.get(name) == FLOAT:
                seen.add(value.tensor)
                places[name] = value
    return places


def _showing(graph: OnnxGraph, names: Sequence[str]) -> bytes:
    """The model with these tensors as its outputs."""
    import onnx

    model = onnx.ModelProto()
    model.ParseFromString(graph.model)
    del model.graph.output[:]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, graph.shapes[name]) for name in names
    )
    return bytes(model.SerializeToString())
