"""Sparse and clustered weights with tensorflow-model-optimization (tfmot).

tfmot works on tf-keras: the network is rebuilt there (`legacy_keras`), the layers that tfmot
takes are wrapped one by one, trained, and their weights taken back by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.learning.context import Context
from compress.learning.tfmot import keras2_export
from compress.learning.tfmot.keras2_export import Legacy
from compress.learning.training import callbacks as monitoring
from compress.learning.training import loop
from compress.learning.training.batches import EpochSettings, batches, held_out
from compress.learning.training.callbacks import LossScale
from compress.learning.training.phases import training_cost
from compress.model.ir import weight_sparsity
from compress.model.ir.keras_graph import Layer, Network, build
from compress.model.ir.layer_specs import spec_of

RAMP = 2 / 3
"""Fraction of the training in which zeros are added; the rest recovers the accuracy."""
TURNS = 60
"""Number of times that zeros are added."""
DEPTHWISE = "tfmot leaves depthwise kernels alone: they are few weights, and all of them matter"


def library() -> Any:
    """Return the package tensorflow_model_optimization."""
    keras2_export.library()
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="distutils", category=DeprecationWarning)
        import tensorflow_model_optimization
        import tensorflow_model_optimization.python.core.clustering.keras.experimental.cluster  # as its manual has it
    if before is None:  # tfmot sets it, for itself and for every process started later
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
    return tensorflow_model_optimization


def rounding_layer(name: str) -> Any:
    """Return tfmot's layer that rounds a tensor to 8 bits in a range that is a moving average of the data."""
    tool = library()
    # Not part of tfmot's public interface, which has it in quantize_model only.
    from tensorflow_model_optimization.python.core.quantization.keras.quantize_layer import QuantizeLayer

    quantizer = tool.quantization.keras.quantizers.MovingAverageQuantizer(
        num_bits=8, per_axis=False, symmetric=False, narrow_range=False
    )
    return QuantizeLayer(quantizer, name=name)


def sparsify(network: Network, sparsity: float, settings: EpochSettings, context: Context) -> tuple[Network, Facts]:
    """Train while weights become zero, the smallest ones first.

    Args:
        network: the trained network.
        sparsity: share of zeros in each kernel at the end.
        settings: how to train.
        context: data, seed, progress.

    Returns:
        The sparse network; the history, and why some layers were not changed.

    Raises:
        StageError: tfmot takes no layer of this network, or the loss is no longer a number.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    tool = library()
    left = {name: reason for name, reason in _reasons(network).items() if reason}
    _refuse_nothing(network, left, "sparsify")
    schedule = _schedule(tool, sparsity, settings, context)

    def change(layer: Layer, counterpart: Any) -> Any:
        taken = counterpart is not None and _is_known(layer) and layer.name not in left
        return tool.sparsity.keras.prune_low_magnitude(counterpart, schedule) if taken else counterpart

    rebuilt = _rebuilt(network, change, context)
    history = train(rebuilt.model, network, settings, context, [tool.sparsity.keras.UpdatePruningStep()])
    return taken_back(network, rebuilt.weights()), {**history, "left": left}


def cluster(network: Network, clusters: int, settings: EpochSettings, context: Context) -> tuple[Network, Facts]:
    """Train while the weights of each kernel share a few values; zeros of sparse kernels stay.

    Args:
        network: the trained network, sparse or not.
        clusters: how many values a kernel may have.
        settings: how to train.
        context: data, seed, progress.

    Returns:
        The clustered network; the history, and why some layers were not changed.

    Raises:
        StageError: tfmot takes no layer of this network, or the loss is no longer a number.
        ModelError: the network cannot be rebuilt in tf-keras.
    """
    tool = library().clustering.keras
    left = {name: reason for name, reason in _reasons(network, clusters=clusters).items() if reason}
    _refuse_nothing(network, left, "cluster")
    redundancies = weight_sparsity.by_layer(network)
    first = tool.CentroidInitialization.KMEANS_PLUS_PLUS

    def change(layer: Layer, counterpart: Any) -> Any:
        if counterpart is None or layer.name not in redundancies or layer.name in left:
            return counterpart
        if redundancies[layer.name].sparse:
            return tool.experimental.cluster.cluster_weights(counterpart, clusters, first, preserve_sparsity=True)
        return tool.cluster_weights(counterpart, clusters, first)

    rebuilt = _rebuilt(network, change, context)
    history = train(rebuilt.model, network, settings, context)
    stripped = {layer.name: layer for layer in tool.strip_clustering(rebuilt.model).layers}
    weights = {name: tuple(stripped[name].get_weights()) for name in rebuilt.variables}
    return taken_back(network, weights), {**history, "left": left}


def train(
    model: Any, network: Network, settings: EpochSettings, context: Context, callbacks: Sequence[Any] = ()
) -> Facts:
    """Train a tf-keras model in place, on the labels: the same data, loss and schedule as in `fit.fit`.

    Args:
        model: the tf-keras model.
        network: the network of the model.
        settings: how to train.
        context: data, seed, progress.
        callbacks: of tfmot.

    Returns:
        `history`: one map for each epoch.

    Raises:
        StageError: the loss is no longer a number.
    """
    tf_keras = keras2_export.library(context.seed)
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
    frozen = keras2_export.plain(network).frozen
    if frozen:
        shown = ", ".join(f"{kind} {name!r}" for name, kind in frozen.items())
        context.progress.note(f"not trained here, because tf-keras has no counterpart: {shown}")
    keras2_export.library(context.seed)
    return keras2_export.legacy(network, change)


def _schedule(tool: Any, sparsity: float, settings: EpochSettings, context: Context) -> Any:
    """Return the schedule of sparsity: fast at first (Zhu and Gupta, To prune, or not to prune, 2017)."""
    steps = settings.batches_per_epoch(len(context.data.labels("train"))) * settings.epochs
    frequency = max(1, steps // TURNS)
    end = max(1, int(steps * RAMP) // frequency) * frequency
    return tool.sparsity.keras.PolynomialDecay(0.0, sparsity, 0, end, frequency=frequency)


def _reasons(network: Network, *, clusters: int = 0) -> dict[str, str]:
    """Return why tfmot cannot change a layer, for each layer with a kernel; "" if it can."""
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
        else:
            reasons[layer.name] = ""
    return reasons


def _is_known(layer: Layer) -> bool:
    """Return True if a layer has a kernel, and tf-keras has the layer."""
    spec = spec_of(layer)
    return bool(spec.kernels) and spec.keras2


def _refuse_nothing(network: Network, left: Mapping[str, str], stage: str) -> None:
    taken = [layer for layer in network.layers.values() if _is_known(layer)]
    if all(layer.name in left for layer in taken):
        shown = "; ".join(f"{network.layers[name].kind} {name!r}: {reason}" for name, reason in left.items())
        raise StageError(
            f"tfmot supports no layer of this model: {shown or 'none has weights'}", hint=f"remove `{stage}`"
        )
