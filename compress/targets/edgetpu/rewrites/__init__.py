"""Rewrites that let the compiler take, and map, more of a model: what there is, and how each is proved."""

from __future__ import annotations

from dataclasses import dataclass

from compress.targets.edgetpu.rewrites import data_movement, elementwise, function_fitting, layers, shapes, versions
from compress.targets.edgetpu.rewrites.elementwise import Rewrite
from compress.tflite import dilation


@dataclass(frozen=True)
class Entry:
    """A rewrite and what it must keep.

    Attributes:
        rewrite: proposes edits; its docstring says what it does.
        tolerance: by how many steps its output may change; 0 for the same to the bit.
        operators: which operators it is for; empty for those that break a rule on versions.
        every_code: whether it is tried on all 256 codes too, not only on real values.
        always: whether it applies to operators that are mapped already.
        islands: whether it applies to float operators between DEQUANTIZE and QUANTIZE.
        partly: whether some of what it puts in may stay on the CPU, for other rewrites to go on with.
    """

    rewrite: Rewrite
    tolerance: int
    operators: tuple[str, ...]
    every_code: bool = False
    always: bool = False
    islands: bool = False
    partly: bool = False

    @property
    def name(self) -> str:
        """The rewrite's name."""
        return self.rewrite.__name__


REWRITES = (
    Entry(layers.grouped_convolution, 1, ("CONV_2D",)),
    Entry(layers.one_dilation, 0, ("CONV_2D", "DEPTHWISE_CONV_2D")),
    Entry(layers.fused_activation, 0, ("TRANSPOSE_CONV", "AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION")),
    Entry(layers.dense_rows, 1, ("FULLY_CONNECTED",)),
    Entry(layers.dense_scales, 4, ("FULLY_CONNECTED",), always=True, partly=True),
    Entry(layers.batch_norm_leftover, 2, ("MUL", "ADD", "SUB"), always=True),
    Entry(layers.mean_over_channels, 1, ("MEAN",)),
    Entry(layers.constant_matmul, 1, ("BATCH_MATMUL",)),
    Entry(elementwise.hard_swish, 2, ("HARD_SWISH",), every_code=True, islands=True),
    Entry(elementwise.leaky_relu, 1, ("LEAKY_RELU",), every_code=True, islands=True),
    Entry(elementwise.gelu, 3, ("GELU",), every_code=True, islands=True),
    Entry(elementwise.elu, 3, ("ELU",), every_code=True, islands=True),
    Entry(elementwise.absolute, 1, ("ABS",), every_code=True, islands=True),
    Entry(elementwise.negative, 1, ("NEG",), every_code=True, islands=True),
    Entry(elementwise.square, 1, ("SQUARE",), every_code=True, islands=True),
    Entry(elementwise.relu_0_to_1, 1, ("RELU_0_TO_1",), every_code=True, islands=True),
    Entry(elementwise.squared_difference, 2, ("SQUARED_DIFFERENCE",), islands=True),
    Entry(elementwise.divide, 2, ("DIV",), islands=True),
    Entry(elementwise.requantized, 1, ("DEQUANTIZE",), islands=True),
    Entry(elementwise.float_island, 2, elementwise.ISLANDS, islands=True),
    Entry(function_fitting.curve, 3, function_fitting.FUNCTIONS, every_code=True, islands=True),
    Entry(shapes.repeated_map, 0, ("RESIZE_BILINEAR",)),
    Entry(shapes.strided_slice, 0, ("STRIDED_SLICE",)),
    Entry(shapes.split_sizes, 0, ("SPLIT_V",)),
    Entry(shapes.unpack, 0, ("UNPACK",)),
    Entry(shapes.gather, 0, ("GATHER",)),
    Entry(shapes.pad_value, 0, ("PADV2",)),
    Entry(shapes.depth_to_space, 0, ("DEPTH_TO_SPACE",)),
    Entry(data_movement.moved_numbers, 0, data_movement.MOVERS),
    Entry(data_movement.function_first, 0, shapes.UNARY, partly=True),
    Entry(dilation.dilated_convolution, 1, ("SPACE_TO_BATCH_ND",)),
    Entry(dilation.dilated_row, 1, ("SPACE_TO_BATCH_ND",)),
    Entry(versions.older_version, 0, ()),
)
"""Every rewrite of an operator, in the order they are tried; `operators` empty for all of them.

Where only convolutions change places, one step is for TFLite: its kernels for them do not all round alike.
"""
