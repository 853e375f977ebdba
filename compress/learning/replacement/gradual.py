"""Gradual replacement of activations: each one turns into a ReLU during the training, with the original as teacher.

A deep network whose smooth activations all become ReLUs at once computes something else entirely, and training from
there ends far from the original. Here the network leaves the original in small steps:

- An activation is (1 - share) * original + share * replacement. The share rises from 0 to 1 along a line.
- After each convolution, every channel gets the mean and the deviation that it has in the original for the same batch,
  times a trained gain, plus a trained offset. With a share of 0 this is exactly the original; a batch norm would not
  be. At the end, statistics over the training samples take the place of those of a batch, and all of it is folded into
  the convolutions. Tried with YOLOX-nano, and worse: training on with fixed statistics (mAP50 0.34 instead of 0.39).
- The outputs of convolutions are compared with the original's, besides the outputs of the network.
- Adam's steps are relative to the size that makes a weight matter: the deviation of its output over the magnitude of
  its input. Folded kernels differ by orders of magnitude from channel to channel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.data.rows import rows as rows_of
from compress.learning.context import Context
from compress.learning.replacement.activations import Replacements, plain_calls, replace_by_relu
from compress.learning.training.bn_recalibration import random_batches
from compress.learning.training.loop import Batch, Loss, Rate, TrainingSettings, fit
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, map_tensors, subnetwork, tensors_in
from compress.model.ir.layer_specs import ACTIVATION, spec_of
from compress.model.ir.layer_specs.functions import Activation
from compress.model.ir.passes import fold
from compress.model.ir.tensorflow import keras, run

PACKAGE = "coralline"
JOINED, MATCHED = "JoinedActivations", "MatchedStatistics"
ORIGINAL = "original_"
"""Prefix of the original's layers, next to those of the network that is trained."""
FEATURES = 5.0
"""Weight of the comparison of inner outputs: the mean over layers of the error in units of each channel's variance."""
MOMENTUM = 0.9
"""Part of the old statistics in a training step."""
EPSILON = 1e-6
"""Added to variances."""
MEASURED = 512
"""Largest number of training samples for the final statistics."""
SAMPLES = 32
"""Number of training samples for the sizes of steps."""
OutputLoss = Callable[[Batch, Any, Any], Any]
"""(batch, outputs, outputs of the original) -> loss of each sample [n]."""


@dataclass(frozen=True)
class GradualTraining:
    """Gradual replacement.

    Attributes:
        kinds: the activations to replace.
        by: "relu" or "relu6".
        share: the part of the training after which all activations are replaced.
        loss: the loss on the outputs.
    """

    kinds: Collection[Activation]
    by: str
    share: float
    loss: OutputLoss


def train(
    original: Network, network: Network, how: GradualTraining, settings: TrainingSettings, context: Context
) -> tuple[Network, Replacements, Facts]:
    """Replace activations while the network is trained.

    The network to change is the original, which is the teacher, or has the same layers but some.

    Returns:
        The network with replaced activations and trained weights, batch norms folded; the replacements; and the facts
        of `fit`.

    Raises:
        StageError: the loss is not finite.
    """
    start, teacher = fold.folded(network), _frozen(fold.folded(original))
    joined, replacements = replace_by_relu(start, how.kinds, how.by, lambda name: _layer(JOINED, name))
    if not replacements.replaced:
        return network, replacements, {}
    layers()
    matched = [name for name in joined.layers if _matches(joined.layers[name], joined, teacher)]
    joint = _joint(joined, teacher, matched)
    model = build(joint)
    counts = [len(list(tensors_in(branch.outputs))) for branch in (joined, teacher)]
    compared = [name for name in matched if not _kernel(joined.layers[name]).depthwise]
    variances, steps = _measured(teacher, joined, matched, compared, context)

    def loss(batch: Batch, outputs: Any) -> Any:
        ops = keras().ops
        ours, theirs = outputs[: counts[0]], outputs[counts[0] : sum(counts)]
        features = outputs[sum(counts) :]
        total = how.loss(batch, ours, theirs)
        for number, variance in enumerate(variances):
            error = ops.square(features[number] - ops.stop_gradient(features[number + len(variances)])) / variance
            total += FEATURES / len(variances) * ops.mean(error, axis=list(range(1, len(error.shape))))
        return total

    rates = {path: Rate(factor) for path, factor in steps.items()}
    facts = fit(model, Loss(loss), settings, context, [lambda trained: _rising(trained, how.share)], rates)
    _measure_statistics(model, context, settings.batch_size)
    facts.pop("batch_norms", None)
    plain, _ = replace_by_relu(start, how.kinds, how.by)
    live = {operation.name: operation for operation in model.operations}
    trained = {name: _trained(layer, live) for name, layer in plain.layers.items() if layer.weights}
    return plain.edited(trained, {}), replacements, facts


# --- the network and its original as one -------------------------------------------------


def _frozen(network: Network) -> Network:
    """Return the network with renamed layers, as it is in inference: not trained, nothing random."""
    entrances = {tensor.layer for tensor in tensors_in(network.inputs)}
    names = {name: name if name in entrances else f"{ORIGINAL}{name}" for name in network.layers}

    def renamed(tensor: LayerOutput) -> LayerOutput:
        return replace(tensor, layer=names[tensor.layer])

    layers = {}
    for name, layer in network.layers.items():
        if spec_of(layer).random_in_training:
            layer = replace(ACTIVATION.layer(name, (), activation="linear"), calls=plain_calls(layer))
        calls = map_tensors(layer.calls, renamed)
        settings = {"name": names[name]} | ({} if name in entrances or not layer.weights else {"trainable": False})
        layers[names[name]] = replace(layer.configured(**settings), name=names[name], calls=calls)
    shapes = {renamed(tensor): shape for tensor, shape in network.shapes.items()}
    return replace(network, layers=layers, outputs=map_tensors(network.outputs, renamed), shapes=shapes)


def _kernel(layer: Layer) -> Any:
    kernel = spec_of(layer).kernel
    assert kernel is not None
    return kernel


def _matches(layer: Layer, network: Network, teacher: Network) -> bool:
    """Whether a layer is a linear convolution with one call, channels last, that the original has too."""
    theirs = teacher.layers.get(f"{ORIGINAL}{layer.name}")
    return (
        spec_of(layer).kernel is not None
        and len(layer.calls) == 1
        and len(network.shapes[LayerOutput(layer.name)]) > 1
        and layer.config.get("data_format") != "channels_first"
        and layer.config.get("activation", "linear") in ("linear", None)
        and theirs is not None
        and len(theirs.calls) == 1
        and teacher.shapes[LayerOutput(theirs.name)] == network.shapes[LayerOutput(layer.name)]
    )


def _joint(network: Network, teacher: Network, matched: Sequence[str]) -> Network:
    """Return both as one network: its outputs, those of the original, and the inner outputs of both."""
    moved, added = {}, {}
    for name in matched:
        new = network.free_name(f"{name}_matched")
        pair = [LayerOutput(name), LayerOutput(f"{ORIGINAL}{name}")]
        moved[LayerOutput(name)] = LayerOutput(new)
        added[new] = replace(_layer(MATCHED, new), calls=({"args": [pair], "kwargs": {}},))
    edited = network.edited({}, moved)
    compared = [name for name in matched if not _kernel(network.layers[name]).depthwise]
    return replace(
        edited,
        layers={**teacher.layers, **edited.layers, **added},
        outputs=[
            *tensors_in(edited.outputs),
            *tensors_in(teacher.outputs),
            *(moved[LayerOutput(name)] for name in compared),
            *(LayerOutput(f"{ORIGINAL}{name}") for name in compared),
        ],
        shapes={**teacher.shapes, **edited.shapes, **{moved[tensor]: network.shapes[tensor] for tensor in moved}},
    )


def _trained(layer: Layer, live: Mapping[str, Any]) -> Layer:
    """Return a layer with its trained weights, and the statistics after it folded into it."""
    matched = live.get(f"{layer.name}_matched")
    weights = [np.asarray(values) for values in live[layer.name].get_weights()]
    if matched is None:
        return replace(layer, weights=tuple(weights))
    factor, offset = matched.scale_and_shift()
    kernel = _kernel(layer)
    folded = kernel.times_outputs(weights[0], factor)
    bias = (weights[1].astype(np.float64) if layer.config.get("use_bias", True) else 0.0) * factor + offset
    return replace(layer.configured(use_bias=True), weights=(folded.astype(np.float32), bias.astype(np.float32)))


# --- the layers --------------------------------------------------------------------------


def _layer(kind: str, name: str) -> Layer:
    entry = {"module": None, "class_name": kind, "config": {"name": name}, "registered_name": f"{PACKAGE}>{kind}"}
    return Layer(name, kind, entry, (), ())


@cache
def layers() -> dict[str, Any]:
    """Return the layer classes, registered with Keras; defined at the first call, since Keras is imported late."""
    library: Any = keras()
    ops = library.ops

    class JoinedActivations(library.layers.Layer):  # type: ignore[misc]
        """(1 - share) * activation + share * replacement."""

        def build(self, shapes: Any) -> None:
            del shapes
            self.share = self.add_weight(name="share", shape=(), initializer="zeros", trainable=False)

        def compute_output_spec(self, tensors: Any) -> Any:
            return library.KerasTensor(tensors[0].shape, dtype=tensors[0].dtype)

        def call(self, tensors: Any) -> Any:
            activation, replacement = tensors
            return activation + ops.cast(self.share, activation.dtype) * (replacement - activation)

    class MatchedStatistics(library.layers.Layer):  # type: ignore[misc]
        """Gives each channel of [values, those of the original] the original's mean and deviation, gain and offset."""

        measuring = False
        batches = 0

        def build(self, shapes: Any) -> None:
            channels = (shapes[0][-1],)
            self.gain = self.add_weight(name="gain", shape=channels, initializer="ones")
            self.offset = self.add_weight(name="offset", shape=channels, initializer="zeros")
            self.statistics = [
                self.add_weight(name=name, shape=channels, initializer=start, trainable=False)
                for name, start in (
                    ("mean", "zeros"),
                    ("variance", "ones"),
                    ("original_mean", "zeros"),
                    ("original_variance", "ones"),
                )
            ]

        def compute_output_spec(self, tensors: Any, training: bool = False) -> Any:
            del training
            return library.KerasTensor(tensors[0].shape, dtype=tensors[0].dtype)

        def call(self, tensors: Any, training: bool = False) -> Any:
            statistics = self.statistics
            if training or self.measuring:
                axes = list(range(len(tensors[0].shape) - 1))
                moments = [
                    moment for tensor in tensors for moment in ops.moments(ops.cast(tensor, "float32"), axes=axes)
                ]
                momentum = self.batches / (self.batches + 1) if self.measuring else MOMENTUM
                self.batches += self.measuring
                for kept, moment in zip(statistics, moments, strict=True):
                    kept.assign(momentum * kept + (1 - momentum) * ops.stop_gradient(moment))
                statistics = moments
            factor, shift = _scale_and_shift(ops, statistics, self.gain, self.offset)
            return tensors[0] * ops.cast(factor, tensors[0].dtype) + ops.cast(shift, tensors[0].dtype)

        def scale_and_shift(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            """Return the layer as a factor and an offset for each channel, by the statistics that it holds."""
            values = [np.asarray(variable, np.float64) for variable in (*self.statistics, self.gain, self.offset)]
            return _scale_and_shift(np, values[:4], *values[4:])

    register = library.saving.register_keras_serializable(PACKAGE)
    return {JOINED: register(JoinedActivations), MATCHED: register(MatchedStatistics)}


def _scale_and_shift(ops: Any, statistics: Sequence[Any], gain: Any, offset: Any) -> tuple[Any, Any]:
    """Return the factor and the offset that turn mean and variance into those of the original."""
    mean, variance, original_mean, original_variance = statistics
    deviation = ops.sqrt(original_variance + EPSILON)
    factor = gain * deviation / ops.sqrt(variance + EPSILON)
    return factor, original_mean + offset * deviation - factor * mean


def _rising(model: Any, share: float) -> Any:
    """Return a Keras callback that sets the share of the replacements, by the number of the step."""
    joined = [layer for layer in model.layers if isinstance(layer, layers()[JOINED])]

    class Rising(keras().callbacks.Callback):  # type: ignore[misc]
        before = 0  # the steps of the epochs before

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del logs
            self.before = epoch * self.params["steps"]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            del logs
            steps = share * self.params["steps"] * self.params["epochs"]
            for layer in joined:
                layer.share.assign(min((self.before + batch + 1) / steps, 1.0))

    return Rising()


# --- statistics --------------------------------------------------------------------------


def _measured(
    teacher: Network, network: Network, matched: Sequence[str], compared: Sequence[str], context: Context
) -> tuple[list[Any], dict[str, NDArray[np.float32]]]:
    """Return the variances of compared outputs by channel, and the sizes of steps by the path of each weight."""
    ends = [LayerOutput(f"{ORIGINAL}{name}") for name in matched]
    starts = [teacher.layers[end.layer].inputs()[0] for end in ends]
    observed = build(subnetwork(teacher, [*starts, *ends]))
    inputs = context.data.inputs("train")
    order = np.sort(np.random.default_rng(context.seed).permutation(len(inputs))[:SAMPLES])
    sums = [np.zeros((2, teacher.shapes[tensor][-1] or 0)) for tensor in (*starts, *ends)]
    for index in order:
        for total, values in zip(sums, run(observed, rows_of(inputs, np.array([index]))), strict=True):
            flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
            total += [flat.mean(axis=0), (flat**2).mean(axis=0)]
    moments = [total / len(order) for total in sums]
    magnitudes = {name: np.sqrt(square) for name, (_, square) in zip(matched, moments, strict=False)}
    variances = {
        name: square - mean**2 + EPSILON for name, (mean, square) in zip(matched, moments[len(matched) :], strict=True)
    }
    steps = {}
    for name in matched:
        weights = network.layers[name].weights
        deviation = np.sqrt(variances[name])
        steps[f"{name}/kernel"] = _kernel_steps(_kernel(network.layers[name]), weights[0], magnitudes[name], deviation)
        if len(weights) > 1:
            steps[f"{name}/bias"] = deviation
    typed = {path: np.asarray(values, np.float32) for path, values in steps.items()}
    return [np.asarray(variances[name], np.float32) for name in compared], typed


def _kernel_steps(
    kernel: Any, weights: NDArray[Any], magnitude: NDArray[Any], deviation: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the change of each weight that alone changes its output by about a deviation over the root of the fan."""
    shape = weights.shape
    fan = kernel.fan(shape)
    groups = len(magnitude) // shape[kernel.into]
    if groups > 1:  # the channels of different groups share a position in the kernel
        magnitude = np.sqrt((magnitude.reshape(groups, -1) ** 2).mean(axis=0))
    least = 1e-3 * max(magnitude.max(initial=0.0), EPSILON)
    steps = kernel.times_outputs(np.ones(shape), deviation / np.sqrt(fan))
    return np.asarray(kernel.times_inputs(steps, 1 / np.maximum(magnitude, least)))


def _measure_statistics(model: Any, context: Context, batch: int) -> None:
    """Set the statistics of all matched layers to their means over batches of training samples."""
    matched = [layer for layer in model.layers if isinstance(layer, layers()[MATCHED])]
    for layer in matched:
        layer.measuring = True
    for samples in random_batches(context, MEASURED, batch):
        run(model, samples)
    for layer in matched:
        layer.measuring = False
