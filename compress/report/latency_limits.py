"""The section on what limits the predicted latency, and the changes that would reduce it."""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.blocks import Block, Heading, Section, Text, table
from compress.report.record import HostLatencyRecord, RunRecord
from compress.report.wording import MAX_PROSE, number, shorten

LIMITS = {
    "fixed_ms": "Start of the Edge TPU, and instructions",
    "input_ms": "Transfer of the input",
    "compute_ms": "Computation on the Edge TPU",
    "stream_ms": "Parameters that are sent at every inference",
    "output_ms": "Transfer of the output",
    "cpu_ms": "Operators on the CPU",
}
"""The parts of a predicted latency."""
MAX_ADVICE = 8


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if the latency is predicted."""
    latency = record.latency
    if latency is None or latency.value is None or not latency.parts:
        return
    yield Section(
        f"Limits of the latency on {shorten(latency.host)}",
        [*_parts(latency, latency.value), *_changes(latency)],
        key="latency-limits",
    )


def _parts(latency: HostLatencyRecord, total: float) -> Iterator[Block]:
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
