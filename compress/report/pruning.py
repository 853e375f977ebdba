"""The sections on pruning, and on layers that were replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compress.report import svg
from compress.report.blocks import (
    Block,
    Cell,
    Columns,
    Details,
    Figure,
    Heading,
    Pairs,
    Section,
    Table,
    Text,
    missing,
    table,
)
from compress.report.wording import MAX_PROSE, first, number, sentence, shorten, show
from compress.results.encoding import decode
from compress.results.pruning import (
    CostChange,
    LayerWidths,
    PruningRecord,
    PruningStep,
    ReplacementRecord,
    SensitivityCurve,
    SensitivityRecord,
)
from compress.results.run import RunRecord

MAX_LAYERS = 40  # chosen; report.json has all
MAX_OPEN = 12  # chosen; a longer table is folded
COLUMNS = 4  # chosen
CELL_WIDTH = 108.0  # px; COLUMNS of them and the gaps fit into svg.WIDTH
CELL_HEIGHT = 60.0  # px, chosen
GAP_X = 12.0  # px, chosen
GAP_Y = 34.0  # px; a line of text fits between two rows
COSTS = {
    "macs": ("multiply-accumulates", "MACs"),
    "parameters": ("parameters", "parameters"),
    "size_bytes": ("8-bit file, about", "bytes"),
    "compute_ms": ("arithmetic of the Edge TPU", "ms"),
    "latency_ms": ("latency", "ms"),
    "streamed_bytes": ("parameters sent at every inference", "bytes"),
}
"""Name and unit of each cost (`compress.results.pruning.CostFigures`)."""
ACCURACY = "accuracy"
SENSITIVITY_TITLE = (
    "Measured {} on training samples, from 0 to {:.3g}, if one group of layers alone has fewer channels: all channels "
    "are kept at the left, none at the right. There is no training after a removal."
)


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if the run pruned or measured sensitivity."""
    facts = {stage.id: decode(PruningRecord, stage.facts) for stage in record.stages if stage.stage == "prune"}
    blocks: list[Block] = []
    for stage, pruning in facts.items():
        for index, step in enumerate(pruning.steps, 1):
            text = Text(" ".join(_sentences(step, str(pruning.objective.get("name", "not recorded")))))
            changes = Columns([_costs(step.cost), [_widths(step.layers)]])
            blocks += [Heading(f"{shorten(stage)}, step {index}"), text, changes]
    steps = [step for pruning in facts.values() for step in pruning.steps]
    blocks += _sensitivity(record, steps)
    if blocks:
        yield Section("Pruning", blocks)


def _sentences(step: PruningStep, objective: str) -> Iterator[str]:
    yield f"Objective: {shorten(objective)}. Allocation: {shorten(step.allocation)}."
    if step.trials:
        trials = ", ".join(f"{method} {number(value, 'fraction')}" for method, value in step.trials.items())
        yield f"Validation accuracy after one epoch: {trials}."
    if step.unsupported:
        yield f"Unchanged, because their channels cannot be followed: {first(step.unsupported, MAX_LAYERS)}."
    for warning in step.warnings[:MAX_LAYERS]:
        yield sentence(f"Note: {shorten(warning, MAX_PROSE)}")


def _costs(change: CostChange) -> Sequence[Block]:
    """Return the table of each cost that is known before and after the step."""
    rows = []
    for name, (text, unit) in COSTS.items():
        before = getattr(change.figures_before, name)
        after = getattr(change.figures_after, name)
        if before is not None and after is not None:
            fraction = f"{after / before:.3f}" if before else "none"
            rows.append((text, number(before, unit), number(after, unit), fraction))
    caption = "Before and after; time, memory and file size are predicted."
    return table(("Cost", "Before", "After", "Fraction"), rows, caption)


def _widths(layers: Mapping[str, LayerWidths]) -> Block:
    if not layers:
        return Text("Nothing was removed.")
    rows = [(shorten(name), f"{widths.before:,}", f"{widths.after:,}") for name, widths in layers.items()]
    blocks: list[Block] = [Table(("Layer name", "Before", "After"), rows[:MAX_LAYERS])]
    if len(rows) > MAX_LAYERS:
        blocks.append(Text(f"{len(rows) - MAX_LAYERS} more are in report.json."))
    return Details(f"Layers with fewer channels: {len(rows)}", blocks, is_open=len(rows) <= MAX_OPEN)


def _sensitivity(record: RunRecord, steps: Sequence[PruningStep]) -> list[Block]:
    """Return the curves of the model before pruning; else those of the first step that measured some."""
    sensitivity = record.sensitivity or SensitivityRecord()
    measured = [sensitivity.curves, *(step.sensitivity for step in steps)]
    curves = next(filter(None, measured), ())
    if curves:
        caption = "Layers that share channels are one group. The most sensitive group is first."
        title = SENSITIVITY_TITLE.format(_quantity(curves), _highest(curves))
        if len(curves) > MAX_LAYERS:
            caption += f" The {MAX_LAYERS} most sensitive of {len(curves)} groups are drawn; all are in report.json."
        return [Heading("Sensitivity"), Figure(sensitivity_chart(curves), title, caption, data=_drawn(curves))]
    if sensitivity.missing:
        return [Heading("Sensitivity"), missing(f"not measured: {shorten(sensitivity.missing, MAX_PROSE)}")]
    return []


def _drawn(curves: Sequence[SensitivityCurve]) -> Table:
    """Return the values of the curves as a table."""
    rows = [
        (shorten(_name(curve)), f"{kept:,} of {max(curve.kept[0], 1):,}", f"{value:.3f}")
        for curve in _ranked(curves)
        for kept, value in zip(curve.kept, _values(curve), strict=True)
    ]
    return Table(("Layers", "Channels kept", _quantity(curves).capitalize()), rows)


def _ranked(curves: Sequence[SensitivityCurve]) -> list[SensitivityCurve]:
    """Return the groups that are drawn, the most sensitive first."""
    return sorted(curves, key=lambda curve: -max(curve.divergence))[:MAX_LAYERS]


def _name(curve: SensitivityCurve) -> str:
    """Return the first layer of a group, and the number of the others."""
    others = len(curve.layers) - 1
    return f"{curve.layers[0]} and {others} more" if others else curve.layers[0]


def sensitivity_chart(curves: Sequence[SensitivityCurve]) -> str:
    """Return small charts of accuracy, or of the change of the outputs, by the share of channels kept.

    The most sensitive layer group is first.
    """
    curves = _ranked(curves)
    lines = -(-len(curves) // COLUMNS)
    size = (svg.WIDTH, lines * (CELL_HEIGHT + GAP_Y) + 14)
    quantity = _quantity(curves)
    highest = _highest(curves)
    parts = []
    descriptions = []
    for index, curve in enumerate(curves):
        left = index % COLUMNS * (CELL_WIDTH + GAP_X)
        top = index // COLUMNS * (CELL_HEIGHT + GAP_Y) + 20
        parts += _small_chart(curve, left, top, highest)
        points = ", ".join(
            f"{kept} kept, {quantity} {value:.3f}" for kept, value in zip(curve.kept, _values(curve), strict=True)
        )
        descriptions.append(f"{_name(curve)}: {points}")
    title = f"{quantity.capitalize()} when one group of layers gets narrower"
    return svg.svg("sensitivity", size, title, "; ".join(descriptions), parts)


def _quantity(curves: Sequence[SensitivityCurve]) -> str:
    return ACCURACY if all(curve.accuracy for curve in curves) else "change of the outputs"


def _highest(curves: Sequence[SensitivityCurve]) -> float:
    """Return the upper end of the charts: 1 for an accuracy."""
    if _quantity(curves) == ACCURACY:
        return 1.0
    return max(max(curve.divergence) for curve in curves) or 1.0


def _values(curve: SensitivityCurve) -> tuple[float, ...]:
    return curve.accuracy or curve.divergence


def _small_chart(curve: SensitivityCurve, left: float, top: float, highest: float) -> list[str]:
    """Return the chart of one layer group: all channels on the left, values from 0 to `highest`."""
    x = svg.Axis(0, 1, left, left + CELL_WIDTH)
    y = svg.Axis(0, highest, top + CELL_HEIGHT, top)
    quantity = _quantity([curve])
    name = _name(curve)
    full = max(curve.kept[0], 1)
    parts = [svg.text(left, top - 6, name, "tick", room=CELL_WIDTH)]
    parts += [
        svg.line(left, y.at(level * highest), left + CELL_WIDTH, y.at(level * highest), "grid") for level in (0, 0.5, 1)
    ]
    positions = []
    circles = []
    for kept, value in zip(curve.kept, _values(curve), strict=True):
        positions.append((x.at(1 - kept / full), y.at(value)))
        tip = svg.tip(f"{name}: {kept} of {full} kept, {quantity} {value:.3f}")
        circles.append(svg.circle(*positions[-1], 3, "result", tip))
    return [*parts, svg.polyline(positions, "curve result"), *circles]


MAX_ROWS = 20  # chosen; report.json has all
MAX_NAMES = 6  # chosen; about two lines of a table
TIMES = {"before": "before", "replaced": "after the replacement", "healed": "after training"}


def replacements(record: RunRecord) -> Iterator[Section]:
    """Yield the section on the last `replace_activations` that changed the model."""
    facts = [decode(ReplacementRecord, stage.facts) for stage in record.stages if stage.stage == "replace_activations"]
    changed = [stage for stage in facts if stage.replaced]
    if changed:
        last = changed[-1]
        columns = Columns([list(_replacements(last)), list(_accuracy(last))])
        yield Section("Activation replacement", [columns, *_layers(last)])


def _replacements(facts: ReplacementRecord) -> Iterator[Block]:
    rows = [
        (Cell(shorten(kind.replace("_", " ")), first(row.layers, MAX_NAMES)), shorten(row.by), f"{row.count:,}")
        for kind, row in facts.replaced.items()
    ]
    yield Table(("Original", "Replacement", "Count"), rows)
    for kind in facts.not_found:
        yield Text(f"○ Requested, but not in the model: {shorten(kind)}", "unsure")


def _accuracy(facts: ReplacementRecord) -> Iterator[Block]:
    rows = [(text, show(facts.accuracy[time])) for time, text in TIMES.items() if time in facts.accuracy]
    caption = "Measured on the validation split. The model before the replacement was the teacher."
    if rows:
        yield Table(("When", "Accuracy"), rows, caption)


def _layers(facts: ReplacementRecord) -> Iterator[Block]:
    rows = [(shorten(layer, 80), f"not replaced: {shorten(reason, 200)}") for layer, reason in facts.skipped.items()]
    rows += [(shorten(layer, 80), shorten(text, 200)) for layer, text in facts.details.items()]
    if rows:
        yield Heading("Layer by layer")
        yield Pairs(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        yield Text(f"{len(rows) - MAX_ROWS} more are in report.json.")
