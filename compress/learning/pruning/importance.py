"""Structured pruning, second of three questions: which channels matter least?

The answer is an importance score for each channel: from the weights alone, or from the change of the loss without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.progress import SILENT, Progress
from compress.model.ir.channel_groups import ChannelGroups
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, map_tensors
from compress.model.ir.layer_specs import INPUT, spec_of
from compress.model.ir.tensorflow import keras, run, split_inputs
from compress.tasks.base import Head

Scores = NDArray[np.float64]
"""Importance by channel number; channels of one group have the same score."""
ImportanceMethod = Literal["taylor", "batch_norm", "l2", "l1"]
PACKAGE = "coralline"
GATE = "ChannelGate"
GATES = "channel_gates"
_BATCH = 64
"""Samples that are run at once; chosen: the result does not depend on it."""


@dataclass(frozen=True)
class ImportanceSamples:
    """Samples that importance and sensitivity are measured on.

    Attributes:
        inputs: float32 [n, ...].
        labels: the training targets [n, ...].
        head: the meaning of the network's output.
        has_classes: whether each sample has one class.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[Any]
    head: Head
    has_classes: bool = True


def importance_scores(
    network: Network,
    channels: ChannelGroups,
    method: ImportanceMethod,
    samples: ImportanceSamples | None,
    progress: Progress = SILENT,
) -> Scores:
    """Return the importance of every channel; `taylor` needs samples."""
    if method == "taylor":
        assert samples is not None
        return taylor_scores(network, channels, samples, progress)
    return weight_scores(network, channels, method)


def weight_scores(network: Network, channels: ChannelGroups, method: ImportanceMethod) -> Scores:
    """Return the size of the weights that produce each channel.

    `l1` and `l2` are norms of the kernel. `batch_norm` is the L2 norm times the factor of the batch norm that follows:
    the norm of the kernel after folding. Norms are divided by the mean of their layer, so that layers can be compared,
    and averaged over the layers of a channel group.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017 (norms); Liu et al.,
    Network Slimming, ICCV 2017 (batch norm scales).
    """
    total = np.zeros(len(channels.group))
    count = np.zeros(len(channels.group))
    consumers = network.consumers()
    for layer in network.layers.values():
        if not produces_channels(layer):
            continue
        output = LayerOutput(layer.name)
        norms = _kernel_norms(layer, method)
        if method == "batch_norm":
            for name, _ in consumers.get(output, []):
                if spec_of(network.layers[name]).is_batch_norm:
                    norms *= np.abs(batch_norm_factor(network.layers[name]))
        groups = channels.group[channels.layouts[output]]
        np.add.at(total, groups, norms / max(float(norms.mean()), 1e-12))
        np.add.at(count, groups, 1)
    scores: Scores = (total / np.maximum(count, 1))[channels.group]
    return scores


def produces_channels(layer: Layer) -> bool:
    """Whether a layer computes each of its output channels from all input channels."""
    return spec_of(layer).channels == "mixes"


def _kernel_norms(layer: Layer, method: ImportanceMethod) -> NDArray[np.float64]:
    """Return the norm of the weights of each output channel."""
    spec = spec_of(layer)
    kernel = layer.weights[len(spec.kernels) - 1].astype(np.float64)
    rows = np.moveaxis(kernel, spec.kernels[-1].out, -1).reshape(-1, kernel.shape[spec.kernels[-1].out])
    norms: NDArray[np.float64] = np.abs(rows).sum(axis=0) if method == "l1" else np.sqrt((rows**2).sum(axis=0))
    return norms


def batch_norm_factor(layer: Layer) -> NDArray[np.float64]:
    """Return scale / standard deviation; the weights are [gamma], [beta], mean, variance."""
    gamma = layer.weights[0].astype(np.float64) if layer.config.get("scale", True) else np.float64(1)
    factor: NDArray[np.float64] = gamma / np.sqrt(layer.weights[-1].astype(np.float64) + layer.config["epsilon"])
    return factor


def refuse_constant(model: Any, inputs: NDArray[np.float32]) -> None:
    """Refuse a model with the same output for all samples: none of its channels matters.

    Raises:
        StageError: all outputs are the same.
    """
    flatten = keras().tree.flatten
    first = [np.asarray(output) for output in flatten(run(model, inputs[:1]))]
    for start in range(0, len(inputs), _BATCH):
        outputs = flatten(run(model, inputs[start : start + _BATCH]))
        if any((np.asarray(output) != row).any() for output, row in zip(outputs, first, strict=True)):
            return
    if len(inputs) > 1:
        what = f"the model gives the same answer for all of {len(inputs)} training samples: no channel matters to it"
        raise StageError(what, hint="train it first (`train` before `prune`), and check data.preprocess")


def taylor_scores(
    network: Network, channels: ChannelGroups, samples: ImportanceSamples, progress: Progress = SILENT
) -> Scores:
    """Return the expected squared change of the loss without each channel.

    The change is estimated for each sample to first order: by the derivative of the loss with respect to a factor on
    the channel, wherever other layers read it.

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019 (equation 8, with gates).
    """
    import tensorflow

    model = gated_model(network, channels)
    total = np.zeros(len(channels.group))

    @tensorflow.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def squared_derivatives(inputs: Any, labels: Any) -> Any:
        gates = tensorflow.ones((tensorflow.shape(inputs)[0], len(total)))
        with tensorflow.GradientTape() as tape:
            tape.watch(gates)
            outputs = model([*split_inputs(model.inputs[:-1], inputs), gates], training=False)
            losses = samples.head.importance(labels, outputs)
        return tensorflow.reduce_sum(tape.gradient(losses, gates) ** 2, axis=0)

    for start in range(0, len(samples.inputs), _BATCH):
        part = slice(start, start + _BATCH)
        total += np.asarray(squared_derivatives(samples.inputs[part], samples.labels[part]), np.float64)
        progress.update(min(part.stop, len(samples.inputs)), len(samples.inputs))
    scores: Scores = (total / max(len(samples.inputs), 1))[channels.group]
    return scores


def gated_model(network: Network, channels: ChannelGroups) -> Any:
    """Return the network as a Keras model with a second input: a factor for each channel number, [batch, channels].

    The factor multiplies the channels wherever a layer reads them that mixes channels. The factor of a whole group is
    that at the group's number; with 0 there, the outputs are those of the network without the group.
    """
    _gate_class()
    count = len(channels.group)
    layers = dict(network.layers)
    factors = LayerOutput(network.free_name(GATES))
    shapes = {**network.shapes, factors: (count,)}
    layers[factors.layer] = INPUT.layer(factors.layer, (), batch_shape=(None, count), dtype="float32", sparse=False)
    for layer in network.layers.values():
        if not produces_channels(layer):
            continue
        calls = []
        for call, arguments in enumerate(layer.calls):
            (source,) = layer.inputs(call)
            name = replace(network, layers=layers).free_name(f"{layer.name}_gate_{call}")
            config = {"name": name, "groups": channels.group[channels.layouts[source]].tolist()}
            entry = {"module": None, "class_name": GATE, "config": config, "registered_name": f"{PACKAGE}>{GATE}"}
            layers[name] = Layer(name, GATE, entry, ({"args": [source, factors], "kwargs": {}},), ())
            shapes[LayerOutput(name)] = network.shapes[source]
            calls.append(map_tensors(arguments, {source: LayerOutput(name)}.get))
        layers[layer.name] = replace(layer, calls=tuple(calls))
    inputs = network.inputs if isinstance(network.inputs, list) else [network.inputs]
    return build(replace(network, layers=layers, shapes=shapes, inputs=[*inputs, factors]))


@cache
def _gate_class() -> Any:
    """Define and register the gate layer once; Keras is imported late."""
    library = keras()

    class ChannelGate(library.layers.Layer):  # type: ignore[misc, name-defined]
        """Multiplication of each channel by the factor of its group."""

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
