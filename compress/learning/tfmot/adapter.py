"""Sparsity, clustering and QAT with tensorflow-model-optimization (tfmot), which works on tf-keras.

The network is rebuilt in tf-keras. Layers with weights become the tf-keras layers of the same name, with the same
weights. All others stay the Keras 3 layers that they are, and run inside the tf-keras model, so that nothing needs a
counterpart that only computes; layers with weights that have none run there too, untrained. The layers that tfmot
supports are wrapped one by one, trained, and their weights are taken back by name.

In QAT, the plan and the conversion are Coralline's, and each layer is wrapped separately, at the points that the file
rounds at. This avoids the errors of tfmot's `quantize_model`: it reorders the inputs of a Concatenate without a message
(a network for groceries fell from 69% to 49%), its ranges start at +-6 with a slow average, so here they start from
calibration, and it rounds depthwise and transposed kernels with one scale, where the file has one for each channel.
Batch norm is trained too; in front of the training it is folded into dense layers, which have one scale.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError, StageError
from compress.learning.context import Context
from compress.learning.quantization import fake_quantization, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan, nudged
from compress.learning.training import callbacks as monitoring
from compress.learning.training import loop
from compress.learning.training.batches import EpochSettings, batches, held_out
from compress.learning.training.callbacks import LossScale
from compress.learning.training.phases import training_cost
from compress.model.importers.keras.keras2 import TOLERANCE, difference
from compress.model.ir import weight_sparsity
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import fold
from compress.model.ir.tensorflow import keras

Change = Callable[[Layer, Any], Any]
"""(layer, its counterpart with weights, or None where there is none) -> the tf-keras layer to use, or None."""


@dataclass(frozen=True)
class Legacy:
    """A network in tf-keras.

    Attributes:
        model: the tf-keras model.
        variables: by layer its weights, in the network's order; they stay the same when a tool wraps the layer.
        frozen: layers with weights that cannot be trained in tf-keras: what they are.
    """

    model: Any
    variables: Mapping[str, list[Any]]
    frozen: Mapping[str, str]

    def weights(self) -> dict[str, tuple[NDArray[np.float32], ...]]:
        """Return the current weights of every layer with a counterpart."""
        return {name: tuple(variable.numpy() for variable in variables) for name, variables in self.variables.items()}


def keras2(seed: int | None = None) -> Any:
    """tf-keras; with a seed, everything random starts from it."""
    keras(seed)
    import tf_keras

    if seed is not None:
        tf_keras.utils.set_random_seed(seed)
    return tf_keras


def plain(network: Network) -> Legacy:
    """Rebuild the network in tf-keras, and compare the outputs.

    Raises:
        ModelError: its outputs differ.
    """
    legacy_model = legacy(network)
    largest = difference(legacy_model.model, build(network))
    if not largest <= TOLERANCE:
        raise ModelError(
            f"the outputs of the model rebuilt in tf-keras differ by {largest:.2g} of the largest output",
            allowed=f"{TOLERANCE:g}",
            hint="use the stages that work in Keras 3, and report which layers the model has",
        )
    return legacy_model


def legacy(network: Network, change: Change = lambda layer, counterpart: counterpart) -> Legacy:
    """Rebuild any network in tf-keras, with changed layers; activations inside layers become separate layers."""
    return _Building(fold.split_activations(network), change).build()


class _Building:
    """One rebuild: the layers and tensors built so far."""

    def __init__(self, network: Network, change: Change) -> None:
        self.network, self.change = network, change
        self.library, self.keras = keras2(), keras()
        self.live = {operation.name: operation for operation in build(network).operations}
        self.layers: dict[str, Any] = {}
        self.variables: dict[str, list[Any]] = {}
        self.frozen: dict[str, str] = {}
        self.tensors: dict[LayerOutput, Any] = {}

    def build(self) -> Legacy:
        """Call every layer in order; return the model."""
        for layer, call in self.network.in_order():
            if not layer.calls:
                shape, dtype = self.network.shapes[LayerOutput(layer.name)], self.live[layer.name].dtype
                outputs = self.library.Input(shape, name=layer.name, dtype=dtype)
            else:
                outputs = self._called(layer, call)
            for number, tensor in enumerate(self.keras.tree.flatten(outputs)):
                self.tensors[LayerOutput(layer.name, call, number)] = tensor
        ends = [
            _filled(self.keras, structure, self.tensors) for structure in (self.network.inputs, self.network.outputs)
        ]
        ends = [end[0] if isinstance(end, list) and len(end) == 1 else end for end in ends]
        return Legacy(self.library.Model(*ends, name=self.network.name), self.variables, self.frozen)

    def _called(self, layer: Layer, call: int) -> Any:
        inputs = layer.inputs(call)
        if layer.name not in self.layers:
            counterpart = self._counterpart(layer)
            self.layers[layer.name] = self.change(layer, counterpart)
            if layer.weights and counterpart is None:
                self.frozen[layer.name] = layer.kind
        legacy_layer = self.layers[layer.name]
        if legacy_layer is not None:
            return legacy_layer(self.tensors[inputs[0]])
        name = layer.name if call == 0 else f"{layer.name}_call{call}"
        kept = _kept(self.library, self.live[layer.name], layer.calls[call], bool(layer.weights))
        return kept(name=name)([self.tensors[tensor] for tensor in inputs])

    def _counterpart(self, layer: Layer) -> Any:
        """Return the tf-keras layer of the same name with the same weights, if there is one."""
        custom = not isinstance(layer.config.get("activation", "linear"), str)
        if not (layer.weights and spec_of(layer).keras2) or custom:
            return None
        kind = getattr(self.library.layers, layer.kind)
        counterpart = kind(**dict(_options(layer, kind)), name=layer.name)
        counterpart.build((None, *self.network.shapes[layer.inputs()[0]]))
        counterpart.set_weights(list(layer.weights))
        self.variables[layer.name] = list(counterpart.weights)
        return counterpart


def _options(layer: Layer, kind: Any) -> Iterator[tuple[str, Any]]:
    """Return the settings of a Keras 3 layer that its counterpart has too, without initializers."""
    accepted = inspect.signature(kind.__init__).parameters
    yield "trainable", layer.config.get("trainable", True)
    for name, value in layer.config.items():
        if name in accepted and name != "name" and not name.endswith("_initializer"):
            if isinstance(value, dict):  # regularizers and constraints, in the form of Keras 2
                value = {key: value[key] for key in ("class_name", "config")}
            yield name, value


def _kept(tf_keras: Any, live: Any, structure: Any, frozen: bool) -> Any:
    """Return a tf-keras layer class that makes one call of a Keras 3 layer with a list of tensors."""
    library = keras()
    trains = "training" in inspect.signature(live.call).parameters

    class Kept(tf_keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any, training: Any = None) -> Any:
            tensors = inputs if isinstance(inputs, list | tuple) else [inputs]
            filled = _filled(library, structure, dict(zip(tensors_in(structure), tensors, strict=True)))
            kwargs = {key: value for key, value in filled["kwargs"].items() if value is not None}
            if trains and training is not None:  # as in Keras 3, stronger than what a call was recorded with
                kwargs["training"] = training and not frozen
            return live(*filled["args"], **kwargs)

    return Kept


def _filled(library: Any, structure: Any, tensors: Mapping[LayerOutput, Any]) -> Any:
    """Return a structure with values in place of `LayerOutput`."""
    return library.tree.map_structure(lambda leaf: tensors[leaf] if isinstance(leaf, LayerOutput) else leaf, structure)


RAMP = 2 / 3
"""Fraction of the training in which zeros are added; the rest recovers the accuracy."""
TURNS = 60
"""Number of times that zeros are added."""
DEPTHWISE = "tfmot leaves depthwise kernels alone: they are few weights, and all of them matter"


def tfmot() -> Any:
    """Return the package tensorflow_model_optimization."""
    keras2()
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*distutils", category=DeprecationWarning)
        import tensorflow_model_optimization
        import tensorflow_model_optimization.python.core.clustering.keras.experimental.cluster  # as its manual has it
    if before is None:  # tfmot sets it, for itself and for every process started later
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
    return tensorflow_model_optimization


def rounding_layer(name: str) -> Any:
    """Return tfmot's layer that rounds a tensor to 8 bits in a range that is a moving average of the data."""
    tool = tfmot()
    # Not part of tfmot's public interface, which has it in quantize_model only.
    from tensorflow_model_optimization.python.core.quantization.keras.quantize_layer import QuantizeLayer

    quantizer = tool.quantization.keras.quantizers.MovingAverageQuantizer(
        num_bits=8, per_axis=False, symmetric=False, narrow_range=False
    )
    return QuantizeLayer(quantizer, name=name)


def sparsify(network: Network, sparsity: float, settings: EpochSettings, context: Context) -> tuple[Network, Facts]:
    """Train while weights become zero, the smallest ones first, until each kernel has this share of zeros.

    Returns:
        The sparse network; the history, and why some layers were not changed.

    Raises:
        StageError: tfmot takes no layer of this network, or the loss is no longer a number.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    tool = tfmot()
    left = _left(network, "sparsify")
    schedule = _schedule(tool, sparsity, settings, context)

    def change(layer: Layer, counterpart: Any) -> Any:
        taken = counterpart is not None and _is_known(layer) and layer.name not in left
        return tool.sparsity.keras.prune_low_magnitude(counterpart, schedule) if taken else counterpart

    rebuilt = _rebuilt(network, change, context)
    history = fit(rebuilt.model, network, settings, context, [tool.sparsity.keras.UpdatePruningStep()])
    return taken_back(network, rebuilt.weights()), {**history, "left": left}


def cluster(network: Network, clusters: int, settings: EpochSettings, context: Context) -> tuple[Network, Facts]:
    """Train while the weights of each kernel share a few values; zeros of sparse kernels stay.

    The result and the errors are those of `sparsify`.
    """
    tool = tfmot().clustering.keras
    left = _left(network, "cluster", clusters)
    redundancies = weight_sparsity.by_layer(network)
    first = tool.CentroidInitialization.KMEANS_PLUS_PLUS

    def change(layer: Layer, counterpart: Any) -> Any:
        if counterpart is None or layer.name not in redundancies or layer.name in left:
            return counterpart
        if redundancies[layer.name].sparse:
            return tool.experimental.cluster.cluster_weights(counterpart, clusters, first, preserve_sparsity=True)
        return tool.cluster_weights(counterpart, clusters, first)

    rebuilt = _rebuilt(network, change, context)
    history = fit(rebuilt.model, network, settings, context)
    stripped = {layer.name: layer for layer in tool.strip_clustering(rebuilt.model).layers}
    weights = {name: tuple(stripped[name].get_weights()) for name in rebuilt.variables}
    return taken_back(network, weights), {**history, "left": left}


def fit(
    model: Any, network: Network, settings: EpochSettings, context: Context, callbacks: Sequence[Any] = ()
) -> Facts:
    """Train a tf-keras model in place, on the labels: with the data, the loss and the schedule of `loop.fit`.

    Raises:
        StageError: the loss is no longer a number.
    """
    tf_keras = keras2(context.seed)
    loss = loop.label_loss(loop.head_of(build(network), context.data))
    inputs, labels = context.data.inputs("train"), context.data.labels("train")
    steps = settings.batches_per_epoch(len(labels))
    schedule = tf_keras.optimizers.schedules.CosineDecay(settings.learning_rate, steps * settings.epochs)
    model.compile(
        tf_keras.optimizers.Adam(schedule),
        loss=lambda labels, outputs: loss.of(loop.Batch(None, labels), outputs),
        metrics=["accuracy"],
        jit_compile=False,
    )
    validation = held_out(context.data.inputs("validation"), context.data.labels("validation"))
    reporting = monitoring.reporting(tf_keras, context.progress, steps, settings.epochs)
    cost = training_cost(context.data, settings.epochs)
    epochs = monitoring.epochs_phase(settings.epochs, cost, LossScale(loss.name))
    with context.progress.phase(epochs):
        history = model.fit(
            batches(inputs, labels, settings, context.seed),
            epochs=settings.epochs,
            steps_per_epoch=steps,
            validation_data=validation,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, reporting],
        ).history
    return {"history": loop.rows(history)}


def taken_back(network: Network, weights: Mapping[str, tuple[Any, ...]]) -> Network:
    """Return the network with trained weights, by layer name."""
    layers = {name: layer for name, layer in network.layers.items() if name in weights}
    return network.edited({name: replace(layer, weights=weights[name]) for name, layer in layers.items()}, {})


def _rebuilt(network: Network, change: Callable[[Layer, Any], Any], context: Context) -> Legacy:
    """Rebuild the network in tf-keras with wrapped layers, after a comparison of the unwrapped rebuild."""
    frozen = plain(network).frozen
    if frozen:
        shown = ", ".join(f"{kind} {name!r}" for name, kind in frozen.items())
        context.progress.note(f"not trained here, because tf-keras has no counterpart: {shown}")
    keras2(context.seed)
    return legacy(network, change)


def _schedule(tool: Any, sparsity: float, settings: EpochSettings, context: Context) -> Any:
    """Return the schedule of sparsity: fast at first (Zhu and Gupta, To prune, or not to prune, 2017)."""
    steps = settings.batches_per_epoch(len(context.data.labels("train"))) * settings.epochs
    frequency = max(1, steps // TURNS)
    end = max(1, int(steps * RAMP) // frequency) * frequency
    return tool.sparsity.keras.PolynomialDecay(0.0, sparsity, 0, end, frequency=frequency)


def _left(network: Network, stage: str, clusters: int = 0) -> dict[str, str]:
    """Return why tfmot cannot change a layer, for each layer with a kernel that it cannot change.

    Raises:
        StageError: tfmot cannot change any layer.
    """
    reasons = {}
    for layer in network.layers.values():
        kernel = weight_sparsity.kernel(layer) if _is_known(layer) else None
        if kernel is None:
            if any(weight.ndim > 1 for weight in layer.weights):
                reasons[layer.name] = f"tfmot does not support the kernel of a {layer.kind}"
        elif layer.kind == "DepthwiseConv2D":
            reasons[layer.name] = DEPTHWISE
        elif kernel.size <= clusters:
            reasons[layer.name] = f"it has {kernel.size} weights, no more than clusters"
        elif clusters == 2 and weight_sparsity.by_layer(network)[layer.name].sparse:
            reasons[layer.name] = "it is sparse, and needs at least three clusters, one of them for zeros"
        elif not isinstance(layer.config.get("activation", "linear"), str):
            reasons[layer.name] = "its activation is a custom function"
    if all(layer.name in reasons for layer in network.layers.values() if _is_known(layer)):
        shown = "; ".join(f"{network.layers[name].kind} {name!r}: {reason}" for name, reason in reasons.items())
        raise StageError(
            f"tfmot supports no layer of this model: {shown or 'none has weights'}", hint=f"remove `{stage}`"
        )
    return reasons


def _is_known(layer: Layer) -> bool:
    """Return True if a layer has a kernel, and tf-keras has the layer."""
    spec = spec_of(layer)
    return bool(spec.kernels) and spec.keras2


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
    legacy: Legacy
    plan: QuantizationPlan
    rounded: Mapping[str, Any]
    preserved: Mapping[str, str]

    def trained(self, method: str) -> tuple[Network, QuantizationPlan]:
        """Return the network in canonical form with the weights of the model, and the plan with its ranges."""
        ranges = dict(self.plan.ranges)
        for name, layer in self.rounded.items():
            low, high = (float(layer.quantizer_vars[end]) for end in ("min_var", "max_var"))
            ranges[name] = nudged(low, high)
        network = fold.canonical(taken_back(self.network, self.legacy.weights()))
        return network, QuantizationPlan(ranges, method)


def train_quantized(
    network: Network, plan: QuantizationPlan, settings: EpochSettings, context: Context
) -> tuple[Network, QuantizationPlan, Facts]:
    """Train with tfmot's quantizers; keep the zeros of sparse kernels and the shared values of clustered ones.

    Args:
        network: as it was read, batch norm not folded.
        plan: calibrated ranges of the network in canonical form, to start from; nothing else of it is used.
        settings: how to train.
        context: data, seed, progress.

    Returns:
        The network in canonical form with trained weights, the plan with trained ranges, and the history with the
        patterns that were `preserved`, by layer.

    Raises:
        StageError: tfmot has no quantizer for a layer, or the loss is NaN or infinite.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    prepared = prepare(network, plan, context.seed)
    history = fit(prepared.legacy.model, prepared.network, settings, context)
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
    plain(network)
    canonical = fold.canonical(network)
    points = quantizer_placement.find(canonical)
    following = set(points.values()) - quantizer_placement.fixed(canonical, points).keys()
    norms = [layer for name, layer in network.layers.items() if name not in canonical.layers]
    after_norm = {norm.inputs()[0]: LayerOutput(norm.name) for norm in norms}
    behind = {after_norm.get(tensor, tensor): name for tensor, name in points.items()}
    names = {layer: name for name, layer in fake_quantization.layer_names(network, behind).items()}
    preserved: dict[str, str] = {}
    for name, redundancy in weight_sparsity.by_layer(network).items():
        kept = ["zeros"] if redundancy.sparse else []
        if redundancy.clustered and network.layers[name].kind not in CHANNELWISE:  # tfmot does not cluster those
            kept.append("clusters")
        preserved[name] = " and ".join(kept)
    rounded: dict[str, Any] = {}
    refused: list[Layer] = []

    def change(layer: Layer, counterpart: Any) -> Any:
        if names.get(layer.name) in following:
            rounded[names[layer.name]] = rounding_layer(layer.name)
            return rounded[names[layer.name]]
        if not layer.weights or layer.kind == "BatchNormalization":
            return counterpart
        if counterpart is None or not _registry("").supports(counterpart):
            refused.append(layer)
            return counterpart
        return _wrapped(layer, counterpart, preserved[layer.name])

    keras2(seed)
    rebuilt = legacy(fake_quantization.insert(network, behind, plan, following), change)
    if refused:
        shown = ", ".join(f"{layer.kind} {layer.name!r}" for layer in refused)
        raise StageError(
            f"tfmot cannot quantize {shown}", hint="choose `engine: coralline`, which supports these layers"
        )
    for name, layer in rounded.items():
        for end, value in zip(("min_var", "max_var"), plan.ranges[name], strict=True):
            layer.quantizer_vars[end].assign(value)
    return Prepared(network, rebuilt, plan, rounded, {name: what for name, what in preserved.items() if what})


def _registry(preserved: str) -> Any:
    """Return the registry of tfmot for kernels whose zeros or clusters must be kept."""
    tool = tfmot()
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
    wrapper = tfmot().quantization.keras.QuantizeWrapperV2
    return wrapper(counterpart, config)


@cache
def _channelwise() -> Any:
    """Return the quantizer class for CHANNELWISE kernels; defined at the first call, because tfmot is imported late."""
    import tensorflow

    base = tfmot().quantization.keras.quantizers.LastValueQuantizer

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
