"""The .tflite file of an embedding extractor with a last layer: FULLY_CONNECTED and SOFTMAX.

Numbers of fields and operators: TensorFlow Lite's schema.fbs.
"""

from __future__ import annotations

import struct
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from coralline_pycoral.flat_tables import ByteString, Old, Values, field, numbers, tables, u32, vector, with_tables
from deploy.contract.preprocessing import Array

CONV_2D, FULLY_CONNECTED, L2_NORMALIZATION, MUL, SOFTMAX = 3, 9, 11, 18, 25
FLOAT32, INT32, UINT8, INT8 = 0, 2, 3, 9
_MODEL_CODES, _MODEL_SUBGRAPHS, _MODEL_DESCRIPTION, _MODEL_BUFFERS = 1, 2, 3, 4
_TENSORS, _INPUTS, _OUTPUTS, _OPERATORS = range(4)
_DTYPES: Dict[int, Any] = {
    FLOAT32: np.dtype("<f4"),
    INT32: np.dtype("<i4"),
    UINT8: np.dtype("u1"),
    INT8: np.dtype("i1"),
}
_VERSIONS = {FLOAT32: (1, 1), UINT8: (1, 1), INT8: (4, 2)}
"""The versions of FULLY_CONNECTED and SOFTMAX for the type of their input."""
_OPTIONS = {FULLY_CONNECTED: 8, SOFTMAX: 9}
"""The numbers of the options of operators in the union BuiltinOptions."""


class LastLayer(NamedTuple):
    """A last layer.

    Attributes:
        weights: float [classes, values].
        biases: float [classes].
        logits: the smallest and the largest logit, for the quantization; others saturate.
        sharpness: the factor of the logits in the softmax.
    """

    weights: Array
    biases: Array
    logits: Tuple[float, float]
    sharpness: float = 1.0


class FileTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        kind: its type, such as UINT8.
        scale: its scale; 1 for floats.
        content: its values if it is constant; otherwise empty.
    """

    shape: Tuple[int, ...]
    kind: int
    scale: float
    zero_point: int
    content: bytes

    @property
    def values(self) -> Array:
        """The real values."""
        stored = np.frombuffer(self.content, _DTYPES[self.kind]).astype(np.float32)
        return ((stored - np.float32(self.zero_point)) * np.float32(self.scale)).reshape(self.shape)


class HeadFile:
    """A parsed .tflite file with one graph.

    Raises:
        ValueError, struct.error, IndexError: the file is damaged.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.model = u32(content, 0)
        (self.graph,) = tables(content, vector(content, self.model, _MODEL_SUBGRAPHS))
        codes = tables(content, vector(content, self.model, _MODEL_CODES))
        kinds = [max(_number(content, code, 0, "<b"), _number(content, code, 3, "<i")) for code in codes]
        self.operators = tables(content, vector(content, self.graph, _OPERATORS))
        self.kinds = [kinds[_number(content, operator, 0, "<I")] for operator in self.operators]

    @property
    def description(self) -> str:
        """The description of the file; empty if there is none."""
        if not field(self.content, self.model, _MODEL_DESCRIPTION):
            return ""
        text = vector(self.content, self.model, _MODEL_DESCRIPTION)
        return self.content[text + 4 : text + 4 + u32(self.content, text)].decode("utf-8", "replace")

    def ends(self, operator: int, number: int) -> List[int]:
        """Return the tensors that an operator reads (`number` 1) or writes (2)."""
        return _integers(self.content, vector(self.content, self.operators[operator], number))

    def sharpness(self, operator: int) -> float:
        """Return the factor of the logits in a SOFTMAX."""
        return float(_number(self.content, vector(self.content, self.operators[operator], 4), 0, "<f"))

    def tensor(self, index: int) -> FileTensor:
        """Return a tensor."""
        data = self.content
        table = tables(data, vector(data, self.graph, _TENSORS))[index]
        scale, zero_point = 1.0, 0
        if field(data, table, 4):
            quantization = vector(data, table, 4)
            if field(data, quantization, 2) and u32(data, vector(data, quantization, 2)):
                (scale,) = struct.unpack_from("<f", data, vector(data, quantization, 2) + 4)
                (zero_point,) = struct.unpack_from("<q", data, vector(data, quantization, 3) + 4)
        buffer = tables(data, vector(data, self.model, _MODEL_BUFFERS))[_number(data, table, 2, "<I")]
        start = vector(data, buffer, 0) if field(data, buffer, 0) else 0
        content = data[start + 4 : start + 4 + u32(data, start)] if start else b""
        shape = tuple(_integers(data, vector(data, table, 0)))
        return FileTensor(shape, _number(data, table, 1, "<b"), float(scale), int(zero_point), content)

    @property
    def output(self) -> int:
        """The index of the only output."""
        (index,) = _integers(self.content, vector(self.content, self.graph, _OUTPUTS))
        return index

    def cut(self, operator: int) -> bytes:
        """Return the file without the operators after `operator`, whose output becomes the output of the file."""
        data = bytearray(self.content)
        (output,) = self.ends(operator, 2)
        outputs = vector(data, self.graph, _OUTPUTS)
        struct.pack_into("<Ii", data, outputs, 1, output)
        struct.pack_into("<I", data, vector(data, self.graph, _OPERATORS), operator + 1)
        return bytes(data)


def with_layer(extractor: bytes, layer: LastLayer, description: str = "") -> bytes:
    """Return the file of an extractor with a last layer; the output is the probabilities.

    Args:
        extractor: a .tflite file whose output is an embedding: uint8, int8 or float32.
        layer: the layer.
        description: the description of the file.

    Raises:
        ValueError: the output is no embedding of the right length.
    """
    file = HeadFile(extractor)
    embedding = file.tensor(file.output)
    if int(np.prod(embedding.shape)) != layer.weights.shape[1] or embedding.kind not in _VERSIONS:
        what = "the output of the extractor has the shape %r, and the weights take %d values"
        raise ValueError(what % (list(embedding.shape), layer.weights.shape[1]))
    tensors, contents = _new_tensors(embedding, layer)
    data, model, graph = extractor, file.model, file.graph
    first_tensor, first_code, first_buffer = (
        u32(data, vector(data, table, number))
        for table, number in ((graph, _TENSORS), (model, _MODEL_CODES), (model, _MODEL_BUFFERS))
    )
    ends = ([file.output, first_tensor, first_tensor + 1], [first_tensor + 2]), ([first_tensor + 2], [first_tensor + 3])
    kinds = (FULLY_CONNECTED, SOFTMAX)
    options: Sequence[Dict[int, Any]] = ({}, {0: ("<f", layer.sharpness)})
    operators = [
        {
            0: ("<I", first_code + index),
            1: numbers("i", read),
            2: numbers("i", written),
            3: ("<B", _OPTIONS[kind]),
            4: chosen,
        }
        for index, ((read, written), kind, chosen) in enumerate(zip(ends, kinds, options))
    ]
    codes = [
        {0: ("<b", kind), 2: ("<i", version), 3: ("<i", kind)}
        for kind, version in zip(kinds, _VERSIONS[embedding.kind])
    ]
    for tensor, buffer in zip(tensors, (first_buffer, first_buffer + 1, 0, 0)):
        tensor[2] = ("<I", buffer)
    new_graph = {
        _TENSORS: _olds(data, graph, _TENSORS) + tensors,
        _INPUTS: Old(vector(data, graph, _INPUTS)),
        _OUTPUTS: numbers("i", [first_tensor + 3]),
        _OPERATORS: _olds(data, graph, _OPERATORS) + operators,
    }
    root: Dict[int, Any] = {
        0: ("<I", 3),
        _MODEL_CODES: _olds(data, model, _MODEL_CODES) + codes,
        _MODEL_SUBGRAPHS: [new_graph],
        _MODEL_DESCRIPTION: _text(description),
        _MODEL_BUFFERS: _olds(data, model, _MODEL_BUFFERS)
        + [{0: Values(len(content), content)} for content in contents],
    }
    for number in (5, 6):  # metadata, by the numbers of buffers
        if field(data, model, number):
            root[number] = Old(vector(data, model, number))
    return with_tables(extractor, root, b"TFL3")


def _new_tensors(embedding: FileTensor, layer: LastLayer) -> Tuple[List[Dict[int, Any]], List[bytes]]:
    """Return the tables of weights, biases, logits and probabilities, and the bytes of the first two."""
    classes = len(layer.weights)
    kind = embedding.kind
    shapes = (layer.weights.shape, (classes,), (1, classes), (1, classes))
    names = ("learnt/weights", "learnt/biases", "learnt/logits", "probabilities")
    if kind == FLOAT32:
        kinds: Sequence[int] = (FLOAT32,) * 4
        quantizations: Sequence[Optional[Tuple[float, int]]] = (None,) * 4
        contents = [np.asarray(values, "<f4").tobytes() for values in (layer.weights, layer.biases)]
    else:
        smallest = 0 if kind == UINT8 else -128
        middle = smallest + 128
        scale = max(float(np.abs(layer.weights).max()), 1e-6) / 127
        low, high = min(layer.logits[0], 0.0), max(layer.logits[1], 0.0, layer.logits[0] + 1e-6)
        step = (high - low) / 255
        logits = (step, round(smallest - low / step))
        bias_scale = embedding.scale * scale
        kinds = (kind, INT32, kind, kind)
        quantizations = ((scale, middle), (bias_scale, 0), logits, (1 / 256, smallest))
        stored = np.round(layer.weights / scale) + middle
        contents = [
            stored.astype(_DTYPES[kind]).tobytes(),
            np.round(layer.biases / bias_scale).clip(-(2.0**31), 2.0**31 - 1).astype("<i4").tobytes(),
        ]
    tensors = []
    for shape, tensor_kind, name, quantization in zip(shapes, kinds, names, quantizations):
        table: Dict[int, Any] = {0: numbers("i", shape), 1: ("<b", tensor_kind), 3: _text(name)}
        if quantization is not None:
            table[4] = {2: numbers("f", quantization[:1]), 3: numbers("q", quantization[1:])}
        tensors.append(table)
    return tensors, contents


def _olds(data: bytes, table: int, number: int) -> List[Any]:
    return [Old(position) for position in tables(data, vector(data, table, number))]


def _text(text: str) -> Values:
    content = text.encode()
    return Values(len(content), content + b"\0")


def _number(data: ByteString, table: int, number: int, form: str) -> Any:
    """Return a number of a table; 0 if the field has its default."""
    position = field(data, table, number)
    return struct.unpack_from(form, data, position)[0] if position else 0


def _integers(data: ByteString, position: int) -> List[int]:
    return list(struct.unpack_from("<%di" % u32(data, position), data, position + 4))
