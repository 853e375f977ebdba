"""Rewrites of layers with weights, and of operators next to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.dilation import only_consumer
from compress.model.tflite.edit import SAME, VALID, Edit, reshape
from compress.model.tflite.graph import NONE, Graph, Operator, Quantization, Tensor
from compress.targets.edgetpu.rewrites.elementwise import (
    clip_to_dtype,
    dequantized_constant,
    is_per_tensor_8bit,
    replace_operator,
    scale_and_zero_point,
)

ACTIVATIONS = {1: (0.0, np.inf), 2: (-1.0, 1.0), 3: (0.0, 6.0)}
"""The fused activations that clip values, by their value in the TFLite schema, with minimum and maximum."""
_SEPARATE = {1: "RELU", 2: "RELU_N1_TO_1", 3: "RELU6"}
_WEIGHTS_DTYPE = "INT8"


def per_channel_dense_layer(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Quantize per-channel FULLY_CONNECTED weights per tensor, or replace it by a 1x1 CONV_2D if the error is large."""
    x, weights, *_ = graph.input_tensors(operator)
    stored = weights.quantization
    per_channel = stored is not None and stored.per_channel and weights.dtype == "INT8"
    if not (per_channel and weights.is_constant and is_per_tensor_8bit(x)):
        return
    bias = _bias(operator, graph)
    if operator.option("weightsFormat", 0) or (bias is not None and not bias.is_constant):
        return
    yield _one_scale(operator, graph, bias)
    out = graph.output_tensors(operator)[0]
    if out.elements != weights.shape[0]:
        return
    edit, _, _ = replace_operator(operator, graph)
    outputs, inputs = weights.shape
    kernel = edit.like(weights, "kernel", shape=(outputs, 1, 1, inputs), values=weights.array())
    biases = _zeros(edit, outputs, weights.quantization, x) if bias is None else bias.index
    fused = operator.option("fusedActivationFunction", 0)
    _add_1x1_convolution(edit, x, (1, 1, 1, inputs), outputs, kernel, biases, out, fused)
    yield edit


def dense_layer_on_rows(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace FULLY_CONNECTED on several rows, as in transformers, by a 1x1 CONV_2D."""
    x, weights, *_ = graph.input_tensors(operator)
    bias, out = _bias(operator, graph), graph.output_tensors(operator)[0]
    if not weights.is_constant or len(weights.shape) != 2 or operator.option("weightsFormat", 0):
        return
    outputs, inputs = weights.shape
    shape = x.shape[:3] if len(x.shape) == 4 and x.shape[3] == inputs else (1, 1, x.elements // inputs)
    edit, _, _ = replace_operator(operator, graph)
    kernel = edit.like(weights, "kernel", shape=(outputs, 1, 1, inputs), values=weights.array())
    biases = _zeros(edit, outputs, weights.quantization, x) if bias is None else bias.index
    fused = operator.option("fusedActivationFunction", 0)
    _add_1x1_convolution(edit, x, (*shape, inputs), outputs, kernel, biases, out, fused)
    yield edit


def grouped_convolution(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace a grouped CONV_2D by DEPTHWISE_CONV_2D, or by SPLIT, a CONV_2D for each group and CONCATENATION."""
    x, weights, *_ = graph.input_tensors(operator)
    if len(x.shape) != 4 or len(weights.shape) != 4 or not weights.is_constant:
        return
    outputs, height, width, group_channels = weights.shape
    groups, rest = divmod(x.shape[3], max(group_channels, 1))
    bias = _bias(operator, graph)
    if groups < 2 or rest or outputs % groups or bias is None or not bias.is_constant:
        return
    if group_channels == 1:
        yield _depthwise(operator, graph, (1, height, width, outputs))
        return
    edit, _, out = replace_operator(operator, graph)
    slices = [edit.like(x, f"group{i}", shape=(*x.shape[:3], group_channels)) for i in range(groups)]
    axis = edit.tensor(f"{x.name}/axis", (), "INT32", values=np.asarray(3, np.int32))
    edit.add("SPLIT", [axis, x.index], slices, edit.options("SplitOptions", numSplits=groups))
    options = edit.options("Conv2DOptions", **vars(operator.options))
    options.quantizedBiasType = 0
    size = outputs // groups
    parts = []
    for i, group_input in enumerate(slices):
        chosen = slice(i * size, (i + 1) * size)
        kernel = _cut(edit, weights, chosen, f"group{i}")
        biases = _cut(edit, bias, chosen, f"group{i}")
        parts.append(edit.like(out, f"group{i}", shape=(*out.shape[:3], size)))
        edit.add("CONV_2D", [group_input, kernel, biases], [parts[-1]], options)
    edit.add("CONCATENATION", parts, [out.index], edit.options("ConcatenationOptions", axis=3))
    yield edit


def fused_activation(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace a fused activation of TRANSPOSE_CONV, pooling or CONCATENATION by a separate operator, or remove it if
    the output's range already clips the values."""
    fused, out = operator.option("fusedActivationFunction", 0), graph.output_tensors(operator)[0]
    if fused not in ACTIVATIONS or not is_per_tensor_8bit(out):
        return
    version = {"TRANSPOSE_CONV": 3}.get(operator.name)
    scale, zero_point = scale_and_zero_point(out)
    lowest = -128 if out.dtype == "INT8" else 0
    low, high = scale * (lowest - zero_point), scale * (lowest + 255 - zero_point)
    edit = Edit(graph)
    if low >= ACTIVATIONS[fused][0] - scale / 2 and high <= ACTIVATIONS[fused][1] + scale / 2:
        edit.change(operator, version=version, options={"fusedActivationFunction": 0})
    else:
        plain = edit.like(out, "linear")
        edit.change(operator, outputs=[plain], version=version, options={"fusedActivationFunction": 0})
        edit.add(_SEPARATE[fused], [plain], [out.index])
    yield edit


def mean_over_channels(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace MEAN over channels whose number is not a multiple of 4 by a 1x1 CONV_2D with equal weights."""
    x, axes = graph.input_tensors(operator)
    if not (axes.is_constant and x.shape and is_per_tensor_8bit(x)):
        return
    channels = x.shape[-1]
    if {int(axis) % len(x.shape) for axis in axes.array().ravel()} != {len(x.shape) - 1} or channels % 4 == 0:
        return
    edit, _, out = replace_operator(operator, graph)
    one = Quantization((1 / (127 * channels),), (0,), 0)
    kernel = edit.tensor(
        f"{x.name}/mean", (1, 1, 1, channels), _WEIGHTS_DTYPE, one, np.full((1, 1, 1, channels), 127, np.int8)
    )
    shape = x.shape if len(x.shape) == 4 else (1, x.elements // channels, 1, channels)
    _add_1x1_convolution(edit, x, shape, 1, kernel, _zeros(edit, 1, one, x), out)
    yield edit


def constant_matmul(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace BATCH_MATMUL with a constant matrix by a 1x1 CONV_2D."""
    x, matrix = graph.input_tensors(operator)
    fits = matrix.is_constant and matrix.quantization is not None and not matrix.quantization.per_channel
    if not fits or operator.option("adjX", False) or sum(size > 1 for size in matrix.shape) > 2:
        return
    values = matrix.array().reshape(matrix.shape[-2:])
    kernel_values = values if operator.option("adjY", False) else values.T
    outputs, inputs = kernel_values.shape
    edit, _, out = replace_operator(operator, graph)
    kernel = edit.like(
        matrix, "kernel", shape=(outputs, 1, 1, inputs), values=kernel_values.reshape(outputs, 1, 1, inputs)
    )
    biases = _zeros(edit, outputs, matrix.quantization, x)
    _add_1x1_convolution(edit, x, (1, 1, x.elements // inputs, inputs), outputs, kernel, biases, out)
    yield edit


def channel_scale_and_shift(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Fold MUL, ADD or SUB with one constant for each channel into the convolution before it."""
    folding = _folding(operator, graph)
    if folding is None:
        return
    convolution, factor, shift = folding
    x, weights = graph.tensors[convolution.inputs[0]], graph.tensors[convolution.inputs[1]]
    bias, out = _bias(convolution, graph), graph.output_tensors(operator)[0]
    assert weights.quantization is not None
    scales = np.broadcast_to(np.asarray(weights.quantization.scale), factor.shape)
    one_scale = not weights.quantization.per_channel
    if one_scale and np.ptp(np.abs(factor)) > 0:
        return
    input_scale = scale_and_zero_point(x)[0]
    sums = np.zeros(factor.shape) if bias is None else bias.array() * input_scale * scales
    new_scales = scales * np.abs(factor)
    axis = 3 if convolution.name == "DEPTHWISE_CONV_2D" else 0
    signs = np.sign(factor).reshape([-1 if i == axis else 1 for i in range(len(weights.shape))])
    codes = np.clip(weights.array().astype(np.int32) * signs, -127, 127).astype(np.int8)
    count = 1 if one_scale else len(factor)
    quantization = Quantization(tuple(map(float, new_scales[:count])), (0,) * count, weights.quantization.axis)
    edit = Edit(graph)
    edit.remove(operator)
    kernel = edit.tensor(f"{weights.name}/folded", weights.shape, weights.dtype, quantization, codes)
    bias_codes = (sums * factor + shift) / (input_scale * new_scales)
    biases = _biases(edit, f"{out.name}/bias", bias_codes, new_scales[:count], x)
    fused = operator.option("fusedActivationFunction", 0)
    changed = {"fusedActivationFunction": fused}
    edit.change(convolution, inputs=[x.index, kernel, biases], outputs=[out.index], options=changed)
    yield edit


# --- parts ------------------------------------------------------------------------------


def _bias(operator: Operator, graph: Graph) -> Tensor | None:
    index = operator.inputs[2] if len(operator.inputs) > 2 else NONE
    return None if index == NONE else graph.tensors[index]


def _one_scale(operator: Operator, graph: Graph, bias: Tensor | None) -> Edit:
    x, weights, *_ = graph.input_tensors(operator)
    assert weights.quantization is not None
    scales = np.asarray(weights.quantization.scale)
    values = weights.array() * scales[:, None]
    step = float(np.abs(values).max()) / 127 or 1.0
    edit = Edit(graph)
    codes = np.clip(np.round(values / step), -127, 127).astype(np.int8)
    kernel = edit.tensor(f"{weights.name}/one_scale", weights.shape, "INT8", Quantization((step,), (0,), 0), codes)
    inputs = [x.index, kernel, NONE]
    if bias is not None:
        inputs[2] = _biases(edit, f"{bias.name}/one_scale", bias.array() * scales / step, np.asarray([step]), x)
    edit.change(operator, inputs=inputs)
    return edit


def _biases(edit: Edit, name: str, codes: NDArray[np.float64], scales: NDArray[np.float64], x: Tensor) -> int:
    limits = np.iinfo(np.int32)
    quantization = Quantization(
        tuple(float(scale_and_zero_point(x)[0] * scale) for scale in scales), (0,) * len(scales), 0
    )
    values = np.clip(np.round(codes), limits.min, limits.max).astype(np.int32)
    return edit.tensor(name, values.shape, "INT32", quantization, values)


def _depthwise(operator: Operator, graph: Graph, shape: tuple[int, ...]) -> Edit:
    edit, x, out = replace_operator(operator, graph)
    weights = graph.tensors[operator.inputs[1]]
    stored = weights.quantization
    quantization = None if stored is None else Quantization(stored.scale, stored.zero_point, 3)
    values = np.ascontiguousarray(weights.array().transpose(3, 1, 2, 0))
    kernel = edit.tensor(f"{weights.name}/depthwise", shape, weights.dtype, quantization, values)
    names = ("padding", "strideW", "strideH", "fusedActivationFunction", "dilationWFactor", "dilationHFactor")
    options = {name: operator.option(name) for name in names}
    table = edit.options("DepthwiseConv2DOptions", depthMultiplier=shape[3] // x.shape[3], **options)
    edit.add("DEPTHWISE_CONV_2D", [x.index, kernel, operator.inputs[2]], [out.index], table)
    return edit


def _cut(edit: Edit, constant: Tensor, chosen: slice, suffix: str) -> int:
    """Return some outputs of a kernel or bias, with their scales."""
    values = constant.array()[chosen]
    stored = constant.quantization
    if stored is not None and stored.per_channel:
        stored = Quantization(stored.scale[chosen], stored.zero_point[chosen], stored.axis)
    return edit.like(constant, suffix, shape=values.shape, quantization=stored, values=values)


def _zeros(edit: Edit, count: int, weights: Quantization | None, x: Tensor) -> int:
    """Add zero biases for a convolution without biases: old runtimes require them, and the compiler drops zeros."""
    scales = np.asarray(weights.scale if weights else (1.0,))
    return _biases(edit, f"{x.name}/zeros", np.zeros(count), scales, x)


def _add_1x1_convolution(
    edit: Edit,
    x: Tensor,
    shape: tuple[int, ...],
    outputs: int,
    kernel: int,
    biases: int,
    out: Tensor,
    activation: int = 0,
) -> None:
    """Add a 1x1 CONV_2D of `x` as a map of the given shape, between RESHAPEs where the tensors have other shapes."""
    input_map, output_map = x.index, out.index
    output_shape = (*shape[:3], outputs)
    if x.shape != shape:
        input_map = reshape(edit, x.index, edit.like(x, "map", shape=shape), shape)
    if out.shape != output_shape:
        output_map = edit.like(out, "map", shape=output_shape)
    options = edit.options("Conv2DOptions", padding=VALID, strideW=1, strideH=1, fusedActivationFunction=activation)
    edit.add("CONV_2D", [input_map, kernel, biases], [output_map], options)
    if output_map != out.index:
        reshape(edit, output_map, out.index, out.shape)


def add_selection_convolution(edit: Edit, x: Tensor, source: int, target: int, selection: NDArray[np.bool_]) -> int:
    """Add a CONV_2D that only selects values, [out, row, column, in], in the quantization of `x`."""
    kernel, zeros = _ones(edit, x, selection)
    strides = {"strideH": selection.shape[1], "strideW": selection.shape[2]}
    edit.add("CONV_2D", [source, kernel, zeros], [target], edit.options("Conv2DOptions", padding=VALID, **strides))
    return target


def add_selection_transpose_conv(
    edit: Edit, x: Tensor, source: int, target: int, selection: NDArray[np.bool_], shape: Sequence[int]
) -> None:
    """Add a TRANSPOSE_CONV that only selects values, with an output of the given shape."""
    kernel, zeros = _ones(edit, x, selection)
    strides = {"strideH": selection.shape[1], "strideW": selection.shape[2]}
    options = edit.options("TransposeConvOptions", padding=SAME, **strides)
    edit.add("TRANSPOSE_CONV", [edit.integers("shape", *shape), kernel, source, zeros], [target], options)


def _ones(edit: Edit, x: Tensor, selection: NDArray[np.bool_]) -> tuple[int, int]:
    """Add weights that are one for the selected values, and zero biases."""
    highest = 127 if x.dtype == "INT8" else 255
    step = Quantization((1 / highest,), (0,), 0)
    kernel = edit.tensor(
        f"{x.name}/ones", selection.shape, x.dtype, step, clip_to_dtype(selection.astype(np.float64) * highest, x.dtype)
    )
    return kernel, _zeros(edit, len(selection), step, x)


def _folding(operator: Operator, graph: Graph) -> tuple[Operator, NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the convolution that an operator can be folded into, with a factor and a shift for each channel."""
    computed = [tensor for tensor in graph.input_tensors(operator) if not tensor.is_constant]
    convolution = graph.producer.get(computed[0].index) if len(computed) == 1 else None
    if convolution is None or not _is_foldable(convolution, graph):
        return None
    factor_and_shift = _factor_and_shift(operator, computed[0].shape[-1], graph)
    return None if factor_and_shift is None else (convolution, *factor_and_shift)


def _is_foldable(convolution: Operator, graph: Graph) -> bool:
    """Return whether the constants of a convolution can absorb an operator that follows it."""
    if convolution.name not in ("CONV_2D", "DEPTHWISE_CONV_2D") or convolution.option("fusedActivationFunction", 0):
        return False
    x, weights, *_ = graph.input_tensors(convolution)
    bias = _bias(convolution, graph)
    constant = weights.is_constant and (bias is None or bias.is_constant)
    int8 = weights.dtype == "INT8" and is_per_tensor_8bit(x)
    return constant and int8 and only_consumer(graph, convolution) is not None


def _factor_and_shift(
    operator: Operator, channels: int, graph: Graph
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return MUL, ADD or SUB with a constant as a factor and a shift for each channel."""
    inputs = graph.input_tensors(operator)
    constant = next(tensor for tensor in inputs if tensor.is_constant)
    one_per_channel = constant.elements == 1 or constant.shape[-1] == constant.elements == channels
    if not is_per_tensor_8bit(constant) or not one_per_channel:
        return None
    values = np.broadcast_to(dequantized_constant(constant).ravel(), (channels,))
    if operator.name == "MUL":
        return (values, np.zeros(channels)) if values.all() else None
    if operator.name == "ADD":
        return np.ones(channels), values
    return (np.ones(channels), -values) if constant is inputs[1] else None
