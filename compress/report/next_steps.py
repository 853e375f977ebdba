"""The section "Next steps": what limits the latency, what would reduce it, and the commands that follow."""

from __future__ import annotations

from collections.abc import Iterator

from compress.artifact import MODEL_COMPILED, MODEL_TFLITE
from compress.report.blocks import Block, Heading, Preformatted, Section, Text, missing, table
from compress.report.record import HostLatencyRecord, RunRecord
from compress.report.verdict import absence
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


def section(record: RunRecord) -> Section:
    """Return what limits the latency, the changes with their gains, and the commands."""
    blocks = [*_latency(record.latency), *_commands(record)]
    return Section("Next steps", blocks or [missing(absence(record))])


def commands(record: RunRecord) -> list[str]:
    """Return the commands that follow this run, in order, for the folder of its report."""
    if record.status in ("failed", "interrupted", "degenerate"):
        return []
    lines = []
    if is_uncompiled(record):
        lines.append(f"edgetpu_compiler -s {MODEL_TFLITE}")
    bundle = f"{record.name}.coralline"
    if bundle in record.outputs:
        lines.append(f"python -m compress deploy {bundle} --to ssh://USER@HOST/FOLDER --bench")
    return lines


def is_uncompiled(record: RunRecord) -> bool:
    """Whether the run has a model for a target with a compiler that is not compiled."""
    compiles = record.placement is not None and bool(record.placement.how_to_compile)
    return compiles and MODEL_TFLITE in record.outputs and MODEL_COMPILED not in record.outputs


def _latency(latency: HostLatencyRecord | None) -> Iterator[Block]:
    """Yield the parts of the prediction, the largest first, and what would reduce it."""
    if latency is None or latency.value is None or not latency.parts:
        return
    total = latency.value
    parts = sorted((part for part in latency.parts.items() if part[1] > 0), key=lambda part: -part[1])
    yield Heading(f"Limits of the latency on {shorten(latency.host)}")
    rows = [
        (LIMITS.get(name, shorten(name)), number(ms, "ms"), number(ms / total, "fraction") if total else "")
        for name, ms in parts
    ]
    yield from table(("Part", "Predicted time", "Share"), rows)
    if latency.streamed_bytes:
        yield Text(f"{number(latency.streamed_bytes, 'bytes')} of parameters are sent at every inference.")
    yield Heading("Changes that would reduce it")
    changes = [
        (f"{place}. {shorten(change.what, MAX_PROSE)}", number(change.saves_ms, "ms"))
        for place, change in enumerate(latency.advice[:MAX_ADVICE], 1)
    ]
    if changes:
        yield from table(("Change", "Predicted gain"), changes, "Each gain is that of the change alone.")
    else:
        yield Text("No change with a computed gain above 0.5% is known.")


def _commands(record: RunRecord) -> Iterator[Block]:
    lines = commands(record)
    if not lines:
        return
    if is_uncompiled(record):
        yield Text(
            "The bundle has no compiled model: with the compiler on PATH, run the pipeline again before you deploy."
        )
    yield Heading("Commands, in the folder of this report")
    yield Preformatted("\n".join(lines))
