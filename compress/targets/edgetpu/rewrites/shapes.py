"""Rewrites of operators that only move values. All of them are bit-exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compress.model.tflite.edit import SAME, VALID, Edit, reshape
from compress.model.tflite.graph import Graph, Operator, Quantization
from compress.targets.edgetpu.rewrites.elementwise import (
    is_per_tensor_8bit,
    replace_operator,
    scalar_constant,
    scale_and_zero_point,
)

UNARY = ("RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "QUANTIZE", "HARD_SWISH", "LEAKY_RELU", "ABS", "NEG")
BINARY = ("ADD", "SUB", "MUL", "MAXIMUM", "MINIMUM")


def resized_1x1_map(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace RESIZE_BILINEAR of a 1x1 map by RESIZE_NEAREST_NEIGHBOR, which gives the same values."""
    x = graph.input_tensors(operator)[0]
    if x.shape[1:3] != (1, 1) or operator.name != "RESIZE_BILINEAR":
        return
    edit, _, out = replace_operator(operator, graph)
    options = edit.options("ResizeNearestNeighborOptions")
    edit.add("RESIZE_NEAREST_NEIGHBOR", list(operator.inputs), [out.index], options)
    yield edit


def strided_slice(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace STRIDED_SLICE with strides over height and width by SLICE and a 1x1 MAX_POOL_2D with those strides."""
    x, *constants = graph.input_tensors(operator)
    has_other_masks = any(
        operator.option(name, 0) for name in ("ellipsisMask", "newAxisMask", "shrinkAxisMask", "offset")
    )
    if has_other_masks or len(x.shape) != 4 or not all(constant.is_constant for constant in constants):
        return
    begin, end, strides = (constant.array().ravel().tolist() for constant in constants)
    if (strides[0], strides[3]) != (1, 1) or min(strides) < 1 or strides == [1, 1, 1, 1]:
        return
    masks = operator.option("beginMask", 0), operator.option("endMask", 0)
    starts, sizes = [], []
    for axis, size in enumerate(x.shape):
        first, last, _ = slice(
            None if masks[0] >> axis & 1 else begin[axis], None if masks[1] >> axis & 1 else end[axis]
        ).indices(size)
        starts.append(first)
        sizes.append(last - first)
    edit, _, out = replace_operator(operator, graph)
    source = x.index
    if tuple(sizes) != x.shape:
        source = edit.like(x, "slice", shape=sizes)
        edit.add("SLICE", [x.index, edit.integers("begin", *starts), edit.integers("size", *sizes)], [source])
    options = edit.options(
        "Pool2DOptions", padding=VALID, strideH=strides[1], strideW=strides[2], filterHeight=1, filterWidth=1
    )
    edit.add("MAX_POOL_2D", [source], [out.index], options)
    yield edit


def split_sizes(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace SPLIT_V by a SLICE for each part."""
    x, _, axis = graph.input_tensors(operator)
    if not axis.is_constant:
        return
    along, begin = int(axis.array().ravel()[0]) % len(x.shape), 0
    edit, _, _ = replace_operator(operator, graph)
    for out in graph.output_tensors(operator):
        add_slice(edit, x.index, along, begin, out.shape, out.index)
        begin += out.shape[along]
    yield edit


def unpack(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace UNPACK by a SLICE and a RESHAPE for each part."""
    edit, x, _ = replace_operator(operator, graph)
    along = operator.option("axis", 0) % len(x.shape)
    shape = tuple(1 if axis == along else size for axis, size in enumerate(x.shape))
    for index, out in enumerate(graph.output_tensors(operator)):
        part = edit.like(x, f"part{index}", shape=shape)
        add_slice(edit, x.index, along, index, shape, part)
        reshape(edit, part, out.index, out.shape)
    yield edit


def gather(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace GATHER of consecutive indices by SLICE, and RESHAPE if an axis is dropped."""
    x, indices = graph.input_tensors(operator)
    if not indices.is_constant or operator.option("batchDims", 0):
        return
    edit, _, out = replace_operator(operator, graph)
    along = operator.option("axis", 0) % len(x.shape)
    chosen = [int(index) % x.shape[along] for index in indices.array().ravel()]
    if not chosen or chosen != list(range(chosen[0], chosen[0] + len(chosen))):
        return
    shape = tuple(len(chosen) if axis == along else size for axis, size in enumerate(x.shape))
    part = out.index if shape == out.shape else edit.like(x, "part", shape=shape)
    add_slice(edit, x.index, along, chosen[0], shape, part)
    if part != out.index:
        reshape(edit, part, out.index, out.shape)
    yield edit


def pad_value(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace PADV2 by PAD; for a value other than 0, between two ADD that shift by the value without rounding."""
    x, amounts, value = graph.input_tensors(operator)
    if not value.is_constant or not is_per_tensor_8bit(x):
        return
    (scale, zero_point), code = scale_and_zero_point(x), int(value.array().ravel()[0])
    edit, _, out = replace_operator(operator, graph)
    if code == zero_point:
        edit.add("PAD", [x.index, amounts.index], [out.index], edit.options("PadOptions"))
        yield edit
        return
    shifted = Quantization((scale,), (code,), 0)
    shifted_input, shifted_output = (
        edit.like(x, "shifted", quantization=shifted),
        edit.like(out, "shifted", quantization=shifted),
    )
    for source, shift, target in (
        (x.index, zero_point - code, shifted_input),
        (shifted_output, code - zero_point, out.index),
    ):
        edit.add("ADD", [source, scalar_constant(edit, x, scale * shift)], [target], edit.options("AddOptions"))
    edit.add("PAD", [shifted_input, amounts.index], [shifted_output], edit.options("PadOptions"))
    yield edit


def depth_to_space(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace DEPTH_TO_SPACE by a TRANSPOSE_CONV whose weights are ones and zeros."""
    edit, x, out = replace_operator(operator, graph)
    block, channels = operator.option("blockSize", 1), out.shape[3]
    weights = np.zeros((channels, block, block, x.shape[3]), np.int8)
    for row, column, channel in np.ndindex(block, block, channels):
        weights[channel, row, column, (row * block + column) * channels + channel] = 127
    kernel = edit.tensor(f"{out.name}/ones", weights.shape, "INT8", Quantization((1 / 127,), (0,), 0), weights)
    bias = np.zeros(channels, np.int32)
    zeros = edit.tensor(
        f"{out.name}/zeros", (channels,), "INT32", Quantization((scale_and_zero_point(x)[0] / 127,), (0,), 0), bias
    )
    options = edit.options("TransposeConvOptions", padding=SAME, strideH=block, strideW=block)
    shape = edit.integers("shape", *out.shape)
    edit.add("TRANSPOSE_CONV", [shape, kernel, x.index, zeros], [out.index], options)
    yield edit


# --- parts ------------------------------------------------------------------------------


def add_slice(edit: Edit, source: int, along: int, begin: int, shape: Sequence[int], target: int) -> None:
    """Add a SLICE with an output of the given shape, which begins at a position along one axis."""
    starts = [begin if axis == along else 0 for axis in range(len(shape))]
    edit.add("SLICE", [source, edit.integers("begin", *starts), edit.integers("size", *shape)], [target])
