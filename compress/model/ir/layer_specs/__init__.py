"""The table of layer kinds: for each Keras layer all facts that any part of the program needs.

`spec_of` looks up a layer. Code for one particular kind uses a constant of this module; no other module names Keras
classes in strings (`tests/architecture/test_layer_specs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compress.model.ir.keras_graph import Layer
from compress.model.ir.layer_specs import families as f
from compress.model.ir.layer_specs.base import ChannelFlow, Kernel, LayerSpec, RangeRule
from compress.model.ir.layer_specs.functions import ACROSS_CHANNELS, ELEMENTWISE, operation_name

__all__ = ["ChannelFlow", "Kernel", "LayerSpec", "RangeRule", "all_specs", "spec_of", "spec_of_live"]

INPUT = f.InputSpec("InputLayer")
ACTIVATION = f.ActivationSpec("Activation")
RELU = f.ReluSpec("ReLU")
PRELU = f.PReluSpec("PReLU", keras2=True)
DENSE = f.DenseSpec("Dense", keras2=True)
CONV_1D = f.ConvolutionSpec("Conv1D", 1, keras2=True)
CONV_2D = f.ConvolutionSpec("Conv2D", 2, keras2=True)
DEPTHWISE_CONV_2D = f.DepthwiseConvolutionSpec("DepthwiseConv2D", 2, keras2=True)
BATCH_NORM = f.BatchNormSpec("BatchNormalization", keras2=True)
LAYER_NORM = f.DecomposedSpec("LayerNormalization", keras2=True)
GROUP_NORM = f.DecomposedSpec("GroupNormalization")
UNIT_NORM = f.DecomposedSpec("UnitNormalization")
EINSUM_DENSE = f.DecomposedSpec("EinsumDense")
NORMALIZATION = f.NumericSpec("Normalization")
RESCALING = f.ScalingSpec("Rescaling")
ADD = f.AdditionSpec("Add")
SUBTRACT = f.AdditionSpec("Subtract")
MULTIPLY = f.MultiplicationSpec("Multiply")
AVERAGE = f.AveragingSpec("Average")
MAXIMUM = f.HomogeneousArithmeticSpec("Maximum")
MINIMUM = f.HomogeneousArithmeticSpec("Minimum")
CONCATENATE = f.ConcatenationSpec("Concatenate")
FLATTEN = f.ReshapingSpec("Flatten")
RESHAPE = f.ReshapingSpec("Reshape")
IDENTITY = f.IdentitySpec("Identity")
FLIP = f.MovementSpec("Flip")
LSTM = f.RecurrentSpec("LSTM", cell="LSTMCell")
GRU = f.RecurrentSpec("GRU", cell="GRUCell")
SIMPLE_RNN = f.RecurrentSpec("SimpleRNN", cell="SimpleRNNCell")
CONV_LSTM_2D = f.RecurrentSpec("ConvLSTM2D")
STACKED_CELLS = f.RecurrentSpec("StackedRNNCells")
BIDIRECTIONAL = f.RecurrentWrapperSpec("Bidirectional")
EMBEDDING = f.MaskingSpec("Embedding")
RNN = f.RecurrentWrapperSpec("RNN")
TIME_DISTRIBUTED = f.RecurrentWrapperSpec("TimeDistributed")


def _convolutions(rank: int) -> list[LayerSpec]:
    in_keras2 = rank == 2
    return [
        f.ConvolutionSpec(f"Conv{rank}D", rank, keras2=True),
        f.TransposedConvolutionSpec(f"Conv{rank}DTranspose", rank, keras2=in_keras2),
        f.DepthwiseConvolutionSpec(f"DepthwiseConv{rank}D", rank, keras2=in_keras2),
        f.SeparableConvolutionSpec(f"SeparableConv{rank}D", rank, keras2=True),
    ]


def _spatial(rank: int) -> list[LayerSpec]:
    return [
        f.MaxPoolingSpec(f"MaxPooling{rank}D", rank),
        f.GlobalMaxPoolingSpec(f"GlobalMaxPooling{rank}D", rank),
        f.AveragePoolingSpec(f"AveragePooling{rank}D", rank),
        f.GlobalAveragePoolingSpec(f"GlobalAveragePooling{rank}D", rank),
        f.PaddingSpec(f"ZeroPadding{rank}D", rank),
        f.LinearSpatialSpec(f"Cropping{rank}D", rank),
        f.LinearSpatialSpec(f"UpSampling{rank}D", rank),
        f.DropoutSpec(f"SpatialDropout{rank}D", rank),
    ]


def _functions(names: Iterable[str]) -> list[LayerSpec]:
    """Operations that apply an activation function, by Keras' rule for their names."""
    specs: list[LayerSpec] = []
    for name in sorted(names):
        family = f.LeakyReluSpec if name == "leaky_relu" else f.ElementwiseFunctionSpec
        specs.append(family(operation_name(name), applies=name))
    return specs


_AUGMENTATIONS = (
    *("AugMix", "CutMix", "MixUp", "RandAugment", "RandomBrightness", "RandomColorDegeneration", "RandomColorJitter"),
    *("RandomContrast", "RandomCrop", "RandomElasticTransform", "RandomErasing", "RandomFlip", "RandomGaussianBlur"),
    *("RandomGrayscale", "RandomHue", "RandomInvert", "RandomPerspective", "RandomPosterization", "RandomRotation"),
    *("RandomSaturation", "RandomSharpness", "RandomShear", "RandomTranslation", "RandomZoom"),
)
_LAYERS: tuple[LayerSpec, ...] = (
    *_convolutions(1),
    *_convolutions(2),
    *_spatial(1),
    *_spatial(2),
    *(f.DropoutSpec(kind) for kind in ("Dropout", "GaussianDropout")),
    *(f.NoiseSpec(kind) for kind in ("GaussianNoise", "AlphaDropout")),
    *(f.AugmentationSpec(kind) for kind in _AUGMENTATIONS),
    *(LSTM, GRU, SIMPLE_RNN, CONV_LSTM_2D, BIDIRECTIONAL, RNN, STACKED_CELLS, TIME_DISTRIBUTED),
    *(f.RecurrentSpec(kind) for kind in ("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTM1D", "ConvLSTM3D")),
    f.MaskingSpec("Masking"),
    EMBEDDING,
    *(INPUT, ACTIVATION, RELU, PRELU, DENSE, BATCH_NORM, LAYER_NORM, GROUP_NORM, UNIT_NORM, EINSUM_DENSE),
    *(NORMALIZATION, RESCALING, ADD, SUBTRACT, MULTIPLY, AVERAGE, MAXIMUM, MINIMUM, CONCATENATE, FLATTEN, RESHAPE),
    *(IDENTITY, f.ResizingSpec("Resizing"), f.MovementSpec("Permute")),
    f.LeakyReluSpec("LeakyReLU", applies="leaky_relu"),
    f.ElementwiseFunctionSpec("ELU", applies="elu"),
    f.SoftmaxSpec("Softmax", applies="softmax"),
)
DIVIDE, TRUE_DIVIDE, SQRT, RSQRT = (f.ArithmeticSpec(kind) for kind in ("Divide", "TrueDivide", "Sqrt", "Rsqrt"))
_ARITHMETIC = (
    *("Negative", "Absolute", "Abs", "Square", "Power"),
    *("Exp", "Expm1", "Log", "Log1p", "Erf", "Clip"),
)
_MOVEMENTS = ("GetItem", "Take", "Split", "Unstack", "SpaceToDepth", "DepthToSpace", "Resize")
_OPERATIONS: tuple[LayerSpec, ...] = (
    *_functions(ELEMENTWISE - {"linear"}),
    *(f.SoftmaxSpec(operation_name(name), applies=name) for name in sorted(ACROSS_CHANNELS)),
    *(f.ArithmeticSpec(kind) for kind in _ARITHMETIC),
    *(f.MovementSpec(kind) for kind in _MOVEMENTS),
    *(f.ShapeOperationSpec(kind) for kind in ("Reshape", "Squeeze", "ExpandDims", "Ravel")),
    *(ADD, SUBTRACT, MULTIPLY, MAXIMUM, MINIMUM, CONCATENATE, IDENTITY, FLIP, f.CastSpec("Cast")),
    *(DIVIDE, TRUE_DIVIDE, SQRT, RSQRT),
)
LAYERS: Mapping[str, LayerSpec] = {spec.kind: spec for spec in _LAYERS}
"""Layer kinds by class name."""
OPERATIONS: Mapping[str, LayerSpec] = {spec.kind: spec for spec in _OPERATIONS}
"""Kinds of Keras operations (`keras.ops`) by class name; some have the name of a different layer."""


def all_specs() -> tuple[LayerSpec, ...]:
    """Return all known kinds of layers, without operations."""
    return tuple(LAYERS.values())


def spec_of(layer: Layer) -> LayerSpec:
    """Return the spec of a layer; that of a custom or unknown layer assumes nothing."""
    return _lookup(layer.kind, str(layer.entry.get("module", "keras.layers")))


def spec_of_live(operation: Any) -> LayerSpec:
    """Return the spec of a Keras layer or operation object."""
    return _lookup(type(operation).__name__, type(operation).__module__)


def spec_named(kind: str) -> LayerSpec:
    """Return the spec of a Keras class by its name: a layer, or else an operation."""
    return LAYERS.get(kind) or OPERATIONS.get(kind) or LayerSpec(kind)


def _lookup(kind: str, module: str) -> LayerSpec:
    if module.split(".")[0] != "keras":  # a custom class may have the name of a Keras class
        return LayerSpec(kind)
    table = OPERATIONS if ".ops." in module else LAYERS
    return table.get(kind) or LayerSpec(kind)
