"""The section on activation replacement: what was replaced or skipped, and the accuracy on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compress.core.measurement import Measurement
from compress.report.blocks import Block, Cell, Columns, Heading, Pairs, Section, Table, Text
from compress.report.json_values import decode
from compress.report.record import RunRecord
from compress.report.wording import first, shorten, show

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


def sections(record: RunRecord) -> Iterator[Section]:
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
