"""What a float network computes on real samples: the values that ranges, factors and corrections are taken from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.ir.keras_graph import LayerOutput, Network, build, subnetwork
from compress.ir.layer_specs import spec_of
from compress.ir.tensorflow import keras
from compress.quantization import quantizer_placement as rounding

BATCH = 32
BATCH_BYTES = 1 << 27
"""Activations of a batch that are in memory at once; large models get smaller batches."""
BINS = 4096
"""Of a histogram between two opposite powers of two. At least a quarter of them lie in the range of a tensor whose
values have one sign."""
COUNTED = 1 << 14
"""Values of a tensor that are counted for each sample: more tell nothing new of a distribution."""
SMALLEST_REACH = 2.0**-100
LARGEST_REACH = 2.0**100
"""Limits of histograms: values farther away are counted in the last bin."""
OUTLYING = 3.0
OUTLYING_OF_MOST = 30.0
"""Times as far as three quarters of the samples: clean data (digits, photos, sounds, tables) stay below 10."""
FAR = 3.0
"""Standard deviations of the first batch norm beyond which samples do not fit a model."""


@dataclass(frozen=True)
class ActivationHistogram:
    """How often the values of a tensor lie in each of some equal bins.

    Attributes:
        reach: the bins lie between -reach and reach, a power of two.
        counts: values in each bin [BINS].
    """

    reach: float
    counts: NDArray[np.float64]

    def __add__(self, other: ActivationHistogram) -> ActivationHistogram:
        reach = max(self.reach, other.reach)
        return ActivationHistogram(reach, self._widened(reach) + other._widened(reach))

    def _widened(self, reach: float) -> NDArray[np.float64]:
        """The counts in bins between -reach and reach, which are exact sums of the present ones."""
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
class Statistics:
    """Activations at every point of a network, on calibration samples.

    Attributes:
        low: by point the lowest value in each sample [n].
        high: by point the highest value in each sample [n].
        histograms: by point the distribution of its values; empty where it was not asked for.
        prescribed: the points whose range TFLite prescribes.
    """

    low: Mapping[str, NDArray[np.float64]]
    high: Mapping[str, NDArray[np.float64]]
    histograms: Mapping[str, ActivationHistogram]
    prescribed: Mapping[str, tuple[float, float]]

    @property
    def samples(self) -> int:
        """How many samples were seen."""
        return len(next(iter(self.low.values()))) if self.low else 0


def outliers(found: Statistics) -> list[int]:
    """Samples that reach much farther than the others, at a tenth of the points or more.

    That is more than OUTLYING times as far as 98% of them do; where more than 2% are corrupt, or of so few samples that
    one is, more than OUTLYING_OF_MOST times as far as three quarters do.
    """
    far = np.zeros(found.samples)
    free = [point for point in found.low if point not in found.prescribed]
    for point in free:
        reach = np.maximum(np.abs(found.low[point]), np.abs(found.high[point]))
        most, nearly_all = np.percentile(reach, (75, 98))
        far += (reach > OUTLYING * nearly_all) | ((most > 0) & (reach > OUTLYING_OF_MOST * most))
    return [int(index) for index in np.flatnonzero(far >= max(len(free) / 10, 1))]


def misfit(network: Network, samples: NDArray[np.float32]) -> float | None:
    """How far the samples are from what the first batch norm saw in training.

    In its standard deviations, the median over channels; None where there is no batch norm. What
    is preprocessed otherwise than in training (0 to 255 instead of 0 to 1, say) is far away.

    Args:
        network: as it was trained, batch norm not folded.
        samples: preprocessed samples [n, ...].
    """
    norms = [layer for layer, _ in network.in_order() if spec_of(layer).is_batch_norm and layer.weights]
    if not norms:
        return None
    given = norms[0].inputs()[0]
    mean, variance = norms[0].weights[-2:]
    seen = means_by_channel(network, [given], samples, norms[0].config.get("axis", -1))[given]
    return float(np.median(np.abs(seen - mean) / np.sqrt(variance + norms[0].config.get("epsilon", 1e-3))))


def collect(network: Network, samples: NDArray[np.float32], *, histograms: bool = True) -> Statistics:
    """Run the network on the samples, once.

    Args:
        network: in canonical form (`ir.passes.fold.canonical`).
        samples: preprocessed calibration samples [n, ...].
        histograms: whether distributions are needed in addition to the extremes.

    Raises:
        StageError: a weight or an activation is NaN or infinite.
    """
    _check_weights(network)
    points = rounding.find(network)
    tensors = list(points)
    look = _extremes_and_counts if histograms else _extremes
    extremes = []
    found: dict[str, ActivationHistogram] = {}
    for batch in _runs(network, tensors, samples, look):
        extremes.append(batch["extremes"])
        _refuse_infinite(network, tensors, batch["extremes"], sum(part.shape[-1] for part in extremes[:-1]))
        for number, tensor in enumerate(tensors if histograms else []):
            added = ActivationHistogram(float(batch["reach"][number]), batch["counts"][number].astype(np.float64))
            name = points[tensor]
            found[name] = found[name] + added if name in found else added
    limits = np.concatenate(extremes, axis=-1).astype(np.float64)  # [tensors, 2, n]
    low: dict[str, NDArray[np.float64]] = {}
    high: dict[str, NDArray[np.float64]] = {}
    for tensor, (least, greatest) in zip(tensors, limits, strict=True):
        name = points[tensor]
        low[name] = np.minimum(low.get(name, least), least)
        high[name] = np.maximum(high.get(name, greatest), greatest)
    return Statistics(low, high, found, rounding.fixed(network, points))


def _check_weights(network: Network) -> None:
    """Refuses NaN and infinity, also where a ReLU would hide them."""
    for layer, _ in network.in_order():
        if not all(np.isfinite(weight).all() for weight in layer.weights):
            raise StageError(f"the weights of layer {layer.name!r} are not finite", todo="train the model again")


def _refuse_infinite(network: Network, tensors: list[LayerOutput], extremes: NDArray[Any], first: int) -> None:
    """Name the tensor and the sample where values are NaN or infinite; `first` is the number of the first sample."""
    for tensor, limits in zip(tensors, extremes, strict=True):
        finite = np.isfinite(limits).all(axis=0)
        if finite.all():
            continue
        is_input = not network.layers[tensor.layer].calls
        name = "input" if is_input else f"output of layer {tensor.layer!r}"
        raise StageError(
            f"the {name} is not finite for calibration sample {first + int(np.argmin(finite))}",
            todo="look at the data's range, and at the training",
        )


def largest_by_channel(
    network: Network, tensors: Sequence[LayerOutput], samples: NDArray[np.float32], percent: float = 99
) -> dict[LayerOutput, NDArray[np.float64]]:
    """The largest magnitude of each channel (last axis) of some tensors; a percentile over samples."""
    import tensorflow

    def by_channel(value: Any) -> Any:
        rank = len(value.shape)
        return tensorflow.reduce_max(tensorflow.abs(value), axis=list(range(1, rank - 1)))

    batches = [*_runs(network, list(tensors), samples, lambda values: [by_channel(value) for value in values])]
    return {
        tensor: np.percentile(np.concatenate(parts).astype(np.float64), percent, axis=0)
        for tensor, parts in zip(tensors, zip(*batches, strict=True), strict=True)
    }


def means_by_channel(
    network: Network, tensors: Sequence[LayerOutput], samples: NDArray[np.float32], axis: int = -1
) -> dict[LayerOutput, NDArray[np.float64]]:
    """The mean of each channel of some tensors over all samples and positions; channels lie along `axis`."""
    import tensorflow

    def by_channel(value: Any) -> Any:
        rank = len(value.shape)
        return tensorflow.reduce_mean(value, axis=[other for other in range(rank) if other != axis % rank])

    batches = [*_runs(network, list(tensors), samples, lambda values: [by_channel(value) for value in values])]
    size = batch_size(network)
    weights = [min(size, len(samples) - start) for start in range(0, len(samples), size)]
    return {
        tensor: np.average(np.stack(parts).astype(np.float64), axis=0, weights=weights)
        for tensor, parts in zip(tensors, zip(*batches, strict=True), strict=True)
    }


def _runs(
    network: Network, tensors: list[LayerOutput], samples: NDArray[np.float32], look: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """What `look` makes of the values of some tensors, batch by batch."""
    import tensorflow

    library = keras()
    # A tensor that is an input goes through as it is; Keras gives the same object back.
    model = build(subnetwork(network, tensors))

    @tensorflow.function(reduce_retracing=True)
    def run(batch):  # type: ignore[no-untyped-def]
        return look(library.tree.flatten(model(batch, training=False)))

    size = batch_size(network)
    for start in range(0, len(samples), size):
        found = run(tensorflow.constant(samples[start : start + size]))
        yield library.tree.map_structure(lambda value: value.numpy(), found)


def batch_size(network: Network) -> int:
    """Return how many samples are run at once, so that all activations of the network stay within BATCH_BYTES."""
    values = sum(prod(size or 1 for size in shape) for shape in network.shapes.values())
    return int(np.clip(BATCH_BYTES // (4 * max(values, 1)), 1, BATCH))


def _extremes(values: list[Any]) -> dict[str, Any]:
    """The lowest and the highest value of each tensor in each sample: `extremes` [tensors, 2, batch]."""
    import tensorflow

    flat = [tensorflow.reshape(value, [tensorflow.shape(value)[0], -1]) for value in values]
    ends = [(tensorflow.reduce_min(value, axis=1), tensorflow.reduce_max(value, axis=1)) for value in flat]
    return {"extremes": tensorflow.stack([tensorflow.stack(pair) for pair in ends])}


def _extremes_and_counts(values: list[Any]) -> dict[str, Any]:
    """The same, and a histogram of each tensor: `reach` [tensors] and `counts` [tensors, BINS]."""
    import tensorflow

    found = _extremes(values)
    largest = tensorflow.reduce_max(tensorflow.abs(found["extremes"]), axis=[1, 2])
    # `collect` refuses NaN and infinity once it sees the extremes.
    largest = tensorflow.clip_by_value(largest, SMALLEST_REACH, LARGEST_REACH)
    exponents = tensorflow.math.ceil(tensorflow.math.log(largest) / np.log(2.0) + 1e-4)
    reach = tensorflow.pow(2.0, exponents)
    counts = [
        tensorflow.histogram_fixed_width(_thinned(value), [-reach[number], reach[number]], BINS)
        for number, value in enumerate(values)
    ]
    return {**found, "reach": reach, "counts": tensorflow.stack(counts)}


def _thinned(value: Any) -> Any:
    """The values of a tensor, or every few of them where it has more than COUNTED in a sample."""
    import tensorflow

    shape = value.shape[1:]
    if None in shape or prod(shape) <= COUNTED:
        return value
    size = prod(shape)
    step = -(-size // COUNTED)
    while gcd(step, value.shape[-1]) > 1:  # otherwise some channels would never be counted
        step += 1
    return tensorflow.reshape(value, [-1])[::step]
