"""Batch norm recalibration: means and variances that fit the current weights.

Training updates them as an average over many steps (Keras' momentum is 0.99), and pruning or replacing layers does not
update them. So they can be far from the statistics of the final layers.

Source: Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021, section 3 (PreciseBN).

Batch norms that were restored (`compress.model.ir.passes.fold`) have mean 0 and variance 1, which is right for
inference. But in training a batch norm uses the statistics of the batch: the first step would destroy what the layers
have learnt. So each of them gets the statistics of the training samples, with gamma and beta that keep its function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.progress import Phase
from compress.data.rows import rows as rows_of
from compress.learning.context import Context
from compress.learning.training.validation import comparison, validation_quality
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes.fold import with_statistics
from compress.model.ir.tensorflow import keras, run

SAMPLES = 1024
"""Maximum number of training samples for the statistics."""
COMPARED = 256
"""Number of training samples that show whether statistics are wrong."""
BATCH = 64
"""Samples of a batch whose statistics are averaged; chosen."""
STATISTICS = Phase("batch norm statistics", unit="sample")


def recalibrate_batch_norms(model: Any, context: Context) -> Facts:
    """Measure the statistics of all batch norms again, and keep them if validation is no worse.

    The model is changed in place; of several outputs of a classifier, the first is evaluated. The statistics are those
    of some training samples, preprocessed, not augmented. Batch norms with `trainable=False` stay as they are: they
    normalize by the same statistics in training and in use.

    Returns:
        `batch_norms`: whether the new statistics are kept (`kept`), and the validation result with the old
        and with the new ones; nothing for a model without batch norms.
    """
    norms = _trained_batch_norms(model)
    if not norms:
        return {}
    old = [norm.get_weights() for norm in norms]
    before = validation_quality(model, context)
    _measure_statistics(model, norms, context, SAMPLES)
    after = validation_quality(model, context)
    kept = not after.is_worse_than(before)
    if not kept:
        for norm, weights in zip(norms, old, strict=True):
            norm.set_weights(weights)
    return {"batch_norms": {"kept": kept, **comparison(before, after)}}


def compared_statistics(model: Any, context: Context) -> Facts:
    """Compare the statistics of all batch norms, which are changed, with those on training samples.

    Returns:
        The validation result with both, and the number of `samples`; `first` and `others`: how far the statistics of
        the first batch norm, and of the others (the median), are from those on the samples; None without others.
        Samples of another scale than in training change the first one only, because it normalizes what the others
        read. Nothing for a model without batch norms.
    """
    norms = _trained_batch_norms(model)
    if not norms:
        return {}
    old = [norm.get_weights()[-2:] for norm in norms]
    before = validation_quality(model, context)
    _measure_statistics(model, norms, context, COMPARED)
    after = validation_quality(model, context)
    distances = [_distance(pair, norm) for pair, norm in zip(old, norms, strict=True)]
    others = float(np.median(distances[1:])) if len(distances) > 1 else None
    count = len(context.data.labels("validation"))
    return {**comparison(before, after), "samples": count, "first": distances[0], "others": others}


def _distance(old: Sequence[Any], norm: Any) -> float:
    """Return the difference of the means in standard deviations, plus that of the logarithms of the deviations; the
    median over channels."""
    (old_mean, old_variance), (mean, variance) = old, norm.get_weights()[-2:]
    old_deviation, deviation = (
        np.sqrt(channel_variances + norm.epsilon) for channel_variances in (old_variance, variance)
    )
    return float(np.median(abs(mean - old_mean) / old_deviation + abs(np.log(deviation / old_deviation))))


def _trained_batch_norms(model: Any) -> list[Any]:
    """Return all batch norms that are not frozen, at any depth, once each."""
    kind = keras().layers.BatchNormalization
    layers = {id(layer): layer for layer in model._flatten_layers() if isinstance(layer, kind) and layer.trainable}
    return list(layers.values())


def _measure_statistics(model: Any, norms: list[Any], context: Context, samples: int) -> None:
    """Set means and variances to their averages over batches of training samples.

    Only the batch norms run in training mode: dropout and noise are off, as in inference.
    """
    done = 0
    count = min(samples, len(context.data.labels("train")))
    with ExitStack() as measured:
        measured.enter_context(context.progress.phase(STATISTICS))
        for norm in norms:
            measured.enter_context(measuring(norm))
        for batch in random_batches(context, samples, BATCH):
            run(model, batch)
            done += len(batch)
            context.progress.update(done, count)
    for norm in norms:
        if norm.renorm:  # its training derives the variance from this
            norm.moving_stddev.assign(keras().ops.sqrt(norm.moving_variance + norm.epsilon))


def random_batches(context: Context, samples: int, batch: int) -> Iterator[NDArray[np.float32]]:
    """Yield some training samples in batches of nearly equal size.

    They are in random order: data that is sorted by class would have batches of one class.
    """
    inputs = context.data.inputs("train")
    order = np.random.default_rng(context.seed).permutation(len(inputs))[:samples]
    for indices in np.array_split(order, -(-len(order) // batch)):
        yield rows_of(inputs, indices)


@contextmanager
def measuring(norm: Any) -> Iterator[None]:
    """Make one batch norm normalize by its batch, and average the statistics over all calls.

    Calls are counted here, because a shared layer is called several times for each batch.
    """
    momentum = norm.momentum
    renorm = norm.renorm
    original = norm.call
    calls = 0

    def averaging(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        nonlocal calls
        del training
        norm.momentum = calls / (calls + 1)
        calls += 1
        return original(inputs, training=True, mask=mask)

    norm.call = averaging
    norm.renorm = False
    try:
        yield
    finally:
        del norm.call
        norm.momentum = momentum
        norm.renorm = renorm


RESTORED_SAMPLES = 512
"""Number of training samples for the statistics."""
RESTORED_BATCH = 32
"""Samples that are computed at once; chosen: the statistics do not depend on it."""


def with_measured_statistics(network: Network, norms: Sequence[str], context: Context) -> Network:
    """Return a network whose batch norms have the statistics of training samples, and compute the same as before.

    The network has one input; the batch norms have an offset and a factor, and are called once.
    """
    names = [name for name in norms if network.layers[name].config.get("scale", True)]
    if not names:
        return network
    read = [network.layers[name].inputs()[0] for name in names]
    model = keras_graph.build(keras_graph.subnetwork(network, read))
    sums = [np.zeros((2, network.shapes[tensor][-1] or 0)) for tensor in read]
    counts = [0] * len(read)
    for batch in random_batches(context, RESTORED_SAMPLES, RESTORED_BATCH):
        for number, values in enumerate(keras().tree.flatten(run(model, batch))):
            array = np.asarray(values, np.float64).reshape(-1, sums[number].shape[1])
            sums[number] += [array.sum(axis=0), (array**2).sum(axis=0)]
            counts[number] += len(array)
    layers = dict(network.layers)
    for name, (total, squares), count in zip(names, sums, counts, strict=True):
        mean = total / count
        layers[name] = with_statistics(layers[name], mean, np.maximum(squares / count - mean**2, 0))
    return replace(network, layers=layers)
