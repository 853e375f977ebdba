"""Statistics of a float network's activations on real samples, for ranges and equalization."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd, log2, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.core.progress import SILENT, Phase, Progress
from compress.learning.quantization import quantizer_placement
from compress.model.ir.keras_graph import LayerOutput, Network, build, subnetwork, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes.fold import split_activations
from compress.model.ir.tensorflow import batch_signature, keras, run
from compress.tasks.base import Judge

BATCH = 32
"""Samples that are run at once, at most; chosen."""
BATCH_BYTES = 1 << 27
"""Activations of a batch that are in memory at once; large models get smaller batches."""
BINS = 4096
"""Bins of a histogram between two opposite powers of two. At least a quarter of them are in the range of a tensor whose
values have one sign."""
CALIBRATION = Phase("calibration", unit="sample")
COUNTED = 1 << 14
"""Values of a tensor that are counted for each sample: more do not change the distribution."""
SMALLEST_REACH = 2.0**-100
LARGEST_REACH = 2.0**100
"""Limits of histograms: values farther away are counted in the last bin."""
OUTLYING = 3.0
"""Ratio to the magnitude of 98% of the samples; chosen."""
OUTLYING_OF_MOST = 30.0
"""Ratio to the magnitude of three quarters of the samples: clean data (photos, sounds, tables) stay below 10."""
FAR = 3.0
"""Standard deviations of the first batch norm beyond which samples do not fit a model."""
OTHER_SPREAD = 8.0
"""Ratio of standard deviations beyond which samples do not fit a model."""


@dataclass(frozen=True)
class ActivationHistogram:
    """Counts of the values of a tensor in equal bins.

    Attributes:
        reach: the bins are between -reach and reach, a power of two.
        counts: values in each bin [BINS].
    """

    reach: float
    counts: NDArray[np.float64]

    def __add__(self, other: ActivationHistogram) -> ActivationHistogram:
        reach = max(self.reach, other.reach)
        return ActivationHistogram(reach, self._widened(reach) + other._widened(reach))

    def _widened(self, reach: float) -> NDArray[np.float64]:
        """Return the counts in bins between -reach and a larger reach; they are exact sums of the present ones."""
        if reach == self.reach:
            return self.counts
        times = min(int(reach / self.reach), BINS // 2)
        merged = self.counts.reshape(-1, times).sum(axis=1)
        return np.pad(merged, (BINS - len(merged)) // 2)

    def within(self, low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the centres, clipped to a range, and the counts of the bins in it and next to it: [bins], [bins]."""
        width = 2 * self.reach / BINS
        centres = (np.arange(BINS, dtype=np.float64) + 0.5) * width - self.reach
        inside = (centres + width >= low) & (centres - width <= high)
        return np.clip(centres[inside], low, high), self.counts[inside]


@dataclass(frozen=True)
class Extremes:
    """Lowest and highest values of one tensor in each sample.

    Attributes:
        low: by sample and channel (last axis) [n, channels]; [n, 1] if channels were not kept apart.
        high: likewise.
    """

    low: NDArray[np.float32]
    high: NDArray[np.float32]

    def divided(self, divisors: NDArray[np.float64]) -> Extremes:
        """Return the extremes of the tensor with each channel divided by a positive number."""
        return Extremes((self.low / divisors).astype(np.float32), (self.high / divisors).astype(np.float32))

    def largest(self, percent: float) -> NDArray[np.float64]:
        """Return the largest magnitude of each channel: a percentile over the samples."""
        magnitudes = np.maximum(np.abs(self.low), np.abs(self.high)).astype(np.float64)
        return np.asarray(np.percentile(magnitudes, percent, axis=0))


@dataclass(frozen=True)
class Statistics:
    """Activations at every point of a network, on calibration samples.

    Attributes:
        low: by point the lowest value in each sample [n]; not below the limit of a saturating tensor.
        high: by point the highest value in each sample [n]; likewise.
        histograms: by point the distribution of its values; empty if not requested.
        prescribed: the points whose range TFLite prescribes.
        points: by tensor its point.
        extremes: by observed tensor its extremes.
        saturation: by tensor the limits beyond which its values make no difference.
    """

    low: Mapping[str, NDArray[np.float64]]
    high: Mapping[str, NDArray[np.float64]]
    histograms: Mapping[str, ActivationHistogram]
    prescribed: Mapping[str, tuple[float, float]]
    points: Mapping[LayerOutput, str] = field(default_factory=dict)
    extremes: Mapping[LayerOutput, Extremes] = field(default_factory=dict)
    saturation: Mapping[LayerOutput, tuple[float, float]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.low.values()))) if self.low else 0

    def divided(self, divisors: Mapping[LayerOutput, NDArray[np.float64]]) -> Statistics:
        """Return the statistics of the same network with the channels of some tensors divided; without histograms.

        The divisors [channels] are positive, and the extremes of their tensors must be known by channel.
        """
        scaled = {
            tensor: extremes.divided(divisors[tensor]) if tensor in divisors else extremes
            for tensor, extremes in self.extremes.items()
        }
        return summarized(scaled, self.points, {}, self.prescribed, self.saturation)


def summarized(
    extremes: Mapping[LayerOutput, Extremes],
    points: Mapping[LayerOutput, str],
    histograms: Mapping[str, ActivationHistogram],
    prescribed: Mapping[str, tuple[float, float]],
    saturation: Mapping[LayerOutput, tuple[float, float]],
) -> Statistics:
    """Return statistics by point from the extremes of the tensors."""
    low: dict[str, NDArray[np.float64]] = {}
    high: dict[str, NDArray[np.float64]] = {}
    for tensor, point in points.items():
        limits = saturation.get(tensor, (-np.inf, np.inf))
        lowest = np.clip(extremes[tensor].low.min(axis=1).astype(np.float64), *limits)
        highest = np.clip(extremes[tensor].high.max(axis=1).astype(np.float64), *limits)
        low[point] = np.minimum(low.get(point, lowest), lowest)
        high[point] = np.maximum(high.get(point, highest), highest)
    return Statistics(low, high, histograms, prescribed, points, extremes, saturation)


def outliers(statistics: Statistics) -> list[int]:
    """Return the samples with much larger activations than the others, at a tenth of the points or more.

    They are more than OUTLYING times those of 98% of the samples. If more than 2% are corrupt, they are more than
    OUTLYING_OF_MOST times those of three quarters of the samples.
    """
    far = np.zeros(statistics.samples)
    free = [point for point in statistics.low if point not in statistics.prescribed]
    for point in free:
        reach = np.maximum(np.abs(statistics.low[point]), np.abs(statistics.high[point]))
        most, nearly_all = np.percentile(reach, (75, 98))
        far += (reach > OUTLYING * nearly_all) | ((most > 0) & (reach > OUTLYING_OF_MOST * most))
    return [int(index) for index in np.flatnonzero(far >= max(len(free) / 10, 1))]


@dataclass(frozen=True)
class Misfit:
    """The difference of samples from the training data of a model, by its first batch norm.

    Attributes:
        distance: of the means, in the batch norm's standard deviations; the median over channels.
        spread: standard deviation of the samples relative to the batch norm's; the median over channels.
    """

    distance: float
    spread: float

    @property
    def is_large(self) -> bool:
        """Whether the samples have another preprocessing than in training, such as 0 to 255 instead of 0 to 1."""
        return self.distance > FAR or not 1 / OTHER_SPREAD < self.spread < OTHER_SPREAD

    @property
    def size(self) -> float:
        """A measure for comparing preprocessings: 0 for samples like the training data."""
        return self.distance + abs(float(np.log(max(self.spread, 1e-9))))


def misfit(network: Network, samples: NDArray[np.float32]) -> Misfit | None:
    """Return how far preprocessed samples [n, ...] are from the training data; None without a batch norm.

    The network is the one that was trained: its batch norms are not folded.
    """
    norms = [layer for layer, _ in network.in_order() if spec_of(layer).is_batch_norm and layer.weights]
    if not norms:
        return None
    tensor = norms[0].inputs()[0]
    mean, variance = (np.asarray(weight, np.float64) for weight in norms[0].weights[-2:])
    deviation = np.sqrt(variance + norms[0].config.get("epsilon", 1e-3))
    axis = norms[0].config.get("axis", -1)
    means, measured = _means_and_deviations(network, tensor, samples, axis)
    return Misfit(float(np.median(np.abs(means - mean) / deviation)), float(np.median(measured / deviation)))


def preprocessing_error(network: Network, samples: NDArray[np.float32]) -> float | None:
    """Return a measure for comparing preprocessings of the same samples: the lowest one fits the model best.

    With a batch norm, its statistics decide. Without a batch norm, the first convolution decides: a batch norm that was
    folded into it leaves biases about as large as the standard deviation of its outputs on samples like the training
    data. A network with neither a batch norm nor biases in its first convolution has no such measure (None).
    """
    if (mismatch := misfit(network, samples)) is not None:
        return mismatch.size
    network = split_activations(network)
    first = next((layer for layer, _ in network.in_order() if spec_of(layer).kernel is not None), None)
    if first is None or not first.config.get("use_bias", True) or len(first.weights) < 2 or first.weights[0].ndim < 3:
        return None
    biases = float(np.median(np.abs(first.weights[1])))
    tensor = LayerOutput(first.name)
    _, deviations = _means_and_deviations(network, tensor, samples)
    spread = float(np.median(deviations))
    return abs(float(np.log(max(spread, 1e-9) / biases))) if biases > 0 else None


def _means_and_deviations(
    network: Network, tensor: LayerOutput, samples: NDArray[np.float32], axis: int = -1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the standard deviation of each channel of a tensor."""
    means = means_by_channel(network, [tensor], samples, axis)[tensor]
    squares = means_by_channel(network, [tensor], samples, axis, squared=True)[tensor]
    return means, np.sqrt(np.maximum(squares - means**2, 0))


def collect(
    network: Network,
    samples: NDArray[np.float32],
    *,
    histograms: bool = True,
    by_channel: Sequence[LayerOutput] = (),
    before: Statistics | None = None,
    changed: Collection[LayerOutput] = (),
    progress: Progress = SILENT,
) -> Statistics:
    """Run the network on the samples, once.

    Args:
        network: in canonical form (`ir.passes.fold.canonical`).
        samples: preprocessed calibration samples [n, ...].
        histograms: whether distributions are needed in addition to the extremes.
        by_channel: tensors whose extremes are needed for each channel.
        before: the statistics of a network with the same values, but in the tensors that are `changed`; then only the
            part of the network that computes these tensors runs.
        changed: tensors with other values than those in `before`, or new ones.
        progress: receives the number of samples that are done.

    Raises:
        StageError: a weight or an activation is NaN or infinite.
    """
    for layer, _ in network.in_order():  # a ReLU would hide NaN
        if not all(np.isfinite(weight).all() for weight in layer.weights):
            raise StageError(f"the weights of layer {layer.name!r} are not finite", hint="train the model again")
    points = quantizer_placement.find(network)
    rounded = list(points)
    tensors = list(dict.fromkeys([*rounded, *by_channel]))
    if before is not None:
        affected = {
            point for tensor, point in points.items() if tensor in changed or before.points.get(tensor) != point
        }
        rounded = [tensor for tensor in rounded if points[tensor] in affected]
        tensors = list(dict.fromkeys([*rounded, *(tensor for tensor in by_channel if tensor in changed)]))
    per_channel = [tensor in set(by_channel) for tensor in tensors]
    counts: dict[str, ActivationHistogram] = {}
    batches: list[list[NDArray[np.float32]]] = []
    done = 0
    with progress.phase(CALIBRATION):
        for values in _runs(network, tensors, samples) if tensors else ():
            limits = [_extremes(*arguments) for arguments in zip(values, per_channel, strict=True)]
            _refuse_infinite(network, tensors, limits, done)
            batches.append(limits)
            done += len(values[0])
            # The tensors behind the rounded ones are those of `by_channel`, and need no histograms.
            for tensor, value, ends in zip(rounded if histograms else (), values, limits, strict=False):
                point, added = points[tensor], _histogram(value, float(np.abs(ends).max()))
                counts[point] = counts[point] + added if point in counts else added
            progress.update(done, len(samples))
    extremes = {
        tensor: Extremes(*np.concatenate(parts, axis=1))
        for tensor, parts in zip(tensors, zip(*batches, strict=True), strict=True)
    }
    if before is not None:
        extremes, counts = {**before.extremes, **extremes}, {**before.histograms, **counts}
    prescribed = quantizer_placement.fixed(network, points)
    return summarized(extremes, points, counts, prescribed, quantizer_placement.saturating(network, points))


def effects(
    network: Network, samples: NDArray[np.float32], judge: Judge, progress: Progress = SILENT
) -> dict[str, ActivationHistogram] | None:
    """Return by point the distribution of its values, in which each value counts by its effect on the outputs.

    The effect of a small error of a value is the energy of the judge's `differences`, to first order. A random
    combination of the differences has a derivative whose expected square is that energy: the diagonal of the
    Gauss-Newton matrix. Source: Nagel et al., A White Paper on Neural Network Quantization, 2021, section 3.1 (ranges
    by the error of the outputs); Li et al., BRECQ, ICLR 2021, section 3.3 (the diagonal from gradients).

    Args:
        network: in canonical form, with the outputs that the judge compares.
        samples: preprocessed calibration samples [n, ...]; a few are enough.
        judge: says which differences of the outputs count.
        progress: receives the number of samples that are done.

    Returns:
        None if the judge has no differences, or a layer has no derivative.
    """
    import tensorflow

    outputs = list(tensors_in(network.outputs))
    sizes = [prod(size or 0 for size in network.shapes[output]) for output in outputs]
    zeros = np.zeros((1, sum(sizes)))
    if 0 in sizes or judge.differences(zeros, zeros) is None:
        return None
    library = keras()
    points = quantizer_placement.find(network)
    tensors = list(dict.fromkeys([*outputs, *points]))
    model = build(subnetwork(network, tensors))

    signature = [batch_signature(model), tensorflow.TensorSpec((), "int32")]

    @tensorflow.function(input_signature=signature, autograph=False)
    def derivatives(batch, batch_number):  # type: ignore[no-untyped-def]
        with tensorflow.GradientTape() as tape:
            tape.watch(batch)
            values = library.tree.flatten(run(model, batch))
            pairs = [(values[tensors.index(output)], size) for output, size in zip(outputs, sizes, strict=True)]
            rows = tensorflow.concat([tensorflow.reshape(value, (-1, size)) for value, size in pairs], axis=1)
            combined = 0.0
            parts = judge.differences(tensorflow.stop_gradient(rows), rows, library.ops) or ()
            for number, part in enumerate(parts):  # every part has its own noise: equal noise would add their effects
                seed = tensorflow.stack([batch_number, number])
                noise = tensorflow.random.stateless_normal(tensorflow.shape(part), seed)
                combined += tensorflow.reduce_sum(part * noise)
        return values, tape.gradient(combined, values, unconnected_gradients="zero")

    histograms: dict[str, ActivationHistogram] = {}
    done = 0
    for number, batch in enumerate(batches(network, samples)):
        try:
            values, gradients = derivatives(tensorflow.constant(batch), tensorflow.constant(number))
        except LookupError:  # an operation without a derivative
            return None
        for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
            if tensor not in points:
                continue
            array, point = np.asarray(value), points[tensor]
            added = _histogram(array, float(np.abs(array).max()), np.square(np.asarray(gradient)))
            histograms[point] = histograms[point] + added if point in histograms else added
        done += len(batch)
        progress.update(done, len(samples))
    return histograms


def _refuse_infinite(network: Network, tensors: list[LayerOutput], extremes: list[NDArray[Any]], first: int) -> None:
    """Name the tensor and the sample where values are NaN or infinite; `first` is the number of the first sample."""
    for tensor, limits in zip(tensors, extremes, strict=True):
        finite = np.isfinite(limits).all(axis=(0, 2))
        if finite.all():
            continue
        is_input = not network.layers[tensor.layer].calls
        name = "input" if is_input else f"output of layer {tensor.layer!r}"
        raise StageError(
            f"the {name} is not finite for calibration sample {first + int(np.argmin(finite))}",
            hint="check the range of the data and the training",
        )


def means_by_channel(
    network: Network,
    tensors: Sequence[LayerOutput],
    samples: NDArray[np.float32],
    axis: int = -1,
    *,
    squared: bool = False,
) -> dict[LayerOutput, NDArray[np.float64]]:
    """Return the mean of each channel of some tensors, or of their squares, over all samples and positions.

    Channels are along `axis`.
    """

    def by_channel(value: NDArray[np.float32]) -> NDArray[np.float32]:
        others = tuple(other for other in range(value.ndim) if other != axis % value.ndim)
        return np.asarray((np.square(value) if squared else value).mean(axis=others))

    batches = [[by_channel(value) for value in values] for values in _runs(network, tensors, samples)]
    size = batch_size(network)
    weights = [min(size, len(samples) - start) for start in range(0, len(samples), size)]
    return {
        tensor: np.average(np.stack(parts).astype(np.float64), axis=0, weights=weights)
        for tensor, parts in zip(tensors, zip(*batches, strict=True), strict=True)
    }


def measured_ranges(
    network: Network, tensors: list[LayerOutput], samples: NDArray[np.float32]
) -> dict[LayerOutput, tuple[float, float]]:
    """Return the lowest and highest value of some tensors on samples; they may be infinite."""
    limits = [[(value.min(), value.max()) for value in values] for values in _runs(network, tensors, samples)]
    by_tensor = zip(tensors, zip(*limits, strict=True), strict=True)
    return {
        tensor: (float(min(low for low, _ in parts)), float(max(high for _, high in parts)))
        for tensor, parts in by_tensor
    }


def _runs(
    network: Network, tensors: Sequence[LayerOutput], samples: NDArray[np.float32]
) -> Iterator[list[NDArray[np.float32]]]:
    """Yield the values of some tensors [batch, ...], batch by batch."""
    import tensorflow

    library = keras()
    # A tensor that is an input goes through as it is; Keras gives the same object back.
    model = build(subnetwork(network, list(tensors)))

    # One signature for all batches: a last batch of another size would be traced again, which takes a second.
    @tensorflow.function(input_signature=[batch_signature(model)])
    def values_of(batch):  # type: ignore[no-untyped-def]
        return library.tree.flatten(run(model, batch))

    for batch in batches(network, samples):
        yield [np.asarray(value) for value in values_of(tensorflow.constant(batch))]


def batches(network: Network, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield the samples in batches of `batch_size`."""
    size = batch_size(network)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def batch_size(network: Network) -> int:
    """Return how many samples are run at once, so that all activations of the network stay within BATCH_BYTES."""
    values = sum(prod(size or 1 for size in shape) for shape in network.shapes.values())
    return int(np.clip(BATCH_BYTES // (4 * max(values, 1)), 1, BATCH))


def _extremes(value: NDArray[np.float32], by_channel: bool) -> NDArray[np.float32]:
    """Return the lowest and the highest values of a tensor: [2, batch, channels], or [2, batch, 1]."""
    if not by_channel:
        value = value.reshape(len(value), -1, 1)
    low = high = value
    while low.ndim > 2:  # numpy reduces one axis after the other ten times as fast as all at once
        low, high = low.min(axis=1), high.max(axis=1)
    return np.stack([low, high])


def _histogram(
    value: NDArray[np.float32], largest: float, weights: NDArray[np.float32] | None = None
) -> ActivationHistogram:
    """Return the histogram of a tensor [batch, ...] whose largest magnitude is `largest`.

    With weights [batch, ...] every value counts; otherwise a part of the values of a large tensor does.
    """
    reach = 2.0 ** ceil(log2(min(max(largest, SMALLEST_REACH), LARGEST_REACH)) + 1e-4)
    counted = _thinned(value) if weights is None else value.ravel()
    bins = np.clip(((counted + reach) * (BINS / 2 / reach)).astype(np.int64), 0, BINS - 1)
    counts = np.bincount(bins, None if weights is None else weights.ravel(), BINS)
    return ActivationHistogram(reach, counts.astype(np.float64))


def _thinned(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values of a tensor, or a regular part of them if it has more than COUNTED in a sample."""
    size = prod(value.shape[1:])
    step = max(-(-size // COUNTED), 1)
    while step > 1 and gcd(step, value.shape[-1]) > 1:  # otherwise some channels would never be counted
        step += 1
    return value.reshape(-1)[::step]
