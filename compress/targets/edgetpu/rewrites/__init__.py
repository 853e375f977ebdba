"""Rewrites that let the compiler take, and map, more of a model: what there is, and how each is proved."""

from __future__ import annotations

from dataclasses import dataclass

from compress.targets.edgetpu.rewrites import data_movement, elementwise, function_fitting, layers, shapes, versions
from compress.targets.edgetpu.rewrites.elementwise import Rewrite
from compress.tflite import dilation


@dataclass(frozen=True)
class RewriteEntry:
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
    RewriteEntry(layers.grouped_convolution, 1, ("CONV_2D",)),
    RewriteEntry(layers.equal_dilation, 0, ("CONV_2D", "DEPTHWISE_CONV_2D")),
    RewriteEntry(layers.fused_activation, 0, ("TRANSPOSE_CONV", "AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION")),
    RewriteEntry(layers.dense_layer_on_rows, 1, ("FULLY_CONNECTED",)),
    RewriteEntry(layers.per_channel_dense_layer, 4, ("FULLY_CONNECTED",), always=True, partly=True),
    RewriteEntry(layers.channel_scale_and_shift, 2, ("MUL", "ADD", "SUB"), always=True),
    RewriteEntry(layers.mean_over_channels, 1, ("MEAN",)),
    RewriteEntry(layers.constant_matmul, 1, ("BATCH_MATMUL",)),
    RewriteEntry(elementwise.hard_swish, 2, ("HARD_SWISH",), every_code=True, islands=True),
    RewriteEntry(elementwise.leaky_relu, 1, ("LEAKY_RELU",), every_code=True, islands=True),
    RewriteEntry(elementwise.gelu, 3, ("GELU",), every_code=True, islands=True),
    RewriteEntry(elementwise.elu, 3, ("ELU",), every_code=True, islands=True),
    RewriteEntry(elementwise.absolute, 1, ("ABS",), every_code=True, islands=True),
    RewriteEntry(elementwise.negative, 1, ("NEG",), every_code=True, islands=True),
    RewriteEntry(elementwise.square, 1, ("SQUARE",), every_code=True, islands=True),
    RewriteEntry(elementwise.relu_0_to_1, 1, ("RELU_0_TO_1",), every_code=True, islands=True),
    RewriteEntry(elementwise.squared_difference, 2, ("SQUARED_DIFFERENCE",), islands=True),
    RewriteEntry(elementwise.divide, 2, ("DIV",), islands=True),
    RewriteEntry(elementwise.requantized, 1, ("DEQUANTIZE",), islands=True),
    RewriteEntry(elementwise.float_island, 2, elementwise.ISLAND_OPERATORS, islands=True),
    RewriteEntry(function_fitting.fitted_function, 3, function_fitting.FUNCTIONS, every_code=True, islands=True),
    RewriteEntry(shapes.resized_1x1_map, 0, ("RESIZE_BILINEAR",)),
    RewriteEntry(shapes.strided_slice, 0, ("STRIDED_SLICE",)),
    RewriteEntry(shapes.split_sizes, 0, ("SPLIT_V",)),
    RewriteEntry(shapes.unpack, 0, ("UNPACK",)),
    RewriteEntry(shapes.gather, 0, ("GATHER",)),
    RewriteEntry(shapes.pad_value, 0, ("PADV2",)),
    RewriteEntry(shapes.depth_to_space, 0, ("DEPTH_TO_SPACE",)),
    RewriteEntry(data_movement.data_movement_chain, 0, data_movement.MOVEMENT_OPERATORS),
    RewriteEntry(data_movement.elementwise_before_movement, 0, shapes.UNARY, partly=True),
    RewriteEntry(dilation.dilated_convolution, 1, ("SPACE_TO_BATCH_ND",)),
    RewriteEntry(dilation.dilated_row, 1, ("SPACE_TO_BATCH_ND",)),
    RewriteEntry(versions.older_version, 0, ()),
)
"""Every rewrite of an operator, in the order they are tried; `operators` empty for all of them.

Where only convolutions change places, one step is for TFLite: its kernels for them do not all round alike.
"""
