"""Quantization-aware training with tfmot's quantizers; the plan and the conversion are Coralline's.

Each layer is wrapped separately, at the points that the file rounds at. This avoids the errors of tfmot's
`quantize_model`: nothing is reordered at a concatenation, ranges start from calibration instead of +-6,
and depthwise and transposed kernels have one scale for each channel, as in the file. Batch norm is
trained too; in front of the training it is folded into dense layers, which have one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.learning.context import Context
from compress.learning.quantization import fake_quantization, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan, nudged
from compress.learning.tfmot import keras2_export, sparsity
from compress.learning.training.batches import EpochSettings
from compress.model.ir import weight_sparsity
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.passes import fold

CHANNELWISE = {"DepthwiseConv2D", "Conv2DTranspose"}
"""Layers whose kernels tfmot would round with one scale, and the file with one scale per channel."""


@dataclass(frozen=True)
class Prepared:
    """A network whose tf-keras model rounds as the file does, before, during and after the training.

    Attributes:
        network: in Keras 3, batch norm folded into dense layers only.
        legacy: the tf-keras model with tfmot's layers, and its weights.
        plan: the ranges to start from.
        rounded: the tfmot layer of every point whose range follows the data.
        preserved: by layer what the training keeps of its kernel: zeros, clusters, or both.
    """

    network: Network
    legacy: keras2_export.Legacy
    plan: QuantizationPlan
    rounded: Mapping[str, Any]
    preserved: Mapping[str, str]

    def trained(self, method: str) -> tuple[Network, QuantizationPlan]:
        """Return the network in canonical form with the weights of the model, and the plan with its ranges."""
        ranges = {**self.plan.ranges, **{name: _range(layer) for name, layer in self.rounded.items()}}
        network = fold.canonical(sparsity.taken_back(self.network, self.legacy.weights()))
        return network, QuantizationPlan(ranges, method)


def train(
    network: Network, plan: QuantizationPlan, settings: EpochSettings, context: Context
) -> tuple[Network, QuantizationPlan, Facts]:
    """Train with tfmot's quantizers; keep the zeros of sparse kernels and the shared values of clustered ones.

    Args:
        network: as it was read, batch norm not folded.
        plan: calibrated ranges of the network in canonical form, to start from; nothing else of it is used.
        settings: how to train.
        context: data, seed, progress.

    Returns:
        The network in canonical form with trained weights, the plan with trained ranges, and the history with
        what was `preserved` in which layer.

    Raises:
        StageError: tfmot has no quantizer for a layer, or the loss is NaN or infinite.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    prepared = prepare(network, plan, context.seed)
    history = sparsity.train(prepared.legacy.model, prepared.network, settings, context)
    trained, ranges = prepared.trained(
        f"{plan.method}, then averaged by tfmot over {settings.epochs} epochs of training"
    )
    return trained, ranges, {**history, "preserved": dict(prepared.preserved)}


def prepare(network: Network, plan: QuantizationPlan, seed: int) -> Prepared:
    """Rebuild a network in tf-keras with tfmot's quantizers, in calibrated ranges.

    Raises:
        StageError: tfmot has no quantizer for a layer.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    network = fold.folded_dense(fold.unfolded(network))
    keras2_export.plain(network)
    canonical = fold.canonical(network)
    points = quantizer_placement.find(canonical)
    following = set(points.values()) - quantizer_placement.fixed(canonical, points).keys()
    behind = _behind_norms(network, canonical, points)
    names = {layer: name for name, layer in fake_quantization.layer_names(network, behind).items()}
    redundancies = weight_sparsity.by_layer(network)
    preserved = {name: _preserved(network.layers[name], redundancy) for name, redundancy in redundancies.items()}
    rounded: dict[str, Any] = {}
    refused: list[Layer] = []

    def change(layer: Layer, counterpart: Any) -> Any:
        if names.get(layer.name) in following:
            rounded[names[layer.name]] = sparsity.rounding_layer(layer.name)
            return rounded[names[layer.name]]
        if not layer.weights or layer.kind == "BatchNormalization":
            return counterpart
        if counterpart is None or not _registry("").supports(counterpart):
            refused.append(layer)
            return counterpart
        return _wrapped(layer, counterpart, preserved[layer.name])

    keras2_export.library(seed)
    legacy = keras2_export.legacy(fake_quantization.insert(network, behind, plan, following), change)
    _refuse(refused)
    for name, layer in rounded.items():
        _set_range(layer, plan.ranges[name])
    return Prepared(network, legacy, plan, rounded, {name: what for name, what in preserved.items() if what})


def _behind_norms(network: Network, canonical: Network, points: Mapping[LayerOutput, str]) -> dict[LayerOutput, str]:
    """Return the points of a network whose batch norm is not folded: they are after the batch norm."""
    norms = [layer for name, layer in network.layers.items() if name not in canonical.layers]
    behind = {norm.inputs()[0]: LayerOutput(norm.name) for norm in norms}
    return {behind.get(tensor, tensor): name for tensor, name in points.items()}


def _preserved(layer: Layer, redundancy: weight_sparsity.Redundancy) -> str:
    """Return the pattern of a kernel that the training keeps; tfmot does not cluster CHANNELWISE kernels."""
    parts = {"zeros": redundancy.sparse, "clusters": redundancy.clustered and layer.kind not in CHANNELWISE}
    return " and ".join(name for name, there in parts.items() if there)


def _registry(preserved: str) -> Any:
    """Return the registry of tfmot for kernels whose zeros or clusters must be kept."""
    tool = sparsity.library()
    combine = tool.experimental.combine
    if "clusters" in preserved:
        scheme = combine.Default8BitClusterPreserveQuantizeScheme(preserve_sparsity="zeros" in preserved)
    elif preserved:
        scheme = combine.Default8BitPrunePreserveQuantizeScheme()
    else:
        scheme = tool.quantization.keras.default_8bit.Default8BitQuantizeScheme()
    return scheme.get_quantize_registry()


def _wrapped(layer: Layer, counterpart: Any, preserved: str) -> Any:
    """Return a tf-keras layer whose kernel tfmot rounds in every step; a separate layer rounds its output."""
    config = _registry("" if layer.kind in CHANNELWISE else preserved).get_quantize_config(counterpart)
    config.activation_attrs, config.quantize_output = [], False
    if layer.kind in CHANNELWISE:
        config.weight_quantizer = _channelwise()(layer.kind)
    wrapper = sparsity.library().quantization.keras.QuantizeWrapperV2
    return wrapper(counterpart, config)


def _refuse(left: Sequence[Layer]) -> None:
    if left:
        shown = ", ".join(f"{layer.kind} {layer.name!r}" for layer in left)
        raise StageError(
            f"tfmot cannot quantize {shown}", hint="choose `engine: coralline`, which supports these layers"
        )


@cache
def _channelwise() -> Any:
    """Return the quantizer class for CHANNELWISE kernels; defined at the first call, because tfmot is imported late."""
    import tensorflow

    base = sparsity.library().quantization.keras.quantizers.LastValueQuantizer

    class Channelwise(base):  # type: ignore[misc, valid-type]
        """A quantizer with one scale per channel, along any axis; exact zeros stay zero."""

        def __init__(self, kind: str) -> None:
            super().__init__(num_bits=8, per_axis=True, symmetric=True, narrow_range=True)
            self.kind = kind

        def build(self, tensor_shape: Any, name: str, layer: Any) -> dict[str, Any]:
            height, width, before, last = tensor_shape
            del height, width
            count = before if self.kind == "Conv2DTranspose" else before * last
            kernel = next(weight for weight in layer.layer.weights if tuple(weight.shape) == tuple(tensor_shape))
            redundancy = weight_sparsity.of(kernel.numpy())
            self.mask = (kernel.numpy() != 0).astype("float32") if redundancy.sparse else 1.0
            ends = {"min_var": f"{name}_min", "max_var": f"{name}_max"}
            return {
                key: layer.add_weight(end, shape=(count,), initializer="zeros", trainable=False)
                for key, end in ends.items()
            }

        def __call__(self, inputs: Any, training: Any, weights: Any, **kwargs: Any) -> Any:
            inputs = inputs * self.mask
            if self.kind == "Conv2DTranspose":  # height, width, out, in
                turned = tensorflow.transpose(inputs, (0, 1, 3, 2))
                return tensorflow.transpose(super().__call__(turned, training, weights, **kwargs), (0, 1, 3, 2))
            height, width, channels, multiplier = inputs.shape
            flat = tensorflow.reshape(inputs, (height, width, 1, channels * multiplier))
            return tensorflow.reshape(super().__call__(flat, training, weights, **kwargs), inputs.shape)

    return Channelwise


def _set_range(layer: Any, limits: tuple[float, float]) -> None:
    for end, value in zip(("min_var", "max_var"), limits, strict=True):
        layer.quantizer_vars[end].assign(value)


def _range(layer: Any) -> tuple[float, float]:
    low, high = (float(layer.quantizer_vars[end]) for end in ("min_var", "max_var"))
    return nudged(low, high)
