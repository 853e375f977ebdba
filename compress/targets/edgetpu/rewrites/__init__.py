"""The rewrites after which the compiler accepts a model, or maps more of its operators."""

from __future__ import annotations

from dataclasses import dataclass

from compress.model.tflite import dilation
from compress.targets.edgetpu.rewrites import data_movement, elementwise, function_fitting, layers, shapes, versions
from compress.targets.edgetpu.rewrites.elementwise import Rewrite


@dataclass(frozen=True)
class RewriteEntry:
    """A rewrite, the operators that it applies to, and the allowed difference of its output.

    Attributes:
        rewrite: the function that proposes edits; its docstring is the manual.
        tolerance: the largest allowed difference of its output, in quantization steps; 0 means bit-exact.
        operators: the operators that it applies to; empty for any with an unsupported version.
        all_codes: whether the rewrite is also verified on all 256 codes, not only on the values in the model.
        also_if_mapped: whether the rewrite also applies to operators that are already mapped.
        float_islands: whether the rewrite also applies to float operators between DEQUANTIZE and QUANTIZE.
        allows_cpu: whether its new operators may stay on the CPU, where other rewrites apply to them.
        if_refused: whether it applies, after all other rewrites, to operators that make the compiler refuse the model.
    """

    rewrite: Rewrite
    tolerance: int
    operators: tuple[str, ...]
    all_codes: bool = False
    also_if_mapped: bool = False
    float_islands: bool = False
    allows_cpu: bool = False
    if_refused: bool = False

    @property
    def name(self) -> str:
        """The rewrite's name."""
        return self.rewrite.__name__


REWRITES = (
    RewriteEntry(layers.grouped_convolution, 1, ("CONV_2D",)),
    RewriteEntry(layers.fused_activation, 0, ("TRANSPOSE_CONV", "AVERAGE_POOL_2D", "MAX_POOL_2D", "CONCATENATION")),
    RewriteEntry(layers.dense_layer_on_rows, 1, ("FULLY_CONNECTED",)),
    RewriteEntry(layers.per_channel_dense_layer, 4, ("FULLY_CONNECTED",), also_if_mapped=True, allows_cpu=True),
    RewriteEntry(layers.channel_scale_and_shift, 2, ("MUL", "ADD", "SUB"), also_if_mapped=True),
    RewriteEntry(layers.mean_over_channels, 1, ("MEAN",)),
    RewriteEntry(layers.constant_matmul, 1, ("BATCH_MATMUL",)),
    RewriteEntry(elementwise.hard_swish, 2, ("HARD_SWISH",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.leaky_relu, 1, ("LEAKY_RELU",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.gelu, 3, ("GELU",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.elu, 3, ("ELU",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.absolute, 1, ("ABS",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.negative, 1, ("NEG",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.square, 1, ("SQUARE",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.relu_0_to_1, 1, ("RELU_0_TO_1",), all_codes=True, float_islands=True),
    RewriteEntry(elementwise.squared_difference, 2, ("SQUARED_DIFFERENCE",), float_islands=True),
    RewriteEntry(elementwise.divide, 2, ("DIV",), float_islands=True),
    RewriteEntry(elementwise.requantized, 1, ("DEQUANTIZE",), float_islands=True),
    RewriteEntry(elementwise.float_island, 2, elementwise.ISLAND_OPERATORS, float_islands=True),
    RewriteEntry(function_fitting.fitted_function, 3, function_fitting.FUNCTIONS, all_codes=True, float_islands=True),
    RewriteEntry(shapes.resized_1x1_map, 0, ("RESIZE_BILINEAR",)),
    RewriteEntry(shapes.strided_slice, 0, ("STRIDED_SLICE",)),
    RewriteEntry(shapes.split_sizes, 0, ("SPLIT_V",)),
    RewriteEntry(shapes.unpack, 0, ("UNPACK",)),
    RewriteEntry(shapes.gather, 0, ("GATHER",)),
    RewriteEntry(shapes.pad_value, 0, ("PADV2",)),
    RewriteEntry(shapes.depth_to_space, 0, ("DEPTH_TO_SPACE",)),
    RewriteEntry(data_movement.data_movement_chain, 0, data_movement.MOVEMENT_OPERATORS),
    RewriteEntry(data_movement.elementwise_before_movement, 0, shapes.UNARY, allows_cpu=True),
    RewriteEntry(dilation.dilated_convolution, 1, ("SPACE_TO_BATCH_ND",)),
    RewriteEntry(dilation.dilated_row, 1, ("SPACE_TO_BATCH_ND",)),
    RewriteEntry(versions.older_version, 0, ()),
    RewriteEntry(versions.float_on_cpu, 1, (), allows_cpu=True, if_refused=True),
)
"""Every rewrite of an operator, in the order in which they are tried.

Rewrites that only rearrange convolutions have a tolerance of one step, because TFLite's convolution kernels do not all
round in the same way.
"""
