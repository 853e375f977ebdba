"""Samples for calibration without data: made so that the statistics of batch norms on them are those of the training.

A batch norm stores mean and variance of its input on the training data. Samples start as smooth noise, and follow the
gradient of the difference between their statistics and the stored ones, over all batch norms of the network. That alone
gives samples of no class, whose logits are smaller than those of real ones: each sample of a classifier is also
drawn to a class.

Sources: Cai et al., ZeroQ: A Novel Zero Shot Quantization Framework, CVPR 2020 (statistics); Yin et al., Dreaming to
Distill: Data-Free Knowledge Transfer via DeepInversion, CVPR 2020 (classes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.progress import SILENT, Phase, Progress
from compress.data.sources.random_samples import smooth_noise
from compress.learning.quantization.activation_statistics import batch_size
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, subnetwork, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import keras, run, split_inputs

BATCHES = (8, 32)
"""Fewest and most samples whose statistics are matched together; few for networks with large activations."""
MOST = 64
"""Largest number of samples for calibration, and of held-out ones: they take time, and are alike."""
STEPS = 60
"""Steps of Adam for each batch."""
RATE = 0.1
"""Learning rate at the start, as a share of the range of values; it falls to 0 as a cosine."""
CLASS_WEIGHT = 0.1
"""Weight of the cross-entropy with the class of each sample, next to the distance of the statistics."""
SYNTHESIS = Phase("synthetic samples", unit="batch")
Samples = NDArray[np.float32]
Limits = tuple[float, float] | tuple[Samples, Samples]
"""The lowest and the highest value of a sample; of a model with several inputs, of each value in a row."""
_OTHER_SAMPLES = "give samples without labels (data: {source: {folder: {path: photos, labels: none}}})"


@dataclass(frozen=True)
class _Stored:
    """The statistics that a batch norm stores, by channel.

    Attributes:
        mean: the mean.
        deviation: the standard deviation.
        epsilon: a variance that keeps those of dead channels from counting.
        calls: the number of calls whose inputs have these statistics together; more than one if it is shared.
    """

    mean: Samples
    deviation: Samples
    epsilon: float
    calls: int


@dataclass(frozen=True)
class SyntheticSamples:
    """Samples that fit the batch norms of a network.

    Attributes:
        samples: the samples [n, ...].
        initial_distance: the difference of their statistics from the stored ones before the first step: the mean over
            channels of the squared differences of mean and standard deviation, in units of the stored variance.
        distance: the same at the end.
    """

    samples: Samples
    initial_distance: float
    distance: float


def norms_of(network: Network) -> list[Layer]:
    """Return the batch norms of a network whose statistics can be compared: those on the last axis."""
    return [
        layer
        for layer in network.layers.values()
        if spec_of(layer).is_batch_norm
        and layer.calls
        and layer.normalizes_last_axis(len(network.shapes[layer.inputs()[0]]))
    ]


def synthesize(
    network: Network,
    count: int,
    like: Samples,
    seed: int = 0,
    progress: Progress = SILENT,
) -> SyntheticSamples:
    """Return samples for a network, without any data.

    Args:
        network: as it was trained, batch norms not folded.
        count: number of samples.
        like: samples [n, ...] with the shape and the range of values that the network takes; each input has its own.
        seed: of the noise.
        progress: receives the number of batches that are done.

    Raises:
        StageError: the network has no batch norm, none follows its input, or it takes integers.
    """
    norms = norms_of(network)
    if not norms:
        raise _refused(network)
    if not all(np.isfinite(weight).all() for norm in norms for weight in norm.weights):
        raise StageError("the statistics of a batch norm are not finite", hint="train the model again")
    outputs = [tensor for tensor in tensors_in(network.outputs) if _has_classes(network, tensor)]
    inputs = [norm.inputs(call)[0] for norm in norms for call in range(len(norm.calls))]
    model = build(subnetwork(network, [*inputs, *outputs[:1]]))
    if any("float" not in str(tensor.dtype) for tensor in model.inputs):
        raise StageError(
            "calibration: {select: data_free} is for inputs of real numbers; an input of the model takes integers",
            hint=_OTHER_SAMPLES,
        )
    limits = _limits(model, like)
    step = _step(model, [_statistics(norm) for norm in norms], limits)
    batches, distances = [], []
    with progress.phase(SYNTHESIS):
        size = int(np.clip(batch_size(network), *BATCHES))
        total = -(-count // size)
        for number in range(total):
            samples, first, last = _batch(step, (size, *like.shape[1:]), limits, seed, number)
            batches.append(samples)
            distances.append((first, last))
            progress.update(number + 1, total)
    first, last = np.mean(distances, axis=0)
    return SyntheticSamples(np.concatenate(batches)[:count], float(first), float(last))


def _refused(network: Network) -> StageError:
    """Return the error for a network without a batch norm whose statistics can be compared."""
    names = [layer.name for layer in network.layers.values() if spec_of(layer).is_batch_norm and layer.calls]
    reason = "the model has none, or they are folded into other layers"
    if names:
        reason = f"those of the model are along another axis than the last one: {', '.join(names[:5])}"
    return StageError(
        "calibration: {select: data_free} needs batch norms, whose statistics describe the training data; " + reason,
        hint=_OTHER_SAMPLES,
    )


def _limits(model: Any, like: Samples) -> Limits:
    """Return the range of values of samples; each of several inputs has its own."""
    if len(model.inputs) == 1:
        return float(like.min()), float(like.max())
    inputs = [np.asarray(values) for values in split_inputs(model.inputs, like)]
    low, high = (
        np.concatenate([np.full(values[0].size, bound(values), np.float32) for values in inputs])
        for bound in (np.min, np.max)
    )
    return low, high


def _has_classes(network: Network, tensor: LayerOutput) -> bool:
    """Whether an output is the softmax of a classifier."""
    layer = network.layers[tensor.layer]
    is_softmax = spec_of(layer).activation(layer) == "softmax" or layer.config.get("activation") == "softmax"
    return is_softmax and len(network.shapes[tensor]) == 1


def _statistics(norm: Layer) -> _Stored:
    """Return the statistics that a batch norm stores."""
    mean, variance = (np.asarray(weight, np.float32) for weight in norm.weights[-2:])
    epsilon = float(norm.config.get("epsilon", 1e-3))
    return _Stored(mean, np.sqrt(variance + np.float32(epsilon)), epsilon, len(norm.calls))


def _step(model: Any, norms: list[_Stored], limits: Limits) -> Any:
    """Return a function: one step of Adam for a batch of samples, which returns their distance before it.

    It returns None if the distance has no derivative. A shared batch norm stores the means over its calls.

    Its arguments are the samples, the moments of Adam, the number of the step, and the number of the first sample: the
    classes follow from the numbers of the samples, so that all batches together have all classes.
    """
    import tensorflow

    library = keras()

    low, high = limits

    def moments(values: list[Any]) -> list[Any]:
        by_call = [tensorflow.nn.moments(value, list(range(len(value.shape) - 1))) for value in values]
        return [tensorflow.add_n(list(moment)) / len(values) for moment in zip(*by_call, strict=True)]

    def losses(batch: Any, first: Any) -> tuple[Any, Any]:
        values = library.tree.flatten(run(model, batch))
        parts = []
        for norm in norms:
            mean, variance = moments(values[: norm.calls])
            values = values[norm.calls :]
            shift = (mean - norm.mean) / norm.deviation
            spread = tensorflow.sqrt(variance + norm.epsilon) / norm.deviation - 1
            parts.append(tensorflow.reduce_mean(tensorflow.square(shift) + tensorflow.square(spread)))
        return tensorflow.add_n(parts) / len(parts), sum(class_loss(value, first) for value in values)

    def class_loss(probabilities: Any, first: Any) -> Any:
        count = probabilities.shape[-1]
        classes = tensorflow.one_hot((first + tensorflow.range(tensorflow.shape(probabilities)[0])) % count, count)
        chosen = tensorflow.reduce_sum(probabilities * classes, axis=-1)
        return CLASS_WEIGHT * tensorflow.reduce_mean(-tensorflow.math.log(chosen + 1e-7))

    @tensorflow.function  # type: ignore[untyped-decorator]
    def step(samples: Any, mean: Any, square: Any, number: Any, first: Any) -> Any:
        with tensorflow.GradientTape() as tape:
            value, of_classes = losses(samples, first)
            total = value + of_classes
        slope = tape.gradient(total, samples)
        if slope is None:
            return None
        mean.assign(0.9 * mean + 0.1 * slope)
        square.assign(0.999 * square + 0.001 * tensorflow.square(slope))
        count = number + 1.0
        size = RATE * (high - low) * 0.5 * (1 + tensorflow.cos(np.pi * number / STEPS))
        change = size * (mean / (1 - 0.9**count)) / (tensorflow.sqrt(square / (1 - 0.999**count)) + 1e-12)
        samples.assign(tensorflow.clip_by_value(samples - change, low, high))
        return value

    return step


def _batch(step: Any, shape: tuple[int, ...], limits: Limits, seed: int, batch: int) -> tuple[Samples, float, float]:
    """Return the samples of a batch, and their distance at the start and the end.

    Raises:
        StageError: the distance has no derivative.
    """
    import tensorflow

    low, high = limits
    generator = np.random.default_rng((seed, batch))
    noise = np.stack([smooth_noise(generator, shape[1:]) for _ in range(shape[0])])
    samples = tensorflow.Variable((low + (high - low) * noise).astype(np.float32))
    moments = [tensorflow.Variable(tensorflow.zeros_like(samples)) for _ in range(2)]
    first = tensorflow.constant(batch * shape[0])
    values = [step(samples, *moments, tensorflow.constant(number, "float32"), first) for number in range(STEPS)]
    if values[0] is None:
        raise StageError(
            "calibration: {select: data_free} changes samples along the derivatives of the batch norms' inputs; those "
            "of the model have none: they follow an operation such as argmax, or do not depend on the model's input",
            hint=_OTHER_SAMPLES,
        )
    return samples.numpy(), float(values[0]), float(values[-1])
