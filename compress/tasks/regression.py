"""Regression: one or several values for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.measurement import Z95, Measurement, Metric, missing
from compress.data.types import Data, Split
from compress.tasks.base import ModelOutputs, Refusal, Rows, Specification, Use, pooled_dense
from compress.tasks.findings import VerdictReason, against_constant
from compress.tasks.measured import SAME, ByValue, MeasuredTask, ValuesHead, refuse_shape, spread_of

WITHOUT_CLASSES: Mapping[Use, Refusal] = {
    "class weights": Refusal("class_weights: the data has no single class for each sample", "class_weights: none"),
    "mixup": Refusal("augment.mixup: the data has no single class for each sample", "mixup: 0", "leave it out"),
    "label smoothing": Refusal("label_smoothing: the data has no single class for each sample", "label_smoothing: 0"),
    "tfmot": Refusal("it trains with tfmot, which is set up for classifiers only", hint="leave it out"),
    "tfmot qat": Refusal("engine: tfmot trains classifiers only", "engine: coralline"),
    "embedding": Refusal("the last layer of the model does not give scores of classes", hint="leave it out"),
}
"""Methods that need one class for each sample."""
PREDICTED = 0.5
"""Share of a target's variance that the original explains, from which the target counts on its own."""


class Regression(MeasuredTask):
    """Values for each sample; the metrics are R² and the mean absolute error over all targets."""

    name: ClassVar[str] = "regression"
    one_vector: ClassVar[bool] = True
    models: ClassVar[str] = "regression models"
    score_name: ClassVar[str] = "validation_score"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("r2", "R²", "fraction", "r2_drop", limited=True),
        Metric("mae", "Mean absolute error", "", "mae_increase", limited=True),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = WITHOUT_CLASSES
    agreement_note: ClassVar[str] = f"predictions that differ by at most {SAME:g} of their standard deviation"

    def head(self, model: Any, data: Data, specification: Specification = None) -> ValuesHead:
        """Return the head of a model with one output for each target."""
        refuse_shape(model, data, [len(data.class_names)], "one value for each target")
        return ValuesHead(tuple(spread_of(data.targets("train")).tolist()))

    def new_head(self, features: Any, data: Data, dropout: float) -> Any:
        """Return one value for each target."""
        return pooled_dense(features, len(data.class_names), None, dropout)

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the predictions."""
        if rows.shape != targets.shape:
            raise ModelError(
                f"gives {rows.shape[1]} values, but the data has {targets.shape[1]} targets",
                hint="check data.source and the model's last layer",
            )
        return np.asarray(rows, np.float64)

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return R² and the mean absolute error."""
        expected = np.asarray(targets, np.float64)
        errors = np.abs(expected - kept).mean(axis=1)
        return {"r2": r_squared(expected, kept, note), "mae": mean_with_interval(errors, "", note)}

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return also `r2_by_target` of each model: targets of large values do not hide others."""
        facts = super().evaluate(models, data, split, note)
        targets = np.asarray(data.targets(split), np.float64)
        for name, model in models.items():
            columns = zip(targets.T, np.asarray(model.rows, np.float64).T, strict=True)
            rows = [r_squared(expected[:, None], actual[:, None], note) for expected, actual in columns]
            facts[name]["r2_by_target"] = [row.to_json() for row in rows]
        return facts

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare both models with the best constant output, also for each target that the original predicts."""
        reasons = super().findings(facts, names, original, result)
        mean = Measurement(0.0, "fraction", "measured")
        pairs = zip(names, facts[original]["r2_by_target"], facts[result]["r2_by_target"], strict=True)
        for target, *values in pairs if len(names) > 1 else ():
            before, after = (Measurement(**value) for value in values)
            if (before.value or 0.0) >= PREDICTED:
                found = against_constant(self.metrics[0], (mean, before, after), facts["samples"])
                reasons += [replace(reason, text=f"the target {target!r}: {reason.text}") for reason in found]
        return reasons

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByValue:
        """Return the comparison by predictions, each in units of its deviation."""
        return ByValue(by_column=True)


def r_squared(targets: NDArray[np.float64], rows: NDArray[np.float64], note: str) -> Measurement:
    """Return the coefficient of determination, averaged over the targets that are not constant."""
    total = ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
    residual = ((targets - rows) ** 2).sum(axis=0)
    varied = total > 0
    if not varied.any():
        return missing("fraction", "the targets of the split are constant")
    value = float((1 - residual[varied] / total[varied]).mean())
    if not np.isfinite(value):
        return missing("fraction", "the model's outputs are not finite")
    return Measurement(value, "fraction", "measured", note=note)


def mean_with_interval(values: NDArray[np.float64], unit: str, note: str) -> Measurement:
    """Return the mean of one value for each sample [n] with its 95% interval; missing if it is not finite."""
    mean = float(values.mean())
    if not np.isfinite(mean):
        return missing(unit, "the model's outputs are not finite")
    half = Z95 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Measurement(mean, unit, "measured", max(mean - half, 0.0), mean + half, note)
