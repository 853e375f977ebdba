"""The rules for an operator to run on the Edge TPU: one function for each rule.

The first paragraph of a rule's docstring is the requirement, the second one is the advice. `check` and the manual show
both. A rule returns a description of the violation, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

from compress.core.errors import ModelError
from compress.model.tflite.graph import NONE, Graph, Operator
from compress.targets.base import Target
from compress.targets.edgetpu.constants import CONSTANTS

Rule = Callable[..., str | None]
"""A function of an operator and its graph; `compiler_version` takes the target instead of the graph."""
BIAS_POSITIONS = {"CONV_2D": 2, "DEPTHWISE_CONV_2D": 2, "FULLY_CONNECTED": 2, "TRANSPOSE_CONV": 3}
"""The position of the bias among an operator's inputs."""
PARAMETER_POSITIONS: Mapping[str, tuple[int, ...]] = {
    "CONV_2D": (1, 2),
    "DEPTHWISE_CONV_2D": (1, 2),
    "FULLY_CONNECTED": (1, 2),
    "TRANSPOSE_CONV": (0, 1, 3),
    "PAD": (1,),
    "MEAN": (1,),
    "SUM": (1,),
    "REDUCE_MAX": (1,),
    "REDUCE_MIN": (1,),
    "PRELU": (1,),
    "SLICE": (1, 2),
    "STRIDED_SLICE": (1, 2, 3),
    "TRANSPOSE": (1,),
    "RESIZE_BILINEAR": (1,),
    "RESIZE_NEAREST_NEIGHBOR": (1,),
    "SPLIT": (0,),
}
"""The positions of the inputs that must be constants."""
REDUCTIONS = ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN")


def supported_operator(operator: Operator, graph: Graph) -> str | None:
    """The Edge TPU must support the operator.

    Replace the layer by a supported one, or move it to the end of the model.
    """
    del graph
    if operator.name in CONSTANTS.operators and not operator.custom:
        return None
    return f"{operator.name} is not supported"


def compiler_version(operator: Operator, target: Target) -> str | None:
    """The compiler's version must support the operator.

    Use compiler 16.0, and runtime 14 on the device.
    """
    compiler = target.compiler
    known = CONSTANTS.operators.get(operator.name)
    if known is None or known.runtime <= compiler.runtimes[compiler.version]:
        return None
    return f"{operator.name} needs runtime {known.runtime}, newer than compiler {compiler.version} writes for"


def operator_version(operator: Operator, graph: Graph) -> str | None:
    """The compiler of 2021 must support the operator's version.

    Quantize the model with Coralline, which writes the oldest possible versions.
    """
    del graph
    known = CONSTANTS.operators.get(operator.name)
    if known is None or operator.version <= known.max_version:
        return None
    return f"version {operator.version}; the newest supported version is {known.max_version}"


def eight_bit_tensors(operator: Operator, graph: Graph) -> str | None:
    """All activations and weights must be 8-bit quantized (int8 or uint8).

    Quantize the whole model to full integer, including inputs and outputs.
    """
    bias_position = BIAS_POSITIONS.get(operator.name, len(operator.inputs))
    bias = operator.inputs[bias_position : bias_position + 1]
    is_lstm = operator.name == "UNIDIRECTIONAL_SEQUENCE_LSTM"
    for tensor in [*graph.input_tensors(operator), *graph.output_tensors(operator)]:
        structural = tensor.is_constant and tensor.dtype in ("INT32", "INT64", "BOOL")
        # The cell state and the layer normalization of an LSTM are int16, its biases int32.
        lstm_state = tensor.is_variable or (is_lstm and tensor.is_constant)
        if tensor.index in bias or structural or lstm_state:
            continue
        if tensor.dtype not in CONSTANTS.dtypes:
            return f"{tensor.name} is {tensor.dtype}"
    return None


def static_shapes(operator: Operator, graph: Graph) -> str | None:
    """All shapes must be known when the model is compiled.

    Fix every dimension before you convert the model.
    """
    for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator)):
        if tensor.dynamic:
            return f"{tensor.name} has a dynamic shape"
    return None


def three_dimensions(operator: Operator, graph: Graph) -> str | None:
    """Only the 3 innermost dimensions may be larger than 1.

    Use batch 1 and no 5-dimensional tensors. `python -m compress legalize` replaces those that only move values
    (channel shuffles, upsampling, detection heads).
    """
    limit = CONSTANTS.max_active_rank
    for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator)):
        outer = tensor.shape[: max(len(tensor.shape) - limit, 0)]
        if not tensor.is_constant and any(size > 1 for size in outer):
            return f"{tensor.name} has the shape {list(tensor.shape)}"
    return None


def constant_parameters(operator: Operator, graph: Graph) -> str | None:
    """Weights, biases, axes and paddings must be constants.

    Make the second operand a weight of the layer, not the output of another layer.
    """
    for position in PARAMETER_POSITIONS.get(operator.name, ()):
        if position < len(operator.inputs) and operator.inputs[position] != NONE:
            tensor = graph.tensors[operator.inputs[position]]
            if not tensor.is_constant:
                return f"{tensor.name} is computed"
    return None


def no_fused_activation(operator: Operator, graph: Graph) -> str | None:
    """Pooling and concatenation must not have a fused activation.

    Put the activation before the layer.
    """
    del graph
    fused = operator.option("fusedActivationFunction", 0)
    applies = operator.name in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION")
    return "has a fused activation" if applies and fused else None


def equal_dilation(operator: Operator, graph: Graph) -> str | None:
    """A convolution must have the same dilation in x and y, unless its kernel has one tap along one of them.

    Set dilation_rate to one value.
    """
    width = operator.option("dilationWFactor", 1)
    height = operator.option("dilationHFactor", 1)
    if width == height or 1 in graph.tensors[operator.inputs[1]].shape[1:3]:  # a temporal network: [files]
        return None
    return f"dilation {height} by {width}"


def dense_layer_format(operator: Operator, graph: Graph) -> str | None:
    """A dense layer must have the default weight format, and a vector as its output.

    Run `python -m compress legalize`, which replaces a dense layer on several rows by a 1x1 convolution. Convert
    without the converter's CPU optimizations.
    """
    if operator.name != "FULLY_CONNECTED":
        return None
    if operator.option("weightsFormat", 0) != 0:
        return "has shuffled weights"
    shape = graph.output_tensors(operator)[0].shape
    return None if sum(size > 1 for size in shape) <= 1 else f"has the output shape {list(shape)}"


def bilinear_resize_input(operator: Operator, graph: Graph) -> str | None:
    """A bilinear resize must have an input larger than 1x1.

    Use a nearest-neighbor resize for a 1x1 map: the result is the same.
    """
    if operator.name != "RESIZE_BILINEAR":
        return None
    input_size = graph.tensors[operator.inputs[0]].shape[1:3]
    output_size = graph.output_tensors(operator)[0].shape[1:3]
    return "resizes a 1x1 map" if input_size == (1, 1) and output_size != (1, 1) else None


def softmax_size(operator: Operator, graph: Graph) -> str | None:
    """Softmax must be over a vector of limited length.

    Compute the softmax in the application, or make the output smaller.
    """
    if operator.name != "SOFTMAX":
        return None
    shape = graph.output_tensors(operator)[0].shape
    limit = CONSTANTS.limits.softmax_elements
    return None if shape and shape[-1] <= limit else f"works on {list(shape)}; at most {limit} elements"


def batch_axis_unchanged(operator: Operator, graph: Graph) -> str | None:
    """Reductions, padding, split and pack must not change the batch dimension.

    Use height, width or channels as the axis.
    """
    if operator.name in REDUCTIONS:
        return _reduced_batch(operator, graph)
    if operator.name == "PAD":
        paddings = graph.tensors[operator.inputs[1]]
        if not paddings.is_constant or len(paddings.shape) != 2 or len(paddings.array()) != 4:
            return None
        return "pads the batch" if paddings.array()[0].any() else None
    if operator.name == "SPLIT" and len(operator.outputs) > 1:
        axis = graph.tensors[operator.inputs[0]]
        rank = len(graph.output_tensors(operator)[0].shape)
        on_batch = axis.is_constant and int(axis.array().ravel()[0]) % rank == 0
        return "splits the batch" if on_batch else None
    if operator.name == "PACK" and len(operator.inputs) > 1:
        return "packs along the batch" if operator.option("axis", 0) == 0 else None
    return None


def _reduced_batch(operator: Operator, graph: Graph) -> str | None:
    axes = graph.tensors[operator.inputs[1]]
    rank = len(graph.tensors[operator.inputs[0]].shape)
    if axes.elements > rank > 1:
        raise ValueError(f"a reduction over {axes.elements} axes of a tensor with {rank} dimensions")
    over_batch = rank > 1 and axes.is_constant and (axes.array() % rank == 0).any()
    return "reduces over the batch" if over_batch else None


def mean_over_channels(operator: Operator, graph: Graph) -> str | None:
    """The number of channels must be a multiple of 4 for a mean over channels.

    Run `python -m compress legalize`, which replaces it by a 1x1 convolution, or give the layer before it more filters.
    """
    if operator.name != "MEAN":
        return None
    shape = graph.tensors[operator.inputs[0]].shape
    over_channels = len(shape) - 1 in reduced_axes(operator, graph)
    return f"is over {shape[-1]} channels" if over_channels and shape[-1] % 4 else None


def reduced_axes(operator: Operator, graph: Graph) -> set[int]:
    """Return the axes of a reduction, counted from 0; none if they are not constant."""
    axes = graph.tensors[operator.inputs[1]]
    rank = max(len(graph.tensors[operator.inputs[0]].shape), 1)
    return {int(axis) % rank for axis in axes.array().flatten()} if axes.is_constant else set()


def mean_positions(operator: Operator, graph: Graph) -> str | None:
    """A mean over height and width must be over a limited number of positions.

    Use strides or pooling before it; or split the map, and take the mean of the means of its parts.
    """
    if operator.name != "MEAN":
        return None
    positions = _window_positions(operator, graph)
    limit = CONSTANTS.limits.reduced_positions_refused
    return f"is over {positions:,} positions; {limit:,} are not mapped (edgetpu#461)" if positions >= limit else None


def prelu_slopes(operator: Operator, graph: Graph) -> str | None:
    """PRELU must have one slope for each channel.

    Share the slopes over height and width: shared_axes=[1, 2].
    """
    if operator.name != "PRELU":
        return None
    shape = graph.tensors[operator.inputs[1]].shape
    return f"has slopes of the shape {list(shape)}" if any(size > 1 for size in shape[:-1]) else None


def concatenation_inputs(operator: Operator, graph: Graph) -> str | None:
    """A concatenation may have a constant input only if it has two inputs and the constant is all zeros.

    Use padding for zeros, and add other constants after it.
    """
    constants = [tensor for tensor in graph.input_tensors(operator) if tensor.is_constant]
    if operator.name != "CONCATENATION" or not constants:
        return None
    zeros = [0 if tensor.quantization is None else tensor.quantization.first_zero_point for tensor in constants]
    zero = all((tensor.array() == value).all() for tensor, value in zip(constants, zeros, strict=True))
    return None if zero and len(operator.inputs) == 2 else f"{constants[0].name} is a constant"


def transpose_size(operator: Operator, graph: Graph) -> str | None:
    """The input and the output of a transpose must fit on the chip together.

    Keep the layout height, width, channels. `python -m compress legalize` removes transposes that cancel each other.
    """
    if operator.name != "TRANSPOSE":
        return None
    tensor = graph.tensors[operator.inputs[0]]
    limit = CONSTANTS.limits.transpose_elements
    moves_values = sum(size > 1 for size in tensor.shape) > 1
    if not moves_values or tensor.elements <= limit:
        return None
    return f"moves {tensor.elements:,} elements; at most {limit:,}"


def flatten_size(operator: Operator, graph: Graph) -> str | None:
    """A feature map that is flattened must fit into the memory of one tile.

    Add pooling before the flatten layer; global average pooling needs no flatten layer.
    """
    if operator.name != "RESHAPE":
        return None
    source = graph.tensors[operator.inputs[0]]
    output = graph.output_tensors(operator)[0]
    limit = CONSTANTS.memory.narrow_bytes_per_tile
    if sum(size > 1 for size in output.shape) > 1 or sum(size > 1 for size in source.shape) < 2:
        return None
    size_bytes = prod(source.shape[:-1]) * -(-source.shape[-1] // 4) * 4
    return f"flattens {size_bytes:,} bytes; a tile has {limit:,}" if size_bytes > limit else None


def strided_slice(operator: Operator, graph: Graph) -> str | None:
    """A strided slice must have stride 1, no ellipsis and no new axis.

    Run `python -m compress legalize`, which replaces strides by a pooling layer, or use cropping.
    """
    if operator.name != "STRIDED_SLICE":
        return None
    if operator.option("ellipsisMask", 0) or operator.option("newAxisMask", 0):
        return "has an ellipsis or a new axis"
    strides = graph.tensors[operator.inputs[3]]
    if strides.elements > len(graph.tensors[operator.inputs[0]].shape):
        raise ValueError(f"{strides.elements} strides")
    return "has strides other than 1" if strides.is_constant and (strides.array() != 1).any() else None


_NOT_SUPPORTED = "Operation not supported"
_UNSPECIFIED = "Operation is otherwise supported, but not mapped due to some unspecified limitation"
_NOT_CONSTANT = "Filter, bias, or other param is not constant at compile-time"
_TWO_DIMENSIONAL = "For example, a fully-connected or softmax layer with 2D output"
RULES: Mapping[Rule, str] = {
    supported_operator: _NOT_SUPPORTED,
    compiler_version: _NOT_SUPPORTED,
    operator_version: "Operation version not supported",
    eight_bit_tensors: "Operation is working on an unsupported data type",
    static_shapes: _UNSPECIFIED,
    three_dimensions: "Tensor has unsupported rank (up to 3 innermost dimensions mapped)",
    constant_parameters: _NOT_CONSTANT,
    no_fused_activation: _UNSPECIFIED,
    equal_dilation: _UNSPECIFIED,
    dense_layer_format: _TWO_DIMENSIONAL,
    bilinear_resize_input: "Image-interpolation layer won't run precisely enough on Edge TPU",
    softmax_size: _TWO_DIMENSIONAL,
    batch_axis_unchanged: _UNSPECIFIED,
    mean_over_channels: _UNSPECIFIED,
    mean_positions: _UNSPECIFIED,
    prelu_slopes: _UNSPECIFIED,
    concatenation_inputs: _NOT_CONSTANT,
    transpose_size: _UNSPECIFIED,
    flatten_size: _UNSPECIFIED,
    strided_slice: _UNSPECIFIED,
}
"""Every rule with the compiler's status text for it, in the order in which they are tried."""


@contextmanager
def refusing_damaged(*others: type[Exception]) -> Iterator[None]:
    """Raise a ModelError for the exceptions, and `others`, that an invalid operator of a damaged file causes."""
    errors: tuple[type[Exception], ...] = (IndexError, ValueError, ZeroDivisionError, OverflowError, *others)
    try:
        yield
    except errors as error:
        raise ModelError(f"an operator is invalid ({error}): the file is damaged") from error


def first_violation(operator: Operator, graph: Graph, target: Target) -> tuple[Rule, str] | None:
    """Return the first rule that an operator violates, with a description of the violation.

    Raises:
        ModelError: the operator lacks a required input, output or dimension.
    """
    try:
        for rule in RULES:
            source = target if rule is compiler_version else graph
            violation = rule(operator, source)
            if violation:
                return rule, violation
    except IndexError as error:
        message = f"operator {operator.index} ({operator.name}) lacks an input, an output or a dimension"
        raise ModelError(message) from error
    return None


def warning(operator: Operator, graph: Graph) -> tuple[str, str] | None:
    """Return the reason and the advice for an operator that is mapped but may give wrong results, or None."""
    if operator.name != "FULLY_CONNECTED":
        return None
    if len(operator.inputs) < 2:
        raise ModelError(f"operator {operator.index} ({operator.name}) lacks an input")
    quantization = graph.tensors[operator.inputs[1]].quantization
    if quantization is None or not quantization.per_channel:
        return None
    return (
        "its weights are quantized per channel; TFLite runtimes of 2021 use only the first scale: wrong results",
        "Quantize with Coralline, which makes dense weights per-tensor.",
    )


def size_risk(operator: Operator, graph: Graph) -> str:
    """Return why it is not known whether an operator of this size is mapped, or "".

    Only operators with a limit of their own are compared; that of all others is the memory for activations.
    """
    limits = CONSTANTS.limits
    if operator.name in (*REDUCTIONS, *_POOLING):
        positions, mapped = _window_positions(operator, graph), limits.reduced_positions_mapped
        if positions > mapped:
            refused = limits.reduced_positions_refused
            return (
                f"it reduces {positions:,} positions; up to {mapped:,} are known to be mapped, {refused:,} are known "
                "not to be (edgetpu#461, edgetpu#183)"
            )
    if operator.name in limits.resized_elements_mapped:
        elements = graph.output_tensors(operator)[0].elements
        mapped = limits.resized_elements_mapped[operator.name]
        if elements > mapped:
            return (
                f"it writes {elements:,} values; up to {mapped:,} are known to be mapped, and larger ones stayed on "
                "the CPU (edgetpu#31, edgetpu#187)"
            )
    if operator.name in ("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"):
        inputs, mapped = (graph.tensors[operator.inputs[0]].shape or (1,))[-1], limits.lstm_inputs_mapped
        if inputs > mapped:
            return f"it has {inputs:,} inputs; with 1,000 the compiler failed, with {mapped} it did not (edgetpu#598)"
    return ""


_POOLING = ("AVERAGE_POOL_2D", "MAX_POOL_2D")


def _window_positions(operator: Operator, graph: Graph) -> int:
    """Return the number of positions that a reduction or a pooling layer combines."""
    if operator.name in _POOLING:
        return int(operator.option("filterHeight", 1) * operator.option("filterWidth", 1))
    shape = graph.tensors[operator.inputs[0]].shape
    return prod(shape[axis] for axis in reduced_axes(operator, graph) if axis < len(shape) - 1)


def documentation(function: Callable[..., object]) -> tuple[str, str]:
    """Return the two paragraphs of a docstring: a requirement and the advice, or a failure's cause and its fix."""
    first, _, second = (inspect.getdoc(function) or "").partition("\n\n")
    return first, " ".join(second.split())


def describe(rule: Rule, violation: str, operator: Operator) -> dict[str, str]:
    """Return a violation as the fields of a report: status, reason, advice."""
    requirement, advice = documentation(rule)
    if rule is supported_operator:
        advice = CONSTANTS.advice.get(operator.name, advice)
    return {"status": RULES[rule], "reason": f"{violation}. {requirement}", "advice": advice}
