"""Regression: one or several values for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.artifact import Facts
from compress.data.types import Data, Split
from compress.errors import ModelError
from compress.ir.tensorflow import keras
from compress.measurement import Z95, Measurement, Metric, missing
from compress.stage import Refusal, Use
from compress.tasks import degeneracy
from compress.tasks.base import (
    DistillationTerms,
    EvaluationMembers,
    Head,
    ModelOutputs,
    Quality,
    Rows,
    Specification,
    Task,
    refuse_misfit,
    snr_db,
)

SAME = 0.1
"""Two predictions agree if they differ by at most this fraction of the standard deviation of the predictions."""
MIDDLE = 0.1
"""Predictions within this fraction of the targets' standard deviation around their median count as one output."""
NO_CLASSES = "the data has numbers as targets, not classes"


@dataclass(frozen=True)
class RegressionHead(Head):
    """The meaning of a regression model's output: one number for each target.

    Attributes:
        scale: the standard deviation of each target in the training split; errors are divided by it, so that targets
            of different units have the same weight.
    """

    scale: tuple[float, ...]

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean squared error over the targets, in units of their variance: [n]."""
        ops = keras().ops
        difference = (ops.cast(outputs, "float32") - ops.cast(targets, "float32")) / np.array(self.scale, np.float32)
        return ops.mean(ops.square(difference), axis=-1)

    def logits(self, outputs: Any) -> Any:
        """Return the predictions themselves."""
        return outputs

    def soft_targets(self, logits: Sequence[Any], weights: Sequence[float], temperature: float) -> Any:
        """Return the weighted mean of the teachers' predictions; the temperature does not apply."""
        del temperature
        ops = keras().ops
        shares = np.array(weights, np.float32) / np.float32(sum(weights))
        parts = [ops.convert_to_tensor(each, "float32") * share for each, share in zip(logits, shares, strict=True)]
        return sum(parts[1:], parts[0])

    def distillation_loss(self, logits: Any, soft_targets: Any, labels: Any, terms: DistillationTerms) -> Any:
        """Return the mean squared error with the teachers' predictions: [n]."""
        del labels, terms
        return self.loss(keras().ops.stop_gradient(soft_targets), logits)


@dataclass(frozen=True)
class ByValue:
    """The comparison of two regression models by their predictions."""

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the ratio of all predictions."""
        return snr_db(expected, actual)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the targets whose predictions agree."""
        return _agreeing(expected, actual)


class Regression(Task):
    """Values for each sample; the metrics are R² and the mean absolute error over all targets."""

    name: ClassVar[str] = "regression"
    models: ClassVar[str] = "regression models"
    score_name: ClassVar[str] = "validation_score"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("r2", "R²", "fraction", "r2_drop"),
        Metric("mae", "Mean absolute error", "", "mae_increase", limited=True),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        "class weights": Refusal(f"class_weights: {NO_CLASSES}", "class_weights: none"),
        "subset": Refusal("subset: samples are selected by their classes, and the data has targets", "all samples"),
        "selection by classes": Refusal(f"calibration: {NO_CLASSES}", "select: balanced, random, stratified"),
        "measured sensitivity": Refusal(
            "sensitivity compares class probabilities, and the data has targets", "allocation: balanced"
        ),
        "decoupled": Refusal(f"decoupled: {NO_CLASSES}", "distillation without `decoupled`"),
        "tfmot": Refusal("it trains with tfmot, which is set up for classifiers only", hint="leave it out"),
        "tfmot qat": Refusal("engine: tfmot trains classifiers only", "engine: coralline"),
        "package": Refusal(
            "the device runner reads classes or boxes from outputs, not targets of regression",
            hint="leave package out, and run model.tflite with your own program",
        ),
    }

    def head(self, model: Any, data: Data, specification: Specification = None) -> RegressionHead:
        """Return the head of a model with one output for each target.

        Raises:
            ModelError: several inputs or outputs, or shapes that differ from the data's.
        """
        del specification
        refuse_misfit(model, data, 1)
        shape = tuple(model.outputs[0].shape[1:])
        if shape != (len(data.class_names),):
            raise ModelError(
                f"the model's output has the shape {list(shape)}, but the data has {len(data.class_names)} targets",
                hint="check data.source and the model's last layer",
            )
        return self._head(data)

    def _head(self, data: Data) -> RegressionHead:
        return RegressionHead(tuple(_spread_of(data.targets("train")).tolist()))

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the targets: float32 [n, targets]."""
        return data.targets(split)

    def validation(
        self, model: Any, data: Data, specification: Specification, batches: Iterator[tuple[slice, Any]]
    ) -> Quality:
        """Return the mean loss of the first output."""
        del model, specification
        head, targets, total = self._head(data), data.targets("validation"), 0.0
        for samples, outputs in batches:
            predictions = keras().tree.flatten(outputs)[0]
            total += float(np.sum(np.asarray(head.loss(targets[samples], predictions), np.float64)))
        return Quality("loss", total / len(targets))

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[tuple[str | int, ...], Refusal]]:
        """Return also the sensitivity, which compares probabilities of classes."""
        refused = super().refused_settings(settings)
        if (settings.get("measure") or {}).get("sensitivity") is not None:
            reason = self.refused["measured sensitivity"]
            refused.append((("measure", "sensitivity"), Refusal(reason.what, "latency", "leave it out")))
        return refused

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return `r2`, `mae`, `predictions` and `spread` of each model; and `targets` and `split`."""
        targets = data.targets(split).astype(np.float64)
        facts: Facts = {"targets": targets.tolist(), "split": split}
        for name, model in models.items():
            rows = np.concatenate(list(model.blocks)).astype(np.float64)
            _refuse_other_width(rows, data)
            facts[name] = {
                "r2": _r2(targets, rows, note).to_json(),
                "mae": _mae(targets, rows, note).to_json(),
                "predictions": rows.tolist(),
                "spread": asdict(_answers(targets, rows, split)),
            }
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the drop of R², the relative increase of the mean absolute error, and the agreement."""
        del names
        before, after = (np.array(facts[model]["predictions"]) for model in (original, result))
        values = {name: [facts[model][name]["value"] for model in (original, result)] for name in ("r2", "mae")}
        return {"measurements": _changes(values, before, after)}

    def judge_outputs(
        self, facts: Facts, names: Sequence[str], original: str, result: str
    ) -> dict[str, degeneracy.Judgement]:
        """Judge whether two models predict one value for nearly everything; `result` may be the original."""
        del names
        spreads = {name: degeneracy.Spread(**facts[name]["spread"]) for name in (original, result)}
        return {
            original: degeneracy.judge(spreads[original]),
            result: degeneracy.judge(spreads[result], spreads[original]),
        }

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByValue:
        """Return the comparison by predictions."""
        del specification, logits
        return ByValue()

    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the mean absolute error, negative, in units of the targets' standard deviation."""
        del specification
        targets = data.targets(split)
        return -float((np.abs(rows - targets) / _spread_of(targets)).mean())

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Refuse: bundles do not support regression (`package` is refused before a run)."""
        reason = self.refused["package"]
        raise ModelError(reason.what, hint=reason.hint)


def _spread_of(targets: NDArray[Any]) -> NDArray[np.float64]:
    """Return the standard deviation of each target; 1 for a constant one."""
    deviation = np.asarray(targets, np.float64).std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)


def _refuse_other_width(rows: Rows, data: Data) -> None:
    if rows.shape[1] != len(data.class_names):
        raise ModelError(
            f"gives {rows.shape[1]} numbers, but the data has {len(data.class_names)} targets",
            hint="check data.source and the model's last layer",
        )


def _r2(targets: NDArray[np.float64], rows: NDArray[np.float64], note: str) -> Measurement:
    """Return the coefficient of determination, averaged over the targets that are not constant."""
    total = ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)
    residual = ((targets - rows) ** 2).sum(axis=0)
    varied = total > 0
    if not varied.any():
        return missing("fraction", "the targets of the split are constant")
    value = float((1 - residual[varied] / total[varied]).mean())
    if not np.isfinite(value):
        return missing("fraction", "the model's outputs are not finite")
    return Measurement(value, "fraction", "measured", note=f"{note}, {len(rows)} samples")


def _mae(targets: NDArray[np.float64], rows: NDArray[np.float64], note: str) -> Measurement:
    """Return the mean absolute error over all targets, with the 95% interval of a mean."""
    errors = np.abs(targets - rows).mean(axis=1)
    mean = float(errors.mean())
    if not np.isfinite(mean):
        return missing("", "the model's outputs are not finite")
    half = Z95 * float(errors.std(ddof=1)) / len(errors) ** 0.5 if len(errors) > 1 else 0.0
    return Measurement(mean, "", "measured", max(mean - half, 0.0), mean + half, f"{note}, {len(rows)} samples")


def _changes(values: Mapping[str, Sequence[Any]], before: Rows, after: Rows) -> dict[str, Any]:
    r2_drop, mae_increase = (missing("fraction", "needs both numbers") for _ in range(2))
    if None not in values["r2"]:
        r2_drop = Measurement(values["r2"][0] - values["r2"][1], "fraction", "measured", note="the same samples")
    if None not in values["mae"] and values["mae"][0] > 0:
        increase = values["mae"][1] / values["mae"][0] - 1
        mae_increase = Measurement(increase, "fraction", "measured", note="of the original's error, the same samples")
    note = f"of {before.size} predictions, those that differ by at most {SAME:g} of their standard deviation"
    agreement = Measurement(float(_agreeing(before, after).mean()), "fraction", "measured", note=note)
    named = {"r2_drop": r2_drop, "mae_increase": mae_increase, "agreement": agreement}
    return {name: each.to_json() for name, each in named.items()}


def _agreeing(expected: Rows, actual: Rows) -> NDArray[np.float64]:
    """Return for each sample the share of the targets whose two predictions agree."""
    tolerance = SAME * np.asarray(expected, np.float64).std(axis=0)
    tolerance = np.maximum(tolerance, 1e-6 * np.abs(expected).max(axis=0, initial=0.0))
    near = np.abs(np.asarray(expected, np.float64) - actual) <= tolerance
    return np.asarray(near.mean(axis=1), np.float64)


def _answers(targets: NDArray[np.float64], rows: NDArray[np.float64], split: Split) -> degeneracy.Spread:
    """Count the predictions near their median, and the samples whose targets are not near it."""
    median = np.median(rows, axis=0)
    band = MIDDLE * _spread_of(targets)
    same = np.asarray((np.abs(rows - median) <= band).all(axis=1))
    others = np.asarray((np.abs(targets - median) > band).any(axis=1))
    shown = ", ".join(f"{value:.4g}" for value in median[:4]) + (", …" if len(median) > 4 else "")
    return degeneracy.Spread(
        text=f"gives about {shown} to {same.sum():,} of {len(same):,} {split} samples",
        samples=len(same),
        same=int(same.sum()),
        others=int(others.sum()),
        told_apart=int((others & ~same).sum()),
    )
