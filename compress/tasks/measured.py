"""The common base of tasks whose metrics follow from outputs and targets alone.

A subclass says what is kept of each sample's outputs (`kept`), which metrics follow from it (`measured`), and which
constant output is best (`constant`); facts, comparison, verdict and the bundle's part follow from that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras
from compress.results.evaluation import Judgement
from compress.tasks.base import (
    EvaluationMembers,
    Head,
    Judge,
    Location,
    ModelOutputs,
    Refusal,
    Rows,
    Shapes,
    Specification,
    Task,
    first_output,
    refuse_misfit,
    snr_db,
)
from compress.tasks.findings import VerdictReason, against_constant
from compress.tasks.output_forms import OutputForm
from deploy.contract.image_geometry import moves_positions
from deploy.contract.preprocessing import Preprocessing

BLOCK = 256
"""Samples whose outputs are worked on at once."""
STILL = 1e-5
"""Standard deviation of a float model's outputs over samples, relative to their size, below which they are constant."""
FLATTENED = 0.05
"""The same of a result relative to the original's, below which it counts as constant."""
SAME = 0.1
"""Two values agree if they differ by at most this fraction of the standard deviation of the values."""
LOOKED_AT = 512
"""Number of samples from which the deviation over samples is estimated."""


@dataclass(frozen=True)
class ValuesHead(Head):
    """A head whose first output is an array [n, values] that is compared with targets of the same shape.

    Attributes:
        scale: the standard deviation of each value in the training split; errors are divided by it, so that values of
            different units have the same weight.
    """

    loss_name: ClassVar[str] = "mean squared error in units of the variance of the targets"
    shown_values: ClassVar[tuple[str, ...]] = ("mae",)

    scale: tuple[float, ...]

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the mean of the targets."""
        return [np.asarray(targets, np.float64).mean(axis=0).reshape(1, *shapes[0]).astype(np.float32)]

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return the mean absolute error in the unit of the targets."""
        ops = keras().ops
        difference = ops.abs(ops.cast(first_output(outputs), "float32") - ops.cast(targets, "float32"))
        return {"mae": ops.mean(ops.reshape(difference, (ops.shape(difference)[0], -1)), axis=-1)}

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean squared error over all values, in units of their variance: [n]."""
        return self.divergence(targets, first_output(outputs))

    def logits(self, outputs: Any) -> Any:
        """Return the values themselves."""
        return first_output(outputs)

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the mean squared difference in units of the variance: [n]."""
        ops = keras().ops
        difference = ops.cast(actual, "float32") - ops.cast(expected, "float32")
        difference = ops.reshape(difference, (ops.shape(difference)[0], -1)) / np.array(self.scale, np.float32)
        return ops.mean(ops.square(difference), axis=-1)


@dataclass(frozen=True)
class ScoresHead(Head):
    """A head whose first output [n, ..., classes] is probabilities, or their logits.

    Attributes:
        output: the output; its form says which probabilities it has.
        probabilities: whether the model ends with a softmax or a sigmoid.
    """

    output: OutputForm
    probabilities: bool

    def logits(self, outputs: Any) -> Any:
        """Return the logits [n, ..., classes]."""
        values = first_output(outputs)
        return self.output.logits(values) if self.probabilities else values

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the divergence of the probabilities, averaged over the positions: [n]."""
        return self.output.divergence(expected, actual, temperature)


class MeasuredTask(Task):
    """A task whose metrics follow from outputs and targets alone."""

    agreement_note: ClassVar[str] = "equal decisions of both models"

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the targets of the data: [n, ...]."""
        return data.targets(split)

    @abstractmethod
    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return what the metrics need of each sample [n, ...], from outputs [n, outputs] and targets [n, ...].

        Raises:
            ModelError: the outputs do not fit the targets.
        """

    @abstractmethod
    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the metrics by name, from the results of `kept` and the targets of all samples: [n, ...] each."""

    def constant(self, data: Data) -> Rows | None:
        """Return the best output that does not depend on the input, from the training split: [1, outputs].

        By default the mean of the targets; None for a task without such an output.
        """
        return np.asarray(np.asarray(self.targets(data, "train"), np.float64).mean(axis=0, keepdims=True))

    def fidelity(self, specification: Specification, *, logits: bool = False) -> Judge:
        """Return the comparison of two models: by default by all values."""
        return ByValue()

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return the metrics, `constant` (those of the best constant output) and `deviation` of each model.

        For two models also `changes` and `agreement`.
        """
        targets = self.targets(data, split)
        facts: Facts = {"split": split, "samples": len(targets)}
        constant = self.constant(data)
        for name, model in models.items():
            metrics = self._metrics(model.rows, targets, model.specification, note)
            facts[name] = {metric: value.to_json() for metric, value in metrics.items()}
            facts[name]["deviation"] = deviation_over_samples(model.rows)
        if constant is not None:
            specification = next(iter(models.values())).specification
            metrics = self._metrics(np.repeat(constant, min(len(targets), BLOCK), axis=0), targets, specification, note)
            facts["constant"] = {metric: value.to_json() for metric, value in metrics.items()}
        if len(models) > 1:
            first, last = (list(models.values())[index] for index in (0, -1))
            judge = self.fidelity(first.specification)
            blocks = [slice(start, start + BLOCK) for start in range(0, len(first.rows), BLOCK)]
            same = [judge.same(np.asarray(first.rows[block]), np.asarray(last.rows[block])) for block in blocks]
            facts["agreement"] = float(np.concatenate(same).mean())
        return facts

    def _metrics(
        self, rows: Rows, targets: NDArray[Any], specification: Specification, note: str
    ) -> dict[str, Measurement]:
        """Return the metrics of outputs. If there are fewer outputs than targets, the first block is repeated."""
        parts = []
        for start in range(0, len(targets), BLOCK):
            part = targets[start : start + BLOCK]
            block = rows[start : start + BLOCK] if len(rows) == len(targets) else rows[: len(part)]
            parts.append(self.kept(np.asarray(block), part, specification))
        return self.measured(np.concatenate(parts), targets, f"{note}, {len(targets)} samples")

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the change of each metric, and the agreement."""
        changes = {}
        for metric in self.metrics:
            before, after = (Measurement(**facts[model][metric.name]) for model in (original, result))
            changes[metric.change] = changed(metric, before, after)
        note = f"{self.agreement_note}, {facts['samples']} samples"
        changes["agreement"] = Measurement(facts["agreement"], "fraction", "measured", note=note)
        return {"measurements": {name: change.to_json() for name, change in changes.items()}}

    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether the outputs of two models depend on the input."""
        return judged_by_deviation(facts, f"{facts['samples']:,} {facts['split']} samples", original, result)

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare both models with the best constant output."""
        metric = self.metrics[0]
        if "constant" not in facts:
            return []
        constant, before, after = (Measurement(**facts[model][metric.name]) for model in ("constant", original, result))
        return against_constant(metric, (constant, before, after), facts["samples"])

    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the first metric, negative if lower values are better; the worst value if it is missing."""
        targets = self.targets(data, split)
        metric = self.metrics[0]
        value = self._metrics(rows, targets, specification, "")[metric.name].value
        if value is None:
            return float("-inf")
        return value if metric.higher_is_better else -value

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the metrics of each model with their changes; the device does not measure the quality."""
        targets = self.targets(data, "test")[list(indices)]
        models = {role: self._metrics(outputs, targets, specification, note) for role, outputs in rows.items()}
        metrics = {f"{name}_{role}": value for role, values in models.items() for name, value in values.items()}
        for metric in self.metrics:
            metrics[metric.change] = changed(metric, *(models[role][metric.name] for role in ("original", "int8")))
        same = self.fidelity(specification).same(rows["original"], rows["int8"])
        metrics["agreement"] = Measurement(float(same.mean()), "fraction", "measured", note=self.agreement_note)
        return EvaluationMembers(None, {name: value.to_json() for name, value in metrics.items()})


def changed(metric: Metric, before: Measurement, after: Measurement) -> Measurement:
    """Return the drop of a metric, or the increase of a metric whose lower values are better.

    An increase of a quantity with a unit is a fraction of the original's value.
    """
    if before.value is None or after.value is None:
        return missing("fraction", "a value is missing")
    if metric.higher_is_better:
        return Measurement(before.value - after.value, "fraction", "measured", note="the same samples")
    if metric.unit == "fraction":
        return Measurement(after.value - before.value, "fraction", "measured", note="the same samples")
    if before.value <= 0:
        return missing("fraction", "the original's error is 0")
    note = "of the original's error, the same samples"
    return Measurement(after.value / before.value - 1, "fraction", "measured", note=note)


def deviation_over_samples(rows: Rows) -> float:
    """Return how much outputs differ between samples: their deviation from the mean output, relative to their size."""
    chosen = np.asarray(rows[:: max(len(rows) // LOOKED_AT, 1)][:LOOKED_AT], np.float64)
    size = float(np.sqrt((chosen**2).mean())) if chosen.size else 0.0
    if not np.isfinite(size) or size == 0:
        return 0.0
    return float(np.sqrt(((chosen - chosen.mean(axis=0)) ** 2).mean()) / size)


def judged_by_deviation(facts: Facts, samples: str, original: str, result: str) -> dict[str, Judgement]:
    """Judge whether the outputs of two models depend on the input, by their `deviation` over `samples`, in words."""
    expected, actual = (facts[model]["deviation"] for model in (original, result))
    judgements = {original: _judgement(expected < STILL, samples)}
    if result != original:
        judgements[result] = _judgement(actual < max(STILL, FLATTENED * expected), samples)
    return judgements


def _judgement(constant: bool, split: str) -> Judgement:
    text = f"gives {'nearly the same output' if constant else 'different outputs'} for {split}"
    return Judgement("degenerate" if constant else "varied", text)


@dataclass(frozen=True)
class ByValue(Judge):
    """The comparison of two models by all their values.

    Attributes:
        by_column: whether the values are different quantities, each of which counts in units of its deviation.
    """

    by_column: bool = False

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the ratio of all values."""
        if not self.by_column:
            return snr_db(expected, actual)
        unit = spread_of(expected)
        return snr_db(expected / unit, actual / unit)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the values that differ by at most SAME of the standard deviation over the samples."""
        expected = np.asarray(expected, np.float64)
        limit = np.maximum(SAME * expected.std(axis=0), 1e-6 * np.abs(expected).max(axis=0, initial=0.0))
        return np.asarray((np.abs(expected - actual) <= limit).mean(axis=1), np.float64)


def spread_of(targets: NDArray[Any]) -> NDArray[np.float64]:
    """Return the standard deviation of each target over the samples [n, ...], flattened; 1 for a constant target."""
    deviation = np.asarray(targets, np.float64).reshape(len(targets), -1).std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)


def refuse_moving(settings: Mapping[str, Any], targets: str, sources: Sequence[str]) -> list[tuple[Location, Refusal]]:
    """Return the preprocessing steps that move the content of images, but not their `targets` (a name in the plural).

    The targets of `sources` move with their images.
    """
    source = settings["data"]["source"]
    if not isinstance(source, str) and any(name in source for name in sources):
        return []
    refused: list[tuple[Location, Refusal]] = []
    for index, entry in enumerate(settings["data"].get("preprocess") or ()):
        step = {entry: {}} if isinstance(entry, str) else entry
        if not moves_positions(Preprocessing([step])):
            continue
        what = f"{next(iter(step))} changes positions in the image, but not in {targets} of arrays"
        hint = f"store the samples at their final size, or use the source {' or '.join(sources)}"
        refused.append((("data", "preprocess", index), Refusal(what, hint=hint)))
    return refused


def refuse_shape(model: Any, data: Data, expected: Sequence[int | None], meaning: str) -> None:
    """Raise a ModelError if a model's input does not fit the data, or its first output does not have the expected
    shape."""
    refuse_misfit(model, data)
    shape = tuple(model.outputs[0].shape[1:])
    fits = len(shape) == len(expected) and all(b in (None, a) for a, b in zip(shape, expected, strict=True))
    if not fits:
        dimensions = ", ".join("any" if dimension is None else str(dimension) for dimension in expected)
        raise ModelError(
            f"the model's output has the shape {list(shape)}",
            allowed=f"[{dimensions}]: {meaning}",
            hint="check data.source and the model's last layer",
        )
