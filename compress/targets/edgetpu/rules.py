"""The rules for an operator to run on the Edge TPU: one function for each.

A rule's docstring is what the user is told: its first line says what is required, the
rest what to change. A rule returns what it found wrong, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from compress.errors import ModelError
from compress.targets.base import Target
from compress.tflite.graph import NONE, Graph, Operator, Tensor

Rule = Callable[[Operator, Graph, Target], str | None]


def supported_operator(operator: Operator, graph: Graph, target: Target) -> str | None:
    """The operator must be one that the Edge TPU has.

    Replace the layer by one of the supported operations, or move it to the end of the model.
    """
    del graph
    known = operator.name in target.tables["operators"] and not operator.custom
    return None if known else f"{operator.name} is not supported"


def compiler_version(operator: Operator, graph: Graph, target: Target) -> str | None:
    """The operator must be one that this version of the compiler has.

    Use compiler 16.0, and runtime 14 on the device.
    """
    del graph
    compiler = target.tables["compiler"]
    needed = target.tables["operators"].get(operator.name, {}).get("runtime", 0)
    if needed <= compiler["runtimes"][compiler["version"]]:
        return None
    return f"{operator.name} needs runtime {needed}, newer than compiler {compiler['version']} writes for"


def operator_version(operator: Operator, graph: Graph, target: Target) -> str | None:
    """The operator's version must be one that the compiler of 2021 knows.

    Quantize again with Coralline, which writes old versions where there are any.
    """
    del graph
    newest = target.tables["operators"].get(operator.name, {}).get("max_version", operator.version)
    return None if operator.version <= newest else f"version {operator.version}; the newest known is {newest}"


def eight_bit_tensors(operator: Operator, graph: Graph, target: Target) -> str | None:
    """All activations and weights must be 8-bit quantized (int8 or uint8).

    Quantize the whole model to full integer, inputs and outputs included.
    """
    tensors = [*graph.input_tensors(operator), *graph.output_tensors(operator)]
    weighted = {"CONV_2D": 2, "DEPTHWISE_CONV_2D": 2, "FULLY_CONNECTED": 2, "TRANSPOSE_CONV": 3}.get(operator.name)
    bias = operator.inputs[weighted] if weighted is not None and len(operator.inputs) > weighted else NONE
    structural = ("INT32", "INT64", "BOOL")
    for tensor in tensors:
        if tensor.index == bias or (tensor.is_constant and tensor.dtype in structural):
            continue
        if tensor.is_variable or (operator.name == "UNIDIRECTIONAL_SEQUENCE_LSTM" and tensor.is_constant):
            continue  # cell state and layer norm are int16, biases int32
        if tensor.dtype not in target.tables["dtypes"]:
            return f"{tensor.name} is {tensor.dtype}"
    return None


def static_shapes(operator: Operator, graph: Graph, target: Target) -> str | None:
    """All sizes must be known when the model is compiled.

    Fix every dimension before converting.
    """
    del target
    dynamic = [
        tensor.name for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator)) if tensor.dynamic
    ]
    return f"{dynamic[0]} has a dynamic shape" if dynamic else None


def three_dimensions(operator: Operator, graph: Graph, target: Target) -> str | None:
    """At most the 3 innermost dimensions may be larger than 1.

    Keep the batch at 1 and avoid 5-dimensional tensors; `python -m compress legalize` replaces those that only move
    numbers (channel shuffles, upsampling, heads of detectors).
    """
    limit = target.tables["max_active_rank"]
    for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator)):
        if not tensor.is_constant and any(side > 1 for side in tensor.shape[: max(len(tensor.shape) - limit, 0)]):
            return f"{tensor.name} has the shape {list(tensor.shape)}"
    return None


def constant_parameters(operator: Operator, graph: Graph, target: Target) -> str | None:
    """Weights, biases, axes and paddings must be constants.

    Make the second operand a weight of the layer, not the output of another one.
    """
    del target
    checked = {
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
    }.get(operator.name, ())
    for position in checked:
        if position < len(operator.inputs) and operator.inputs[position] != NONE:
            tensor = graph.tensors[operator.inputs[position]]
            if not tensor.is_constant:
                return f"{tensor.name} is computed"
    return None


def no_fused_activation(operator: Operator, graph: Graph, target: Target) -> str | None:
    """Pooling and concatenation must not have a fused activation.

    Put the activation in front of the layer.
    """
    del graph, target
    fused = operator.option("fusedActivationFunction", 0)
    applies = operator.name in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION")
    return "has a fused activation" if applies and fused else None


def equal_dilation(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A convolution's dilation must be the same in x and y.

    Give dilation_rate one number; for 1-D convolutions `python -m compress legalize` does.
    """
    del graph, target
    w, h = operator.option("dilationWFactor", 1), operator.option("dilationHFactor", 1)
    return None if w == h else f"dilation {h} by {w}"


def dense_layer_format(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A dense layer must have the default weight format, and a vector as output.

    Run `python -m compress legalize`, which makes a dense layer on several rows a 1x1 convolution; convert without the
    converter's optimizations for CPUs.
    """
    del target
    if operator.name != "FULLY_CONNECTED":
        return None
    if operator.option("weightsFormat", 0) != 0:
        return "has shuffled weights"
    shape = graph.output_tensors(operator)[0].shape
    return None if sum(side > 1 for side in shape) <= 1 else f"has the output shape {list(shape)}"


def bilinear_resize_input(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A bilinear resize must start from more than one position.

    Repeat a 1x1 map with a nearest-neighbour resize instead: it is the same.
    """
    del target
    if operator.name != "RESIZE_BILINEAR":
        return None
    shape = graph.tensors[operator.inputs[0]].shape
    return (
        "resizes a 1x1 map" if shape[1:3] == (1, 1) and graph.output_tensors(operator)[0].shape[1:3] != (1, 1) else None
    )


def softmax_size(operator: Operator, graph: Graph, target: Target) -> str | None:
    """Softmax works on a vector of limited length.

    Leave the softmax to the application, or make the output smaller.
    """
    if operator.name != "SOFTMAX":
        return None
    shape = graph.output_tensors(operator)[0].shape
    limit = target.tables["limits"]["softmax_elements"]
    return None if shape and shape[-1] <= limit else f"works on {list(shape)}; at most {limit} elements"


def batch_axis_unchanged(operator: Operator, graph: Graph, target: Target) -> str | None:
    """Means, sums, maxima, paddings, splits and packs must leave the batch alone.

    Reduce over height, width or channels only.
    """
    del target
    if operator.name in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN"):
        tensor, axes = graph.tensors[operator.inputs[0]], graph.tensors[operator.inputs[1]]
        rank = len(tensor.shape)
        if axes.elements > rank > 1:
            raise ValueError(f"{axes.elements} axes of {rank}")
        touched = rank > 1 and axes.is_constant and (axes.array() % rank == 0).any()
        return "reduces over the batch" if touched else None
    if operator.name == "PAD":
        paddings = graph.tensors[operator.inputs[1]]
        padded = paddings.is_constant and len(paddings.shape) == 2 and paddings.array()[0].any()
        return "pads the batch" if padded and len(paddings.array()) == 4 else None
    if operator.name == "SPLIT":
        axis = graph.tensors[operator.inputs[0]]
        along = int(axis.array().ravel()[0]) % len(graph.output_tensors(operator)[0].shape) if axis.is_constant else 1
        return "splits the batch" if along == 0 and len(operator.outputs) > 1 else None
    if operator.name == "PACK":
        return "packs along the batch" if operator.option("axis", 0) == 0 and len(operator.inputs) > 1 else None
    return None


def mean_over_channels(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A mean over channels must be over a multiple of 4 of them.

    Run `python -m compress legalize`, which makes it a 1x1 convolution, or give the layer in front more filters.
    """
    del target
    if operator.name != "MEAN":
        return None
    shape, axes = graph.tensors[operator.inputs[0]].shape, graph.tensors[operator.inputs[1]]
    over = {int(axis) % max(len(shape), 1) for axis in axes.array().flatten()} if axes.is_constant else set()
    return f"is over {shape[-1]} channels" if len(shape) - 1 in over and shape[-1] % 4 else None


def prelu_slopes(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A PRELU's slopes must be one for each channel.

    Share them over height and width: shared_axes=[1, 2].
    """
    del target
    if operator.name != "PRELU":
        return None
    shape = graph.tensors[operator.inputs[1]].shape
    return f"has slopes of the shape {list(shape)}" if any(side > 1 for side in shape[:-1]) else None


def concatenation_inputs(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A concatenation may have a constant input only if it has two inputs and the constant is all zeros.

    Use padding for zeros, and an addition after it for anything else.
    """
    del target
    constants = [tensor for tensor in graph.input_tensors(operator) if tensor.is_constant]
    if operator.name != "CONCATENATION" or not constants:
        return None
    zero = all((each.array() == _zero_point(each)).all() for each in constants)
    return None if zero and len(operator.inputs) == 2 else f"{constants[0].name} is a constant"


def transpose_size(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A transpose must fit on the chip twice.

    Keep the layout height, width, channels throughout; `python -m compress legalize` cancels transposes that meet.
    """
    if operator.name != "TRANSPOSE":
        return None
    tensor, limit = graph.tensors[operator.inputs[0]], target.tables["limits"]["transpose_elements"]
    moved = sum(side > 1 for side in tensor.shape) > 1
    return f"moves {tensor.elements:,} elements; at most {limit:,}" if moved and tensor.elements > limit else None


def flatten_size(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A map that is flattened into a vector must fit into one tile's memory.

    Pool before flattening: global average pooling needs no flatten at all.
    """
    if operator.name != "RESHAPE":
        return None
    tensor, vector = graph.tensors[operator.inputs[0]], graph.output_tensors(operator)[0]
    limit = target.tables["memory"]["narrow_bytes_per_tile"]
    if sum(side > 1 for side in vector.shape) > 1 or sum(side > 1 for side in tensor.shape) < 2:
        return None
    size = prod(tensor.shape[:-1]) * -(-tensor.shape[-1] // 4) * 4
    return f"flattens {size:,} bytes; a tile has {limit:,}" if size > limit else None


def strided_slice(operator: Operator, graph: Graph, target: Target) -> str | None:
    """A strided slice must have stride 1 everywhere, and no ellipsis or new axis.

    Run `python -m compress legalize`, which makes strides a pooling layer; or use a plain slice (cropping).
    """
    del target
    if operator.name != "STRIDED_SLICE":
        return None
    if operator.option("ellipsisMask", 0) or operator.option("newAxisMask", 0):
        return "has an ellipsis or a new axis"
    strides = graph.tensors[operator.inputs[3]]
    if strides.elements > len(graph.tensors[operator.inputs[0]].shape):
        raise ValueError(f"{strides.elements} strides")
    return "has strides other than 1" if strides.is_constant and (strides.array() != 1).any() else None


def _zero_point(tensor: Tensor) -> int:
    return tensor.quantization.zero_point[0] if tensor.quantization and tensor.quantization.zero_point else 0


RULES: Mapping[Rule, str] = {
    supported_operator: "Operation not supported",
    compiler_version: "Operation not supported",
    operator_version: "Operation version not supported",
    eight_bit_tensors: "Operation is working on an unsupported data type",
    static_shapes: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    three_dimensions: "Tensor has unsupported rank (up to 3 innermost dimensions mapped)",
    constant_parameters: "Filter, bias, or other param is not constant at compile-time",
    no_fused_activation: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    equal_dilation: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    dense_layer_format: "For example, a fully-connected or softmax layer with 2D output",
    bilinear_resize_input: "Image-interpolation layer won't run precisely enough on Edge TPU",
    softmax_size: "For example, a fully-connected or softmax layer with 2D output",
    batch_axis_unchanged: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    mean_over_channels: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    prelu_slopes: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    concatenation_inputs: "Filter, bias, or other param is not constant at compile-time",
    transpose_size: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    flatten_size: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
    strided_slice: "Operation is otherwise supported, but not mapped due to some unspecified limitation",
}
"""Every rule with the compiler's own wording for it, in the order they are tried."""


def first_violation(operator: Operator, graph: Graph, target: Target) -> tuple[Rule, str] | None:
    """The first rule that an operator breaks, and what was found.

    Raises:
        ModelError: the operator lacks something that it needs.
    """
    try:
        return next(((rule, found) for rule in RULES if (found := rule(operator, graph, target))), None)
    except IndexError as error:
        raise ModelError(f"operator {operator.index} ({operator.name}) lacks an input, an output or a side") from error


def warning(operator: Operator, graph: Graph, target: Target) -> tuple[str, str] | None:
    """What is mapped and still may go wrong: (reason, advice). Dense weights with a scale for each output."""
    del target
    if operator.name != "FULLY_CONNECTED":
        return None
    if len(operator.inputs) < 2:
        raise ModelError(f"operator {operator.index} ({operator.name}) lacks an input")
    quantization = graph.tensors[operator.inputs[1]].quantization
    if quantization is None or not quantization.per_channel:
        return None
    return (
        "its weights have a scale for each output; TFLite runtimes of 2021 take them for one and compute it wrongly",
        "Quantize with Coralline, which makes dense weights per-tensor.",
    )


def documentation(rule: Rule) -> tuple[str, str]:
    """Return what a rule requires and what to change: the two parts of its docstring."""
    requirement, _, advice = (inspect.getdoc(rule) or "").partition("\n\n")
    return requirement, " ".join(advice.split())


def describe(rule: Rule, found: str, operator: Operator, target: Target) -> dict[str, Any]:
    """A broken rule as the fields of a report: status, reason, advice."""
    requirement, advice = documentation(rule)
    if rule is supported_operator:
        advice = target.tables["advice"].get(operator.name, advice)
    return {"status": RULES[rule], "reason": f"{found}. {requirement}", "advice": advice}
