"""The section on architecture search: what was searched, the front of the candidates, and the chosen sub-network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compress.report.blocks import Block, Details, Heading, Section, Table, Text
from compress.report.json_values import decode
from compress.report.pruning import COSTS, WidthFacts
from compress.report.record import RunRecord
from compress.report.wording import first, number, shorten

MAX_ROWS = 40
MAX_OPEN = 12
LARGE = 10_000_000
"""Numbers from here are shown by their power of ten."""


@dataclass(frozen=True)
class ArchitectureFacts:
    """The facts of `search_architecture`.

    The largest, the smallest and the chosen sub-network, and those of the front, have their costs by name, and their
    result on validation with shared weights (`validation`). `equal` has the number of validation samples (`samples`),
    the highest accuracy (`best`), its standard error (`error`), and how many `sub_networks` are within that.
    """

    metric: str = "accuracy"
    sub_networks: float = 0
    evaluated: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float | None] = field(default_factory=dict)
    smallest: Mapping[str, float | None] = field(default_factory=dict)
    chosen: Mapping[str, float | None] = field(default_factory=dict)
    equal: Mapping[str, float] = field(default_factory=dict)
    front: tuple[Mapping[str, float], ...] = ()
    layers: Mapping[str, WidthFacts] = field(default_factory=dict)
    blocks: Mapping[str, bool] = field(default_factory=dict)
    kernels: Mapping[str, WidthFacts] = field(default_factory=dict)


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section, if the run searched an architecture."""
    blocks: list[Block] = []
    searches = [stage for stage in record.stages if stage.stage == "search_architecture"]
    for stage in searches:
        facts = decode(ArchitectureFacts, stage.facts)
        if facts.chosen:
            blocks += [Heading(shorten(stage.id)), *_search(facts)]
    if blocks:
        yield Section("Architecture search", blocks)


def _many(count: float) -> str:
    """Return a number of sub-networks; of a large one its power of ten."""
    return f"{count:,.0f}" if count < LARGE else f"more than 10^{int(math.log10(count))}"


def _search(facts: ArchitectureFacts) -> Iterator[Block]:
    limits = ", ".join(f"{_name(name)} {_value(name, limit)}" for name, limit in facts.limits.items())
    yield Text(f"{facts.evaluated:,} of {_many(facts.sub_networks)} sub-networks were evaluated. Limits: {limits}.")
    columns = {"Largest": facts.largest, "Smallest": facts.smallest, "Chosen": facts.chosen}
    yield _table(facts.metric, columns)
    if facts.equal.get("sub_networks", 1) > 1:
        yield Text(_equal(facts.equal))
    yield Text(_left_out(facts))
    rows = [(shorten(name), f"{widths.before:,}", f"{widths.after:,}") for name, widths in facts.layers.items()]
    rows += [
        (f"{shorten(name)}, kernel", _square(sizes.before), _square(sizes.after))
        for name, sizes in facts.kernels.items()
    ]
    yield _folded("Channels and kernels of the chosen sub-network", Table(("Layer name", "Largest", "Chosen"), rows))
    yield _folded("Front of all evaluated sub-networks", _front(facts))


def _equal(equal: Mapping[str, float]) -> str:
    best, error = (number(equal[name], "fraction") for name in ("best", "error"))
    return (
        f"The highest validation accuracy is {best}, its standard error {error} ({equal['samples']:,.0f} samples). "
        f"{equal['sub_networks']:,.0f} sub-networks are within that; the one with the most MACs was chosen, because a "
        "larger network is usually better after further training."
    )


def _table(metric: str, columns: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return the costs and the result on validation of some sub-networks."""
    known = [name for name in ("validation", *COSTS) if all(name in column for column in columns.values())]
    rows = []
    for name in known:
        title = f"validation {metric}" if name == "validation" else COSTS[name][0]
        rows.append((title, *(_value(name, column[name]) for column in columns.values())))
    caption = (
        "Validation with the weights that all sub-networks share, before any further training. Time, memory and file "
        "size are predicted."
    )
    return Table(("Cost", *columns), rows, caption)


def _front(facts: ArchitectureFacts) -> Table:
    names = [name for name in ("latency_ms", "macs", "size_bytes") if all(name in point for point in facts.front)]
    rows = [
        (*(_value(name, point[name]) for name in names), _value("validation", point.get("validation")))
        for point in facts.front
    ]
    return Table((*(_name(name) for name in names), f"validation {facts.metric}"), rows)


def _left_out(facts: ArchitectureFacts) -> str:
    absent = [shorten(name) for name, kept in facts.blocks.items() if not kept]
    if not facts.blocks:
        return "No residual block could be left out."
    if not absent:
        return f"All {len(facts.blocks)} residual blocks are kept."
    return f"{len(absent)} of {len(facts.blocks)} residual blocks are left out: {first(absent, MAX_OPEN)}."


def _folded(title: str, content: Table) -> Block:
    rows = list(content.rows)
    blocks: list[Block] = [Table(content.header, rows[:MAX_ROWS])]
    if len(rows) > MAX_ROWS:
        blocks.append(Text(f"{len(rows) - MAX_ROWS} more are in report.json."))
    return Details(f"{title}: {len(rows)}", blocks, is_open=len(rows) <= MAX_OPEN)


def _name(name: str) -> str:
    return COSTS[name][0] if name in COSTS else shorten(name)


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return number(value, "fraction" if name == "validation" else COSTS[name][1] if name in COSTS else "")


def _square(size: int) -> str:
    return f"{size}x{size}"
