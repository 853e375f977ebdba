"""Healing: further training of a trained model, kept only if validation is no worse afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compress.core.artifact import Facts
from compress.core.progress import Phase
from compress.learning.context import Context
from compress.learning.training import phases
from compress.learning.training.loop import Loss, Rate, TrainingSettings, fit
from compress.learning.training.validation import comparison, validation_quality
from compress.model.ir.tensorflow import set_weights


def heal(
    model: Any,
    loss: Loss,
    settings: TrainingSettings,
    context: Context,
    rates: Mapping[str, Rate] = MappingProxyType({}),
) -> Facts:
    """Train a trained model in place, as `fit` does; restore its weights if validation is worse afterwards.

    After an interruption, call it with the model as it was at the first start; `fit` continues from its checkpoint.

    Returns:
        The facts of `fit`, and `healing`: whether the training is kept (`kept`), and the validation result before and
        after it. `batch_norms` is missing if the training is not kept.

    Raises:
        StageError: the loss is not finite.
    """
    weights = model.get_weights()
    training = phases.training(context.data, settings, "")
    check = Phase("comparison", phases.validation_cost(context.data))
    context.progress.plan(training, check)
    before = validation_quality(model, context)
    with context.progress.phase(training):
        facts = fit(model, loss, settings, context, rates=rates)
    with context.progress.phase(check):
        after = validation_quality(model, context)
    compared = comparison(before, after)
    kept = not after.is_worse_than(before)
    if not kept:
        set_weights(model, weights)
        facts.pop("batch_norms", None)
        context.progress.note(
            f"the training changed the validation {compared['metric']} from {compared['validation_before']} to "
            f"{compared['validation_after']}: the weights from before the training are kept"
        )
    return {**facts, "healing": {"kept": kept, **compared}}
