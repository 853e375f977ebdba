"""The result of a search as sections, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.core.measurement import Metric
from compress.report import html, markdown, search_chart
from compress.report.blocks import Block, Cell, Details, Figure, FileLink, Pairs, Section, Table, Text, missing
from compress.report.wording import count, moment, noun, number, seconds, sentence, shorten, show
from compress.results.search import FrontPoint, SearchRecord, TrialRecord

Row = tuple[Cell | str, ...]
MAX_ROWS = 2000
"""Trials in the table of all trials."""
MAX_VALUE = 60
"""Characters of a setting's value."""


def page(record: SearchRecord) -> str:
    """Return the page of the search."""
    return html.render("search.html.j2", record=record, finished=moment(record.finished), outcome=_outcome(record),
                       sections=sections(record))  # fmt: skip


def text(record: SearchRecord) -> str:
    """Return the result of the search as text for a terminal."""
    lines = [markdown.plain_text([_front(record)]).rstrip("\n"), "", _outcome(record)]
    return "\n".join([*lines, *(sentence(note) for note in record.notes)])


def _outcome(record: SearchRecord) -> str:
    """Return the recommendation as a sentence."""
    if record.recommended is None:
        return sentence(f"No trial is recommended: {record.reason}")
    return sentence(f"Trial {record.recommended} is recommended: {record.reason}")


def sections(record: SearchRecord) -> list[Section]:
    """Return the sections, in order."""
    return [
        _front(record),
        Section("Trade-off", list(_figures(record))),
        Section("Constraints", list(_constraints(record))),
        Section("What was varied", [Pairs([(name, shorten(words, 400)) for name, words in record.settings.items()])]),
        Section("All trials", list(_trials(record))),
    ]


def _front(record: SearchRecord) -> Section:
    if not record.front:
        return Section("Front", [missing(record.reason)])
    has_test = any(point.test is not None for point in record.front)
    header = ("Trial", *(_head(metric) for metric in record.objectives),
              *(["Test split"] if has_test else []), "Settings", "Result")  # fmt: skip
    rows = [_front_row(record, point, has_test=has_test) for point in record.front]
    caption = "Trials that no other one beats in everything. They were chosen by the validation split alone."
    dominated = [str(point.number) for point in record.front if point.is_dominated]
    if dominated:
        caption += f" All of them exceed the budget, except {', '.join(dominated)}: the best trials within it."
    if has_test:
        caption += " The test split is read once the search is over, and changes nothing."
    reported = [point for point in record.front if point.test is not None]
    links = [FileLink(f"{point.folder}/report.html", f"trial {point.number}") for point in reported]
    return Section("Front", [Table(header, rows, caption), *([Details("Reports", links)] if links else [])])


def _front_row(record: SearchRecord, point: FrontPoint, *, has_test: bool) -> Row:
    trial = record.trial(point.number)
    name = Cell(str(point.number), "recommended", "good") if point.number == record.recommended else str(point.number)
    test = show(point.test, absent="the run failed") if has_test else None
    result = point.bundle or point.model or point.folder or "not run yet"
    tests = [] if test is None else [test]
    return (
        name,
        *_values(trial, record.objectives),
        *tests,
        _settings(trial),
        Cell(shorten(result, 120), point.verdict),
    )


def _head(metric: Metric) -> str:
    return metric.label


def _values(trial: TrialRecord, objectives: Sequence[Metric]) -> Iterator[Cell | str]:
    for metric in objectives:
        value = trial.values.get(metric.name)
        yield "not measured" if value is None else number(value, metric.unit)


def _settings(trial: TrialRecord) -> str:
    return ", ".join(f"{name} {value_text(value)}" for name, value in trial.settings.items())


def value_text(value: object) -> str:
    """Return the value of a setting on one line."""
    if isinstance(value, list | tuple):
        return shorten(f"[{', '.join(map(value_text, value))}]", MAX_VALUE)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else shorten(str(value), MAX_VALUE)


def _figures(record: SearchRecord) -> Iterator[Block]:
    """Yield a drawing of the first objective against each other one; of one objective, its course."""
    first, *others = record.objectives
    for other in others:
        if not search_chart.drawn(record, [first, other]):
            yield missing(f"no complete trial has {noun(first.label)} and {noun(other.label)}")
            continue
        svg = search_chart.trade_off(record, first, other)
        title = f"{first.label} on validation against {noun(other.label)}, one mark for each complete trial."
        yield Figure(svg, title, " ".join(search_chart.notes(record, first, other)), see="All trials")
    if not others and not search_chart.drawn(record, [first]):
        yield missing(f"no complete trial has {noun(first.label)}")
    elif not others:
        svg = search_chart.course(record, first)
        title = f"{first.label} on validation of each complete trial, in their order."
        yield Figure(svg, title, " ".join(search_chart.notes(record, first, None)), see="All trials")


def _constraints(record: SearchRecord) -> Iterator[Block]:
    if record.host:
        yield Text(f"Latency is predicted for {record.host}. No device has run the models.")
    yield Text(f"Optuna's {record.sampler} chose the trials.")
    for constraint in record.constraints:
        yield Text(sentence(constraint))
    if not record.constraints:
        yield Text("No constraints were set.")
    for note in record.notes:
        yield Text(sentence(note))


def _trials(record: SearchRecord) -> Iterator[Block]:
    counts = {status: sum(trial.status == status for trial in record.trials)
              for status in ("complete", "stopped", "failed", "repeated", "interrupted", "running")}  # fmt: skip
    words = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    if not record.trials:
        yield missing("no trial has begun")
        return
    yield Text(f"{count(len(record.trials), 'trial')}: {words}. They took {seconds(record.seconds)}.")
    header = ("Trial", "State", *(_head(metric) for metric in record.objectives), "Settings", "Time")
    rows = [_trial_row(trial, record) for trial in record.trials[-MAX_ROWS:]]
    title = "Every trial" if len(rows) == len(record.trials) else f"The last {MAX_ROWS:,} trials; search.json has all"
    yield Details(title, [Table(header, rows)])


def _trial_row(trial: TrialRecord, record: SearchRecord) -> Row:
    violated = ", ".join(name for name, excess in trial.excess.items() if excess > 0)
    state = Cell(trial.status, shorten(trial.reason, 300))
    if trial.status == "complete" and violated:
        state = Cell("complete", f"violates {violated}", "bad")
    return (str(trial.number), state, *_values(trial, record.objectives), _settings(trial), seconds(trial.seconds))
