"""Quantization-aware training (QAT) of a network in canonical form.

Ranges start from the calibrated plan; weights are rounded in every step with a straight-through
gradient. Zeros and clusters of the weights are kept (`weight_sparsity`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.data.rows import blocks
from compress.learning.context import Context
from compress.learning.quantization import export, fake_quantization, quantizer_placement
from compress.learning.quantization.fake_quantized_layers import EPSILON, RoundedKernel
from compress.learning.quantization.plan import QuantizationPlan, edited, nudged
from compress.learning.quantization.post_training import QuantizationResult
from compress.learning.quantization.search import file_outputs
from compress.learning.quantization.settings import RoundedTraining
from compress.learning.training.loop import Loss, Rate, TrainingSettings, fit, own_loss
from compress.model.ir import weight_sparsity
from compress.model.ir.keras_graph import Network, build
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import flattened, keras, run
from compress.model.ir.weight_sparsity import Pattern
from compress.tasks.base import Judge

Norms = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
"""Gamma and beta of the batch norms that were folded, by layer (`fold.folded_norms`)."""
LEAST_VARIANCE = 1e-8
"""Least variance of a batch norm with a gamma near 0, whose outputs would otherwise be divided by 0; chosen."""
LEAST_SIZE = 1e-3
"""Least size of the weights of a channel, relative to the largest channel, in their learning rate: zeros move too."""
BATCH = 32
"""Samples that the trained model computes at once; chosen: the result does not depend on it."""


def train(
    network: Network,
    plan: QuantizationPlan,
    settings: TrainingSettings,
    context: Context,
    how: RoundedTraining | None = None,
    norms: Norms | None = None,
    loss: Loss | None = None,
) -> tuple[Network, QuantizationPlan, Facts]:
    """Train with fake quantization.

    Args:
        network: in canonical form.
        plan: the ranges to start from, and the changes of the weights; AdaRound is not kept.
        settings: how to train.
        context: data, seed, progress. One input and one output: data sets have no more so far.
        how: ranges and batch norm in training; None for the defaults.
        norms: the batch norms, which are trained if `how` says so.
        loss: the loss; None for that of the labels alone.

    Returns:
        The network with trained weights, the plan with trained ranges and no edits, the training history and
        which layers keep zeros or clusters.

    Raises:
        StageError: the loss is NaN or infinite.
    """
    how = how or RoundedTraining()
    start = edited(network, plan)
    ranges = replace(plan, factors={}, bias_shifts={}, rounding={})
    points, kept = quantizer_placement.find(start), weight_sparsity.patterns(start)
    names = fake_quantization.layer_names(start, points)
    following = names.keys() - (names if how.ranges == "fixed" else quantizer_placement.fixed(start, points)).keys()
    quantized = fake_quantization.insert(start, points, ranges, following, learned=how.ranges == "learned")
    chosen = (norms or {}) if how.batch_norm == "trained" else {}
    model = build(_prepared(fake_quantization.with_rounded_weights(quantized), kept, _moments(start, plan, chosen)))
    loss = loss or own_loss(build(network), context)
    freezing = [lambda trained: _freezing(trained, how.freeze)] if how.freeze else []
    trained = {operation.name: operation for operation in model.operations}
    history = fit(model, loss, settings, context, freezing, _relative_rates(model))
    layers = {}
    for name, layer in start.layers.items():
        if layer.weights:
            has_kernel = spec_of(layer).kernel is not None
            weights = trained[name].plain_weights() if has_kernel else trained[name].get_weights()
            layers[name] = replace(layer, weights=tuple(weights))
    quantizers = {name: trained[names[name]] for name in following}
    moved = {name: nudged(float(layer.low), float(layer.high)) for name, layer in quantizers.items()}
    method = f"{plan.method}, then {how.ranges} in {settings.epochs} epochs of training"
    facts = {**history, **_described(kept)}
    return start.edited(layers, {}), replace(ranges, ranges={**plan.ranges, **moved}, method=method), facts


@dataclass(frozen=True)
class Comparison:
    """A comparison of QAT with PTQ on the validation split.

    Attributes:
        result: the better one; PTQ if they are equal.
        scores: by method the accuracy, or another measure.
        agreement: share of the samples that the trained model and its file answer the same.
    """

    result: QuantizationResult
    scores: Mapping[str, float]
    agreement: float


def compared(
    ptq: QuantizationResult,
    network: Network,
    plan: QuantizationPlan,
    inputs: NDArray[np.float32],
    score: Callable[[NDArray[np.float32]], float],
    judge: Judge,
    io: export.InputType,
) -> Comparison:
    """Convert a trained network in canonical form, and compare it with the result of post-training quantization.

    `score` rates the outputs [n, outputs] for the validation samples [n, ...]; a larger number is better.
    """
    qat = replace(ptq, content=export.convert(network, plan, io), method="qat", ranges=plan.method)
    outputs: dict[str, NDArray[np.float32]] = {
        result.method: np.concatenate([file_outputs(result.content, part) for part in blocks(inputs)])
        for result in (ptq, qat)
    }
    scores = {method: score(rows) for method, rows in outputs.items()}
    model = simulated(network, plan)
    batches = (inputs[start : start + BATCH] for start in range(0, len(inputs), BATCH))
    trained = [flattened(keras().tree.flatten(run(model, batch))) for batch in batches]
    agreement = float(judge.same(outputs["qat"], np.concatenate(trained)).mean())
    return Comparison(qat if scores["qat"] > scores["ptq"] else ptq, scores, agreement)


def simulated(network: Network, plan: QuantizationPlan) -> Any:
    """Return the Keras model that simulates the file of a network and its plan in float arithmetic."""
    return build(
        fake_quantization.with_rounded_weights(
            fake_quantization.insert(network, quantizer_placement.find(network), plan)
        )
    )


def _relative_rates(model: Any) -> dict[str, Rate]:
    """Return the learning rates of the kernels, relative to the size of their weights, by the path of the weight.

    The factor of an output channel is the root mean square of its weights, divided by that of a new network (He et al.,
    Delving Deep into Rectifiers, 2015): a learning rate means for folded kernels what it means for new ones.

    Adam changes every weight by about the learning rate, however large the weight is, and folded kernels differ by
    orders of magnitude from channel to channel. With one rate for all weights the first steps destroy the network:
    after two epochs with 96 photos and a learning rate of 0.00003, YOLOX-nano had a validation loss of 12, and of 0.20
    with these factors; before the training it had about 0.25, and guessing has 17.
    """
    rates = {}
    for layer in model.layers:
        if not isinstance(layer, RoundedKernel):
            continue
        weights = np.asarray(layer.kernel, np.float64)
        shape = layer.axes.output_shape(weights.shape)
        size = np.sqrt((weights**2).mean(axis=tuple(np.flatnonzero(np.equal(shape, 1))), keepdims=True))
        size = np.maximum(size, LEAST_SIZE * (size.max() or 1.0)) / np.sqrt(2 / layer.axes.fan(weights.shape))
        rates[layer.kernel.path] = Rate(np.broadcast_to(size, weights.shape).astype(np.float32))
    return rates


def _prepared(network: Network, kept: Mapping[str, Pattern], moments: Mapping[str, tuple[Any, ...]]) -> Network:
    """Return the network with layers that keep patterns and include a batch norm."""
    changed = {}
    for name in {**kept, **moments}:
        layer = network.layers[name]
        weights = layer.weights
        if name in moments:
            layer = layer.configured(normalized=True, use_bias=False)
            weights = (weights[0], *moments[name], np.ones((), np.float32))
        if name in kept:
            layer = layer.configured(distinct=int(kept[name].codes.max()) + 1)
            weights = (*weights, kept[name].codes)
        changed[name] = replace(layer, weights=weights)
    return network.edited(changed, {})


def _moments(network: Network, plan: QuantizationPlan, norms: Norms) -> dict[str, tuple[Any, ...]]:
    """Return gamma, beta, mean and variance of batch norms after the folded kernels, by layer.

    The outputs of a batch norm have the standard deviation gamma and the mean beta; the plan scales and shifts them.
    These are the statistics of the folded layer, and a batch norm with them is the identity at first.
    """
    moments = {}
    for name, (gamma, beta) in norms.items():
        layer = network.layers[name]
        if layer.config.get("data_format") == "channels_first":
            continue
        factors, shifts = (np.asarray(edit) for edit in (plan.factors.get(name, 1.0), plan.bias_shifts.get(name, 0.0)))
        variance, centre = np.maximum((gamma / factors) ** 2, LEAST_VARIANCE), beta / factors + shifts
        values = (np.sqrt(variance + EPSILON), centre, centre - layer.weights[1], variance)
        moments[name] = tuple(np.asarray(value, np.float32) for value in values)
    return moments


def _freezing(model: Any, share: float) -> Any:
    """Return a Keras callback that freezes ranges and batch norms in the last part of the training."""
    moving = [layer for layer in model.layers if hasattr(layer, "moves")]

    class Freezing(keras().callbacks.Callback):  # type: ignore[misc]
        before = 0  # the steps of the epochs before
        frozen = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del logs
            self.before = epoch * self.params["steps"]

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            del logs
            last = ceil(self.params["steps"] * self.params["epochs"] * (1 - share))
            if not self.frozen and self.before + batch >= last:
                self.frozen = True
                for layer in moving:
                    layer.moves.assign(0.0)

    return Freezing()


def _described(kept: Mapping[str, Pattern]) -> Facts:
    """Return the layers that keep zeros or clusters."""
    return {
        "kept_zeros": {name: round(pattern.zeros, 4) for name, pattern in kept.items() if pattern.zeros},
        "kept_clusters": {name: pattern.clusters for name, pattern in kept.items() if pattern.clusters},
    }
