"""Quantization-aware training: the canonical network learns to live with its rounding.

Batch norm is folded before, ranges start from the calibrated plan and follow the data as
slow averages, weights are rounded in every step with a straight-through gradient.
"""

from __future__ import annotations

from dataclasses import replace

from compress.quantization import fake
from compress.quantization import points as rounding
from compress.quantization.plan import QuantizationPlan, nudged
from compress.stage import Context, Facts
from compress.training.fit import TrainingSettings, fit, head_of, label_loss
from compress.training.network import Network, build


def train(
    network: Network, plan: QuantizationPlan, settings: TrainingSettings, context: Context
) -> tuple[Network, QuantizationPlan, Facts]:
    """Trains with fake quantization.

    Args:
        network: in canonical form.
        plan: the calibrated ranges to start from.
        settings: how to train.
        context: data, seed, progress.

    Returns:
        The network with trained weights, the plan with trained ranges, the training history.

    Raises:
        StageError: the loss is no longer a number.
    """
    points = rounding.find(network)
    prescribed = rounding.fixed(network, points)
    names = fake.layer_names(network, points)
    following = names.keys() - prescribed.keys()
    model = build(fake.with_rounded_weights(fake.insert(network, points, plan, following)))
    head = head_of(build(network), context.data)
    history = fit(model, label_loss(head), settings, context)
    trained = {operation.name: operation for operation in model.operations}
    layers = {
        name: replace(layer, weights=tuple(trained[name].get_weights()))
        for name, layer in network.layers.items()
        if layer.weights
    }
    learnt = {name: trained[names[name]].get_weights() for name in following}
    ranges = {**plan.ranges, **{name: nudged(float(low), float(high)) for name, (low, high) in learnt.items()}}
    method = f"{plan.method}, then averaged over {settings.epochs} epochs of training"
    return network.edited(layers, {}), QuantizationPlan(ranges, method), history
