"""Import of .onnx files: rebuild the model with Keras layers, and compare it with onnxruntime.

`read` finds the unsupported operators without TensorFlow. `load` builds and compares the Keras model.
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
from compress.importers.common.graph_builder import UNKNOWN
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

INTEGER_DTYPES = {
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
RANDOM_VALUE_COUNTS = {"UINT8": 256, "BOOL": 2}
"""Number of different random values, from 0 up, for an input of this type."""
OTHER_RANDOM_VALUE_COUNT = 8
"""The same for the other integer types, whose values are often indices."""


@dataclass(frozen=True)
class OnnxFile:
    """A parsed .onnx file.

    Attributes:
        path: the file.
        graph: the parsed graph.
        imported: the network made from the graph; None if the graph has operators of an unsupported kind.
    """

    path: Path
    graph: OnnxGraph
    imported: OnnxNetwork | None

    @property
    def problems(self) -> tuple[Refused, ...]:
        """All unsupported operators."""
        return self.imported.problems if self.imported else self.graph.refused

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences between the file and the network, as text."""
        return self.imported.notes if self.imported else self.graph.notes


def read(path: Path, shapes: Shapes = MappingProxyType({})) -> OnnxFile:
    """Read a file and convert its graph to layers, without TensorFlow.

    Args:
        path: the file.
        shapes: shapes of inputs with open dimensions, by name.

    Raises:
        ModelError: the file is not an ONNX model, is damaged, or is invalid.
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
        ModelError: an operator is unsupported, or the outputs differ.
    """
    if file.problems or file.imported is None:
        raise unsupported(file.problems, str(file.path))
    imported = file.imported
    used_layers = networks.subnetwork(imported.network, list(tensors_in(imported.network.outputs)))
    network = replace(used_layers, name="model", outputs=imported.network.outputs)
    try:
        runs = [*_random_runs(imported), *_sample_runs(imported, samples)]
        expected = _expected_outputs(imported.graph, imported, runs, imported.graph.outputs)
        model = verification.build_model(network)
        return model, _verify(model, imported, runs, expected)
    except ModelError as error:
        error.where = str(file.path)
        raise


def _verify(model: keras.Model, imported: OnnxNetwork, runs: Runs, expected: Runs) -> Parity:
    """Compare the outputs of the model with those of onnxruntime.

    Raises:
        ModelError: the difference is larger than allowed.
    """
    by_run = [
        _run_differences(model, imported, inputs, outputs) for inputs, outputs in zip(runs, expected, strict=True)
    ]
    parity, exceeding = verification.verified(
        runs,
        by_run,
        expected,
        lambda: _outputs_with_last_bits_changed(imported, runs),
        "onnxruntime",
        len(runs),
    )
    if exceeding:
        raise verification.too_different(parity, "", _first_difference(imported, exceeding))
    return parity


def _run_differences(
    model: keras.Model, imported: OnnxNetwork, inputs: Arrays, expected: Arrays
) -> list[OutputDifference]:
    """Run the model on one sample, and compare each of its outputs."""
    actual = verification.run_model(model, [array[None] for array in inputs])
    outputs = zip(imported.outputs, expected, actual, strict=True)
    return [_difference(imported, value, reference, array) for value, reference, array in outputs]


def _outputs_with_last_bits_changed(imported: OnnxNetwork, runs: Runs) -> Runs:
    """Return the outputs of the file for nearly the same inputs; integer inputs stay as they are."""
    changed = []
    for before, after in zip(runs, verification.change_last_bits(runs), strict=True):
        arrays = zip(_input_types(imported), before, after, strict=True)
        changed.append([original if dtype in INTEGER_DTYPES else other for dtype, original, other in arrays])
    return _expected_outputs(imported.graph, imported, changed, imported.graph.outputs)


def _input_types(imported: OnnxNetwork) -> list[str]:
    """Return the data type of each input in the file."""
    return [imported.graph.types[name] for name in imported.inputs]


def _random_runs(imported: OnnxNetwork) -> list[Arrays]:
    """Return random inputs; integral values for inputs that are integers in the file."""
    runs: list[Arrays] = []
    for arrays in verification.random_inputs([value.network_shape for value in imported.inputs.values()]):
        inputs = zip(imported.inputs, arrays, strict=True)
        runs.append([_to_random_integers(imported.graph, name, array) for name, array in inputs])
    return runs


def _to_random_integers(graph: OnnxGraph, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert random floats to integral values if the file has the input as integers."""
    if graph.types[name] not in INTEGER_DTYPES:
        return array
    count = _random_value_count(graph, name)
    return np.asarray(np.floor(np.abs(array) * count) % count, np.float32)


def _random_value_count(graph: OnnxGraph, name: str) -> int:
    """Return the number of different random values for an input: at most the rows of any table that it may index."""
    reached = {name}
    counts = [RANDOM_VALUE_COUNTS.get(graph.types[name], OTHER_RANDOM_VALUE_COUNT)]
    for node in graph.nodes:
        if node.operator == "Gather" and node.inputs[0] in graph.constants:
            if node.inputs[1] in reached:
                counts.append(len(graph.constants[node.inputs[0]]))
        elif reached.intersection(node.inputs):
            reached.update(node.outputs)
    return min(counts)


def _sample_runs(imported: OnnxNetwork, samples: NDArray[np.float32] | None) -> list[Arrays]:
    """Return the samples one by one if the input has their shape; rounded if the file has integers."""
    shapes = [value.network_shape for value in imported.inputs.values()]
    if samples is None or len(shapes) != 1 or samples.shape[1:] != shapes[0]:
        return []
    (dtype,) = _input_types(imported)
    if dtype == "BOOL":
        samples = np.rint(samples).clip(0, 1)
    elif dtype in INTEGER_DTYPES:
        limits = np.iinfo(INTEGER_DTYPES[dtype])
        samples = np.rint(samples).clip(limits.min, limits.max)
    return [[np.asarray(sample, np.float32)] for sample in samples]


def _expected_outputs(
    graph: OnnxGraph, imported: OnnxNetwork, runs: Runs, outputs: Sequence[str]
) -> list[list[NDArray[Any]]]:
    """Return the outputs of onnxruntime for the inputs of the network."""
    unused_names = [name for name in graph.inputs if name not in imported.inputs]
    unused = {name: np.zeros(graph.shapes[name], _dtype(graph, name)) for name in unused_names}
    feeds = []
    for arrays in runs:
        inputs = zip(imported.inputs.items(), arrays, strict=True)
        feeds.append({name: _graph_input(graph, name, value, array) for (name, value), array in inputs} | unused)
    try:
        return child_processes.run_model(graph.model, feeds, outputs)
    except child_processes.OnnxRuntimeFailedError as error:
        raise ModelError(str(error), hint="run the file in onnxruntime, and export it again") from error


def _dtype(graph: OnnxGraph, name: str) -> Any:
    return INTEGER_DTYPES.get(graph.types[name], np.float32)


def _graph_input(graph: OnnxGraph, name: str, value: OnnxValue, array: NDArray[Any]) -> NDArray[Any]:
    """Return an input of the network in the layout and type of the graph."""
    ordered = np.empty(array.size, np.float32)
    ordered[value.positions] = array.reshape(-1)
    return ordered.reshape(value.shape).astype(_dtype(graph, name))


def _difference(
    imported: OnnxNetwork, value: OnnxValue, expected: NDArray[Any], actual: NDArray[Any]
) -> OutputDifference:
    """Compare a tensor of the graph with the same tensor of the network, in the network's layout."""
    if expected.size != actual.size:
        return OutputDifference(float("inf"), float("inf"))
    minimum_scale = 1.0 if _is_probability(imported, value) else MINIMUM_SCALE
    return verification.compare_output(expected.reshape(-1)[value.positions], actual.reshape(-1), minimum_scale)


def _is_probability(imported: OnnxNetwork, value: OnnxValue) -> bool:
    """Whether a sigmoid or a softmax computes the value: runtimes compute these to a fixed precision relative to 1."""
    layer = imported.network.layers[value.tensor.layer]
    while layer.kind in ("Reshape", "Flatten", "Permute", "Identity"):
        layer = imported.network.layers[layer.inputs()[0].layer]
    return layer.kind == "Softmax" or layer.config.get("activation") in ("sigmoid", "softmax")


def _first_difference(imported: OnnxNetwork, runs: Runs) -> str:
    """Return the first operator whose result differs, with its name in the file."""
    largest = _intermediate_differences(imported, runs)
    for node in imported.graph.nodes:
        relative = max((largest.get(name, 0.0) for name in node.outputs), default=0.0)
        if relative > TOLERANCE:
            return f"{node.operator} {node.name!r}, by {relative:.2g}"
    return "no operator alone"


def _intermediate_differences(imported: OnnxNetwork, runs: Runs) -> dict[str, float]:
    """Return the largest relative difference of every intermediate tensor, by its name in the file."""
    observed = _observed_tensors(imported)
    model = networks.build(networks.subnetwork(imported.network, [value.tensor for value in observed.values()]))
    graph = replace(imported.graph, model=_with_outputs(imported.graph, list(observed)))
    expected = _expected_outputs(graph, imported, runs, list(observed))
    largest = dict.fromkeys(observed, 0.0)
    for inputs, outputs in zip(runs, expected, strict=True):
        actual = verification.run_model(model, [array[None] for array in inputs])
        for name, reference, array in zip(observed, outputs, actual, strict=True):
            relative = _difference(imported, observed[name], reference, array).relative
            largest[name] = max(largest[name], relative)
    return largest


def _observed_tensors(imported: OnnxNetwork) -> Mapping[str, OnnxValue]:
    """Return the operator outputs that the network still computes, by name; each tensor of the network once."""
    observed: dict[str, OnnxValue] = {}
    seen = {UNKNOWN}
    for node in imported.graph.nodes:
        for name in node.outputs:
            value = imported.values.get(name)
            if value is not None and value.tensor not in seen and imported.graph.types.get(name) == FLOAT:
                seen.add(value.tensor)
                observed[name] = value
    return observed


def _with_outputs(graph: OnnxGraph, names: Sequence[str]) -> bytes:
    """Return the model with these tensors as its outputs."""
    import onnx

    model = onnx.ModelProto()
    model.ParseFromString(graph.model)
    del model.graph.output[:]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, graph.shapes[name]) for name in names
    )
    return bytes(model.SerializeToString())
