"""ONNX models of a few operators, defined in the tests that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compress.model.importers.onnx import onnx_file

EXACT = 2e-5


@dataclass(frozen=True)
class Constant:
    """A constant among the inputs of an operator; it becomes a stored tensor."""

    numbers: Any


def constant(numbers: Any) -> Constant:
    return Constant(np.asarray(numbers))


def floats(*shape: int, low: float = -1.0) -> Constant:
    """Return a constant of random floats up to 1, which are always the same for a shape."""
    return constant(np.random.default_rng(sum(shape)).uniform(low, 1.0, shape).astype(np.float32))


def whole(*numbers: int) -> Constant:
    return constant(np.array(numbers, np.int64))


def number(value: float) -> Constant:
    return constant(np.array(value, np.float32))


def node(kind: str, inputs: Sequence[Any], outputs: Sequence[str], **settings: Any) -> tuple[Any, list[Any]]:
    """Return an operator, and the stored tensors that it takes. Its default name is that of its first output."""
    stored, names = [], []
    for place, operand in enumerate(inputs):
        if isinstance(operand, Constant):
            names.append(f"{outputs[0]}_{place}")
            stored.append(numpy_helper.from_array(operand.numbers, names[-1]))
        else:
            names.append(operand)
    title, domain = settings.pop("name", outputs[0]), settings.pop("domain", "")
    return helper.make_node(kind, names, list(outputs), title, domain=domain, **settings), stored


@dataclass(frozen=True)
class Model:
    """The content of an ONNX file.

    Attributes:
        nodes: results of `node`.
        inputs: shapes by name; a dimension that is not fixed is a name.
        outputs: the names of the outputs.
        opset: the version of the operators.
        types: the types of inputs that are not floats.
    """

    nodes: Sequence[tuple[Any, list[Any]]]
    inputs: Mapping[str, Sequence[Any]]
    outputs: Sequence[str]
    opset: int = 17
    types: Mapping[str, int] = field(default_factory=dict)

    def proto(self) -> Any:
        """Return the ONNX model. The shapes of its outputs are those that onnx infers."""
        graph_inputs = [
            helper.make_tensor_value_info(name, self.types.get(name, TensorProto.FLOAT), list(shape))
            for name, shape in self.inputs.items()
        ]
        stored = {tensor.name: tensor for _, tensors in self.nodes for tensor in tensors}
        shown = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs]
        graph = helper.make_graph(
            [operator for operator, _ in self.nodes], "graph", graph_inputs, shown, list(stored.values())
        )
        domains = {operator.domain for operator, _ in self.nodes}
        opsets = [helper.make_opsetid(domain, 1 if domain else self.opset) for domain in sorted({"", *domains})]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8 if self.opset < 20 else 10)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        for value, better in zip(model.graph.output, inferred.graph.output, strict=True):
            value.CopyFrom(better)
            if not value.type.tensor_type.HasField("shape"):
                value.type.tensor_type.shape.SetInParent()
        return model


def imported(path: Path) -> tuple[onnx_file.OnnxFile, Any, list[str]]:
    """Import a file, and check that the outputs are equal. Return the file, the Keras model and its layer types."""
    file = onnx_file.read(path)
    assert file.problems == ()
    model, parity = onnx_file.load(file)
    assert parity.max_rel < EXACT
    return file, model, [type(layer).__name__ for layer in model.operations if type(layer).__name__ != "InputLayer"]
