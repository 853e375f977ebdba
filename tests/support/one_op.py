"""Models of one operator or of a few, assembled by hand to test rules, counts and readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from compress.model.tflite import graph, limits

OPTIONS = {
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "TRANSPOSE_CONV": "TransposeConvOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "BATCH_MATMUL": "BatchMatMulOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "CONCATENATION": "ConcatenationOptions",
    "SOFTMAX": "SoftmaxOptions",
    "ADD": "AddOptions",
    "SUB": "SubOptions",
    "MUL": "MulOptions",
    "DIV": "DivOptions",
    "GATHER": "GatherOptions",
    "UNPACK": "UnpackOptions",
    "SPLIT": "SplitOptions",
    "SPLIT_V": "SplitVOptions",
    "DEPTH_TO_SPACE": "DepthToSpaceOptions",
    "LEAKY_RELU": "LeakyReluOptions",
    "GELU": "GeluOptions",
    "MIRROR_PAD": "MirrorPadOptions",
    "RESIZE_BILINEAR": "ResizeBilinearOptions",
    "SHAPE": "ShapeOptions",
    "ARG_MAX": "ArgMaxOptions",
    "PACK": "PackOptions",
    "MEAN": "ReducerOptions",
    "SUM": "ReducerOptions",
    "REDUCE_MAX": "ReducerOptions",
    "REDUCE_MIN": "ReducerOptions",
    "REDUCE_PROD": "ReducerOptions",
    "L2_NORMALIZATION": "L2NormOptions",
    "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighborOptions",
    "SPACE_TO_DEPTH": "SpaceToDepthOptions",
    "STRIDED_SLICE": "StridedSliceOptions",
}
"""The options table of each operator that has one here."""
NUMPY = {"INT8": "i1", "UINT8": "u1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FLOAT32": "<f4", "BOOL": "?"}


@dataclass(frozen=True)
class Tensor:
    """A tensor.

    Attributes:
        shape: its shape.
        dtype: the schema's name of its type.
        data: values of a constant: one for all elements, or all of them; None for a computed tensor.
        scales: the scales of its quantization; empty for floats and for structure (shapes, axes, strides).
        zero_point: the zero point of its quantization, the same for every scale.
        signature: the shape with -1 for dynamic dimensions.
        variable: whether it is a variable tensor.
    """

    shape: tuple[int, ...]
    dtype: str = "INT8"
    data: Any = None
    scales: tuple[float, ...] = (0.5,)
    zero_point: int = 0
    signature: tuple[int, ...] | None = None
    variable: bool = False


@dataclass(frozen=True)
class Op:
    """An operator: tensors by name, "" for an absent one; options with the names of the schema."""

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    version: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: bool = False


def integers(*values: int) -> Tensor:
    """Return a structural constant: a shape, axes, strides."""
    return Tensor((len(values),), "INT32", list(values), ())


def model(tensors: Mapping[str, Tensor], operators: Sequence[Op], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return the schema's `ModelT` of a graph."""
    from ai_edge_litert import schema_py_generated as schema

    place = {name: index for index, name in enumerate(tensors)} | {"": graph.NONE}
    schema_model = schema.ModelT()
    schema_model.version, schema_model.buffers, schema_model.operatorCodes = 3, [schema.BufferT()], []
    main = schema.SubGraphT()
    main.name, schema_model.subgraphs = b"main", [main]
    main.inputs, main.outputs = ([place[name] for name in names] for names in (inputs, outputs))
    main.tensors = [_tensor(schema, schema_model, name, tensor) for name, tensor in tensors.items()]
    main.operators = [_operator(schema, schema_model, op, place) for op in operators]
    return schema_model


def content(*arguments: Any) -> bytes:
    """Return the model as the bytes of a .tflite file; the arguments are those of `model`."""
    return graph.serialize(SimpleNamespace(source=model(*arguments)))


def read(*arguments: Any) -> graph.Graph:
    """Return the model as a graph, written and read again; the arguments are those of `model`."""
    return graph.parse(content(*arguments))


def one(
    name: str,
    inputs: Sequence[Tensor | None],
    output: Tensor,
    version: int = 1,
    *,
    custom: bool = False,
    **options: Any,
) -> graph.Graph:
    """Return a graph of one operator. The inputs of the operator that are not constants are the inputs of the graph."""
    tensors = {f"in{index}": tensor for index, tensor in enumerate(inputs) if tensor} | {"out": output}
    names = [f"in{index}" if tensor else "" for index, tensor in enumerate(inputs)]
    graph_inputs = [name for name in names if name and tensors[name].data is None and not tensors[name].variable]
    return read(tensors, [Op(name, names, ["out"], version, options, custom)], graph_inputs, ["out"])


def _tensor(schema: Any, schema_model: Any, name: str, tensor: Tensor) -> Any:
    result = schema.TensorT()
    result.name, result.shape, result.type = name.encode(), list(tensor.shape), getattr(schema.TensorType, tensor.dtype)
    result.shapeSignature = list(tensor.signature) if tensor.signature else None
    result.isVariable = tensor.variable
    result.buffer = 0
    if tensor.data is not None:
        values = np.broadcast_to(np.asarray(tensor.data, NUMPY[tensor.dtype]), tensor.shape)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)
        result.buffer = len(schema_model.buffers)
        schema_model.buffers.append(buffer)
    if tensor.scales and tensor.dtype in ("INT8", "UINT8", "INT16"):
        result.quantization = schema.QuantizationParametersT()
        result.quantization.scale = list(tensor.scales)
        result.quantization.zeroPoint = [tensor.zero_point] * len(tensor.scales)
    return result


def _operator(schema: Any, schema_model: Any, op: Op, place: Mapping[str, int]) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = schema.BuiltinOperator.CUSTOM if op.custom else getattr(schema.BuiltinOperator, op.name)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.customCode = op.name.encode() if op.custom else None
    code.version = op.version
    result = schema.OperatorT()
    result.opcodeIndex = len(schema_model.operatorCodes)
    result.inputs, result.outputs = [place[name] for name in op.inputs], [place[name] for name in op.outputs]
    if op.name in OPTIONS and not op.custom:
        options = getattr(schema, f"{OPTIONS[op.name]}T")()
        for key, (low, _) in limits.RANGES.items():  # the schema's default of a stride is 0, which is invalid
            if low == 1 and getattr(options, key, None) == 0:
                setattr(options, key, 1)
        for key, value in op.options.items():
            assert hasattr(options, key), key
            setattr(options, key, value)
        result.builtinOptionsType = getattr(schema.BuiltinOptions, OPTIONS[op.name])
        result.builtinOptions = options
    schema_model.operatorCodes.append(code)
    return result
