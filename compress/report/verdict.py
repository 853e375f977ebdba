"""The head of the report: the verdict with its reasons, the key figures, the error if there is one, the next steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compress.core.artifact import MODEL_COMPILED, MODEL_TFLITE
from compress.core.measurement import COSTS, Metric
from compress.core.resources import manual
from compress.report.blocks import Cell, joined
from compress.report.wording import (
    MAX_PROSE,
    cut,
    first,
    in_stage,
    interval,
    metric,
    moment,
    noun,
    number,
    seconds,
    sentence,
    shorten,
    show,
    span,
)
from compress.results.placement import HostLatencyRecord, PlacementRecord
from compress.results.run import ModelsRecord, RunRecord

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
        status: the verdict on the result of the run, or how the run ended without one.
        mark: a character for the status.
        level: the verdict, which is shown in this `style`.
        outcome: what the verdict is about in one sentence: the budget, or how far the run came.
        verdict: level and outcome as a text.
        headline: what the target does with the result.
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
        outcome=_outcome_below_level(record),
        verdict=verdict(record),
        error=_error(record),
        reasons=_reasons(record),
        headline=headline(record),
        figures=key_figures(record),
        steps=tuple(steps(record)),
    )


def _outcome_below_level(record: RunRecord) -> str:
    """Return the budget for a complete run whose values are shown next to it, otherwise the outcome."""
    if record.models is None or record.status in EARLY:
        return sentence(outcome(record))
    fits = bool(record.budget) and all(row.holds for row in record.budget)
    return sentence(f"the result {_budget_kept(record)}" if fits else _budget_kept(record))


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
        if name == "latency_ratio" and record.latency is not None and record.latency.measurement.how != "measured":
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
    measured = latency.measurement
    if measured.value is None:
        return f"latency on {shorten(latency.host)} unknown: {shorten(measured.note, MAX_PROSE)}"
    how = joined(", ", measured.how, span(measured.low, measured.high, "ms"))
    return f"latency {number(measured.value, 'ms')} on {shorten(latency.host)} ({how})"


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


MAX_DEVICES = 3
"""Devices in the headline [chosen; all of them are in a section]."""
SHOWN = tuple(metric for metric in COSTS if metric.name in ("size_bytes", "macs"))
"""The costs among the most important values."""


@dataclass(frozen=True)
class KeyFigure:
    """One of the most important values: "0.989 → 0.987", and its change with the interval."""

    label: str
    value: str
    more: str = ""


def headline(record: RunRecord) -> str:
    """Return sentences about the result on its target: operators, latency, memory for parameters, devices."""
    return " ".join(_sentences(record))


def _sentences(record: RunRecord) -> Iterator[str]:
    if record.placement is not None:
        yield from _placement(record.placement)
    rejected = record.placement is not None and bool(record.placement.failure)
    if record.latency is not None and not (rejected and record.latency.measurement.how == "predicted"):
        yield _latency(record.latency, record)
    if record.placement is not None:
        yield from _parameters(record.placement)
    for device in record.devices[:MAX_DEVICES]:
        median = device.measurements.get("latency_ms")
        if median is not None and median.value is not None:
            yield f"{number(median.value, 'ms')} measured on the device {shorten(device.device)}."


def _placement(placement: PlacementRecord) -> Iterator[str]:
    total = len(placement.ops)
    if placement.failure:
        yield sentence(f"The compiler rejects the model: {shorten(placement.failure, MAX_PROSE)}")
    elif total:
        on_tpu = sum(operator.on_tpu for operator in placement.ops)
        origin = "read from the compiled file" if placement.origin == "measured" else "predicted"
        if on_tpu == total:
            yield f"All {total:,} operators run on the Edge TPU ({origin})."
            return
        macs = sum(placement.macs.values())
        share = f" with {number(placement.macs.get('tpu', 0) / macs, 'fraction')} of the MACs" if macs else ""
        yield f"{on_tpu:,} of {total:,} operators run on the Edge TPU{share}, {total - on_tpu:,} on the CPU ({origin})."


def _latency(latency: HostLatencyRecord, record: RunRecord) -> str:
    """Return the latency on the host; for a target without hosts, on this machine."""
    host, measured = shorten(latency.host), latency.measurement
    if measured.value is None:
        return sentence(f"The latency on {host} is unknown: {shorten(measured.note, MAX_PROSE)}")
    text = f"{number(measured.value, 'ms')} for each inference, {measured.how} on {host}"
    if ends := span(measured.low, measured.high, "ms"):
        text += f" ({ends})"
    change = show(record.changes.get("latency_ratio"), "latency_ratio")
    if measured.how == "measured" and change.style != "missing":
        text += f", {change.text} the latency of the original"
    return f"{text}."


def _parameters(placement: PlacementRecord) -> Iterator[str]:
    cached, streamed = placement.cached_bytes, placement.streamed_bytes
    if cached is None or streamed is None or placement.failure:
        return
    if streamed:
        yield (
            f"{number(cached, 'bytes')} of parameters stay in the memory of the chip, and {number(streamed, 'bytes')} "
            "are sent at every inference (predicted)."
        )
    else:
        yield f"{number(cached, 'bytes')} of parameters fit into the memory of the chip (predicted)."


def key_figures(record: RunRecord) -> tuple[KeyFigure, ...]:
    """Return the quality, the size and the MACs of both models; empty if they were not compared."""
    if record.models is None:
        return ()
    return tuple(_key_figure(record, record.models, metric) for metric in (record.quality, *SHOWN))


def _key_figure(record: RunRecord, models: ModelsRecord, metric: Metric) -> KeyFigure:
    before, after = (show(model.measurements.get(metric.name)) for model in (models.original, models.result))
    change = record.changes.get(metric.change)
    shown = show(change, metric.change)
    more = ""
    if change is not None and shown.style != "missing":
        word = metric.change.rpartition("_")[2]
        name = "" if word == "ratio" else word
        more = joined(" ", name, shown.text, interval(change, metric.change), "of the original" * (word == "ratio"))
    origins = {cell.style for cell in (before, after)} - {"measured"}
    if origins:
        more = joined("; ", more, ", ".join(sorted(origins)))
    return KeyFigure(metric.label, f"{before.text} → {after.text}", more)


COMPARE = "python -m compress compare . ../OTHER-RUN"


@dataclass(frozen=True)
class NextStep:
    """A step: what it is for, and its command, for the folder of the report; "" if it is not a command."""

    text: str
    command: str = ""


DEBUG = NextStep("List the layers that quantization changed most.", "python -m compress debug .")


def steps(record: RunRecord) -> list[NextStep]:
    """Return the next steps, in order."""
    if record.status in ("failed", "interrupted"):
        text = "Correct the cause above, then run" if record.status == "failed" else "Run"
        return [NextStep(f"{text} the same command again: stages that were completed are not run again.")]
    if record.status == "not usable":
        return [
            NextStep("Find the cause: the message above names the probable one."),
            *([DEBUG] if any("layers" in stage.facts for stage in record.stages) else []),
            NextStep("Change the pipeline file and run it again: stages that do not change are not run again."),
        ]
    return [*_use(record), NextStep("Compare this run with another one, for example with other settings.", COMPARE)]


def _use(record: RunRecord) -> Iterator[NextStep]:
    """Yield the steps of a usable result: keep the budget, compile, copy to a device."""
    if any(row.holds is False for row in record.budget):
        yield NextStep(
            "The budget is not kept: change the pipeline file, or the limit under `budget`, and run it again. "
            "Stages that do not change are not run again."
        )
    bundle = f"{record.name}.coralline"
    if record.placement is not None and record.placement.failure:
        text = (
            "The compiler rejects the model: change the model as the section “Where operators run” says, and check it."
        )
        yield NextStep(text, f"python -m compress check {MODEL_TFLITE}")
        return
    yield from _on_the_cpu(record)
    if is_uncompiled(record):
        text = "Compile the model, on x86-64 Linux with the vendor's compiler"
        if bundle in record.outputs:
            text += ", then run the pipeline again, so that the bundle has the compiled model"
        yield NextStep(f"{text}. See {manual('compiling.md')}.", f"edgetpu_compiler -s {MODEL_TFLITE}")
    if bundle in record.outputs:
        yield NextStep(
            "Copy the bundle to the device, and measure it there.",
            f"python -m compress deploy {bundle} --to ssh://USER@HOST/FOLDER --bench",
        )
    elif MODEL_TFLITE in record.outputs:
        yield NextStep(f"Add `package` to the stages for a bundle with its runner, or load {MODEL_TFLITE} yourself.")


def _on_the_cpu(record: RunRecord) -> Iterator[NextStep]:
    """Yield the advice to use no accelerator, if the CPU alone is predicted to be faster on the chosen host."""
    if record.placement is None or record.latency is None:
        return
    host = record.placement.expected_latency.get(record.latency.host)
    if host is not None and host.cpu_alone_ms < host.latency_ms:
        yield NextStep(
            f"Decide if you need the Edge TPU: the CPU of {record.latency.host} alone is predicted to take "
            f"{number(host.cpu_alone_ms, 'ms')}, and the Edge TPU {number(host.latency_ms, 'ms')}. The steps below are "
            "for the Edge TPU."
        )


def commands(record: RunRecord) -> list[str]:
    """Return the commands that bring the result to a device, in order, for the folder of the report."""
    usable = record.status not in ("failed", "interrupted", "not usable")
    return [step.command for step in _use(record) if step.command] if usable else []


def is_uncompiled(record: RunRecord) -> bool:
    """Whether the run has a model for a target with a compiler that is not compiled."""
    placement = record.placement
    compiles = placement is not None and bool(placement.how_to_compile) and not placement.failure
    return compiles and MODEL_TFLITE in record.outputs and MODEL_COMPILED not in record.outputs
