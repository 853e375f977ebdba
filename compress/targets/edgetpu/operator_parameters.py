"""The parameters of each operator of a graph, as `memory` counts them: one function for each kind of operator.

Beside the weights that are in the .tflite file, the compiler makes parameters of its own
for what the hardware does by multiplying: concatenating or reshaping where channels are
not a multiple of 4, and the table of a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import numpy as np

from compress.targets.base import Target
from compress.targets.edgetpu import parameter_memory
from compress.targets.edgetpu.constants import PARAMETERS
from compress.targets.edgetpu.parameter_memory import INPUT_BLOCK, Parameters, padded_rows, round_up
from compress.tflite.graph import NONE, Graph, Operator, Tensor

Count = Callable[[Operator, Graph, Target], Parameters]
_Source = tuple[int, int, int]
MAX_JOINED = 256
"""Concatenations and splits that are looked through from one tensor, and parts of a split, at most."""
MAX_KERNEL = 8192
"""A kernel with a longer side is not believed."""


def count(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Return the memory for an operator's parameters on the Edge TPU.

    Args:
        operator: one of the graph's.
        graph: the model.
        target: the target, with its memory limits and the compiler's version.
    """
    kind = COUNTS.get(operator.name)
    return kind(operator, graph, target) if kind else parameter_memory.NONE


def _compiler(target: Target) -> str:
    return str(target.tables["compiler"]["version"])


def _position(tensor: Tensor) -> tuple[int, int, int]:
    """Height, width and channels; what a tensor lacks in front is 1."""
    height, width, channels = (1, 1, 1, *tensor.shape)[-3:]
    return height, width, channels


def _overhead(operator: Operator, graph: Graph, target: Target) -> int:
    """Bytes of one output in addition to weights: 4 for a bias, 8 for a scale and zero point (4 if all are equal)."""
    weights = graph.tensors[operator.inputs[1]]
    each = 0
    if len(operator.inputs) > 2 and operator.inputs[2] != NONE:
        bias = graph.tensors[operator.inputs[2]]
        dropped = _compiler(target) == "16.0" and weights.dtype == "INT8" and bias.is_zero
        each += 0 if dropped else 4
    if weights.quantization and weights.quantization.per_channel:
        each += 4 if weights.quantization.one_scale else 8
    return each


def _taps(operator: Operator, graph: Graph, kernel: tuple[int, int]) -> int:
    """The taps of a kernel that touch real input at some position: on tiny maps padding hides the others."""
    inputs, outputs = graph.tensors[operator.inputs[0]], graph.output_tensors(operator)[0]
    same = operator.option("padding", 0) == 0
    if max(kernel) > MAX_KERNEL:
        raise ValueError(f"a kernel of {kernel[0]}x{kernel[1]}")
    touched = 1
    for axis, (letter, size) in enumerate(zip("HW", kernel, strict=True)):
        length, made = _position(inputs)[axis], _position(outputs)[axis]
        stride = operator.option(f"stride{letter}", 1)
        dilation = operator.option(f"dilation{letter}Factor", 1)
        if stride < 1:
            raise ValueError(f"a stride of {stride}")
        before = max((made - 1) * stride + (size - 1) * dilation + 1 - length, 0) // 2 if same else 0
        touched *= _touching(size, dilation, before, stride, made, length)
    return touched


def _touching(taps: int, dilation: int, before: int, stride: int, positions: int, length: int) -> int:
    """How many taps lie, at one of so many positions, on a side of `length` that has so much padding before it."""
    starts = np.arange(taps, dtype=np.int64) * dilation - before
    first, last = np.maximum(0, -(starts // stride)), np.minimum(positions - 1, (length - 1 - starts) // stride)
    return int((first <= last).sum())


def _convolution(operator: Operator, graph: Graph, target: Target) -> Parameters:
    outputs, kernel_h, kernel_w, channels = graph.tensors[operator.inputs[1]].shape
    height, width, _ = _position(graph.tensors[operator.inputs[0]])
    made_h, made_w, _ = _position(graph.output_tensors(operator)[0])
    for taker in graph.consumers.get(operator.outputs[0], ()):
        last = graph.output_tensors(taker)[0].shape[-1:] or (1,)
        if taker.name == "RESHAPE" and 1 < last[0] < outputs and outputs % last[0] == 0:
            outputs = outputs // last[0] * round_up(last[0], INPUT_BLOCK)  # boxes x coordinates: each part padded
    per_output = _taps(operator, graph, (kernel_h, kernel_w)) * round_up(channels, INPUT_BLOCK)
    found = parameter_memory.convolution(
        outputs,
        per_output,
        _overhead(operator, graph, target),
        made_h * made_w,
        one_position_in=height * width == 1,
    )
    return parameter_memory.mark_uncacheable(found, per_output, target)


def _dense(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """A dense layer; one that follows a flatten reads the map as it lies: channels rounded up at each position."""
    weights, given = graph.tensors[operator.inputs[1]], graph.tensors[operator.inputs[0]]
    producer = graph.producer.get(given.index)
    if producer is not None and producer.name == "RESHAPE":
        given = graph.tensors[producer.inputs[0]]
    height, width, channels = _position(given)
    flattened = len(given.shape) == 4 and channels > 1 and height * width * channels == weights.shape[1]
    per_output = (
        height * width * round_up(channels, INPUT_BLOCK) if flattened else round_up(weights.shape[1], INPUT_BLOCK)
    )
    one = not flattened or height * width == 1
    found = parameter_memory.convolution(
        weights.shape[0], per_output, _overhead(operator, graph, target), 1, one_position_in=one
    )
    return parameter_memory.mark_uncacheable(found, per_output, target)


def _depthwise(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """A depthwise convolution; of one channel it is laid out like a plain one."""
    _, kernel_h, kernel_w, outputs = graph.tensors[operator.inputs[1]].shape
    height, width, channels = _position(graph.tensors[operator.inputs[0]])
    taps, overhead = _taps(operator, graph, (kernel_h, kernel_w)), _overhead(operator, graph, target)
    if channels != 1:
        return parameter_memory.depthwise(outputs, taps, overhead)
    made_h, made_w, _ = _position(graph.output_tensors(operator)[0])
    one = height * width == 1
    return parameter_memory.convolution(outputs, taps * INPUT_BLOCK, overhead, made_h * made_w, one_position_in=one)


def _elementwise(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """A constant operand: a scalar takes nothing, a vector 16 bytes a channel, a whole tensor its bytes."""
    for tensor in graph.input_tensors(operator)[:2]:
        if tensor.is_constant and tensor.elements > 1:
            if sum(side > 1 for side in tensor.shape) == 1:
                return parameter_memory.constant_vector(tensor.elements)
            return Parameters(prod(tensor.shape), prod(tensor.shape), always_streamed=True)
    return parameter_memory.NONE


def _softmax(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Its table; compiler 16 adds a block with the output's scale where the model is uint8."""
    made = graph.output_tensors(operator)[0]
    elements = made.shape[-1] if made.shape else 1
    size = PARAMETERS["softmax_bytes"].get(_compiler(target), 0) * round_up(elements, 4) if elements % 4 else 0
    size += 64 if size and made.dtype == "UINT8" and _compiler(target) == "16.0" else 0
    return Parameters(size, size)


def _reshape(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """A flatten that neither the input nor a dense layer absorbs, of channels that are no multiple of 4."""
    given, made = graph.tensors[operator.inputs[0]], graph.output_tensors(operator)[0]
    height, width, channels = _position(given)
    if made.shape[-1:] != (made.elements,) or height * width == 1 or channels % 4 == 0 or _on_input(given, graph):
        return parameter_memory.NONE
    takers = graph.consumers.get(made.index, ())
    if channels > 1 and takers and all(taker.name == "FULLY_CONNECTED" for taker in takers):
        return parameter_memory.NONE
    size = padded_rows(made.elements) * (height * width * round_up(channels, 4) + 4)
    size = min(size, PARAMETERS["flattened_map_bytes"]) if channels == 1 else size
    return Parameters(size, size)


def _on_input(tensor: Tensor, graph: Graph) -> bool:
    """Whether a tensor is the model's input, as it is or quantized again."""
    producer = graph.producer.get(tensor.index)
    return producer is None or (producer.name == "QUANTIZE" and producer.inputs[0] in graph.inputs)


def _joined(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Channels that are put together by CONCATENATION, or taken apart by SPLIT, and do not lie in whole blocks of 4.

    They are gathered by a 1x1 convolution with zeros and ones, straight from where they first were: a concatenation
    that is only taken apart again costs nothing, and neither does a part that is only joined to others. (The matrices
    are readable in the compiled files.)
    """
    sizes = []
    for index in operator.outputs:
        takers = graph.consumers.get(index, ())
        if index in graph.outputs or any(taker.name not in ("CONCATENATION", "SPLIT") for taker in takers):
            sizes.append(_gathered(_sources(index, graph), _position(graph.tensors[index]), graph))
    return Parameters(sum(size for size, _ in sizes), sum(allocated for _, allocated in sizes))


def _gathered(sources: list[_Source], made: tuple[int, int, int], graph: Graph) -> tuple[int, int]:
    """Bytes in the compiled file, and allocated on the chip."""
    whole = all(first % INPUT_BLOCK == 0 for _, first, _ in sources)
    if whole and all(count % INPUT_BLOCK == 0 for _, _, count in sources[:-1]):
        return 0, 0
    read = sum(round_up(_position(graph.tensors[index])[2], INPUT_BLOCK) for index, _, _ in sources)
    height, width, channels = made
    found = parameter_memory.convolution(channels, read, 4, height * width, one_position_in=height * width == 1)
    return found.size_bytes, found.allocated_bytes


def _sources(index: int, graph: Graph, steps: Iterator[int] | None = None) -> list[_Source]:
    """Where the channels of a tensor come from, through concatenations and splits: tensor, first channel, count."""
    steps = iter(range(MAX_JOINED)) if steps is None else steps
    operator, channels = graph.producer.get(index), _position(graph.tensors[index])[2]
    if operator is None or not _along_channels(operator, graph) or next(steps, None) is None:
        return [(index, 0, channels)]
    if operator.name == "CONCATENATION":
        return [source for given in operator.inputs for source in _sources(given, graph, steps)]
    begin = operator.outputs.index(index) * channels
    found = []
    for tensor, first, count in _sources(operator.inputs[1], graph, steps):
        cut = max(begin, 0), min(begin + channels, count)
        if cut[0] < cut[1]:
            found.append((tensor, first + cut[0], cut[1] - cut[0]))
        begin -= count
    return found


def _along_channels(operator: Operator, graph: Graph) -> bool:
    """Whether an operator joins or takes apart channels."""
    rank = len(graph.output_tensors(operator)[0].shape)
    if operator.name == "CONCATENATION":
        return bool(operator.option("axis", 0) % max(rank, 1) == rank - 1)
    parts = len(operator.outputs)
    if operator.name != "SPLIT" or parts > MAX_JOINED or not graph.tensors[operator.inputs[0]].is_constant:
        return False
    return int(graph.tensors[operator.inputs[0]].array().ravel()[0]) % max(rank, 1) == rank - 1


def _pad(operator: Operator, graph: Graph, target: Target) -> Parameters:
    """Padding of channels is an identity 1x1 convolution; of height and width it costs nothing."""
    paddings = graph.tensors[operator.inputs[1]]
    if not paddings.is_constant or len(paddings.shape) != 2 or not paddings.array()[-1].any():
        return parameter_memory.NONE
    given, made = _position(graph.tensors[operator.inputs[0]])[2], _position(graph.output_tensors(operator)[0])[2]
    size = padded_rows(made) * round_up(given, INPUT_BLOCK)
    return Parameters(size, size)


COUNTS: Mapping[str, Count] = {
    "CONV_2D": _convolution,
    "FULLY_CONNECTED": _dense,
    "DEPTHWISE_CONV_2D": _depthwise,
    **dict.fromkeys(("ADD", "MUL", "SUB", "MAXIMUM", "MINIMUM", "PRELU"), _elementwise),
    "SOFTMAX": _softmax,
    "RESHAPE": _reshape,
    **dict.fromkeys(("CONCATENATION", "SPLIT"), _joined),
    "PAD": _pad,
}
"""What counts the parameters of each operator; others have none."""
