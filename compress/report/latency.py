"""The sections on latency: of the chosen host, on this machine's CPU, what limits it, and results of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from compress.core.measurement import LATENCIES
from compress.report import charts
from compress.report.blocks import Block, Cell, Columns, Figure, Heading, Pairs, Section, Table, Text, missing, table
from compress.report.wording import MAX_PROSE, absence, count, number, scalar, shorten, show
from compress.results.placement import HostLatencyRecord
from compress.results.run import DeviceRecord, ModelRecord, RunRecord

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
    if record.latency.measurement.how != "measured":
        title += ", not a Coral host"
    runs = (("Original", models.original, latency.original), ("Result", models.result, latency.result))
    curves = [_curve(name, model, values) for name, model, values in runs if values]
    rows = [
        (Cell(name, count(len(values), "run")), *(show(model.measurements.get(metric.name)) for metric, _, _ in MARKS))
        for name, model, values in runs
    ]
    table = Table(("Model", "Median", "p90", "p99"), rows)
    conditions = [(shorten(key), scalar(value)) for key, value in latency.conditions.items()]
    listed = Pairs(conditions or [("conditions", "not recorded")])
    times = Columns([[_figure(curves)], [table, Heading("Conditions"), listed]])
    return Section("Latency", [headline, Heading(title), times])


def _curve(name: str, model: ModelRecord, values: tuple[float, ...]) -> charts.LatencyCurve:
    marks = []
    for metric, percentile, fraction in MARKS:
        measurement = model.measurements.get(metric.name)
        if measurement is not None and measurement.value is not None and measurement.how == "measured":
            marks.append((percentile, fraction, measurement.value))
    return charts.LatencyCurve(name, name.lower(), values, marks)


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


LIMITS = {
    "fixed_ms": "Start of the Edge TPU, and instructions",
    "input_ms": "Transfer of the input",
    "compute_ms": "Computation on the Edge TPU",
    "stream_ms": "Parameters that are sent at every inference",
    "output_ms": "Transfer of the output",
    "cpu_ms": "Operators on the CPU",
}
"""The parts of a predicted latency."""
MAX_ADVICE = 8  # chosen; report.json has all


def limits(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if the latency is predicted."""
    latency = record.latency
    if latency is None or latency.measurement.value is None or not latency.parts:
        return
    yield Section(
        f"Limits of the latency on {shorten(latency.host)}",
        [*_limit_parts(latency, latency.measurement.value), *_changes(latency)],
        key="latency-limits",
    )


def _limit_parts(latency: HostLatencyRecord, total: float) -> Iterator[Block]:
    """Yield the parts of the prediction, the largest first."""
    parts = sorted((part for part in latency.parts.items() if part[1] > 0), key=lambda part: -part[1])
    rows = [
        (LIMITS.get(name, shorten(name)), number(ms, "ms"), number(ms / total, "fraction") if total else "")
        for name, ms in parts
    ]
    yield from table(("Part", "Predicted time", "Share"), rows)
    if latency.streamed_bytes:
        yield Text(f"{number(latency.streamed_bytes, 'bytes')} of parameters are sent at every inference.")


def _changes(latency: HostLatencyRecord) -> Iterator[Block]:
    yield Heading("Changes that would reduce it")
    changes = [
        (f"{index}. {shorten(change.what, MAX_PROSE)}", number(change.saves_ms, "ms"))
        for index, change in enumerate(latency.advice[:MAX_ADVICE], 1)
    ]
    if changes:
        yield from table(("Change", "Predicted gain"), changes, "Each gain is that of the change alone.")
    else:
        yield Text("No change with a computed gain above 0.5% is known.")


MAX_DEVICES = 100
COLUMNS = {
    "latency_ms": "Median",
    "latency_p90_ms": "p90",
    "latency_p99_ms": "p99",
    "first_inference_ms": "First",
    "memory_bytes": "Memory",
}
CAPTION = (
    "Measured on the devices, with the bundle of this run. Golden outputs: the comparison with the outputs of the host."
)


def devices(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if anything was measured on a device."""
    devices = record.devices[:MAX_DEVICES]
    if devices:
        measured = {name for device in devices for name in device.measurements}
        shown = [metric for metric in record.metrics if metric.name in measured or metric == record.quality]
        columns = {**COLUMNS, **{metric.name: metric.label for metric in shown}}
        rows = [_device_row(device, columns) for device in devices]
        table = Table(("Device", *columns.values(), "Golden outputs"), rows, CAPTION)
        doubts = [
            Text(f"✕ {shorten(device.device, 100)} cannot be compared: {shorten(doubt, MAX_PROSE)}", "bad")
            for device in devices
            for doubt in device.doubts
        ]
        yield Section("On the device", [table, *doubts])


def _device_row(device: DeviceRecord, columns: dict[str, str]) -> tuple[Cell | str, ...]:
    head = Cell(shorten(device.device, 100), shorten(f"{device.board}; {device.model}; {device.runtime}", MAX_PROSE))
    golden = ", ".join(f"{role} {verdict}" for role, verdict in device.golden.items())
    cells = [show(device.measurements.get(name), name) for name in columns]
    return (head, *cells, shorten(golden, MAX_PROSE) or "not compared")
