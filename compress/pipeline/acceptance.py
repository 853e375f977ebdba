"""The verdict on a complete run's result, and whether it is acceptable: usable, and within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compress.core.errors import BudgetError, NotUsableError, ResultError
from compress.results.evaluation import DegeneracyRecord
from compress.results.placement import PlacementRecord
from compress.results.run import BudgetRecord, DataRecord, RunRecord, StageRecord, VerdictRecord
from compress.tasks.findings import VerdictReason

RANDOM = "random"
"""The data source of random samples."""
MOST_NAMES = 5
"""Classes that a reason names."""
CHANGING = frozenset({"prune", "sparsify", "replace_activations"})
"""The stages that change layers or remove weights."""
SIMILAR = 0.1
"""Difference between the gains of two probable causes, below which both are named."""
Cause = Literal["model", "named", "compression"]


@dataclass(frozen=True)
class VerdictMaterial:
    """The parts of a run that the verdict depends on.

    Attributes:
        degeneracy: whether the outputs of both models depend on the input.
        task: what the task says about the result.
        data: the summary of the data set.
        stages: all stages; some have warnings among their facts.
        placement: where the operators of the result run.
        budget: the limits with their measurements.
        needs_every_class: whether a class without training samples is a mistake.
    """

    degeneracy: DegeneracyRecord | None
    task: Sequence[VerdictReason]
    data: DataRecord | None
    stages: tuple[StageRecord, ...]
    placement: PlacementRecord | None
    budget: Sequence[BudgetRecord]
    needs_every_class: bool = True


@dataclass(frozen=True)
class Verdict:
    """The verdict on a complete run, and what to do about a result that cannot be used.

    Attributes:
        record: the verdict with its reasons.
        cause: the probable cause of the first reason.
        hint: what to do about a result that cannot be used; empty if the reason says it.
    """

    record: VerdictRecord
    cause: Cause = "compression"
    hint: str = ""


def judged(material: VerdictMaterial) -> Verdict:
    """Return the verdict on a complete run. The probable cause comes first, unless the compression is the cause."""
    is_random = material.data is not None and material.data.source == RANDOM
    findings = [*_about_outputs(material.degeneracy), *material.task]
    if is_random:
        findings = [
            replace(finding, level="warning") if finding.on_noise == "warning" else finding
            for finding in findings
            if finding.on_noise != "left out"
        ]
    causes = _probable([finding for finding in findings if finding.cause == "named"])
    serious = [finding for finding in findings if finding.level == "not usable" and finding.cause != "named"]
    doubtful = [finding for finding in findings if finding.level == "warning" and finding.cause != "named"]
    compressed = any(finding.cause == "compression" for finding in serious)
    ordered = [*serious, *causes, *doubtful] if compressed else [*causes, *serious, *doubtful]
    reasons = [finding.text for finding in ordered]
    reasons += _about_data(material.data, needs_every_class=material.needs_every_class)
    if is_random:
        reasons.append(
            "the samples are random numbers: ranges from them, and all comparisons, hold for random numbers only"
        )
    reasons += [f"{stage.id}: {text}" for stage in material.stages for text in stage.facts.get("warnings", ())]
    reasons += _about_placement(material.placement)
    unique = tuple(dict.fromkeys(reasons))
    if any(finding.level == "not usable" for finding in findings):
        cause = ordered[0].cause
        return Verdict(VerdictRecord("not usable", unique), cause, _hint(cause, material.stages))
    return Verdict(VerdictRecord("usable with warnings" if unique else "usable", unique))


def _hint(cause: Cause, stages: Sequence[StageRecord]) -> str:
    """Return what can be done in this pipeline about a result that cannot be used, by the probable cause."""
    names = {stage.stage for stage in stages if stage.status in ("done", "cached")}
    if cause == "named":
        return ""
    if cause == "model" and "train" in names:
        return (
            "train the model longer or with a smaller learning rate, and check the labels, data.preprocess and the "
            "statistics of batch norms"
        )
    if cause == "model":
        return (
            "check the labels, the order of `classes` and data.preprocess; if the model was trained for other classes, "
            "set `model: {head: new}` and add `train`, or choose another model"
        )
    advice = []
    if names & CHANGING:
        longer = "train longer after it" if names & {"train", "distill"} else "add `distill` or `train` after it"
        advice.append(f"compress less, or {longer}")
    if "quantize" in names:
        advice.append("calibrate with samples of the kind that the device will see, or set `quantize: {method: qat}`")
        advice.append("`python -m compress debug` lists the layers that quantization changed most")
    return "; ".join(advice)


def _probable(causes: Sequence[VerdictReason]) -> list[VerdictReason]:
    """Return the probable causes, those that explain most first. Causes that explain much less are left out."""
    best = max((cause.gain for cause in causes if cause.gain is not None), default=0.0)
    probable = [cause for cause in causes if cause.gain is None or cause.gain > best - SIMILAR]
    return sorted(probable, key=lambda cause: -(cause.gain or 0.0))


def _about_outputs(verdicts: DegeneracyRecord | None) -> Iterator[VerdictReason]:
    """Yield whether the outputs of both models depend on the input."""
    text = _degeneracy_in_words(verdicts)
    if text and verdicts is not None:
        cause: Cause = "model" if verdicts.original.verdict == "degenerate" else "compression"
        yield VerdictReason("not usable" if verdicts.result.verdict == "degenerate" else "warning", text, cause)


def _degeneracy_in_words(verdicts: DegeneracyRecord | None) -> str:
    """Return which models give one answer to nearly everything; empty if none does."""
    if verdicts is None:
        return ""
    original, result = verdicts.original, verdicts.result
    if result.verdict == "degenerate":
        if original.verdict == "varied":
            return f"the result {result.text}, and the original does not"
        same = "so does the original" if result.text == original.text else f"the original {original.text}"
        return f"the result {result.text}, and {same}"
    if original.verdict == "degenerate":
        return f"the original {original.text}, so a comparison with it shows little"
    if result.verdict == "undecided":
        return f"the result {result.text}, and too few have another label to judge that"
    return ""


def _about_data(data: DataRecord | None, *, needs_every_class: bool) -> Iterator[str]:
    """Yield classes without samples, and what is probably wrong with the data."""
    if data is None:
        return
    nowhere = _empty_classes(data, ("train", "validation", "test"))
    if nowhere:
        yield (
            f"no sample for {_listed(nowhere, data)}: nothing is known about their accuracy; check the names of "
            "folders and labels, or add samples"
        )
    splits = {"train": "training", "test": "test"} if needs_every_class else {"test": "test"}
    for split, name in splits.items():
        empty = [name for name in _empty_classes(data, (split,)) if name not in nowhere]
        if empty:
            yield f"no {name} sample for {_listed(empty, data)}: add samples, or change data.split"
    yield from data.warnings
    if data.corrupt.count:
        yield f"{data.corrupt.count:,} samples cannot be read and are left out, for example {data.corrupt.first[0]}"


def _empty_classes(data: DataRecord, splits: Sequence[str]) -> list[str]:
    """Return the classes without samples in some splits."""
    counts = [data.counts[split] for split in splits if split in data.counts]
    if not counts:
        return []
    return [name for name, *samples in zip(data.classes, *counts, strict=False) if not any(samples)]


def _listed(names: Sequence[str], data: DataRecord) -> str:
    shown = ", ".join(names[:MOST_NAMES]) + ", …" * (len(names) > MOST_NAMES)
    return f"{len(names)} of {len(data.classes)} classes ({shown})"


def _about_placement(placement: PlacementRecord | None) -> Iterator[str]:
    """Yield why there is no compiled model."""
    if placement is None:
        return
    if placement.failure:
        yield f"the compiler will refuse the model: {placement.failure}"
    elif placement.reason:
        yield placement.reason
    slower = [host for host, latency in placement.expected_latency.items() if latency.cpu_alone_ms < latency.latency_ms]
    if slower:
        on_cpu = sum(operator.placement != "tpu" for operator in placement.ops)
        remaining = f"{on_cpu} of {len(placement.ops)} operators stay on the CPU"
        cause = remaining if on_cpu > 1 else "the model is too small"
        yield (
            f"the accelerator gives no gain, because {cause}: the CPU of {', '.join(slower)} alone is predicted to be "
            "faster; run model.tflite there"
        )


def refusal(
    verdict: Verdict | None, budget: Sequence[BudgetRecord], first_degenerate: str | None
) -> ResultError | None:
    """Return why the result is not acceptable, if it is not.

    Args:
        verdict: the verdict on the result.
        budget: the limits with their measurements.
        first_degenerate: the id of the first stage whose model gives one answer to nearly everything.
    """
    if verdict is not None and verdict.record.level == "not usable":
        return _not_usable(verdict, first_degenerate)
    texts = [_excess(row) for row in budget if row.holds is False]
    if not texts:
        return None
    return BudgetError("; ".join(texts), where="budget")


def _excess(row: BudgetRecord) -> str:
    value = row.measured.value
    assert value is not None  # a missing measurement is not over the limit
    text = f"{row.name} is {value:g} {row.unit}, over the limit of {row.limit:g} by {value - row.limit:g}"
    if row.is_uncertain:
        text += f"; the limit is within the interval {row.measured.low:.3g} to {row.measured.high:.3g}: "
        text += "measure on the device"
    return text


def _not_usable(verdict: Verdict, first: str | None) -> NotUsableError:
    """Return the error for a result that cannot be used, with what to do."""
    text = verdict.record.reasons[0]
    if first is not None and verdict.cause == "compression":
        text += f" (first seen on the validation split after `{first}`)"
    return NotUsableError(text, hint=verdict.hint)


def result_error(record: RunRecord) -> ResultError | None:
    """Return the error of a run that is complete but whose result is not acceptable."""
    kinds = {"not usable": NotUsableError, "over budget": BudgetError}
    if record.error is None or record.status not in kinds:
        return None
    return kinds[record.status](record.error.message)
