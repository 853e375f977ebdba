"""The comparison of runs as sections, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.core.version import __version__
from compress.report import html, plain_text
from compress.report.blocks import Block, Cell, Section, Style, Table, Text, missing, or_missing, table
from compress.report.run_comparison import (
    ComparedPlacement,
    ComparedRun,
    ComparedStage,
    ComparedValues,
    RunComparison,
    RunDifference,
    in_words,
    summary,
)
from compress.report.wording import MAX_PROSE, moment, seconds, sentence, shorten, show

Row = tuple[Cell | str, ...]
STYLES: dict[bool, Style] = {True: "good", False: "bad"}
"""The style of a change for the better, and of one for the worse."""


def page(comparison: RunComparison) -> str:
    """Return the page of the comparison."""
    return html.render(
        "compare.html.j2",
        runs=[_title(run) for run in comparison.runs],
        lines=summary(comparison),
        limits=comparison.limits,
        sections=sections(comparison),
        coralline=__version__,
    )


def text(comparison: RunComparison) -> str:
    """Return the comparison as text for a terminal."""
    lines = [*summary(comparison), *(f"! {limit}" for limit in comparison.limits)]
    return "\n".join([*lines, "", plain_text.render(sections(comparison))])


def _title(run: ComparedRun) -> str:
    return f"{run.letter}: {shorten(run.name, 40)}"


def sections(comparison: RunComparison) -> list[Section]:
    """Return the sections, in order."""
    heads = tuple(_title(run) for run in comparison.runs)
    return [
        Section("Runs", [_runs(comparison.runs)]),
        Section("Result", _values("Quantity", heads, comparison.results, "The quality is that of the test split.")),
        Section("Settings that differ", list(_settings(comparison, heads))),
        Section("Stage by stage", list(_stages(comparison, heads))),
        Section("Latency", list(_latency(comparison, heads))),
        Section("Memory on the target", _memory(comparison, heads)),
        Section("Placement", list(_placements(comparison))),
    ]


def _runs(runs: Sequence[ComparedRun]) -> Table:
    rows = [
        (
            Cell(_title(run), shorten(run.path, 120)),
            Cell(run.verdict if run.status == "ok" and run.verdict else run.status),
            Cell(moment(run.finished), f"Coralline {shorten(run.coralline)}"),
        )
        for run in runs
    ]
    return Table(("Run", "Status", "Finished"), rows, "Every difference is that from A.")


def _values(head: str, heads: tuple[str, ...], rows: Sequence[ComparedValues], caption: str = "") -> list[Block]:
    """Return the table of quantities: the value of A, then each other value with its difference."""
    cells: list[Row] = [(row.label, show(row.values[0], row.name), *_others(row)) for row in rows]
    return list(or_missing(table((head, *heads), cells, caption), "nothing can be compared"))


def _others(row: ComparedValues, *, with_reason: bool = True) -> Iterator[Cell]:
    for index, (value, difference) in enumerate(zip(row.values[1:], row.differences, strict=True)):
        shown = show(value, row.name)
        remark = in_words(row, index, with_reason=with_reason)
        if shown.style == "missing":
            yield shown
        else:
            yield Cell(shown.text, remark, _style(row, difference))


def _style(row: ComparedValues, difference: RunDifference) -> Style:
    """Return the colour of a difference that is certain."""
    if not difference.value or difference.certain not in ("yes", "exact"):
        return ""
    return STYLES[(difference.value > 0) == row.higher_is_better]


def _settings(comparison: RunComparison, heads: tuple[str, ...]) -> Iterator[Block]:
    rows = [
        (shorten(row.key, 80), *("not in this run" if value is None else shorten(value, 200) for value in row.values))
        for row in comparison.settings
    ]
    if not rows:
        yield Text("All settings are the same.")
        return
    yield Table(("Setting", *heads), [tuple(cell or "empty" for cell in row) for row in rows])


def _stages(comparison: RunComparison, heads: tuple[str, ...]) -> Iterator[Block]:
    """Yield a table for each quantity: stages, and its value in each run."""
    caption = "The quality is that of the validation split; differences are judged by their 95% intervals."
    names = dict.fromkeys(row.label for stage in comparison.stages for row in stage.values)
    for index, label in enumerate(names):
        measured = [
            stage for stage in comparison.stages if any(v.value is not None for v in stage.values[index].values)
        ]
        rows: list[Row] = [(shorten(stage.id), *_stage_cells(stage.values[index])) for stage in measured]
        yield from table((label, *heads), rows, caption if index == 0 else "")
    times: list[Row] = [(shorten(stage.id), *_times(stage)) for stage in comparison.stages]
    totals = [sum(filter(None, column)) for column in zip(*(stage.seconds for stage in comparison.stages), strict=True)]
    times.append(("all stages", *(Cell(seconds(total)) for total in totals)))
    yield from table(("Time", *heads), times, "The time of a stage is that of the run that made it.")


def _stage_cells(row: ComparedValues) -> Iterator[Cell]:
    first = show(row.values[0], row.name)
    yield first if first.style == "missing" else Cell(first.text)
    yield from _others(row, with_reason=False)


def _times(stage: ComparedStage) -> Iterator[Cell]:
    for status, time in zip(stage.statuses, stage.seconds, strict=True):
        yield Cell("no such stage") if status is None else Cell(seconds(time), status)


def _latency(comparison: RunComparison, heads: tuple[str, ...]) -> Iterator[Block]:
    if comparison.latency:
        caption = "Predicted at the highest clock; intervals in which measurements are expected."
        yield from _values("Host", heads, comparison.latency, caption)
    yield from _values("This machine", heads, comparison.cpu_latency, "Measured; times vary from run to run.")


def _memory(comparison: RunComparison, heads: tuple[str, ...]) -> list[Block]:
    if not comparison.memory:
        return [missing("no memory is predicted for this target")]
    return _values("Memory", heads, comparison.memory, "Predicted.")


def _placements(comparison: RunComparison) -> Iterator[Block]:
    for run, placement in zip(comparison.runs[1:], comparison.placement, strict=True):
        if placement is None:
            yield missing(f"{run.letter} cannot be compared with A: a run has no placement")
            continue
        yield from _placement(run, placement)


def _placement(run: ComparedRun, placement: ComparedPlacement) -> Iterator[Block]:
    before, after = (shorten(line, MAX_PROSE) for line in placement.summary)
    yield Text(sentence(f"A: {before}. {run.letter}: {after}"))
    if placement.note:
        yield Text(sentence(placement.note))
        return
    rows = [
        (
            Cell(f"{moved.indices[1]} {shorten(moved.op)}", f"in A: {moved.indices[0]}"),
            f"{moved.placements[0]} → {moved.placements[1]}",
            shorten(moved.reason, MAX_PROSE) or "no reason recorded",
        )
        for moved in placement.moved
    ]
    yield from table(("Operator", f"From A to {run.letter}", "Reason"), rows, "Operators that both have.")
    if not rows:
        yield Text("No operator that both runs have runs elsewhere.")
    for name, operators in (("A", placement.only_first), (run.letter, placement.only_this)):
        if operators:
            yield Text(f"Only in {name}: {shorten(', '.join(operators), MAX_PROSE)}.")
