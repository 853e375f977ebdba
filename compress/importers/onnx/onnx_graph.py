"""An ONNX model as plain values: its operators with settings, the shape of every tensor, what is constant.

The batch is 1. What can be computed without an input is: shapes, sizes, indices that exporters
compute step by step (Shape, Gather, Concat, Reshape) are constants here. Shapes are those that
onnx infers, operator by operator, so that what was computed before counts.
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

from compress.errors import ModelError
from compress.importers.common.unsupported import NO_LAYER, Refused
from compress.importers.onnx import onnx_inputs, onnx_model
from compress.importers.onnx.onnx_inputs import Shapes
from compress.importers.onnx.onnx_model import MOST_NUMBERS, TYPE_NAMES

MOST_TOGETHER = 2**29
"""Numbers of all computed tensors."""
MOST_SHAPING = 4096
"""Numbers of a constant that a shape is inferred from."""
OWN_DOMAINS = ("", "ai.onnx")
CHANGING = {
    "Dropout",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
"""Operators that give something else at each run, or may."""
CONTROL = {"If", "Loop", "Scan", "SequenceMap"}
QUANTIZED = ("QLinear", "QuantizeLinear", "DequantizeLinear", "DynamicQuantize", "ConvInteger", "MatMulInteger")
FAILURES = (
    ArithmeticError,
    AttributeError,
    AssertionError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
)


@dataclass(frozen=True)
class Node:
    """An operator.

    Attributes:
        operator: its kind: Conv, Relu.
        name: its own, or that of what it makes.
        number: its place in the file, as it can be computed.
        inputs: tensors; "" for one that is left out.
        outputs: likewise.
        settings: its attributes.
    """

    operator: str
    name: str
    number: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OnnxGraph:
    """A model as it is worked on.

    Attributes:
        nodes: the operators that depend on an input, in order.
        constants: by name the tensors that do not.
        shapes: of every tensor, where it could be told.
        types: likewise.
        inputs: the tensors that are given.
        outputs: those that are asked for.
        refused: operators that are refused for what they are, or that make no sense.
        model: the whole model, as onnxruntime is given it.
        notes: what is not as it was, in words.
        opset: the version of ONNX' own operators.
        producer: the program that wrote the file and its version, where it says so.
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


@dataclass
class _GraphWalk:
    """What is known while the operators are gone through."""

    model: Any
    constants: dict[str, NDArray[Any]]
    types: dict[str, Any]
    nodes: list[Node] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    numbers: int = 0


def read(path: Path, known: Collection[str] | None = None, shapes: Shapes = MappingProxyType({})) -> OnnxGraph:
    """Reads a file.

    Args:
        path: the file.
        known: operators that there are rules for: where some of a file's are refused before it is gone through, or its
            sides are not fixed, those that are not among them are listed too.
        shapes: by input its sides, where the file leaves some open.

    Raises:
        ModelError: it is no ONNX model, or it is damaged, absurd, or reaches out of its folder.
    """
    model, notes = onnx_model.read(path)
    try:
        given = onnx_inputs.given_to(model)
        notes = (*notes, *onnx_inputs.fix(given, shapes), *onnx_inputs.fix_batch(given))
        unfixed = onnx_inputs.unfixed(given)
        if (unfixed or any(_refused(model))) and (refused := tuple(_refused(model, known))):
            return OnnxGraph((), {}, {}, {}, (), (), refused, b"", notes, _opset(model), _producer(model))
        if unfixed:
            raise onnx_inputs.not_fixed(unfixed, path)
        fixed = onnx_inputs.batch(given)
        graph = _walked(onnx_inputs.of_one(model, given)) if fixed else _walked(model)
        if fixed and _scales(graph, fixed, model):
            graph = _with_notes(graph, (f"its batch of {fixed} is taken as 1",))
        elif fixed:
            graph = _walked(model)
        return _with_notes(graph, notes)
    except ModelError as error:
        error.where = error.where or str(path)
        raise


def _with_notes(graph: OnnxGraph, notes: tuple[str, ...]) -> OnnxGraph:
    return replace(graph, notes=(*notes, *graph.notes))


def _refused(model: Any, known: Collection[str] | None = None) -> Iterator[Refused]:
    """The operators that are refused for what they are, and those that are not known, but for what is computed."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for number, proto in enumerate(model.graph.node):
        node, why = _node(proto, number), _why_not(proto)
        fixed = node.operator in ("Constant", "Shape") or constants.issuperset(filter(None, node.inputs))
        if fixed and node.operator not in CHANGING:
            constants.update(node.outputs)
        elif known is not None and node.operator not in known:
            why = why or NO_LAYER
        if why:
            yield Refused(node.name, node.operator, why)


def _why_not(node: Any) -> str:
    """Why an operator is refused for what it is; empty if it is not."""
    if node.domain not in OWN_DOMAINS:
        return f"it is a custom operator, of {node.domain[:60]!r}; export the model without it"
    if node.op_type in CONTROL:
        return "it is control flow, whose course depends on the data; export the model without it"
    if node.op_type.startswith("Sequence") or node.op_type in ("SplitToSequence", "ConcatFromSequence"):
        return "it works on sequences of tensors; export the model without it"
    if node.op_type.startswith(QUANTIZED):
        return "the model is quantized already; bring the float model that it was made of"
    return ""


def _scales(graph: OnnxGraph, batch: int, model: Any) -> bool:
    """Whether with a batch of 1 every output has a first side of 1, where it was that of the batch."""
    said = [value.type.tensor_type for value in model.graph.output if value.type.tensor_type.HasField("shape")]
    before = [kind.shape.dim[0].dim_value in (batch, 0) if kind.shape.dim else False for kind in said]
    return not graph.refused and all(before) and all(graph.shapes.get(name, ())[:1] == (1,) for name in graph.outputs)


def _walked(model: Any) -> OnnxGraph:
    """Goes through the operators: infers shapes, computes what is constant."""
    from onnx import checker

    for value in model.graph.output:  # the checker wants types and shapes, which what is inferred will replace
        if value.type.WhichOneof("value") in (None, "tensor_type"):
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or onnx_model.FLOAT
    try:
        checker.check_model(model)
    except (checker.ValidationError, ValueError, RuntimeError) as error:
        raise ModelError(f"onnx finds fault with it: {_first_line(error)}", todo="export it again") from error
    constants = {tensor.name: onnx_model.array(tensor) for tensor in model.graph.initializer}
    given = onnx_inputs.given_to(model)
    walk = _GraphWalk(model, constants, {value.name: value.type for value in given})
    for value in given:
        _count_in(walk, value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
    for name, numbers in constants.items():
        walk.types[name] = _type_of(numbers, name)
    for number, proto in enumerate(model.graph.node):
        _visit(walk, proto, _node(proto, number))
    outputs = tuple(value.name for value in model.graph.output)
    for value in model.graph.output:
        if value.name in walk.types and _shape(walk.types[value.name]) is not None:
            value.type.CopyFrom(walk.types[value.name])
    shapes = {name: shape for name, kind in walk.types.items() if (shape := _shape(kind)) is not None}
    types = {name: TYPE_NAMES.get(kind.tensor_type.elem_type, "?") for name, kind in walk.types.items()}
    names = tuple(value.name for value in given)
    refused = tuple(walk.refused)
    model_bytes = b"" if refused else _serialized(model)
    told = (_opset(model), _producer(model))
    nodes = tuple(walk.nodes)
    return OnnxGraph(nodes, walk.constants, shapes, types, names, outputs, refused, model_bytes, (), *told)


def _serialized(model: Any) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except ValueError as error:
        raise ModelError(f"with all of its tensors it has more than {onnx_model.MOST_BYTES:,} bytes") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


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
    return Node(proto.op_type, name, number, tuple(proto.input), tuple(proto.output), settings)


def _visit(walk: _GraphWalk, proto: Any, node: Node) -> None:
    """One operator: it is refused, computed, or kept with the shapes of what it makes."""
    why = _infer(walk, proto)
    if why:
        walk.refused.append(Refused(node.name, node.operator, why))
        return
    if (
        node.operator == "Constant"
        or node.operator == "Shape"
        or all(name in walk.constants for name in node.inputs if name)
    ):
        computed = _computed(walk, proto, node)
        if computed is not None:
            for name, numbers in zip(filter(None, node.outputs), computed, strict=True):
                walk.constants[name] = numbers
                walk.types[name] = _type_of(numbers, name)
            return
    for name in filter(None, node.outputs):
        _count_in(walk, name, _shape(walk.types[name]) if name in walk.types else None)
    walk.nodes.append(node)


def _count_in(walk: _GraphWalk, name: str, shape: Sequence[int] | None) -> None:
    """Looks at the size of a computed tensor.

    Raises:
        ModelError: it, or all together, are too large.
    """
    size = prod(shape or ())
    walk.numbers += size
    if size > MOST_NUMBERS:
        raise ModelError(f"its tensor {name[:80]!r} has the sides {list(shape or ())[:8]}", allowed=f"{MOST_NUMBERS:,}")
    if walk.numbers > MOST_TOGETHER:
        raise ModelError(f"its tensors up to {name[:80]!r} have {walk.numbers:,} numbers", allowed=f"{MOST_TOGETHER:,}")


def _infer(walk: _GraphWalk, proto: Any) -> str:
    """Finds the types of what an operator makes; why it makes no sense, or empty."""
    from onnx import checker, defs, numpy_helper, shape_inference

    taken = [name for name in proto.input if name]
    if any(name not in walk.types for name in taken):
        return "" if walk.refused else f"nothing makes its input {next(n for n in taken if n not in walk.types)[:80]!r}"
    version = _opset(walk.model)
    small = {n: walk.constants[n] for n in taken if n in walk.constants and walk.constants[n].size <= MOST_SHAPING}
    data = {name: numpy_helper.from_array(numbers, name) for name, numbers in small.items() if numbers.dtype != object}
    try:
        schema = defs.get_schema(proto.op_type, version, "")
    except defs.SchemaError:
        return f"opset {version} of ONNX has no such operator"
    try:
        types = shape_inference.infer_node_outputs(
            schema, proto, {name: walk.types[name] for name in taken}, data, opset_imports=list(walk.model.opset_import)
        )
    except (shape_inference.InferenceError, checker.ValidationError, *FAILURES, ValueError, TypeError) as error:
        return f"it makes no sense: {_first_line(error)}"
    if proto.op_type == "GroupNormalization":  # onnx infers nothing for it
        types = {proto.output[0]: walk.types[proto.input[0]]}
    walk.types.update(types)
    return ""


def _opset(model: Any) -> int:
    return int(max(each.version for each in model.opset_import if each.domain in OWN_DOMAINS))


def _producer(model: Any) -> str:
    return f"{model.producer_name} {model.producer_version}".strip()[:80]


def _computed(walk: _GraphWalk, proto: Any, node: Node) -> list[NDArray[Any]] | None:
    """What an operator makes of constants; None where that is not to be computed."""
    if node.operator in CHANGING:
        return None
    if node.operator == "Shape":
        kind = walk.types.get(node.inputs[0])
        shape = _shape(kind) if kind is not None else None
        if shape is None:
            return None
        return [np.asarray(shape[slice(node.settings.get("start", 0), node.settings.get("end"))], np.int64)]
    if node.operator == "Constant" and "value" in node.settings:
        return [onnx_model.array(node.settings["value"])]
    for name in node.outputs:
        shape = _shape(walk.types[name]) if name in walk.types else None
        if (shape is None or prod(shape) > MOST_NUMBERS) and node.operator not in ("NonZero", "Compress", "Unique"):
            return None
    try:
        return _evaluated(walk, proto, {name: walk.constants[name] for name in node.inputs if name})
    except (*FAILURES, ValueError, TypeError):
        return None


def _evaluated(walk: _GraphWalk, proto: Any, given: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """What onnx computes for one operator, as a model of its own: for an operator alone onnx forgets the opset."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    takes = [helper.make_value_info(name, walk.types[name]) for name in given]
    makes = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = helper.make_graph([proto], "one", takes, makes)
    model = helper.make_model(graph, opset_imports=list(walk.model.opset_import))
    return [np.asarray(made) for made in ReferenceEvaluator(model).run(None, dict(given))]


def _shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of a type, if all of its sides are told."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _type_of(numbers: NDArray[Any], name: str) -> Any:
    """The type of an array."""
    from onnx import helper

    try:
        return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(numbers.dtype), numbers.shape)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"its tensor {name[:80]!r} is of the type {numbers.dtype}") from error
