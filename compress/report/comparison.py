"""The sections on the run as a whole: budget, before and after, costs after each stage, stages."""

from __future__ import annotations

import math

from compress.measurement import How, Measurement, Metric
from compress.measurement import missing as missing_measurement
from compress.report import charts, training
from compress.report.blocks import Block, Cell, Columns, Figure, Section, Table, Text, missing, or_missing
from compress.report.record import RunRecord, StageRecord
from compress.report.verdict import absence
from compress.report.wording import MAX_PROSE, metric, names, noun, number, seconds, shorten, show

OUTCOMES = {
    True: Cell("✓ within the limit", style="good"),
    False: Cell("✕ over the limit", style="bad"),
    None: Cell("? unknown", style="unsure"),
}
STAGE_MARKS = {"made": "✓", "kept": "✓", "skipped": "»", "failed": "✕", "not run": "○"}
ABSENCE = {"failed": "the stage failed", "not run": "did not run", "skipped": "skipped"}
"""The reason for missing measurements of a stage, by its status."""


def budget(record: RunRecord) -> Section:
    """Return each limit with its measurement."""
    rows = []
    for row in record.budget:
        unit = "ratio" if row.name.endswith("_ratio") else row.unit
        actual = show(row.measured, row.name, absence(record))
        rows.append((metric(record, row.name).label, number(row.limit, unit), actual, OUTCOMES[row.holds]))
    table = Table(("Quantity", "Limit", "Actual", "Outcome"), rows)
    return Section("Budget", [table] if rows else [missing("no budget was set")])


def before_and_after(record: RunRecord) -> Section:
    """Return every measurement of both models with its change."""
    original, result = record.models.original, record.models.result
    if original is None or result is None:
        return Section("Before and after", [missing(absence(record))])
    compared = record.comparison.measurements if record.comparison is not None else {}
    metrics = [metric(record, name) for name in names(record, (original.measurements, result.measurements))]
    rows: list[tuple[str | Cell, ...]] = []
    for known in metrics:
        before, after = (model.measurements.get(known.name) for model in (original, result))
        change = compared.get(known.change) or ratio(before, after)
        rows.append((known.label, show(before), show(after), _change(change, known)))
    others = [name for name in compared if name not in {known.change for known in metrics}]
    rows += [(metric(record, name).label, "compared", "compared", show(compared[name], name)) for name in others]
    stages = f"Original: stage “{shorten(original.stage, 40)}”; result: stage “{shorten(result.stage, 40)}”"
    caption = f"{stages}. {record.quality.label} is measured on the test split."
    return Section("Before and after", [Table(("Quantity", "Original", "Result", "Change"), rows, caption)])


def _change(change: Measurement, known: Metric) -> Cell:
    """Return the change as a cell, with the word "drop" or "increase" where it is not a ratio."""
    cell = show(change, known.change)
    word = known.change.rpartition("_")[2]
    if cell.style == "missing" or word == "ratio":
        return cell
    return Cell(f"{word} {cell.text}", cell.small, cell.style, cell.note)


def ratio(before: Measurement | None, after: Measurement | None) -> Measurement:
    """Return result divided by original, measured if both are."""
    if before is None or after is None or before.value is None or after.value is None:
        return missing_measurement("fraction", "a value is missing")
    if before.value == 0:
        return missing_measurement("fraction", "the original is 0")
    how: How = "measured" if before.how == after.how == "measured" else "predicted"
    return Measurement(after.value / before.value, "fraction", how, note="result divided by original")


def costs(record: RunRecord) -> Section:
    """Return the plots of quality against size and MACs after each stage."""
    plots = [_plot(record, metric(record, name)) for name in ("size_bytes", "macs")]
    return Section(f"{record.quality.label} and cost after each stage", [Columns([[plot] for plot in plots])])


def _plot(record: RunRecord, cost: Metric) -> Block:
    """Return the plot of quality against a cost; a text if no stage has both."""
    points = [point for stage in record.stages if (point := _point(stage, record.quality, cost)) is not None]
    name = noun(cost.label)
    if not points:
        return missing(f"no plot against {name}: no stage has both values")
    caption = (
        "The top left is best. Bars: 95% interval. Filled: both values measured; hollow: at least one value predicted."
    )
    svg = charts.trade_off(points, quality=record.quality.label, cost=name, unit=cost.unit)
    return Figure(svg, f"{record.quality.label} on validation against {name}.", caption)


def _point(stage: StageRecord, quality: Metric, cost: Metric) -> charts.Point | None:
    y, x = (stage.measurements.get(known.name) for known in (quality, cost))
    if y is None or x is None or y.value is None or x.value is None or not math.isfinite(x.value + y.value):
        return None
    return charts.Point(shorten(stage.id, 40), x.value, y.value, y.low, y.high, y.how == x.how == "measured")


def stages(record: RunRecord) -> Section:
    """Return what became of each stage, with the measurements of its model."""
    columns = names(record, [stage.measurements for stage in record.stages])
    rows = [_stage_row(index, stage, columns) for index, stage in enumerate(record.stages)]
    quality = {known.name for known in record.metrics}
    header = [metric(record, name).label + ", validation" * (name in quality) for name in columns]
    caption = f"Total time {seconds(record.seconds)}. Times are measured."
    blocks: list[Block] = [Table(("Stage", "Outcome", *header), rows, caption)] if rows else []
    blocks += [Text(f"{line} (measured).") for line in training.lines(record)]
    return Section("Stages", or_missing(blocks, absence(record)))


def _stage_row(index: int, stage: StageRecord, columns: list[str]) -> tuple[Cell, ...]:
    made = [part for part in (stage.stage if stage.stage != stage.id else "", stage.kind or "no artifact") if part]
    head = Cell(f"{index} {shorten(stage.id)}", shorten(" · ".join(made)))
    outcome = Cell(
        f"{STAGE_MARKS.get(stage.status, '?')} {stage.status}",
        "; ".join(part for part in (seconds(stage.seconds), shorten(stage.reason or "", MAX_PROSE)) if part),
        "bad" if stage.status == "failed" else "",
    )
    absent = ABSENCE.get(stage.status, "not measured")
    return (head, outcome, *(show(stage.measurements.get(name), name, absent) for name in columns))
