"""What a float network computes on real samples: the values that ranges, factors and corrections are taken from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import StageError
from compress.ir.keras_graph import Network, Tensor, build, observed
from compress.ir.layer_specs import spec_of
from compress.ir.tensorflow import keras
from compress.quantization import quantizer_placement as rounding

BATCH = 32
BINS = 2048
OUTLYING = 3.0
OUTLYING_OF_MOST = 30.0
"""Times as far as three quarters of the samples: clean data (digits, photos, sounds, tables) stay below 10."""
FAR = 3.0
"""Standard deviations of the first batch norm beyond which samples do not fit a model."""


@dataclass(frozen=True)
class Statistics:
    """Activations at every point of a network, on calibration samples.

    Attributes:
        low: by point the lowest value in each sample [n].
        high: by point the highest value in each sample [n].
        counts: by point how many values lie in each of BINS equal parts between the least low and the greatest high.
        prescribed: the points whose range TFLite prescribes.
    """

    low: Mapping[str, NDArray[np.float64]]
    high: Mapping[str, NDArray[np.float64]]
    counts: Mapping[str, NDArray[np.float64]]
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
    given = norms[0].given()[0]
    mean, variance = norms[0].weights[-2:]
    seen = means_by_channel(network, [given], samples, norms[0].config.get("axis", -1))[given]
    return float(np.median(np.abs(seen - mean) / np.sqrt(variance + norms[0].config.get("epsilon", 1e-3))))


def collect(network: Network, samples: NDArray[np.float32]) -> Statistics:
    """Runs the network on the samples, twice.

    Args:
        network: in canonical form (`training.folding.canonical`).
        samples: preprocessed calibration samples [n, ...].

    Raises:
        StageError: a weight or an activation is NaN or infinite.
    """
    _check_weights(network)
    points = rounding.find(network)
    tensors = list(points)
    limits = np.concatenate(list(_each_batch(network, tensors, samples, _extremes)), axis=-1)  # [tensors, 2, n]
    for tensor, found in zip(tensors, limits, strict=True):
        if not np.isfinite(found).all():
            _refuse_infinite(network, tensor, int(np.argmin(np.isfinite(found).all(axis=0))))
    low: dict[str, NDArray[np.float64]] = {}
    high: dict[str, NDArray[np.float64]] = {}
    for tensor, (least, greatest) in zip(tensors, limits.astype(np.float64), strict=True):
        name = points[tensor]
        low[name] = np.minimum(low.get(name, least), least)
        high[name] = np.maximum(high.get(name, greatest), greatest)
    spans = [(low[points[tensor]].min(), high[points[tensor]].max()) for tensor in tensors]
    found = sum(_each_batch(network, tensors, samples, _histograms(spans)))
    counts: dict[str, NDArray[np.float64]] = {}
    for tensor, each in zip(tensors, np.asarray(found, np.float64), strict=True):
        counts[points[tensor]] = counts.get(points[tensor], 0.0) + each
    return Statistics(low, high, counts, rounding.fixed(network, points))


def spread(low: float, high: float) -> tuple[float, float]:
    """The ends between which values are counted: two different float32 numbers also where a tensor is constant."""
    return low, max(high, low + 1e-6 * max(abs(low), 1.0))


def _check_weights(network: Network) -> None:
    """Refuses NaN and infinity, also where a ReLU would hide them."""
    for layer, _ in network.in_order():
        if not all(np.isfinite(weight).all() for weight in layer.weights):
            raise StageError(f"the weights of layer {layer.name!r} are not finite", todo="train the model again")


def _refuse_infinite(network: Network, tensor: Tensor, sample: int) -> None:
    """Says where numbers end that are NaN or infinite: in a sample, or in what is computed."""
    name = "input" if not network.layers[tensor.layer].calls else f"output of layer {tensor.layer!r}"
    raise StageError(
        f"the {name} is not finite for calibration sample {sample}",
        todo="look at the data's range, and at the training",
    )


def largest_by_channel(
    network: Network, tensors: Sequence[Tensor], samples: NDArray[np.float32], percent: float = 99
) -> dict[Tensor, NDArray[np.float64]]:
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
    network: Network, tensors: Sequence[Tensor], samples: NDArray[np.float32], axis: int = -1
) -> dict[Tensor, NDArray[np.float64]]:
    """The mean of each channel of some tensors over all samples and positions; channels lie along `axis`."""
    import tensorflow

    def by_channel(value: Any) -> Any:
        rank = len(value.shape)
        return tensorflow.reduce_mean(value, axis=[other for other in range(rank) if other != axis % rank])

    batches = [*_runs(network, list(tensors), samples, lambda values: [by_channel(value) for value in values])]
    weights = [min(BATCH, len(samples) - start) for start in range(0, len(samples), BATCH)]
    return {
        tensor: np.average(np.stack(parts).astype(np.float64), axis=0, weights=weights)
        for tensor, parts in zip(tensors, zip(*batches, strict=True), strict=True)
    }


def _runs(
    network: Network, tensors: list[Tensor], samples: NDArray[np.float32], look: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """What `look` makes of the values of some tensors, batch by batch."""
    import tensorflow

    library = keras()
    # A tensor that is an input goes through as it is; Keras gives the same object back.
    model = build(observed(network, tensors))

    @tensorflow.function(reduce_retracing=True)
    def run(batch):  # type: ignore[no-untyped-def]
        return look(library.tree.flatten(model(batch, training=False)))

    for start in range(0, len(samples), BATCH):
        yield library.tree.map_structure(
            lambda value: value.numpy(), run(tensorflow.constant(samples[start : start + BATCH]))
        )


def _each_batch(
    network: Network, tensors: list[Tensor], samples: NDArray[np.float32], look: Callable[[list[Any]], Any]
) -> Iterator[NDArray[Any]]:
    for found in _runs(network, tensors, samples, look):
        yield np.asarray(found)


def _extremes(values: list[Any]) -> Any:
    """[tensors, 2, batch]: the lowest and the highest value in each sample."""
    import tensorflow

    flat = [tensorflow.reshape(value, [tensorflow.shape(value)[0], -1]) for value in values]
    ends = [(tensorflow.reduce_min(value, axis=1), tensorflow.reduce_max(value, axis=1)) for value in flat]
    return tensorflow.stack([tensorflow.stack(pair) for pair in ends])


def _histograms(spans: Sequence[tuple[float, float]]) -> Callable[[list[Any]], Any]:
    def look(values: list[Any]) -> Any:
        import tensorflow

        return tensorflow.stack(
            [
                tensorflow.histogram_fixed_width(value, spread(low, high), BINS)
                for value, (low, high) in zip(values, spans, strict=True)
            ]
        )

    return look
