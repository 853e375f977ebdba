"""The section on the measurements of devices."""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.blocks import Block, Cell, Section, Table, Text
from compress.report.record import DeviceRecord, RunRecord
from compress.report.wording import MAX_PROSE, shorten, show

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


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if anything was measured on a device."""
    devices = record.devices[:MAX_DEVICES]
    if devices:
        measured = {name for device in devices for name in device.measurements}
        shown = [metric for metric in record.metrics if metric.name in measured or metric == record.quality]
        columns = {**COLUMNS, **{metric.name: metric.label for metric in shown}}
        rows = [_row(device, columns) for device in devices]
        table = Table(("Device", *columns.values(), "Golden outputs"), rows, CAPTION)
        yield Section("On the device", [table, *(doubt for device in devices for doubt in _doubts(device))])


def _row(device: DeviceRecord, columns: dict[str, str]) -> tuple[Cell | str, ...]:
    head = Cell(shorten(device.device, 100), shorten(f"{device.board}; {device.model}; {device.runtime}", MAX_PROSE))
    golden = ", ".join(f"{role} {verdict}" for role, verdict in device.golden.items())
    cells = [show(device.measurements.get(name), name) for name in columns]
    return (head, *cells, shorten(golden, MAX_PROSE) or "not compared")


def _doubts(device: DeviceRecord) -> Iterator[Block]:
    for doubt in device.doubts:
        yield Text(f"✕ {shorten(device.device, 100)} cannot be compared: {shorten(doubt, MAX_PROSE)}", "bad")
