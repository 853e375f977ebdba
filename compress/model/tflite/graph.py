"""A .tflite file as plain values: tensors and operators in execution order.

Built on the flatbuffer bindings of ai-edge-litert, which load without TensorFlow. The complete content is kept
(`Graph.source`), so that unknown fields are preserved when the file is written again; only sparse constants are
expanded.

Source: tensorflow/lite/schema/schema.fbs, schema version 3.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import limits, sparse
from compress.model.tflite.verifier import Allowance, verify
from deploy.contract.tensors import TensorLayout, sample_shape

IDENTIFIER = b"TFL3"
NONE = -1
"""The tensor index of an optional input that is absent."""
_ALIGNMENT = 16
"""Source: schema.fbs, Buffer.data (force_align: 16)."""
INT64_SIZE = 8
"""Bytes of an int64. In the schema, zero points and some options of StableHLO are vectors of them."""
COUNT_SIZE = 4
"""Bytes of the number of elements before a vector."""
DTYPES = {
    "FLOAT32": "float32",
    "FLOAT16": "float16",
    "INT32": "int32",
    "UINT8": "uint8",
    "INT64": "int64",
    "BOOL": "bool",
    "INT16": "int16",
    "INT8": "int8",
    "FLOAT64": "float64",
    "UINT32": "uint32",
    "UINT16": "uint16",
    "UINT64": "uint64",
}


@dataclass(frozen=True)
class Quantization:
    """Affine quantization: real = scale * (stored - zero_point), per tensor or along `axis`."""

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]
    axis: int

    @property
    def per_channel(self) -> bool:
        """Whether the tensor has more than one scale."""
        return len(self.scale) > 1

    @property
    def first_zero_point(self) -> int:
        """The zero point of the first scale; 0 in a file without zero points."""
        return self.zero_point[0] if self.zero_point else 0

    @cached_property
    def one_scale(self) -> bool:
        """Whether all scales are equal."""
        return len(set(self.scale)) <= 1


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
        dtype: the name in the schema, such as "INT8" or "FLOAT32".
        shape: its shape; dynamic dimensions as stored (usually 1).
        dynamic: whether a dimension other than the batch is dynamic. (Converters mark the batch as dynamic by default;
            the compiler uses the stored 1.)
        data: its bytes if it is a constant, otherwise None.
        is_variable: whether the tensor keeps its value between calls.
    """

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    dynamic: bool
    quantization: Quantization | None
    data: NDArray[np.uint8] | None
    is_variable: bool

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_constant(self) -> bool:
        """Whether the file contains the value of the tensor."""
        return self.data is not None

    @cached_property
    def is_zero(self) -> bool:
        """Whether the tensor is a constant with only zeros."""
        return self.data is not None and not self.array().any()

    def array(self) -> NDArray[Any]:
        """Return the value of a constant in its dtype and shape.

        Raises:
            ModelError: the tensor is not a constant, or its number of bytes does not fit its shape.
        """
        if self.data is None or self.dtype not in DTYPES:
            raise ModelError(f"tensor {self.name!r} ({self.dtype}) has no readable constant value")
        try:
            return self.data.view(DTYPES[self.dtype]).reshape(self.shape)
        except (ValueError, TypeError) as error:
            raise ModelError(f"tensor {self.name!r}: {len(self.data)} bytes do not fill {self.shape}") from error


@dataclass(frozen=True)
class Operator:
    """An operator of the graph.

    Attributes:
        name: the name in the schema, such as "CONV_2D", or the name of a custom operator.
        inputs: indices of its input tensors; NONE for a missing optional one.
        options: the schema's options object (`Conv2DOptionsT`, ...), or None.
    """

    index: int
    name: str
    custom: bool
    version: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Any

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option, or `default` if the file does not contain options."""
        return getattr(self.options, name, default)


@dataclass(frozen=True)
class Graph:
    """The main subgraph of a .tflite file.

    Attributes:
        source: the schema's `ModelT`, with the complete content of the file.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    subgraphs: int
    source: Any

    def feeds(self, samples: NDArray[np.float32]) -> list[list[NDArray[Any]]]:
        """Return samples [n, ...] as the inputs of one run each; of several inputs, samples are rows that are split.

        Source: `deploy.contract.tensors`.
        """
        if len(self.inputs) == 1:
            return [[sample[np.newaxis]] for sample in samples]
        tensors = [self.tensors[index] for index in self.inputs]
        layout = TensorLayout([tensor.name for tensor in tensors], [sample_shape(tensor.shape) for tensor in tensors])
        rows = [layout.split(sample[np.newaxis]) for sample in samples]
        return [[part.reshape(tensor.shape) for part, tensor in zip(row, tensors, strict=True)] for row in rows]

    def input_tensors(self, operator: Operator) -> list[Tensor]:
        """Return the input tensors of an operator, without missing optional ones."""
        return [self.tensors[index] for index in operator.inputs if index != NONE]

    def output_tensors(self, operator: Operator) -> list[Tensor]:
        """Return the output tensors of an operator."""
        return [self.tensors[index] for index in operator.outputs]

    def custom_operators(self, name: str) -> list[Operator]:
        """Return the custom operators of this name."""
        return [operator for operator in self.operators if operator.custom and operator.name == name]

    @property
    def named_outputs(self) -> dict[int, str]:
        """The names of several outputs in the only signature, by tensor; empty if there is no such signature.

        The names of the tensors are numbered in another order: PartitionedCall:2 is output_10 of 12 outputs.
        """
        signatures = self.source.signatureDefs or []
        if len(signatures) != 1 or len(self.outputs) < 2:
            return {}
        return {int(entry.tensorIndex): text_of(entry.name or "") for entry in signatures[0].outputs or []}

    @cached_property
    def consumers(self) -> dict[int, list[Operator]]:
        """The operators that read each tensor."""
        consumers: dict[int, list[Operator]] = {}
        for operator in self.operators:
            for index in dict.fromkeys(operator.inputs):
                if index != NONE:
                    consumers.setdefault(index, []).append(operator)
        return consumers

    @cached_property
    def producer(self) -> dict[int, Operator]:
        """The operator that writes each tensor."""
        return {index: operator for operator in self.operators for index in operator.outputs}


def read(path: Path) -> Graph:
    """Read a .tflite file.

    Raises:
        ModelError: the file does not exist, or is not a .tflite file.
    """
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error


def parse(content: bytes, where: str = "") -> Graph:
    """Return the graph in the bytes of a .tflite file; `where` is its name in messages.

    Raises:
        ModelError: the content is not that of a .tflite file, or is damaged.
    """
    if len(content) < 8 or content[4:8] != IDENTIFIER:
        raise ModelError("is not a .tflite file", where=where, hint="give a model that a TFLite converter wrote")
    from ai_edge_litert import schema_py_generated as schema

    unions = ("BuiltinOptions", "BuiltinOptions2", "QuantizationDetails", "SparseIndexVector")
    try:
        allowance = verify(content, {name: _names(getattr(schema, name)) for name in unions})
        source = schema.ModelT.InitFromPackedBuf(bytearray(content), 0)
        _complete(source)
        dtypes = {number: DTYPES[name] for number, name in _names(schema.TensorType).items() if name in DTYPES}
        sparse.expand(source, schema, dtypes, allowance)
        return _graph(source, schema, allowance)
    except (struct.error, IndexError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"is a damaged .tflite file: {error}", where=where) from error


def _complete(source: Any) -> None:
    """Replace absent lists of a file by empty ones."""
    if not source.subgraphs or not source.buffers:
        raise ValueError("it has no graph or no buffers")
    with_lists: list[tuple[Any, tuple[str, ...]]] = [(source, ("operatorCodes",))]
    for subgraph in source.subgraphs:
        with_lists.append((subgraph, ("tensors", "operators", "inputs", "outputs")))
        with_lists += [(operator, ("inputs", "outputs")) for operator in subgraph.operators or []]
    for table, names in with_lists:
        vars(table).update({name: [] for name in names if getattr(table, name) is None})


def from_source(source: Any) -> Graph:
    """Return the graph of the schema's `ModelT`; its parts are shared, not copied."""
    from ai_edge_litert import schema_py_generated as schema

    return _graph(source, schema, Allowance(sys.maxsize))


def serialize(graph: Graph) -> bytes:
    """Return the bytes of a .tflite file with the complete content of `graph.source`.

    Buffers are aligned to 16 bytes, as the schema requires (`force_align`) and the runtimes expect. Equal zero points
    are written once: those of weights and biases, with 8 bytes for each channel, are zeros.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    class AlignedBuffer(schema.BufferT):  # type: ignore[misc]
        def Pack(self, builder: Any) -> Any:  # noqa: N802 - overrides the generated name
            data = None
            if self.data is not None:
                content = np.asarray(self.data, np.uint8).tobytes()
                builder.StartVector(1, len(content), _ALIGNMENT)
                builder.head = builder.head - len(content)
                builder.Bytes[builder.Head() : builder.Head() + len(content)] = content
                data = builder.EndVector()
            schema.BufferStart(builder)
            if data is not None:
                schema.BufferAddData(builder, data)
            schema.BufferAddOffset(builder, self.offset)
            schema.BufferAddSize(builder, self.size)
            return schema.BufferEnd(builder)

    class SharingBuilder(flatbuffers.Builder):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.written: dict[bytes, int] = {}
            self.is_shared = False

        def StartVector(self, size: int, count: int, alignment: int) -> Any:  # noqa: N802 - overrides the generated name
            self.before, self.length = self.Offset(), COUNT_SIZE + size * count
            self.is_shared = size == INT64_SIZE
            return super().StartVector(size, count, alignment)

        def EndVector(self, *count: int) -> int:  # noqa: N802 - overrides the generated name
            vector: int = super().EndVector(*count)
            if not self.is_shared:
                return vector
            self.is_shared = False
            content = bytes(self.Bytes[self.Head() : self.Head() + self.length])
            if content in self.written:
                self.head = len(self.Bytes) - self.before
            return self.written.setdefault(content, vector)

    builder = SharingBuilder(1 << 20)
    plain = graph.source.buffers
    try:
        graph.source.buffers = [AlignedBuffer(b.data, b.offset, b.size) for b in plain or []]
        builder.Finish(graph.source.Pack(builder), IDENTIFIER)
    finally:
        graph.source.buffers = plain
    return bytes(builder.Output())


def _graph(source: Any, schema: Any, allowance: Allowance) -> Graph:
    main = source.subgraphs[0]
    dtypes = _names(schema.TensorType)
    builtins = _names(schema.BuiltinOperator)
    codes = [_operator_code(code, builtins) for code in source.operatorCodes]
    tensors = tuple(_tensor(index, tensor, source.buffers, dtypes) for index, tensor in enumerate(main.tensors))
    operators = tuple(_operator(index, operator, codes) for index, operator in enumerate(main.operators))
    produced: set[int] = set()
    for operator in operators:
        _verify(operator, tensors, produced, allowance)
        limits.check_options(operator.name, operator.options, len(source.subgraphs))
    inputs = _integers(main.inputs)
    outputs = _integers(main.outputs)
    if any(not 0 <= tensor < len(tensors) for tensor in (*inputs, *outputs)) or len(inputs) > len(tensors):
        raise ValueError("an input or output of the graph does not exist")
    if any(not 0 <= entry.buffer < len(source.buffers) for entry in source.metadata or []):
        raise ValueError("a buffer of the metadata does not exist")
    return Graph(tensors, operators, inputs, outputs, len(source.subgraphs), source)


def _verify(operator: Operator, tensors: tuple[Tensor, ...], produced: set[int], allowance: Allowance) -> None:
    """Verify that an operator's tensors exist, and that no earlier operator writes its outputs (`produced`)."""
    for tensor in (*operator.inputs, *operator.outputs):
        if not NONE <= tensor < len(tensors) or (tensor == NONE and tensor in operator.outputs):
            raise ValueError(f"operator {operator.index} refers to tensor {tensor} of {len(tensors)}")
        # The description of an operator contains the names of its tensors: a long name counts at every use.
        allowance.spend(len(tensors[tensor].name))
    allowance.spend(2 * len(operator.name))
    if not produced.isdisjoint(operator.outputs):
        raise ValueError(f"operator {operator.index} writes a tensor that another operator has written")
    produced.update(operator.outputs)


def _integers(items: Any) -> tuple[int, ...]:
    return tuple(sparse.integers(items))


def _names(enumeration: Any) -> dict[int, str]:
    return {number: name for name, number in vars(enumeration).items() if not name.startswith("_")}


def text_of(stored: Any) -> str:
    """Return a string of the file, which the reader gives as bytes or as text."""
    return stored.decode("utf-8", "replace") if isinstance(stored, bytes) else str(stored)


def _operator_code(code: Any, names: dict[int, str]) -> tuple[str, bool, int]:
    # Files older than schema 3a store the code in the deprecated byte only.
    number = max(code.deprecatedBuiltinCode, code.builtinCode)
    limits.check_version(code.version)
    name = names.get(number, f"BUILTIN_{number}")
    if name == "CUSTOM":
        return text_of(code.customCode), True, code.version
    return name, False, code.version


def _operator(index: int, operator: Any, codes: list[tuple[str, bool, int]]) -> Operator:
    name, custom, version = codes[operator.opcodeIndex]
    options = operator.builtinOptions if operator.builtinOptions is not None else operator.builtinOptions2
    return Operator(index, name, custom, version, _integers(operator.inputs), _integers(operator.outputs), options)


def _tensor(index: int, tensor: Any, buffers: list[Any], dtypes: dict[int, str]) -> Tensor:
    data = buffers[tensor.buffer].data if tensor.buffer else None
    data = None if data is None or len(data) == 0 else np.asarray(data, np.uint8)
    shape = _integers(tensor.shape)
    limits.check_shape(index, shape)
    dtype = dtypes.get(tensor.type, f"TYPE_{tensor.type}")
    if data is not None:
        limits.check_data(index, DTYPES.get(dtype), prod(shape), len(data))
    quantization = _quantization(tensor.quantization)
    if quantization is not None:
        scale, zero_point, axis = quantization.scale, quantization.zero_point, quantization.axis
        limits.check_quantization(index, dtype, shape, scale, zero_point, axis)
    return Tensor(
        index,
        text_of(tensor.name or ""),
        dtype,
        shape,
        any(size < 0 for size in _integers(tensor.shapeSignature)[1:]),
        quantization,
        data,
        bool(tensor.isVariable),
    )


def _quantization(stored: Any) -> Quantization | None:
    if stored is None or stored.scale is None or len(stored.scale) == 0:
        return None
    scale = tuple(np.asarray(stored.scale, np.float32).tolist())
    return Quantization(scale, _integers(stored.zeroPoint), int(stored.quantizedDimension))
