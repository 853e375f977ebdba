"""The section on quantization: the candidates, the result, and the tensors with the largest error."""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.blocks import Block, Cell, Columns, Heading, Section, Table, Text
from compress.report.wording import MAX_PROSE, number, scalar, shorten
from compress.results.encoding import decode
from compress.results.quantization import LayerError, QuantizationRecord
from compress.results.run import RunRecord

MAX_LAYERS = 12  # chosen; the layers after them have small shares, and report.json has all
MAX_TRIALS = 40  # chosen; report.json has all
MAX_REWRITES = 20  # chosen; report.json has all


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section on the last `quantize` of the run."""
    stages = [stage for stage in record.stages if stage.stage == "quantize" and "calibration_samples" in stage.facts]
    if stages:
        facts = decode(QuantizationRecord, stages[-1].facts)
        columns = [list(_candidates(facts)), list(_errors(facts))]
        side_by_side = Columns([column for column in columns if column])
        yield Section("Quantization", [*_summary(facts), side_by_side, *_rewrites(facts)])


def _summary(facts: QuantizationRecord) -> Iterator[Block]:
    text = f"Method: {shorten(facts.kept) or 'not recorded'}, ranges: {shorten(facts.ranges, 200) or 'not recorded'}."
    text += f" Calibrated on {facts.calibration_samples:,} training samples."
    if facts.agreement is not None:
        share = number(facts.agreement, "fraction")
        text += f" The file agrees with the float model on {share} of the held-out samples (measured)."
    yield Text(text)
    for gate in facts.separated_gates:
        yield Text(
            f"The gate of {shorten(gate.activation, 80)} is computed by a copy of {shorten(gate.copied, 80)}, so that "
            f"small channels have finer steps. The function is the same. The copy takes {gate.macs:,} more MACs."
        )
    for warning in facts.warnings:
        yield Text(f"✕ {shorten(warning, MAX_PROSE)}", "bad")


def _candidates(facts: QuantizationRecord) -> Iterator[Block]:
    if not facts.tried:
        return
    sees_differences = all(trial.difference_db is not None for trial in facts.tried)
    rows = [
        (
            Cell(shorten(trial.step), shorten(trial.choice, 80)),
            _decibels(trial.snr_db),
            *([_decibels(trial.difference_db)] if sees_differences else []),
            number(trial.agreement, "fraction"),
            "✓ kept" if trial.kept else "not kept",
        )
        for trial in facts.tried[:MAX_TRIALS]
    ]
    caption = "Candidates, as int8 files, were compared with the float model on the same samples."
    header = ["Step", "Signal-to-noise ratio", "Agreement", "Outcome"]
    if sees_differences:
        header.insert(2, "Difference of probabilities and boxes")
        caption += (
            " The candidate with the smallest difference is kept; where differences may be chance, the ratio decides."
        )
    yield Heading("Candidates")
    yield Table(tuple(header), rows, caption)
    for row in facts.not_tried[:MAX_TRIALS]:
        yield Text(f"Not tried: {shorten(row.step)}, {shorten(row.choice, 80)}: {shorten(row.reason, 120)}.")


def _errors(facts: QuantizationRecord) -> Iterator[Block]:
    if not facts.layers:
        return
    rows = [
        (Cell(shorten(row.point, 120), _cause(row)), number(row.share, "fraction"), _decibels(row.snr_db))
        for row in facts.layers[:MAX_LAYERS]
    ]
    caption = "The fraction of the logits' error if one tensor, or the weights of one layer, is quantized (simulated)."
    if len(facts.layers) > MAX_LAYERS:
        caption += f" {len(facts.layers) - MAX_LAYERS} more are in report.json."
    yield Heading("Quantization error")
    yield Table(("Tensor", "Fraction", "Signal-to-noise ratio"), rows, caption)


def _cause(row: LayerError) -> str:
    kind = shorten(row.kind)
    if not row.cause:
        return kind
    return f"{kind}: {shorten(row.cause, 120)}. Setting to change: {shorten(row.setting, 120)}"


def _rewrites(facts: QuantizationRecord) -> Iterator[Block]:
    if not facts.rewritten:
        return
    rows = [
        (
            Cell(shorten(change.rewrite), shorten(f"{change.op} {change.output}", 120)),
            "not run" if change.steps is None else f"{change.steps:g} steps",
            "✓ kept" if change.kept else f"not done: {shorten(scalar(change.reason), 120)}",
        )
        for change in facts.rewritten[:MAX_REWRITES]
    ]
    yield Heading("Rewritten for the compiler")
    yield Table(("Rewrite", "Change of its output", "Outcome"), rows)


def _decibels(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} dB"
