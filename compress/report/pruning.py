"""The sections on pruning, and on layers that were replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compress.core.measurement import Measurement
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
    or_missing,
    table,
)
from compress.report.json_values import decode
from compress.report.record import CurveRecord, RunRecord, SensitivityRecord
from compress.report.wording import MAX_PROSE, first, number, sentence, shorten, show

MAX_LAYERS = 40
MAX_OPEN = 12
COLUMNS = 4
CELL_WIDTH = 108.0
CELL_HEIGHT = 60.0
GAP_X = 12.0
GAP_Y = 34.0
COSTS = {
    "macs": ("multiply-accumulates", "MACs"),
    "parameters": ("parameters", "parameters"),
    "size_bytes": ("8-bit file, about", "bytes"),
    "compute_ms": ("arithmetic of the Edge TPU", "ms"),
    "latency_ms": ("latency", "ms"),
    "streamed_bytes": ("parameters sent at every inference", "bytes"),
}
"""Name and unit of each cost (`compress.learning.pruning.cost.CostFigures`)."""
ACCURACY = "accuracy"
SENSITIVITY_TITLE = (
    "Measured {} on training samples, from 0 to {:.3g}, if one group of layers alone has fewer channels: all channels "
    "are kept at the left, none at the right. There is no training after a removal."
)


@dataclass(frozen=True)
class ObjectiveFacts:
    """The objective of a pruning."""

    name: str = "not recorded"


@dataclass(frozen=True)
class CostFacts:
    """The known costs before and after a step."""

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WidthFacts:
    """The number of channels of a layer before and after a step."""

    before: int
    after: int


@dataclass(frozen=True)
class PruningStepFacts:
    """A step of pruning (`compress.learning.pruning.checkpoint.PruningStep`)."""

    allocation: str = "not recorded"
    figures: CostFacts = CostFacts()
    layers: Mapping[str, WidthFacts] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()
    trials: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    sensitivity: tuple[CurveRecord, ...] = ()


@dataclass(frozen=True)
class PruningFacts:
    """The facts of `prune`."""

    objective: ObjectiveFacts = ObjectiveFacts()
    steps: tuple[PruningStepFacts, ...] = ()


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if the run pruned or measured sensitivity."""
    facts = {stage.id: decode(PruningFacts, stage.facts) for stage in record.stages if stage.stage == "prune"}
    blocks: list[Block] = []
    for stage, pruning in facts.items():
        for index, step in enumerate(pruning.steps, 1):
            blocks += [Heading(f"{shorten(stage)}, step {index}"), *_step(step, pruning.objective)]
    steps = [step for pruning in facts.values() for step in pruning.steps]
    blocks += _sensitivity(record, steps)
    if blocks:
        yield Section("Pruning", blocks)


def _step(step: PruningStepFacts, objective: ObjectiveFacts) -> Iterator[Block]:
    yield Text(" ".join(_sentences(step, objective)))
    yield Columns([_costs(step.figures), [_widths(step.layers)]])


def _sentences(step: PruningStepFacts, objective: ObjectiveFacts) -> Iterator[str]:
    yield f"Objective: {shorten(objective.name)}."
    yield f"Allocation: {shorten(step.allocation)}."
    if step.trials:
        trials = ", ".join(f"{method} {number(value, 'fraction')}" for method, value in step.trials.items())
        yield f"Validation accuracy after one epoch: {trials}."
    if step.unsupported:
        yield f"Unchanged, because their channels cannot be followed: {first(step.unsupported, MAX_LAYERS)}."
    for warning in step.warnings[:MAX_LAYERS]:
        yield sentence(f"Note: {shorten(warning, MAX_PROSE)}")


def _costs(figures: CostFacts) -> Sequence[Block]:
    """Return the table of each cost that is known before and after the step."""
    rows = []
    for name, (text, unit) in COSTS.items():
        if name in figures.before and name in figures.after:
            before = figures.before[name]
            after = figures.after[name]
            fraction = f"{after / before:.3f}" if before else "none"
            rows.append((text, number(before, unit), number(after, unit), fraction))
    caption = "Before and after; time, memory and file size are predicted."
    return or_missing(table(("Cost", "Before", "After", "Fraction"), rows, caption), "costs were not recorded")


def _widths(layers: Mapping[str, WidthFacts]) -> Block:
    if not layers:
        return Text("Nothing was removed.")
    rows = [(shorten(name), f"{widths.before:,}", f"{widths.after:,}") for name, widths in layers.items()]
    blocks: list[Block] = [Table(("Layer name", "Before", "After"), rows[:MAX_LAYERS])]
    if len(rows) > MAX_LAYERS:
        blocks.append(Text(f"{len(rows) - MAX_LAYERS} more are in report.json."))
    return Details(f"Layers with fewer channels: {len(rows)}", blocks, is_open=len(rows) <= MAX_OPEN)


def _sensitivity(record: RunRecord, steps: Sequence[PruningStepFacts]) -> list[Block]:
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


def _drawn(curves: Sequence[CurveRecord]) -> Table:
    """Return the values of the curves as a table."""
    rows = [
        (shorten(_name(curve)), f"{kept:,} of {max(curve.kept[0], 1):,}", f"{value:.3f}")
        for curve in _ranked(curves)
        for kept, value in zip(curve.kept, _values(curve), strict=True)
    ]
    return Table(("Layers", "Channels kept", _quantity(curves).capitalize()), rows)


def _ranked(curves: Sequence[CurveRecord]) -> list[CurveRecord]:
    """Return the groups that are drawn, the most sensitive first."""
    return sorted(curves, key=lambda curve: -max(curve.divergence))[:MAX_LAYERS]


def _name(curve: CurveRecord) -> str:
    """Return the first layer of a group, and the number of the others."""
    others = len(curve.layers) - 1
    return f"{curve.layers[0]} and {others} more" if others else curve.layers[0]


def sensitivity_chart(curves: Sequence[CurveRecord]) -> str:
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


def _quantity(curves: Sequence[CurveRecord]) -> str:
    return ACCURACY if all(curve.accuracy for curve in curves) else "change of the outputs"


def _highest(curves: Sequence[CurveRecord]) -> float:
    """Return the upper end of the charts: 1 for an accuracy."""
    if _quantity(curves) == ACCURACY:
        return 1.0
    return max(max(curve.divergence) for curve in curves) or 1.0


def _values(curve: CurveRecord) -> tuple[float, ...]:
    return curve.accuracy or curve.divergence


def _small_chart(curve: CurveRecord, left: float, top: float, highest: float) -> list[str]:
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
    line = []
    circles = []
    for kept, value in zip(curve.kept, _values(curve), strict=True):
        at_x = svg.n(x.at(1 - kept / full))
        at_y = svg.n(y.at(value))
        line.append(f"{at_x},{at_y}")
        tip = svg.tip(f"{name}: {kept} of {full} kept, {quantity} {value:.3f}")
        circles.append(f'<circle cx="{at_x}" cy="{at_y}" r="3" class="result">{tip}</circle>')
    points = " ".join(line)
    return [*parts, f'<polyline points="{points}" class="curve result" fill="none"/>', *circles]


MAX_ROWS = 20
MAX_NAMES = 6
TIMES = {"before": "before", "replaced": "after the replacement", "healed": "after training"}


@dataclass(frozen=True)
class ReplacedFacts:
    """The layers of one kind that were replaced, and by what."""

    count: int
    by: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplacementFacts:
    """The facts of `replace_activations`; texts by layer in `skipped` and `details`."""

    replaced: Mapping[str, ReplacedFacts] = field(default_factory=dict)
    accuracy: Mapping[str, Measurement] = field(default_factory=dict)
    not_found: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)


def replacements(record: RunRecord) -> Iterator[Section]:
    """Yield the section on the last `replace_activations` that changed the model."""
    facts = [decode(ReplacementFacts, stage.facts) for stage in record.stages if stage.stage == "replace_activations"]
    changed = [stage for stage in facts if stage.replaced]
    if changed:
        last = changed[-1]
        columns = Columns([list(_replacements(last)), list(_accuracy(last))])
        yield Section("Activation replacement", [columns, *_layers(last)])


def _replacements(facts: ReplacementFacts) -> Iterator[Block]:
    rows = [
        (Cell(shorten(kind.replace("_", " ")), first(row.layers, MAX_NAMES)), shorten(row.by), f"{row.count:,}")
        for kind, row in facts.replaced.items()
    ]
    yield Table(("Original", "Replacement", "Count"), rows)
    for kind in facts.not_found:
        yield Text(f"○ Requested, but not in the model: {shorten(kind)}", "unsure")


def _accuracy(facts: ReplacementFacts) -> Iterator[Block]:
    rows = [(text, show(facts.accuracy[time])) for time, text in TIMES.items() if time in facts.accuracy]
    caption = "Measured on the validation split. The model before the replacement was the teacher."
    if rows:
        yield Table(("When", "Accuracy"), rows, caption)


def _layers(facts: ReplacementFacts) -> Iterator[Block]:
    rows = [(shorten(layer, 80), f"not replaced: {shorten(reason, 200)}") for layer, reason in facts.skipped.items()]
    rows += [(shorten(layer, 80), shorten(text, 200)) for layer, text in facts.details.items()]
    if rows:
        yield Heading("Layer by layer")
        yield Pairs(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        yield Text(f"{len(rows) - MAX_ROWS} more are in report.json.")
