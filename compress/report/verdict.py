"""The head of the report: the outcome in one or two sentences, and the error with what is valid in spite of it."""

from __future__ import annotations

from dataclasses import dataclass

from compress.report import headline, next_steps
from compress.report.absence import in_stage
from compress.report.blocks import Cell, joined
from compress.report.headline import KeyFigure
from compress.report.next_steps import NextStep
from compress.report.record import HostLatencyRecord, ModelsRecord, RunRecord
from compress.report.wording import (
    MAX_PROSE,
    cut,
    first,
    interval,
    metric,
    moment,
    noun,
    number,
    seconds,
    sentence,
    shorten,
    show,
)

LEVELS = {
    "usable": ("good", "✓ Usable"),
    "usable with warnings": ("unsure", "▲ Usable with warnings"),
    "not usable": ("bad", "✕ Not usable"),
}
"""Style and title of each level of the verdict."""
EARLY = {"failed": ("bad", "✕ Failed"), "interrupted": ("unsure", "■ Interrupted")}
"""The same for runs without a verdict, by status."""
MARKS = {
    **{level: title.split()[0] for level, (_, title) in LEVELS.items()},
    "ok": "✓",
    "over budget": "▲",
    "failed": "✕",
    "interrupted": "■",
}
COMPLETE = {
    "over budget": "The budget is not kept",
    "not usable": "The result cannot be used",
}
"""Headings of the errors of complete runs."""
_RATIOS = (("size_ratio", "size"), ("macs_ratio", "MACs"), ("latency_ratio", "latency"))


@dataclass(frozen=True)
class ErrorSummary:
    """The error of a run, and the parts of the report that are valid in spite of it."""

    heading: str
    message: str
    exit_code: int
    valid: str


@dataclass(frozen=True)
class Overview:
    """The head of the report: its first screen.

    Attributes:
        name: the name of the run.
        status: the verdict on its result, or how it ended without one.
        mark: a character for the status.
        finished: when it ended.
        target: the target.
        coralline: the version of Coralline.
        style: the style of the verdict.
        level: the verdict.
        outcome: what the verdict is about in one sentence: the budget, or how far the run came.
        verdict: level and outcome as a text.
        error: what ended the run, or why its result is not acceptable.
        reasons: the reasons for the verdict.
        headline: what the target does with the result.
        figures: the most important values.
        steps: what to do next.
    """

    name: str
    status: str
    mark: str
    finished: str
    target: str
    coralline: str
    style: str
    level: str
    outcome: str
    verdict: str
    error: ErrorSummary | None
    reasons: tuple[str, ...] = ()
    headline: str = ""
    figures: tuple[KeyFigure, ...] = ()
    steps: tuple[NextStep, ...] = ()


def overview(record: RunRecord) -> Overview:
    """Return the head of the report."""
    style, level = _level(record)
    return Overview(
        name=shorten(record.name, 100),
        status=record.judgement,
        mark=MARKS.get(record.judgement, "?"),
        finished=moment(record.finished),
        target=shorten(joined(": ", record.target.name, record.target.summary), MAX_PROSE),
        coralline=shorten(record.coralline),
        style=style,
        level=level,
        outcome=_summary(record),
        verdict=verdict(record),
        error=_error(record),
        reasons=_reasons(record),
        headline=headline.headline(record),
        figures=headline.key_figures(record),
        steps=tuple(next_steps.steps(record)),
    )


def _summary(record: RunRecord) -> str:
    """Return the budget for a complete run whose values are shown next to it, otherwise the outcome."""
    if record.models is None or record.status in EARLY:
        return sentence(outcome(record))
    return sentence(f"the result {_budget_kept(record)}" if _fits(record) else _budget_kept(record))


def _fits(record: RunRecord) -> bool:
    return bool(record.budget) and all(row.holds for row in record.budget)


def _level(record: RunRecord) -> tuple[str, str]:
    """Return the style of the verdict, and its title."""
    if record.status in EARLY:
        return EARLY[record.status]
    if record.verdict is not None:
        return LEVELS[record.verdict.level]
    return ("unsure", f"{MARKS[record.status]} {record.status.capitalize()}")


def _reasons(record: RunRecord) -> tuple[str, ...]:
    if record.verdict is None:
        return ()
    # The remedy is at the end of a reason.
    return tuple(sentence(shorten(reason, 3 * MAX_PROSE)) for reason in record.verdict.reasons)


def verdict(record: RunRecord) -> str:
    """Return the verdict and the outcome in one or two sentences."""
    text = sentence(outcome(record))
    if record.verdict is None or record.status in EARLY:
        return text
    return f"{record.verdict.level.capitalize()}. {text}"


def outcome(record: RunRecord) -> str:
    """Return what came out: ratios, quality and budget; or how far a run came that ended early."""
    results = _results(record)
    if record.status in EARLY:
        head = f"{record.status.capitalize()}{in_stage(record)} after {seconds(record.seconds)}"
        return f"{head}; results before that: {results}." if results else f"{head}; no result was measured."
    return f"{results or 'No result was measured'}; {_budget_kept(record)}."


def _results(record: RunRecord) -> str:
    """Return ratios and quality of the result; empty if the models were not compared."""
    if record.models is None:
        return ""
    parts = []
    for name, cost in _RATIOS:
        if name == "latency_ratio" and record.latency is not None and record.latency.provenance != "measured":
            parts.append(latency_text(record.latency))
            continue
        ratio = show(record.changes.get(name), name)
        if ratio.style == "missing":
            parts.append(f"{cost} not compared")
        else:
            parts.append(f"{ratio.text} the {cost}{_origin(ratio)}")
    return ", ".join([*parts, _quality(record, record.models)])


def latency_text(latency: HostLatencyRecord) -> str:
    """Return the latency with its interval and its origin."""
    if latency.value is None:
        return f"latency on {shorten(latency.host)} unknown: {shorten(latency.note, MAX_PROSE)}"
    text = f"latency {number(latency.value, 'ms')} on {shorten(latency.host)} ({latency.provenance}"
    if latency.low is not None and latency.high is not None:
        text += f", {number(latency.low, 'ms')} to {number(latency.high, 'ms')}"
    return f"{text})"


def _quality(record: RunRecord, models: ModelsRecord) -> str:
    """Return the change of the most important metric: "accuracy 0.992 → 0.990 (drop +0.002)"."""
    quality = record.quality
    label = noun(quality.label)
    before, after = (show(model.measurements.get(quality.name)) for model in (models.original, models.result))
    if "missing" in (before.style, after.style):
        return f"{label} not compared"
    text = f"{label} {before.text}{_origin(before)} → {after.text}{_origin(after)}"
    change = record.changes.get(quality.change)
    drop = show(change, quality.change)
    if change is None or drop.style == "missing":
        return text
    return f"{text} (drop {joined(' ', drop.text, interval(change, quality.change))}{_origin(drop)})"


def _origin(cell: Cell) -> str:
    return "" if cell.style == "measured" else f" ({cell.style})"


def limited(record: RunRecord, name: str) -> str:
    """Return the label of a limit; a latency is that of the chosen host."""
    if name == "latency_ms" and record.latency is not None:
        return f"Latency on {shorten(record.latency.host, 60)}"
    return metric(record, name).label


def _budget_kept(record: RunRecord) -> str:
    if not record.budget:
        return "no budget was set"
    for holds, outcome in ((False, "over budget in"), (None, "budget undecided for")):
        labels = [f"“{limited(record, row.name)}”" for row in record.budget if row.holds is holds]
        if labels:
            return f"{outcome} {first(labels, 3)}"
    return "fits the budget"


def _error(record: RunRecord) -> ErrorSummary | None:
    error = record.error
    if error is None:
        return None
    where = in_stage(record) or ", outside of any stage"
    heading = COMPLETE.get(record.status, f"{record.status.capitalize()}{where}")
    return ErrorSummary(heading, cut(error.message) or "(no message)", error.exit_code, valid_parts(record))


def valid_parts(record: RunRecord) -> str:
    """Return what of the report can be relied on in spite of the error."""
    if record.status == "over budget":
        return "The run is complete and everything below is valid; the result only breaks the budget."
    if record.status == "not usable":
        return _valid_although_not_usable(record)
    compared = " The comparison of the two models below is complete and valid." if record.comparison else ""
    done = [f"“{shorten(stage.id, 40)}”" for stage in record.stages if stage.status in ("done", "cached", "skipped")]
    if not done:
        return f"No stage was completed, so the report has no measurements.{compared}"
    stages = "stage that was" if len(done) == 1 else "stages that were"
    return (
        f"Still valid: the {len(done)} {stages} completed ({first(done, 12)}), with the numbers given for them below. "
        f"They are stored; the next run continues from there.{compared}"
    )


def _valid_although_not_usable(record: RunRecord) -> str:
    text = (
        "The run is complete. Sizes, MACs, latencies and placement below are valid. Do not use the result for the "
        "reason above."
    )
    if record.degeneracy is not None and record.degeneracy.original.verdict == "degenerate":
        text += " The same holds for the original, so drop and agreement show nothing."
    return text
