"""Families of layer kinds. Kinds of one family differ in their number of dimensions and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.model.ir.keras_graph import Layer
from compress.model.ir.layer_specs.base import ChannelFlow, Kernel, LayerSpec, RangeRule
from compress.model.ir.layer_specs.functions import canonical_name

# --- layers with kernels -----------------------------------------------------------------


class ConvolutionSpec(LayerSpec):
    """`Conv1D`, `Conv2D`: kernel [..., in, out]."""

    kernels = (Kernel(),)
    width_setting = "filters"
    channels: ClassVar[ChannelFlow] = "mixes"
    fuses_relu = True


class TransposedConvolutionSpec(LayerSpec):
    """`Conv1DTranspose`, `Conv2DTranspose`: kernel [..., out, in]."""

    kernels = (Kernel(into=-1, out=-2, transposed=True),)
    width_setting = "filters"
    channels: ClassVar[ChannelFlow] = "mixes"
    fuses_relu = True


class DepthwiseConvolutionSpec(LayerSpec):
    """`DepthwiseConv1D`, `DepthwiseConv2D`: kernel [..., in, multiplier]."""

    kernels = (Kernel(depthwise=True),)
    channels: ClassVar[ChannelFlow] = "depthwise"
    fuses_relu = True


class SeparableConvolutionSpec(LayerSpec):
    """`SeparableConv1D`, `SeparableConv2D`: a depthwise kernel, then one of a 1x1 convolution."""

    kernels = (Kernel(depthwise=True), Kernel())
    width_setting = "filters"
    channels: ClassVar[ChannelFlow] = "mixes"

    @property
    def parts(self) -> tuple[LayerSpec, LayerSpec]:
        """The two kinds of layers that compute the same: depthwise, then 1x1."""
        depthwise = DepthwiseConvolutionSpec(f"DepthwiseConv{self.rank}D", self.rank)
        return depthwise, ConvolutionSpec(f"Conv{self.rank}D", self.rank)


class DenseSpec(LayerSpec):
    """`Dense`: kernel [in, out]. The compiler of 2021 reads one scale for the whole kernel."""

    kernels = (Kernel(per_channel=False),)
    width_setting = "units"
    channels: ClassVar[ChannelFlow] = "mixes"
    fuses_relu = True


# --- layers that work on each channel ----------------------------------------------------


class ByChannelSpec(LayerSpec):
    """Output channel i is computed from input channel i."""

    channels: ClassVar[ChannelFlow] = "preserves"
    weights_by_channel = True


class BatchNormSpec(ByChannelSpec):
    """`BatchNormalization`."""

    is_batch_norm = True
    float32_only = True
    constant_by_channel = True


class SpatialSpec(ByChannelSpec):
    """Selects, moves or repeats the values of a map: the output has the range of the input."""

    output_range: ClassVar[RangeRule] = "input"
    homogeneous = True


class LinearSpatialSpec(SpatialSpec):
    """A `SpatialSpec` that is linear: cropping, upsampling."""

    passes_factors = True


class PaddingSpec(LinearSpatialSpec):
    """`ZeroPadding1D`, `ZeroPadding2D`."""

    pads = True


class MaxPoolingSpec(SpatialSpec):
    """`MaxPooling1D`, `MaxPooling2D`."""

    pools = True


class GlobalMaxPoolingSpec(MaxPoolingSpec):
    """`GlobalMaxPooling1D`, `GlobalMaxPooling2D`."""

    pools_all = True


class AveragePoolingSpec(LinearSpatialSpec):
    """`AveragePooling1D`, `AveragePooling2D`."""

    pools = True


class GlobalAveragePoolingSpec(AveragePoolingSpec):
    """`GlobalAveragePooling1D`, `GlobalAveragePooling2D`: TFLite's MEAN, which changes the scale."""

    pools_all = True
    output_range: ClassVar[RangeRule] = "own"


class ResizingSpec(ByChannelSpec):
    """`Resizing`."""

    output_range: ClassVar[RangeRule] = "input"


class NoiseSpec(ByChannelSpec):
    """Changes values in training only; a .tflite file has no operator for it."""

    output_range: ClassVar[RangeRule] = "input"
    keeps_values = True
    random_in_training = True


class DropoutSpec(NoiseSpec):
    """Noise that multiplies values, also in training."""

    homogeneous = True
    passes_factors = True


class AugmentationSpec(LayerSpec):
    """Changes images in training only."""

    random_in_training = True


# --- activation functions       ----------------------------------------------------------


@dataclass(frozen=True)
class FunctionSpec(LayerSpec):
    """A layer or operation that applies one activation function."""

    applies: str = ""

    def activation(self, layer: Layer) -> str | None:
        """Return the function."""
        del layer
        return self.applies


@dataclass(frozen=True)
class ElementwiseFunctionSpec(FunctionSpec):
    """A `FunctionSpec` that is applied to each value separately."""

    channels: ClassVar[ChannelFlow] = "preserves"
    elementwise = True


class LeakyReluSpec(ElementwiseFunctionSpec):
    """`LeakyReLU`, `LeakyRelu`."""

    homogeneous = True


class SoftmaxSpec(FunctionSpec):
    """`Softmax` and other functions across the channels."""

    float32_only = True


class ActivationSpec(LayerSpec):
    """`Activation`: the function is a setting. Unless it is elementwise, no channel can be removed."""

    channels: ClassVar[ChannelFlow] = "preserves"

    def activation(self, layer: Layer) -> str | None:
        """Return the function if it is a Keras function."""
        name = layer.config.get("activation")
        return canonical_name(name) if isinstance(name, str) else None


class ReluSpec(LayerSpec):
    """`ReLU`, with a slope, an upper end and a threshold as settings."""

    channels: ClassVar[ChannelFlow] = "preserves"
    elementwise = True

    def activation(self, layer: Layer) -> str | None:
        """Return `relu` or `relu6` for settings that TFLite has an operator for."""
        if layer.config.get("negative_slope") or layer.config.get("threshold"):
            return None
        limit = layer.config.get("max_value")
        return {None: "relu", 6.0: "relu6"}.get(limit)


class PReluSpec(ByChannelSpec):
    """`PReLU`."""

    homogeneous = True
    constant_by_channel = True


# --- several inputs ----------------------------------------------------------------------


class ArithmeticSpec(LayerSpec):
    """Computes each value from the values of all inputs at the same index."""

    channels: ClassVar[ChannelFlow] = "combines"
    elementwise = True


class HomogeneousArithmeticSpec(ArithmeticSpec):
    """`Maximum`, `Minimum`."""

    homogeneous = True


class AveragingSpec(HomogeneousArithmeticSpec):
    """`Average`: additions, then a multiplication."""

    fuses_relu = True


class AdditionSpec(HomogeneousArithmeticSpec):
    """`Add`, `Subtract`."""

    fuses_relu = True


class MultiplicationSpec(ArithmeticSpec):
    """`Multiply`."""

    fuses_relu = True


class ConcatenationSpec(LayerSpec):
    """`Concatenate`."""

    channels: ClassVar[ChannelFlow] = "concatenates"
    output_range: ClassVar[RangeRule] = "joined"
    homogeneous = True


# --- shapes ------------------------------------------------------------------------------


class IdentitySpec(ByChannelSpec):
    """`Identity`."""

    output_range: ClassVar[RangeRule] = "input"
    homogeneous = True
    passes_factors = True
    elementwise = True
    keeps_values = True


class ReshapingSpec(LayerSpec):
    """`Flatten`, `Reshape`."""

    channels: ClassVar[ChannelFlow] = "reshapes"
    output_range: ClassVar[RangeRule] = "input"
    homogeneous = True
    keeps_values = True


class MovementSpec(LayerSpec):
    """Selects or moves values between positions and channels: the output has the range of the input."""

    output_range: ClassVar[RangeRule] = "input"


class ShapeOperationSpec(MovementSpec):
    """Changes the shape to one in the arguments of the call. These are not edited, so no channel can be removed."""

    keeps_values = True


# --- the rest ----------------------------------------------------------------------------


class NumericSpec(LayerSpec):
    """`Normalization` and others that need 32 bits."""

    float32_only = True


class InputSpec(NumericSpec):
    """`InputLayer`."""


class DecomposedSpec(LayerSpec):
    """Always replaced by simpler layers (`passes.decompose`) before other parts of the program see it."""


class ScalingSpec(ByChannelSpec):
    """`Rescaling`: replaced by simpler layers too; elementwise if its settings are single values."""


@dataclass(frozen=True)
class RecurrentSpec(LayerSpec):
    """Recurrent layers and their cells.

    Attributes:
        cell: the class name of the cell that the layer repeats; "" for cells and for other layers.
    """

    cell: str = ""

    recurrent = True
    reads_masks = True


class RecurrentWrapperSpec(LayerSpec):
    """`Bidirectional`, `RNN` and `TimeDistributed`: layers with another layer, or cells, in their settings."""

    reads_masks = True


class MaskingSpec(LayerSpec):
    """`Masking`, and `Embedding`, for which a mask is a setting."""

    def masks(self, config: Mapping[str, Any]) -> bool:
        """Return True if later layers skip time steps that this layer marks."""
        return bool(config.get("mask_zero", True))


class CastSpec(LayerSpec):
    """`Cast`: the same values in another type."""

    keeps_values = True
