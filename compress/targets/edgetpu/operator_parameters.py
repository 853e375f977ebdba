"""The parameter memory of each operator of a graph: one function for each kind of operator.

In addition to the weights in the .tflite file, the compiler adds parameters for operations that the hardware does by
multiplication (concatenation and reshape, if the channels are not a multiple of 4), and the table of a softmax. Source:
observed in compiled models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from compress.model.tflite.graph import NONE, Graph, Operator
from compress.targets.base import Target
from compress.targets.edgetpu import parameter_memory, rules
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.parameter_memory import Parameters
from darwinn.blocks import (
    FLATTENED_MAP_BYTES,
    INPUT_BLOCK,
    padded_rows,
    position,
    round_up,
    touching_taps,
    unaligned_joins,
)

Count = Callable[[Operator, Graph, Target], Parameters]
ELEMENTWISE = ("ADD", "MUL", "SUB", "MAXIMUM", "MINIMUM", "PRELU")
"""The operators that may have a constant operand. One that runs in passes stores it for each pass."""
CHANNELS_FIRST = (0, 3, 1, 2)
"""The transpose from channels last to channels first."""
SINGLE_CHANNEL_FLATTEN = Parameters(FLATTENED_MAP_BYTES, FLATTENED_MAP_BYTES)
"""The most memory for the flatten of a map with one channel."""
MAX_VALUES = 1 << 20
"""The most values that are counted in parts; more do not fit on the chip."""
RUNTIME_WITHOUT_ONE = 14
"""The oldest runtime for which compiler 16 stores no 1.0 next to the table of a uint8 softmax."""
MAX_KERNEL = 8192
"""The largest valid kernel size; a larger one means a damaged file."""


def count(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Return the memory for an operator's parameters on the Edge TPU."""
    return COUNTS.get(operator.name, _unconfirmed)(operator, graph, target)


def _overhead(operator: Operator, graph: Graph, target: Target) -> int:
    """Return the bytes of one output in addition to its weights: 4 for a bias, 8 for a scale (4 if all are equal).

    Compiler 16 drops a bias of zeros, older ones only if the layer has one scale.
    """
    weights = graph.tensors[operator.inputs[1]]
    size_bytes = 0
    per_channel = weights.quantization is not None and weights.quantization.per_channel
    bias_position = rules.BIAS_POSITIONS[operator.name]
    if len(operator.inputs) > bias_position and operator.inputs[bias_position] != NONE:
        bias = graph.tensors[operator.inputs[bias_position]]
        can_drop = weights.dtype == "INT8" and (target.compiler.version == "16.0" or not per_channel)
        size_bytes += 0 if can_drop and bias.is_zero else 4
    if weights.quantization is not None and per_channel:
        size_bytes += 4 if weights.quantization.one_scale else 8
    return size_bytes


def _taps(operator: Operator, graph: Graph, kernel: tuple[int, int]) -> int:
    """Return the number of taps that read an input value at any position; on tiny maps others read only padding."""
    if max(kernel) > MAX_KERNEL:
        raise ValueError(f"a kernel of {kernel[0]}x{kernel[1]}")
    stride = min(operator.option("strideH", 1), operator.option("strideW", 1))
    if stride < 1:
        raise ValueError(f"a stride of {stride}")
    return prod(len(taps) for taps in touching_taps(operator, graph, kernel))


def _convolution(operator: Operator, graph: Graph, target: Target) -> Parameters:
    outputs, kernel_h, kernel_w, channels = graph.tensors[operator.inputs[1]].shape
    for consumer in graph.consumers.get(operator.outputs[0], ()):
        last = graph.output_tensors(consumer)[0].shape[-1:] or (1,)
        if consumer.name == "RESHAPE" and 0 < last[0] < outputs and outputs % last[0] == 0:
            outputs = outputs // last[0] * round_up(last[0], INPUT_BLOCK)  # boxes x coordinates: each part padded
    per_output = _taps(operator, graph, (kernel_h, kernel_w)) * round_up(channels, INPUT_BLOCK)
    return _with_weights(operator, graph, target, outputs, per_output)


def _transposed_convolution(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a transposed convolution as a convolution with the same weights: no compiled model with one is known."""
    outputs, kernel_h, kernel_w, channels = graph.tensors[operator.inputs[1]].shape
    per_output = kernel_h * kernel_w * round_up(channels, INPUT_BLOCK)
    return replace(_with_weights(operator, graph, target, outputs, per_output), is_confirmed=False)


def _with_weights(operator: Operator, graph: Graph, target: Target, outputs: int, per_output: int) -> Parameters:
    """Return the memory for a convolution with a number of outputs, and of weights for each of them."""
    source = operator.inputs[2 if operator.name == "TRANSPOSE_CONV" else 0]
    height, width, _ = position(graph.tensors[source])
    output_height, output_width, _ = position(graph.output_tensors(operator)[0])
    parameters = parameter_memory.convolution(
        outputs,
        per_output,
        _overhead(operator, graph, target),
        output_height * output_width,
        one_position_in=height * width == 1,
    )
    return parameter_memory.mark_uncacheable(parameters, per_output)


def _lstm(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count the four gates of an LSTM, each a dense layer of the input and the state.

    The compiler adds matrices that are not understood: 27,712 bytes in the one compiled model that is known.
    """
    del target
    size = allocated = 0
    for input_weights, state_weights in zip(_INPUT_WEIGHTS, _STATE_WEIGHTS, strict=True):
        if NONE in (operator.inputs[input_weights], operator.inputs[state_weights]):
            continue
        units, inputs = graph.tensors[operator.inputs[input_weights]].shape
        states = graph.tensors[operator.inputs[state_weights]].shape[1]
        per_output = round_up(inputs, INPUT_BLOCK) + round_up(states, INPUT_BLOCK)
        gate = parameter_memory.convolution(units, per_output, 4, 1, one_position_in=True)
        size, allocated = size + gate.size_bytes, allocated + gate.allocated_bytes
    return Parameters(size, allocated, (1, 1), is_confirmed=False)


_INPUT_WEIGHTS, _STATE_WEIGHTS = range(1, 5), range(5, 9)
"""The inputs of an LSTM that are the weights of its gates."""


def _nothing(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count nothing: compiled models with this or a similar operator have no parameters for it."""
    del operator, graph, target
    return parameter_memory.NONE


def _unconfirmed(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count the constants of an operator that no known compiled model has: the compiler may add more."""
    constants = [tensor for tensor in graph.input_tensors(operator) if tensor.is_constant]
    size = sum(tensor.elements for tensor in constants if tensor.dtype in CONSTANTS.dtypes)
    return Parameters(size, size, is_confirmed=False)


def _mean(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a mean: nothing over height and width. No compiled model is known with one over channels."""
    channels = len(graph.tensors[operator.inputs[0]].shape) - 1
    over_channels = channels in rules.reduced_axes(operator, graph)
    return (_unconfirmed if over_channels else _nothing)(operator, graph, target)


def _dense(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a dense layer. After a flatten, channels are rounded up at each position of the feature map."""
    weights, source = graph.tensors[operator.inputs[1]], graph.tensors[operator.inputs[0]]
    producer = graph.producer.get(source.index)
    if producer is not None and producer.name == "RESHAPE":
        source = graph.tensors[producer.inputs[0]]
    height, width, channels = position(source)
    flattened = len(source.shape) == 4 and channels > 1 and height * width * channels == weights.shape[1]
    per_output = (
        height * width * round_up(channels, INPUT_BLOCK) if flattened else round_up(weights.shape[1], INPUT_BLOCK)
    )
    parameters = parameter_memory.convolution(
        weights.shape[0], per_output, _overhead(operator, graph, target), 1, one_position_in=True
    )
    return parameter_memory.mark_uncacheable(parameters, per_output)


def _depthwise(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a depthwise convolution. With one channel it has the layout of a normal convolution."""
    _, kernel_h, kernel_w, outputs = graph.tensors[operator.inputs[1]].shape
    height, width, channels = position(graph.tensors[operator.inputs[0]])
    taps = _taps(operator, graph, (kernel_h, kernel_w))
    overhead = _overhead(operator, graph, target)
    if channels != 1:
        return parameter_memory.depthwise(outputs, taps, overhead)
    output_height, output_width, _ = position(graph.output_tensors(operator)[0])
    one_position_in = height * width == 1
    return parameter_memory.convolution(
        outputs, taps * INPUT_BLOCK, overhead, output_height * output_width, one_position_in=one_position_in
    )


def _elementwise(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a constant operand: nothing for a scalar, 16 bytes a channel for a vector, otherwise the tensor's bytes."""
    for tensor in graph.input_tensors(operator)[:2]:
        if tensor.is_constant and tensor.elements > 1:
            if sum(size > 1 for size in tensor.shape) == 1:
                return parameter_memory.constant_vector(tensor.elements)
            return Parameters(prod(tensor.shape), prod(tensor.shape), always_streamed=True)
    return parameter_memory.NONE


def _softmax(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count the table of a softmax.

    Compiler 16 adds a block with the number 1.0 to uint8 models if the file must run on runtimes before 14
    (`min_runtime_version`). Source: 9 compiled models for runtime 12 have it, 3 for runtime 14 do not.
    """
    output = graph.output_tensors(operator)[0]
    elements = output.shape[-1] if output.shape else 1
    version = target.compiler.version
    bytes_per_element = CONSTANTS.parameters.softmax_bytes.get(version, 0)
    size = bytes_per_element * round_up(elements, 4) if elements % 4 else 0
    is_old = version == "16.0" and target.compiler.runtimes["16.0"] < RUNTIME_WITHOUT_ONE
    size += 64 if size and output.dtype == "UINT8" and is_old else 0
    return Parameters(size, size)


def _reshape(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a reshape that joins dimensions, if channels are not a multiple of 4: a matrix that packs their blocks.

    A flatten may be absorbed by the input or a dense layer.
    """
    source, output = graph.tensors[operator.inputs[0]], graph.output_tensors(operator)[0]
    height, width, channels = position(source)
    if channels % INPUT_BLOCK == 0 or height * width == 1:
        return parameter_memory.NONE
    if width > 1 and position(output)[1:] == (height, width * channels):  # [C, H, W] -> [C, H*W]
        in_parts = CONSTANTS.parameters.joined_values_at_once < width * channels <= MAX_VALUES
        return _packed_in_parts(width, channels) if in_parts else _packed(width, channels)
    is_flatten = output.shape[-1:] == (output.elements,)
    consumers = graph.consumers.get(output.index, ())
    if channels > 1 and consumers and all(consumer.name == "FULLY_CONNECTED" for consumer in consumers):
        return parameter_memory.NONE
    producer = graph.producer.get(source.index)
    is_quantized_input = producer is not None and producer.name == "QUANTIZE" and producer.inputs[0] in graph.inputs
    if not is_flatten or producer is None or is_quantized_input:
        return parameter_memory.NONE
    packed = _packed(height * width, channels)
    return (
        min(packed, SINGLE_CHANNEL_FLATTEN, key=lambda parameters: parameters.size_bytes) if channels == 1 else packed
    )


def _packed(blocks: int, channels: int) -> Parameters:
    """Return the memory for the matrix that joins blocks of channels: a row for each value, and its zero bias."""
    size = padded_rows(blocks * channels) * (blocks * round_up(channels, INPUT_BLOCK) + 4)
    return Parameters(size, size)


def _packed_in_parts(blocks: int, channels: int) -> Parameters:
    """Return the memory for the same in parts. Each reads only the blocks of 4 from its first value to its last.

    Source: observed in compiled detectors.
    """
    values, part = blocks * channels, CONSTANTS.parameters.joined_values_of_a_part
    size = 0
    for first in range(0, values, part):
        last = min(first + part, values) - 1
        read = _block_of(last, channels) - _block_of(first, channels) + 1
        size += padded_rows(last - first + 1) * (INPUT_BLOCK * read + 4)
    return Parameters(size, size)


def _block_of(value: int, channels: int) -> int:
    """Return the index of the block of 4 that contains a value, where each position begins a new block."""
    position, channel = divmod(value, channels)
    return int(position * (round_up(channels, INPUT_BLOCK) // INPUT_BLOCK) + channel // INPUT_BLOCK)


def _joined(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count CONCATENATION and SPLIT along channels that are not in whole blocks of 4.

    The compiler replaces them by a 1x1 convolution with zeros and ones that reads the original tensors. Intermediate
    tensors of several concatenations and splits take nothing. Source: the matrices are visible in compiled models.
    """
    size = allocated = 0
    for index, _, read in unaligned_joins(operator, graph):
        height, width, channels = position(graph.tensors[index])
        one_position = height * width == 1
        matrix = parameter_memory.convolution(channels, read, 4, height * width, one_position_in=one_position)
        size, allocated = size + matrix.size_bytes, allocated + matrix.allocated_bytes
    return Parameters(size, allocated)


def _pad(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count padding: an identity 1x1 convolution for channels, nothing for height and width.

    Its bias is zero. Compilers before 16 store it.
    """
    paddings = graph.tensors[operator.inputs[1]]
    if not paddings.is_constant or len(paddings.shape) != 2 or not paddings.array()[-1].any():
        return parameter_memory.NONE
    input_channels, output_channels = (
        position(graph.tensors[operator.inputs[0]])[2],
        position(graph.output_tensors(operator)[0])[2],
    )
    bias_bytes = 0 if target.compiler.version == "16.0" else 4
    size = round_up(padded_rows(output_channels) * (round_up(input_channels, INPUT_BLOCK) + bias_bytes), 64)
    return Parameters(size, size)


def _transpose(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Count a transpose from channels last to channels first.

    The compiler replaces it by three convolutions whose weights are 0 or 1. The first moves channels into the height,
    in blocks of 4. If the number of channels is not a multiple of 4, it first gives each channel a separate block. The
    second moves the height into the width. The third packs the blocks of 4 that hold the values then.
    Source: the matrices are visible in compiled models.
    """
    del target
    permutation = graph.tensors[operator.inputs[1]]
    if not permutation.is_constant or tuple(permutation.array().ravel().tolist()) != CHANNELS_FIRST:
        return parameter_memory.NONE
    height, width, channels = position(graph.tensors[operator.inputs[0]])
    size = padded_rows(INPUT_BLOCK * height) * INPUT_BLOCK * height + padded_rows(width) * INPUT_BLOCK * width
    if channels % INPUT_BLOCK:
        size += padded_rows(INPUT_BLOCK * channels) * (round_up(channels, INPUT_BLOCK) + 4)
    else:
        size += INPUT_BLOCK**3
    return Parameters(size, size)


_COPIES = (
    *("AVERAGE_POOL_2D", "LOGISTIC", "MAX_POOL_2D", "QUANTIZE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
    *("STRIDED_SLICE", "TANH"),
    # Without a compiled model; they work as QUANTIZE and STRIDED_SLICE do.
    *("RELU", "RELU6", "RELU_N1_TO_1", "SLICE"),
)
"""Operators without parameters. Source: 133 compiled models whose parameters are predicted to the byte."""
COUNTS: Mapping[str, Count] = {
    "CONV_2D": _convolution,
    "FULLY_CONNECTED": _dense,
    "DEPTHWISE_CONV_2D": _depthwise,
    "TRANSPOSE_CONV": _transposed_convolution,
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"), _lstm),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "SOFTMAX": _softmax,
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), _reshape),
    **dict.fromkeys(("CONCATENATION", "SPLIT"), _joined),
    "PAD": _pad,
    "TRANSPOSE": _transpose,
    "MEAN": _mean,
    **dict.fromkeys(_COPIES, _nothing),
    **dict.fromkeys(
        (
            "L2_NORMALIZATION",
            "PACK",
            "REDUCE_MAX",
            "REDUCE_MIN",
            "RSQRT",
            "SPACE_TO_DEPTH",
            "SQUARED_DIFFERENCE",
            "SUM",
        ),
        _unconfirmed,
    ),
}
"""The function that counts the parameters of each operator that the Edge TPU can run."""
