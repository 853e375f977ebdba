"""The parameters that the compiler stores for each operator: which values, and in which layouts they can be.

Arithmetic is that of float32; the reciprocal of an output's scale is rounded before it is multiplied. Source: observed
in compiled models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.graph import NONE, Graph, Operator, Tensor
from darwinn import parameter_layout
from darwinn.blocks import (
    FEW_ROWS,
    FLATTENED_MAP_BYTES,
    INPUT_BLOCK,
    ROW_STEP,
    padded_rows,
    position,
    round_up,
    touching_taps,
    unaligned_joins,
)
from darwinn.operator_constants import INT8_OFFSET
from darwinn.parameter_layout import HEADER, Matrix, NumberKind, ParameterLayout, Values

_MOST_ONES = 1 << 22
"""The largest matrix of zeros and ones that is built, in weights."""


@dataclass(frozen=True, eq=False)
class Single:
    """Parameters with one possible layout."""

    values: Values
    usual_layout: ParameterLayout

    @property
    def size_bytes(self) -> int:
        """The size of the region, without the zeros at its end."""
        return self.usual_layout.size_bytes


Choice = Matrix | Single


@dataclass(frozen=True, eq=False)
class StoredParameters:
    """The parameters of one operator.

    Attributes:
        purpose: what they are, for messages: "weights", or the name of a table that the compiler makes.
        tensors: the tensors that each kind of value comes from, one after another; none for tables that the compiler
            makes.
        choices: what the compiler may store, the usual first.
    """

    operator: Operator
    purpose: str
    tensors: Mapping[NumberKind, tuple[int, ...]]
    choices: tuple[Choice, ...]

    @property
    def is_table(self) -> bool:
        """Whether the compiler makes them, so that they may be missing."""
        return not self.tensors


def stored_parameters(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """Return the parameters that the compiler stores for an operator, as far as it is known.

    The graph is from `compress.model.tflite.graph`, which limits all sizes in it.
    """
    function = _FUNCTIONS.get(operator.name)
    return function(operator, graph) if function else []


def unsigned(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the elements of an 8-bit constant as the compiler stores them, in their order."""
    elements = tensor.array().ravel()
    return elements if tensor.dtype == "UINT8" else elements.view(np.uint8) ^ np.uint8(INT8_OFFSET)


def zero_points(tensor: Tensor) -> NDArray[np.int64]:
    """Return the zero points of an 8-bit tensor as unsigned integers."""
    stored = tensor.quantization.zero_point if tensor.quantization else ()
    return np.array(stored or (0,), np.int64) + (INT8_OFFSET if tensor.dtype == "INT8" else 0)


def scale(tensor: Tensor) -> np.float32:
    """Return the scale of a tensor; 0 without quantization."""
    return np.float32(tensor.quantization.scale[0] if tensor.quantization else 0)


def reciprocal(tensor: Tensor) -> np.float32:
    """Return 1 / scale, rounded to float32; 0 for a scale of 0."""
    divisor = scale(tensor)
    return np.float32(1) / divisor if divisor else divisor


def _weighted(
    operator: Operator, graph: Graph, positions: list[NDArray[np.int32]], *, few: bool
) -> list[StoredParameters]:
    """Return the parameters of a convolution or dense layer.

    `positions` has possible orders of the weights, [outputs, taps, channels] each. With `few`, up to 4 outputs take 4
    rows.
    """
    values = _values(operator, graph)
    if values is None:
        return []
    choices: list[Choice] = []
    for order in positions:
        outputs = len(order)
        for variant in _with_and_without_bias(values):
            rows = {FEW_ROWS if few and outputs <= FEW_ROWS else padded_rows(outputs): None, padded_rows(outputs): None}
            choices += [Matrix(variant, order, count, _header(variant, graph, operator)) for count in rows]
    return [StoredParameters(operator, "weights", _tensors(operator), tuple(choices))]


def _values(operator: Operator, graph: Graph) -> Values | None:
    """Return the values of an operator with weights; None if they are not 8-bit constants with quantization."""
    weights, source = graph.tensors[operator.inputs[1]], graph.tensors[operator.inputs[0]]
    output = graph.output_tensors(operator)[0]
    if weights.dtype not in ("INT8", "UINT8") or not weights.is_constant or weights.quantization is None:
        return None
    arrays: dict[NumberKind, NDArray[Any]] = {NumberKind.ZERO_POINT: zero_points(weights).astype(np.uint32)}
    if len(operator.inputs) > 2 and operator.inputs[2] != NONE:
        bias = graph.tensors[operator.inputs[2]]
        if bias.dtype != "INT32" or not bias.is_constant:
            return None
        arrays[NumberKind.BIAS] = bias.array().ravel()
    if weights.quantization.per_channel:
        count = len(weights.quantization.scale)
        arrays[NumberKind.ZERO_POINT] = np.broadcast_to(arrays[NumberKind.ZERO_POINT], count)
        if not weights.quantization.one_scale:
            scales = np.array(weights.quantization.scale, np.float32)
            with np.errstate(over="ignore"):
                arrays[NumberKind.MULTIPLIER] = scale(source) * scales * reciprocal(output)
    arrays[NumberKind.WEIGHT] = unsigned(weights)
    return Values(arrays)


def _with_and_without_bias(values: Values) -> Iterator[Values]:
    """Yield the values with their bias, and without it if it is zero: compiler 16.0 drops it."""
    yield values
    if NumberKind.BIAS in values.arrays and not values.arrays[NumberKind.BIAS].any():
        yield values.without(NumberKind.BIAS)


def _header(values: Values, graph: Graph, operator: Operator) -> tuple[NumberKind, ...]:
    quantization = graph.tensors[operator.inputs[1]].quantization
    per_channel = quantization is not None and quantization.per_channel
    present = {*values.arrays} - (set() if per_channel else {NumberKind.ZERO_POINT})
    return tuple(kind for kind in HEADER if kind in present)


def _tensors(operator: Operator) -> dict[NumberKind, tuple[int, ...]]:
    tensors: dict[NumberKind, tuple[int, ...]] = dict.fromkeys(
        (NumberKind.WEIGHT, NumberKind.MULTIPLIER, NumberKind.ZERO_POINT), (operator.inputs[1],)
    )
    if len(operator.inputs) > 2 and operator.inputs[2] != NONE:
        tensors[NumberKind.BIAS] = (operator.inputs[2],)
    return tensors


def _convolution(operator: Operator, graph: Graph) -> list[StoredParameters]:
    weights = graph.tensors[operator.inputs[1]]
    if len(weights.shape) != 4:
        return []
    by_tap = np.moveaxis(_indices(weights), 0, 2)[np.ix_(*touching_taps(operator, graph, weights.shape[1:3]))]
    positions = np.moveaxis(by_tap.reshape(-1, weights.shape[0], weights.shape[3]), 1, 0)
    orders = [positions]
    for consumer in graph.consumers.get(operator.outputs[0], ()):
        last = (graph.output_tensors(consumer)[0].shape[-1:] or (1,))[0]
        if (
            consumer.name == "RESHAPE"
            and 1 < last < len(positions)
            and len(positions) % last == 0
            and last % INPUT_BLOCK
        ):
            orders.append(_split_outputs(positions, last))
    return _weighted(operator, graph, orders, few=prod(position(graph.tensors[operator.inputs[0]])[:2]) > 1)


def _split_outputs(positions: NDArray[np.int32], parts: int) -> NDArray[np.int32]:
    """Round up each part of the outputs of a convolution whose channels a RESHAPE splits: boxes x coordinates."""
    boxes = positions.reshape(-1, parts, *positions.shape[1:])
    padded = np.full((len(boxes), round_up(parts, INPUT_BLOCK), *positions.shape[1:]), -1, np.int32)
    padded[:, :parts] = boxes
    return padded.reshape(-1, *positions.shape[1:])


def _dense(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """After a flatten, channels are rounded up at each position of the feature map."""
    weights, source = graph.tensors[operator.inputs[1]], graph.tensors[operator.inputs[0]]
    if len(weights.shape) != 2:
        return []
    producer = graph.producer.get(source.index)
    if producer is not None and producer.name == "RESHAPE":
        source = graph.tensors[producer.inputs[0]]
    positions = _indices(weights)
    orders = [positions[:, np.newaxis]]
    height, width, channels = position(source)
    if channels > 1 and height * width > 1 and height * width * channels == weights.shape[1]:
        orders.insert(0, positions.reshape(len(positions), height * width, channels))
    return _weighted(operator, graph, orders, few=height * width > 1)


def _depthwise(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """With one input channel, a depthwise convolution has the layout of a normal one."""
    weights = graph.tensors[operator.inputs[1]]
    if len(weights.shape) != 4 or weights.shape[0] != 1:
        return []
    taps = np.ix_(*touching_taps(operator, graph, weights.shape[1:3]))
    positions = np.moveaxis(_indices(weights)[0][taps].reshape(-1, weights.shape[3]), 0, 1)[:, :, np.newaxis]
    height, width, channels = position(graph.tensors[operator.inputs[0]])
    if channels == 1:
        return _weighted(operator, graph, [positions], few=height * width > 1)
    values = _values(operator, graph)
    if values is None or channels != weights.shape[3]:
        return []
    choices: list[Choice] = []
    for variant in _with_and_without_bias(values):
        matrix = Matrix(variant, positions, INPUT_BLOCK, _header(variant, graph, operator))
        choices.append(Single(variant, parameter_layout.depthwise(matrix)))
    return [StoredParameters(operator, "weights", _tensors(operator), tuple(choices))]


def _indices(tensor: Tensor) -> NDArray[np.int32]:
    """Return the index of each element of a tensor, in its shape."""
    return np.arange(tensor.elements, dtype=np.int32).reshape(tensor.shape)


def _elementwise(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """Return a constant operand: a vector has 4 bytes for each channel, a tensor its bytes; a scalar is not stored."""
    first, second = (graph.tensors[index] for index in operator.inputs[:2])
    constant, other = (first, second) if first.is_constant else (second, first)
    if (
        not constant.is_constant
        or other.is_constant
        or constant.elements < 2
        or constant.dtype not in ("INT8", "UINT8")
    ):
        return []
    tensors = {NumberKind.CONSTANT: (constant.index,)}
    if sum(size > 1 for size in constant.shape) > 1:
        stored = Values({NumberKind.CONSTANT: unsigned(constant)})
        return [StoredParameters(operator, "constant", tensors, (Single(stored, parameter_layout.plain(stored)),))]
    choices = []
    for vector in _vectors(operator, constant, other, graph.output_tensors(operator)[0]):
        values = Values({NumberKind.CONSTANT: vector})
        choices.append(Single(values, parameter_layout.vector(values)))
    return [StoredParameters(operator, "constant", tensors, tuple(choices))] if choices else []


def _vectors(operator: Operator, constant: Tensor, other: Tensor, output: Tensor) -> Iterator[NDArray[Any]]:
    """Yield what may be stored for a constant vector: multipliers for MUL, summands at the other operand's scale."""
    stored = unsigned(constant).astype(np.int64) - zero_points(constant)[0]
    if not scale(other) or not scale(output):
        return
    if operator.name == "MUL":
        yield stored.astype(np.float32) * scale(constant) * scale(other) * reciprocal(output)
    elif operator.name in ("ADD", "SUB"):
        summands = np.rint(stored * np.float64(scale(constant)) / np.float64(scale(other)))
        summands = (summands if operator.name == "ADD" else -summands) - zero_points(other)[0]
        if np.abs(summands).max() < 2**30:
            yield summands.astype(np.int32)
            # Seen in one int8 model; the condition is not known.
            yield (summands - INT8_OFFSET).astype(np.int32)


def _matrix_of_ones(
    operator: Operator, purpose: str, read: NDArray[np.bool_], header: tuple[NumberKind, ...] = (NumberKind.BIAS,)
) -> StoredParameters:
    """Return a convolution that only moves data.

    `read`, [outputs, taps, channels], is true where an output reads an input; `purpose` is for messages.
    """
    outputs = len(read)
    arrays: dict[NumberKind, NDArray[Any]] = {
        NumberKind.ZERO_POINT: np.zeros(1, np.uint32),
        NumberKind.WEIGHT: np.array([0, 1], np.uint8),
    }
    if header:
        arrays[NumberKind.BIAS] = np.zeros(outputs, np.int32)
    values = Values(arrays)
    rows = sorted({FEW_ROWS if outputs <= FEW_ROWS else padded_rows(outputs), padded_rows(outputs)})
    positions = read.astype(np.int32)
    return StoredParameters(operator, purpose, {}, tuple(Matrix(values, positions, count, header) for count in rows))


def _reshape(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """A flatten that neither the input nor a dense layer absorbs, if the channels are not a multiple of 4."""
    height, width, channels = position(graph.tensors[operator.inputs[0]])
    elements = height * width * channels
    vector = graph.output_tensors(operator)[0]
    if channels % INPUT_BLOCK == 0 or height * width == 1 or vector.shape[-1:] != (vector.elements,):
        return []
    size = padded_rows(elements) * (height * width * INPUT_BLOCK + 4)
    if channels == 1 and size > FLATTENED_MAP_BYTES:
        # A large map of one channel is flattened 16 positions at a time.
        elements = ROW_STEP
    if elements * elements > _MOST_ONES:
        return []
    read = np.eye(elements, dtype=bool).reshape(elements, -1, channels)
    return [_matrix_of_ones(operator, "a matrix that flattens", read)]


def _joined(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """Return the 1x1 convolutions that join or split channels that are not in whole blocks of 4."""
    parts = []
    for index, sources, width in unaligned_joins(operator, graph):
        outputs = position(graph.tensors[index])[2]
        if width * outputs > _MOST_ONES or sum(count for _, _, count in sources) != outputs:
            continue
        read = np.zeros((outputs, 1, width), bool)
        row = column = 0
        for tensor, first, count in sources:
            read[np.arange(row, row + count), 0, np.arange(column + first, column + first + count)] = True
            row += count
            column += round_up(position(graph.tensors[tensor])[2], INPUT_BLOCK)
        parts.append(_matrix_of_ones(operator, "a matrix that joins channels", read))
    return parts


def _pad(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """Padding of channels: an identity without biases."""
    channels = position(graph.tensors[operator.inputs[0]])[2]
    outputs = position(graph.output_tensors(operator)[0])[2]
    paddings = graph.tensors[operator.inputs[1]]
    if outputs <= channels or outputs * channels > _MOST_ONES or not paddings.is_constant or len(paddings.shape) != 2:
        return []
    before = int(paddings.array()[-1][0])
    if not 0 <= before <= outputs - channels:
        return []
    read = np.zeros((outputs, 1, channels), bool)
    read[np.arange(before, before + channels), 0, np.arange(channels)] = True
    return [_matrix_of_ones(operator, "a matrix that pads channels", read, ())]


def _softmax(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """The tables of a softmax whose values do not fill blocks of 4.

    They exclude the missing values: the smallest int32 is added to them, twice on compiler 16, and they are multiplied
    by a number that no other reaches. Models in uint8 have another block with 1.0.
    """
    source = graph.tensors[operator.inputs[0]]
    elements = source.shape[-1] if source.shape else 1
    missing = -elements % INPUT_BLOCK
    if not missing:
        return []
    summands = np.zeros(elements + missing, np.int32)
    summands[elements:] = np.iinfo(np.int32).min
    multipliers = np.full(elements + missing, scale(source), np.float32)
    multipliers[elements:] = scale(source) * np.finfo(np.float32).max
    return [
        *(_table(operator, "summands of a softmax", summands) for _ in range(2)),
        _table(operator, "multipliers of a softmax", multipliers),
        _table(operator, "a multiplier of 1", np.ones(1, np.float32)),
    ]


def _table(operator: Operator, purpose: str, entries: NDArray[Any]) -> StoredParameters:
    values = Values({NumberKind.CONSTANT: entries})
    return StoredParameters(operator, purpose, {}, (Single(values, parameter_layout.vector(values)),))


def _lstm(operator: Operator, graph: Graph) -> list[StoredParameters]:
    """The four gates of an LSTM: biases, and the weights of the input and of the state next to each other."""
    parts = []
    for gate in range(4):
        if len(operator.inputs) < 16 or NONE in (operator.inputs[index] for index in (1 + gate, 5 + gate, 12 + gate)):
            continue
        of_input, of_state, bias = (graph.tensors[operator.inputs[index]] for index in (1 + gate, 5 + gate, 12 + gate))
        constant = all(tensor.is_constant and tensor.dtype in ("INT8", "UINT8") for tensor in (of_input, of_state))
        if (
            not constant
            or not bias.is_constant
            or bias.dtype != "INT32"
            or len(of_input.shape) != 2
            or len(of_state.shape) != 2
        ):
            continue
        units = of_input.shape[0]
        if of_state.shape[0] != units or bias.elements != units:
            continue
        positions = np.concatenate([_indices(of_input), _indices(of_state) + of_input.elements], axis=1)
        values = Values(
            {
                NumberKind.ZERO_POINT: zero_points(of_input)[:1].astype(np.uint32),
                NumberKind.BIAS: bias.array().ravel(),
                NumberKind.WEIGHT: np.concatenate([unsigned(of_input), unsigned(of_state)]),
            }
        )
        matrix = Matrix(values, positions[:, np.newaxis], padded_rows(units), (NumberKind.BIAS,))
        tensors = {NumberKind.WEIGHT: (of_input.index, of_state.index), NumberKind.BIAS: (bias.index,)}
        parts.append(StoredParameters(operator, f"{_GATES[gate]} gate", tensors, (matrix,)))
    return parts


_GATES = ("input", "forget", "cell", "output")
_FUNCTIONS: Mapping[str, Callable[[Operator, Graph], list[StoredParameters]]] = {
    "CONV_2D": _convolution,
    "FULLY_CONNECTED": _dense,
    "DEPTHWISE_CONV_2D": _depthwise,
    **dict.fromkeys(("ADD", "MUL", "SUB"), _elementwise),
    "RESHAPE": _reshape,
    **dict.fromkeys(("CONCATENATION", "SPLIT"), _joined),
    "PAD": _pad,
    "SOFTMAX": _softmax,
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"), _lstm),
}
