"""Structured pruning, second of three questions: which channels matter least?

A score for each group of channels: from the weights alone, or from what the loss would do without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.ir.channel_groups import Channels
from compress.ir.keras_graph import Layer, LayerOutput, Network, build, map_tensors
from compress.ir.layer_specs import INPUT, spec_of
from compress.ir.tensorflow import keras
from compress.tasks.base import Head
from compress.training.loop import Batch, label_loss

Scores = NDArray[np.float64]
"""By channel number, equal within a group."""
Method = Literal["taylor", "batch_norm", "l2", "l1"]
PACKAGE = "coralline"
GATE = "ChannelGate"
GATES = "channel_gates"
_BATCH = 64


@dataclass(frozen=True)
class ImportanceSamples:
    """What scores are measured on.

    Attributes:
        inputs: float32 [n, ...].
        labels: the training targets [n, ...].
        head: what the network's output means.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[Any]
    head: Head


def scores(network: Network, channels: Channels, method: Method, samples: ImportanceSamples | None) -> Scores:
    """How much each group of channels matters; `taylor` needs samples."""
    if method == "taylor":
        assert samples is not None
        return taylor(network, channels, samples)
    return of_weights(network, channels, method)


def of_weights(network: Network, channels: Channels, method: Method) -> Scores:
    """How large the weights are that make a channel.

    `l1` and `l2` are norms of the kernel; `batch_norm` is the L2 norm times the scale over the deviation of the batch
    norm that follows: the weights as they are after folding. Norms are divided by their layer's mean, so that layers
    can be compared, and averaged over the layers of a group.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017 (norms); Liu et al.,
    Network Slimming, ICCV 2017 (batch norm scales).
    """
    total = np.zeros(len(channels.group))
    count = np.zeros(len(channels.group))
    consumers = network.consumers()
    for layer in network.layers.values():
        kernel = made_by(layer)
        if kernel is None:
            continue
        each = np.abs(kernel) if method == "l1" else kernel**2
        norm = each.sum(axis=tuple(range(kernel.ndim - 1)))
        norm = norm if method == "l1" else np.sqrt(norm)
        tensor = LayerOutput(layer.name)
        for name, _ in consumers.get(tensor, []) if method == "batch_norm" else []:
            if spec_of(network.layers[name]).is_batch_norm:
                norm *= np.abs(_batch_norm_factor(network.layers[name]))
        groups = channels.group[channels.layouts[tensor]]
        np.add.at(total, groups, norm / max(float(norm.mean()), 1e-12))
        np.add.at(count, groups, 1)
    score: Scores = (total / np.maximum(count, 1))[channels.group]
    return score


def made_by(layer: Layer) -> NDArray[np.float64] | None:
    """The kernel with which a layer makes channels, these in the last axis; None if it makes none."""
    spec = spec_of(layer)
    if spec.channels != "makes":
        return None
    kernel = layer.weights[len(spec.kernels) - 1].astype(np.float64)
    return np.moveaxis(kernel, spec.kernels[-1].out, -1)


def refuse_constant(model: Any, inputs: NDArray[np.float32]) -> None:
    """Nothing, if a model answers differently for some of the samples.

    Raises:
        StageError: it does not, so that no channel matters to it.
    """
    flatten = keras().tree.flatten
    first = [np.asarray(each) for each in flatten(model(inputs[:1], training=False))]
    for start in range(0, len(inputs), _BATCH):
        answers = flatten(model(inputs[start : start + _BATCH], training=False))
        if any((np.asarray(each) != one).any() for each, one in zip(answers, first, strict=True)):
            return
    if len(inputs) > 1:
        what = f"the model gives the same answer for all of {len(inputs)} training samples: no channel matters to it"
        raise StageError(what, todo="train it first (`train` before `prune`), and look at data.preprocess")


def instead(asked: Method, used: Method) -> str:
    """What to say where another method than the one asked for was used."""
    return f"{asked} finds no channel that matters to the loss: {used} is used instead"


def _batch_norm_factor(layer: Layer) -> NDArray[np.float64]:
    """Scale divided by the deviation; weights are [gamma], [beta], mean, variance."""
    gamma = layer.weights[0].astype(np.float64) if layer.config.get("scale", True) else np.float64(1)
    factor: NDArray[np.float64] = gamma / np.sqrt(layer.weights[-1].astype(np.float64) + layer.config["epsilon"])
    return factor


def taylor(network: Network, channels: Channels, samples: ImportanceSamples) -> Scores:
    """How much the loss would change without a channel: the mean square of a first-order estimate for each sample.

    The estimate is the derivative by a factor on the channel, wherever other layers read it.

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019 (equation 8, with gates).
    """
    import tensorflow

    loss, inputs, labels = label_loss(samples.head), samples.inputs, samples.labels
    model = gated(network, channels)
    total = np.zeros(len(channels.group))

    @tensorflow.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def squares(given: Any, wanted: Any) -> Any:
        gates = tensorflow.ones((tensorflow.shape(given)[0], len(total)))
        with tensorflow.GradientTape() as tape:
            tape.watch(gates)
            found = loss.of(Batch(given, wanted), model([given, gates], training=False))
        return tensorflow.reduce_sum(tape.gradient(found, gates) ** 2, axis=0)

    for start in range(0, len(inputs), _BATCH):
        part = slice(start, start + _BATCH)
        total += np.asarray(squares(inputs[part], labels[part]), np.float64)
    score: Scores = (total / max(len(inputs), 1))[channels.group]
    return score


def gated(network: Network, channels: Channels) -> Any:
    """The network as a Keras model with one more input: a factor for each channel number, [batch, channels].

    It multiplies the channels wherever a layer reads them that mixes channels; with 0 in the place of a group (the
    factor is taken from the group's own number) the outputs are those of the network without it.
    """
    _gate()
    count = len(channels.group)
    gates = INPUT.layer(GATES, (), batch_shape=(None, count), dtype="float32", sparse=False)
    added: dict[str, Layer] = {GATES: gates}
    shapes = {**network.shapes, LayerOutput(GATES): (count,)}
    for layer in network.layers.values():
        if spec_of(layer).channels != "makes":
            continue
        calls = []
        for call, arguments in enumerate(layer.calls):
            (source,) = layer.given(call)
            groups = channels.group[channels.layouts[source]]
            name = f"{layer.name}_gate_{call}"
            added[name] = _gate_layer(name, source, groups)
            shapes[LayerOutput(name)] = network.shapes[source]
            calls.append(map_tensors(arguments, {source: LayerOutput(name)}.get))
        added[layer.name] = replace(layer, calls=tuple(calls))
    layers = {**network.layers, **added}
    entrances = network.inputs if isinstance(network.inputs, list) else [network.inputs]
    return build(replace(network, layers=layers, shapes=shapes, inputs=[*entrances, LayerOutput(GATES)]))


def _gate_layer(name: str, source: LayerOutput, groups: NDArray[np.int64]) -> Layer:
    config = {"name": name, "groups": groups.tolist()}
    entry = {"module": None, "class_name": GATE, "config": config, "registered_name": f"{PACKAGE}>{GATE}"}
    return Layer(name, GATE, entry, ({"args": [source, LayerOutput(GATES)], "kwargs": {}},), ())


@cache
def _gate() -> Any:
    """The layer that multiplies channels; registered with Keras, which is imported late."""
    library = keras()

    class ChannelGate(library.layers.Layer):  # type: ignore[misc, name-defined]
        """Multiplies each channel with the factor of its group."""

        def __init__(self, groups: list[int], **settings: Any) -> None:
            super().__init__(**settings)
            self.groups = groups

        def compute_output_spec(self, x: Any, gates: Any) -> Any:
            del gates
            return library.KerasTensor(x.shape, dtype=x.dtype)

        def call(self, x: Any, gates: Any) -> Any:
            factors = library.ops.take(gates, np.array(self.groups), axis=1)
            return x * library.ops.reshape(factors, (-1, *[1] * (len(x.shape) - 2), len(self.groups)))

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "groups": self.groups}

    return library.saving.register_keras_serializable(PACKAGE, GATE)(ChannelGate)
