"""The section on the latency: of the chosen host, and the times on this machine's CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compress.core.measurement import LATENCIES
from compress.report import charts
from compress.report.absence import absence
from compress.report.blocks import Block, Cell, Columns, Figure, Heading, Pairs, Section, Table, missing
from compress.report.record import LatencyRecord, ModelRecord, RunRecord
from compress.report.wording import count, number, scalar, shorten, show

FEW_RUNS = 100
MARKS = tuple(zip(LATENCIES, ("median", "p90", "p99"), (0.5, 0.9, 0.99), strict=True))
"""The percentiles that are marked: metric, name, fraction of the runs."""
SHARES = {"the fastest": 0.0, "0.1": 0.1, "0.25": 0.25, "0.5": 0.5, "0.75": 0.75, "0.9": 0.9, "0.99": 0.99, "all": 1.0}
"""The rows of the table of the curves: fractions of the runs by their names."""


def section(record: RunRecord) -> Section:
    """Return the latency on the host, then distribution and percentiles on this machine's CPU, and the conditions."""
    latency, models = record.cpu_latency, record.models
    if record.latency is None or latency is None or models is None:
        return Section("Latency", [missing(absence(record))])
    headline = Table(
        ("Host", "Latency of the result"), [(shorten(record.latency.host), show(record.latency.measurement))]
    )
    title = f"This machine's CPU, {scalar(latency.conditions.get('cpu', 'unknown'))}"
    if record.latency.provenance != "measured":
        title += ", not a Coral host"
    runs = (("Original", models.original, latency.original), ("Result", models.result, latency.result))
    curves = [_curve(name, model, values) for name, model, values in runs if values]
    rows = [_row(name, model, len(values)) for name, model, values in runs]
    table = Table(("Model", "Median", "p90", "p99"), rows)
    times = Columns([[_figure(curves)], [table, *_conditions(latency)]])
    return Section("Latency", [headline, Heading(title), times])


def _curve(name: str, model: ModelRecord, values: tuple[float, ...]) -> charts.LatencyCurve:
    marks = []
    for metric, percentile, fraction in MARKS:
        measurement = model.measurements.get(metric.name)
        if measurement is not None and measurement.value is not None and measurement.how == "measured":
            marks.append((percentile, fraction, measurement.value))
    return charts.LatencyCurve(name, name.lower(), values, marks)


def _row(name: str, model: ModelRecord, runs: int) -> tuple[Cell, ...]:
    return (Cell(name, count(runs, "run")), *(show(model.measurements.get(metric.name)) for metric, _, _ in MARKS))


def _figure(curves: list[charts.LatencyCurve]) -> Block:
    if not curves:
        return missing("no run was recorded")
    ranges = [f"{c.name.lower()} {number(min(c.values), 'ms')} to {number(max(c.values), 'ms')}" for c in curves]
    caption = (
        "Dashed line and rings: original. Solid line and diamonds: result. The marks are median, p90 and p99. "
        f"All values are measured: {'; '.join(ranges)}."
    )
    if min(len(curve.values) for curve in curves) < FEW_RUNS:
        caption += f" With fewer than {FEW_RUNS} runs, p99 is the slowest run."
    caption = " ".join([caption, *charts.latency_notes(curves)])
    return Figure(
        charts.latency_curves(curves), "Cumulative distribution of the latency.", caption, data=_drawn(curves)
    )


def _drawn(curves: Sequence[charts.LatencyCurve]) -> Table:
    """Return values of the curves as a table."""
    ordered = [sorted(curve.values) for curve in curves]
    rows = [
        (name, *(number(values[max(0, math.ceil(share * len(values)) - 1)], "ms") for values in ordered))
        for name, share in SHARES.items()
    ]
    return Table(("Fraction of runs", *(curve.name for curve in curves)), rows, "So many runs take at most this time.")


def _conditions(latency: LatencyRecord) -> list[Block]:
    rows = [(shorten(key), scalar(value)) for key, value in latency.conditions.items()]
    return [Heading("Conditions"), Pairs(rows or [("conditions", "not recorded")])]
