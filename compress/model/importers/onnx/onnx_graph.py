"""ONNX graph as plain values: operators with attributes, the shape of every tensor, and the constants.

The batch is 1, if the file has one. All results that depend on no input are computed here: the shapes, sizes and
indices that exporters compute step by step (Shape, Gather, Concat, Reshape) become constants. onnx infers the shapes
operator by operator, so that each inference uses the constants computed before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError, cause_of
from compress.model.importers.common import guarded_calls
from compress.model.importers.common.unsupported import NO_LAYER, Refused
from compress.model.importers.onnx import onnx_inputs, onnx_model
from compress.model.importers.onnx.onnx_inputs import NO_BATCH, BatchAxes, OpenDimensionsError, Shapes
from compress.model.importers.onnx.onnx_model import MOST_NUMBERS, TYPE_NAMES

MOST_TOGETHER = 2**29
"""Maximum number of values in all computed tensors together."""
MOST_SHAPING = 4096
"""Maximum number of values in a constant that shape inference reads."""
STANDARD_DOMAINS = ("", "ai.onnx")
RANDOM_OPERATORS = {"Dropout", "Multinomial", "Bernoulli"} | {
    f"Random{distribution}{like}" for distribution in ("Normal", "Uniform") for like in ("", "Like")
}
"""Operators whose outputs can differ from run to run."""
CONTROL = {"If", "Loop", "Scan", "SequenceMap"}
QUANTIZED = ("QLinear", "QuantizeLinear", "DequantizeLinear", "DynamicQuantize", "ConvInteger", "MatMulInteger")
FAILURES = (
    *(ArithmeticError, AttributeError, AssertionError, LookupError, NotImplementedError, RuntimeError, MemoryError),
    *(ValueError, TypeError),
)
"""Exceptions of onnx for invalid operators."""


@dataclass(frozen=True)
class Node:
    """An operator.

    Attributes:
        operator: type of the operator: Conv, Relu.
        name: name of the operator, or of its first output.
        inputs: names of the input tensors; "" for an omitted tensor.
        outputs: names of the output tensors; "" for an omitted tensor.
    """

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OnnxGraph:
    """A parsed ONNX graph.

    Attributes:
        nodes: the operators that depend on an input, in topological order.
        constants: values of the tensors that depend on no input, by name.
        refused: operators that are invalid or of an unsupported kind.
        model: the original model as bytes, for onnxruntime: with its own batch, and with its open dimensions.
        producer: the program that wrote the file and its version, if the file has them.
        batch: the dimension of the inputs that is set to 1.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    refused: tuple[Refused, ...]
    model: bytes
    notes: tuple[str, ...]
    opset: int = 0
    producer: str = ""
    batch: BatchAxes = NO_BATCH


@dataclass
class _GraphWalk:
    """State of the pass over the operators."""

    model: Any
    constants: dict[str, NDArray[Any]]
    types: dict[str, Any]
    nodes: list[Node] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    total_size: int = 0


def read(
    path: Path, known: Collection[str] | None = None, shapes: Shapes = MappingProxyType({}), *, keep_batch: bool = False
) -> OnnxGraph:
    """Read a file.

    `known` are the operators that have an import rule: operators without a rule are listed as well if shape inference
    is not possible (operators of an unsupported kind, or open dimensions). `shapes` are those of inputs with open
    dimensions, by name. With `keep_batch`, a first dimension of a fixed size above 1 is part of the data.

    Raises:
        OpenDimensionsError: an input has open dimensions, in addition to a batch.
        ModelError: the file is not an ONNX model, is damaged or too large, or refers to a file outside its folder.
    """
    with guarded_calls.located(path):
        model, notes = onnx_model.read(path)
        inputs = onnx_inputs.model_inputs(model)
        original = _original(model)
        notes = (*notes, *onnx_inputs.fix(inputs, shapes))
        batch = NO_BATCH if keep_batch else onnx_inputs.batch(inputs)
        onnx_inputs.set_batch(model, batch, 1, onnx_inputs.shapes_with_batch_of_one(model, batch))
        open_inputs = onnx_inputs.with_open_dimensions(inputs)
        notes += _batch_notes(batch, keep_batch)
        if (open_inputs or any(_refused(model))) and (refused := tuple(_refused(model, known))):
            return OnnxGraph((), {}, {}, {}, (), (), refused, b"", notes, _opset(model), _producer(model))
        if open_inputs:
            raise OpenDimensionsError(inputs, path, original)
        return replace(_parse(model), model=original, batch=batch, notes=notes)


def _batch_notes(batch: BatchAxes, is_kept: bool) -> tuple[str, ...]:
    if is_kept:
        return ("its first dimension is no batch: it is part of the data",)
    if not batch.axes:
        return ()
    return (f"its {'open batch dimension' if batch.is_open else f'batch of {batch.size}'} is set to 1",)


def _refused(model: Any, known: Collection[str] | None = None) -> Iterator[Refused]:
    """Yield the operators of an unsupported kind, and with `known` also those without a rule that are not constant."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for number, proto in enumerate(model.graph.node):
        node = _node(proto, number)
        reason = _unsupported_kind(proto)
        is_constant = node.operator in ("Constant", "Shape") or constants.issuperset(filter(None, node.inputs))
        if is_constant and node.operator not in RANDOM_OPERATORS:
            constants.update(node.outputs)
        elif known is not None and node.operator not in known:
            reason = reason or NO_LAYER
        if reason:
            yield Refused(node.name, node.operator, reason)


def _unsupported_kind(node: Any) -> str:
    """Return the reason if an operator is of an unsupported kind; otherwise an empty string."""
    if node.domain not in STANDARD_DOMAINS:
        return f"it is a custom operator, of {node.domain[:60]!r}; export the model without it"
    if node.op_type in CONTROL:
        return "it is control flow that depends on the data; export the model without it"
    if node.op_type.startswith("Sequence") or node.op_type in ("SplitToSequence", "ConcatFromSequence"):
        return "it works on sequences of tensors; export the model without it"
    if node.op_type.startswith(QUANTIZED):
        return "the model is quantized already; use the original float model"
    return ""


def _parse(model: Any) -> OnnxGraph:
    """Infer the shapes of all operators, and compute the constant ones."""
    _check(model)
    constants = {tensor.name: onnx_model.array(tensor) for tensor in model.graph.initializer}
    inputs = onnx_inputs.model_inputs(model)
    walk = _GraphWalk(model, constants, {value.name: value.type for value in inputs})
    for value in inputs:
        _add_size(walk, value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
    for name, values in constants.items():
        walk.types[name] = _type_of(values, name)
    for number, proto in enumerate(model.graph.node):
        _visit(walk, proto, _node(proto, number))
    shapes = {name: shape for name, kind in walk.types.items() if (shape := _shape(kind)) is not None}
    types = {name: TYPE_NAMES.get(kind.tensor_type.elem_type, "?") for name, kind in walk.types.items()}
    return OnnxGraph(
        nodes=tuple(walk.nodes),
        constants=walk.constants,
        shapes=shapes,
        types=types,
        inputs=tuple(value.name for value in inputs),
        outputs=tuple(value.name for value in model.graph.output),
        refused=tuple(walk.refused),
        model=b"",
        notes=(),
        opset=_opset(model),
        producer=_producer(model),
    )


def _check(model: Any) -> None:
    from onnx import checker

    for value in model.graph.output:  # the checker requires types and shapes; inference replaces these later
        if value.type.WhichOneof("value") in (None, "tensor_type"):
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx_model.FLOAT
    try:
        checker.check_model(model)
    except (checker.ValidationError, ValueError, RuntimeError) as error:
        raise ModelError(f"onnx reports an error in it: {cause_of(error)}", hint="export it again") from error


def _original(model: Any) -> bytes:
    """Return a model as bytes for onnxruntime, which infers the types of outputs and rejects a dimension of 0 or -1."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        value.ClearField("type")
    for value in copy.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:  # an open dimension
                dim.Clear()
    try:
        return bytes(copy.SerializeToString())
    except ValueError as error:
        raise ModelError(f"with its tensors it is larger than {onnx_model.MOST_BYTES:,} bytes") from error


def _node(proto: Any, number: int) -> Node:
    from onnx import helper

    settings = {}
    for attribute in proto.attribute:
        try:
            value = helper.get_attribute_value(attribute)
        except ValueError:
            continue
        settings[attribute.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    name = proto.name or next(filter(None, proto.output), "") or f"{proto.op_type}_{number}"
    return Node(proto.op_type, name, tuple(proto.input), tuple(proto.output), settings)


def _visit(walk: _GraphWalk, proto: Any, node: Node) -> None:
    """Refuse an operator, compute its constant outputs, or add it with the shapes of its outputs."""
    reason = _infer(walk, proto)
    if reason:
        walk.refused.append(Refused(node.name, node.operator, reason))
        return
    has_constant_inputs = all(name in walk.constants for name in node.inputs if name)
    if node.operator in ("Constant", "Shape") or has_constant_inputs:
        computed = _constant_outputs(walk, proto, node)
        if computed is not None:
            for name, values in zip(filter(None, node.outputs), computed, strict=True):
                walk.constants[name] = values
                walk.types[name] = _type_of(values, name)
            return
    for name in filter(None, node.outputs):
        _add_size(walk, name, _known_shape(walk, name))
    walk.nodes.append(node)


def _known_shape(walk: _GraphWalk, name: str) -> tuple[int, ...] | None:
    return _shape(walk.types[name]) if name in walk.types else None


def _add_size(walk: _GraphWalk, name: str, shape: Sequence[int] | None) -> None:
    size = prod(shape or ())
    walk.total_size += size
    if size > MOST_NUMBERS:
        raise ModelError(f"its tensor {name[:80]!r} has the shape {list(shape or ())[:8]}", allowed=f"{MOST_NUMBERS:,}")
    if walk.total_size > MOST_TOGETHER:
        raise ModelError(
            f"its tensors up to {name[:80]!r} have {walk.total_size:,} values", allowed=f"{MOST_TOGETHER:,}"
        )


def _infer(walk: _GraphWalk, proto: Any) -> str:
    """Infer the types of an operator's outputs; return the reason if the operator is invalid."""
    from onnx import checker, defs, shape_inference

    inputs = [name for name in proto.input if name]
    missing = [name for name in inputs if name not in walk.types]
    if missing:
        return "" if walk.refused else f"no operator computes its input {missing[0][:80]!r}"
    version = _opset(walk.model)
    types = {name: walk.types[name] for name in inputs}
    data = _shaping_constants(walk, inputs)
    opsets = list(walk.model.opset_import)
    try:
        schema = defs.get_schema(proto.op_type, version, "")
    except defs.SchemaError:
        return f"opset {version} of ONNX has no such operator"
    try:
        inferred = shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=opsets)
    except (shape_inference.InferenceError, checker.ValidationError, *FAILURES) as error:
        return f"it is invalid: {cause_of(error)}"
    if proto.op_type == "GroupNormalization":  # onnx has no shape inference for it
        inferred = {proto.output[0]: walk.types[proto.input[0]]}
    walk.types.update(inferred)
    return ""


def _shaping_constants(walk: _GraphWalk, names: Sequence[str]) -> dict[str, Any]:
    """Return the small constants among these tensors, which shape inference can read."""
    from onnx import numpy_helper

    constants = {name: walk.constants[name] for name in names if name in walk.constants}
    return {
        name: numpy_helper.from_array(values, name)
        for name, values in constants.items()
        if values.size <= MOST_SHAPING and values.dtype != object
    }


def _opset(model: Any) -> int:
    return int(max(opset.version for opset in model.opset_import if opset.domain in STANDARD_DOMAINS))


def _producer(model: Any) -> str:
    return f"{model.producer_name} {model.producer_version}".strip()[:80]


def _constant_outputs(walk: _GraphWalk, proto: Any, node: Node) -> list[NDArray[Any]] | None:
    """Compute the outputs of an operator with constant inputs; None if that is not possible or not allowed."""
    if node.operator in RANDOM_OPERATORS:
        return None
    if node.operator == "Shape":
        shape = _known_shape(walk, node.inputs[0])
        dimensions = slice(node.settings.get("start", 0), node.settings.get("end"))
        return None if shape is None else [np.asarray(shape[dimensions], np.int64)]
    if node.operator == "Constant" and "value" in node.settings:
        return [onnx_model.array(node.settings["value"])]
    for name in node.outputs:
        shape = _known_shape(walk, name)
        if (shape is None or prod(shape) > MOST_NUMBERS) and node.operator not in ("NonZero", "Compress", "Unique"):
            return None
    try:
        return _evaluate(walk, proto, {name: walk.constants[name] for name in node.inputs if name})
    except FAILURES:
        return None


def _evaluate(walk: _GraphWalk, proto: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run one operator in onnx' reference evaluator, in a model: for an operator alone onnx ignores the opset."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    input_infos = [helper.make_value_info(name, walk.types[name]) for name in inputs]
    output_infos = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = helper.make_graph([proto], "one", input_infos, output_infos)
    model = helper.make_model(graph, opset_imports=list(walk.model.opset_import))
    return [np.asarray(output) for output in ReferenceEvaluator(model).run(None, dict(inputs))]


def _shape(kind: Any) -> tuple[int, ...] | None:
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _type_of(values: NDArray[Any], name: str) -> Any:
    from onnx import helper

    try:
        return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"its tensor {name[:80]!r} has the unsupported type {values.dtype}") from error
