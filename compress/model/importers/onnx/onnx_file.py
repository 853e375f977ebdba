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

from compress.core.errors import ModelError
from compress.model.importers.common import guarded_calls, verification
from compress.model.importers.common.graph_builder import UNKNOWN
from compress.model.importers.common.unsupported import Refused, unsupported
from compress.model.importers.common.verification import MINIMUM_SCALE, OutputDifference, Parity, Runs
from compress.model.importers.onnx import child_processes, onnx_graph, onnx_inputs, onnx_model, original
from compress.model.importers.onnx.layout import OnnxValue
from compress.model.importers.onnx.network import OnnxNetwork, build_network
from compress.model.importers.onnx.network_builder import FLOAT
from compress.model.importers.onnx.onnx_graph import OnnxGraph
from compress.model.importers.onnx.onnx_inputs import OpenDimensionsError, Shapes
from compress.model.importers.onnx.ops.rules import RULES
from compress.model.importers.onnx.original import OriginalRuns, Row
from compress.model.ir import keras_graph as networks

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class OnnxFile:
    """A parsed .onnx file.

    Attributes:
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

    A first dimension of a fixed size above 1 is the batch only if the file computes each of its rows alone.

    `shapes` are those of inputs with open dimensions, by name.

    Raises:
        ModelError: the file is not an ONNX model, is damaged, or is invalid.
    """
    child_processes.check_readable(path, shapes)
    try:
        graph = onnx_graph.read(path, RULES, shapes)
    except OpenDimensionsError as error:
        raise error.proposing(original.accepted_shapes(error.inputs, error.model)) from None
    if graph.batch.size > 1 and not _has_batch(graph):
        graph = onnx_graph.read(path, RULES, shapes, keep_batch=True)
    if graph.refused and not graph.nodes:
        return OnnxFile(path, graph, None)
    with guarded_calls.located(path):
        return OnnxFile(path, graph, build_network(graph, RULES))


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
    with guarded_calls.located(file.path):
        runs = _with_batch(file, original.run(file.graph, _sample_rows(file.imported, samples)))
        model = verification.build_model(file.imported.network)
        return model, _verify(model, file.imported, runs)


def _with_batch(file: OnnxFile, runs: OriginalRuns) -> OriginalRuns:
    """Return the runs of a file if its open dimension is a batch; with single rows if its shapes fix a batch of 1."""
    batch = file.graph.batch
    if not batch.is_open or (runs.batch > 1 and original.has_batch(file.graph, runs)):
        return runs
    if runs.batch == 1 and batch.has_other_name:
        raise _open_batch_error(file, f"onnxruntime runs it only with a {batch.name[:80]!r} of 1")
    alone = original.run_alone(file.graph, runs)
    if runs.batch > 1 and (batch.has_other_name or not original.has_batch_of_one(file.graph, alone)):
        reason = f"{batch.name[:80]!r} is no batch: the outputs of a row depend on the other rows"
        raise _open_batch_error(file, reason)
    return alone


def _open_batch_error(file: OnnxFile, reason: str) -> ModelError:
    inputs = onnx_inputs.model_inputs(onnx_model.parsed(file.graph.model))
    error = OpenDimensionsError(inputs, file.path, file.graph.model, reason)
    return error.proposing(original.accepted_shapes(inputs, file.graph.model))


def _has_batch(graph: OnnxGraph) -> bool:
    """Whether the fixed first dimension is a batch; False if the file cannot be run to find out."""
    try:
        return not graph.refused and original.has_batch(graph, original.run(graph))
    except ModelError:
        return False


def _verify(model: keras.Model, imported: OnnxNetwork, runs: OriginalRuns) -> Parity:
    actual = _outputs(model, imported, runs)
    by_row = [
        [_difference(imported, *tensors) for tensors in zip(imported.outputs, *arrays, strict=True)]
        for arrays in zip(runs.outputs, actual, strict=True)
    ]
    parity, exceeding = verification.verified(
        runs.rows,
        by_row,
        runs.outputs,
        lambda: original.with_last_bits_changed(imported.graph, runs),
        "onnxruntime",
        len(runs.rows),
    )
    if exceeding:
        operators = ((f"{node.operator} {node.name!r}", node.outputs) for node in imported.graph.nodes)
        first = verification.first_difference(operators, _intermediate_differences(imported, runs))
        raise verification.too_different(parity, "", first)
    return parity


def _outputs(model: keras.Model, imported: OnnxNetwork, runs: OriginalRuns) -> Runs:
    """Return the outputs of a Keras model for each row; it gets as many rows at once as the original."""
    outputs: list[list[NDArray[Any]]] = []
    for start in range(0, len(runs.rows), runs.batch):
        rows = runs.rows[start : start + runs.batch]
        values = imported.inputs.items()
        inputs = [np.stack([np.asarray(value.placed(row[name]), np.float32) for row in rows]) for name, value in values]
        arrays = verification.run_model(model, inputs)
        outputs += [[array[index : index + 1] for array in arrays] for index in range(len(rows))]
    return outputs


def _sample_rows(imported: OnnxNetwork, samples: NDArray[np.float32] | None) -> list[Row]:
    """Return the samples as rows, if the model has one input and the input has their shape."""
    if samples is None or len(imported.inputs) != 1:
        return []
    ((name, value),) = imported.inputs.items()
    if samples.shape[1:] != value.network_shape:
        return []
    positions = np.argsort(value.positions)  # in the network's tensor of each value of the graph's tensor
    ordered = samples.reshape(len(samples), -1)[:, positions].reshape(-1, *value.shape)
    return [{name: original.as_stored(imported.graph, name, sample)} for sample in ordered]


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


def _intermediate_differences(imported: OnnxNetwork, runs: OriginalRuns) -> dict[str, float]:
    """Return the largest relative difference of every intermediate tensor, by its name in the file."""
    observed = _observed_tensors(imported)
    model = networks.build(networks.subnetwork(imported.network, [value.tensor for value in observed.values()]))
    graph = replace(imported.graph, model=_with_outputs(imported.graph, list(observed)))
    try:
        expected = original.outputs(graph, runs.rows, runs.batch, list(observed))
    except child_processes.OnnxRuntimeFailedError:
        return {}
    largest = dict.fromkeys(observed, 0.0)
    for arrays in zip(expected, _outputs(model, imported, runs), strict=True):
        for name, reference, array in zip(observed, *arrays, strict=True):
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
    import onnx

    model = onnx_model.parsed(graph.model)
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    return bytes(model.SerializeToString())
