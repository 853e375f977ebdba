"""The verdict on a complete run's result, and whether it is acceptable: usable, and within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compress.errors import BudgetError, NotUsableError, ResultError
from compress.report import degeneracy
from compress.report.record import (
    BudgetRecord,
    DataRecord,
    DegeneracyRecord,
    PlacementRecord,
    RunRecord,
    StageRecord,
    VerdictRecord,
)
from compress.tasks.findings import VerdictReason

RANDOM = "random"
"""The data source of random samples."""
MOST_NAMES = 5
"""Classes that a reason names."""


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
    """

    degeneracy: DegeneracyRecord | None
    task: Sequence[VerdictReason]
    data: DataRecord | None
    stages: tuple[StageRecord, ...]
    placement: PlacementRecord | None
    budget: Sequence[BudgetRecord]


def judged(material: VerdictMaterial) -> VerdictRecord:
    """Return the verdict on a complete run."""
    is_random = material.data is not None and material.data.source == RANDOM
    # Outputs for noise hardly differ from sample to sample: a comparison with a constant output says nothing.
    findings = [] if is_random else [*_about_outputs(material.degeneracy), *material.task]
    serious = [finding.text for finding in findings if finding.level == "not usable"]
    warnings = [finding.text for finding in findings if finding.level == "warning"]
    warnings += _about_data(material.data)
    warnings += _of_stages(material.stages)
    warnings += _about_placement(material.placement)
    if serious:
        return VerdictRecord("not usable", tuple(dict.fromkeys([*serious, *warnings])))
    return VerdictRecord("usable with warnings" if warnings else "usable", tuple(dict.fromkeys(warnings)))


def _about_outputs(verdicts: DegeneracyRecord | None) -> Iterator[VerdictReason]:
    """Yield whether the outputs of both models depend on the input."""
    text = degeneracy.in_words(verdicts)
    if text and verdicts is not None:
        yield VerdictReason("not usable" if verdicts.result.verdict == "degenerate" else "warning", text)


def _about_data(data: DataRecord | None) -> Iterator[str]:
    """Yield classes without samples, and notes that concern the result."""
    if data is None:
        return
    for split in ("train", "test"):
        counts = data.counts.get(split, ())
        empty = [name for name, count in zip(data.classes, counts, strict=False) if not count]
        if empty:
            shown = ", ".join(empty[:MOST_NAMES]) + ", …" * (len(empty) > MOST_NAMES)
            yield f"{len(empty)} of {len(data.classes)} classes have no {split} sample: {shown}"
    if data.source == RANDOM:
        yield "the samples are random numbers: activation ranges, and all comparisons, hold for random numbers only"


def _of_stages(stages: Sequence[StageRecord]) -> Iterator[str]:
    """Yield the warnings that stages report."""
    for stage in stages:
        for warning in stage.facts.get("warnings", ()):
            yield f"{stage.id}: {warning}"


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
        cause = f"{on_cpu} of {len(placement.ops)} operators stay on the CPU" if on_cpu > 1 else "it is too small"
        yield f"the accelerator does not pay, {cause}: the CPU of {', '.join(slower)} alone is predicted to be faster"


def refusal(
    verdict: VerdictRecord | None,
    degenerate: DegeneracyRecord | None,
    budget: Sequence[BudgetRecord],
    first_degenerate: str | None,
) -> ResultError | None:
    """Return why the result is not acceptable, if it is not.

    Args:
        verdict: the verdict on the result.
        degenerate: the judgements on the outputs of original and result.
        budget: the limits with their measurements.
        first_degenerate: the id of the first stage whose model gives one answer to nearly everything.
    """
    if verdict is not None and verdict.level == "not usable":
        return _not_usable(verdict, degenerate, first_degenerate)
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


def _not_usable(verdict: VerdictRecord, degenerate: DegeneracyRecord | None, first: str | None) -> NotUsableError:
    """Return the error for a result that cannot be used, with what to do."""
    text = verdict.reasons[0]
    if degenerate is not None and degenerate.original.verdict == "degenerate":
        return NotUsableError(
            text,
            hint="train the model longer or with a smaller learning rate, and check the labels, data.preprocess and "
            "the statistics of batch norms",
        )
    if first is not None:
        text += f" (first seen on the validation split after `{first}`)"
    return NotUsableError(
        text,
        hint="compress less or train longer after it, and check the statistics of batch norms; `python -m compress "
        "debug` lists the layers that quantization changed most",
    )


def result_error(record: RunRecord) -> ResultError | None:
    """Return the error of a run that is complete but whose result is not acceptable."""
    kinds = {"not usable": NotUsableError, "over budget": BudgetError}
    if record.error is None or record.status not in kinds:
        return None
    return kinds[record.status](record.error.message)
