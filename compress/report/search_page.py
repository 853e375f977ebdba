"""The result of a search as sections, with drawings of the trials, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.core.measurement import Metric
from compress.report import html, markdown, svg
from compress.report.blocks import Block, Cell, Details, Figure, FileLink, Pairs, Section, Table, Text, missing
from compress.report.svg import WIDTH, placed_labels
from compress.report.wording import count, moment, noun, number, seconds, sentence, shorten, show
from compress.results.search import FrontPoint, SearchRecord, TrialRecord

Row = tuple[Cell | str, ...]
MAX_ROWS = 2000
"""Trials in the table of all trials."""
MAX_VALUE = 60
"""Characters of a setting's value."""
LEFT = 78  # px, chosen; numbers with their units fit on its left
RIGHT = 468  # px; svg.WIDTH without a margin
TOP = 30  # px; the name of the axis is above
BOTTOM = 284  # px; ticks and the name of the axis are below
HEIGHT = 332  # px, as charts.trade_off
LEAST_SPAN = 0.05
"""An axis covers at least this fraction of its largest value: smaller differences are none."""
MAX_DRAWN = 2000
"""Trials of a drawing, in addition to the front."""
LOG_FROM = 12.0
"""An axis of costs is logarithmic if the largest value is at least this many times the smallest."""


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
    header = ("Trial", *(metric.label for metric in record.objectives),
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
    result = point.bundle or point.model or point.folder or "not run yet"
    return (
        name,
        *_values(trial, record.objectives),
        *([show(point.test, absent="the run failed")] if has_test else []),
        _settings(trial),
        Cell(shorten(result, 120), point.verdict),
    )


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
        trials = _drawn(record, [first, other])
        if not trials:
            yield missing(f"no complete trial has {noun(first.label)} and {noun(other.label)}")
            continue
        x = _axis([trial.values[other.name] for trial in trials], LEFT, RIGHT - 10, log=True)
        ticks = [svg.tick(x.at(at), BOTTOM, number(at, other.unit) if at else "0") for at in _ticks(x, other.unit)]
        better = "→ more" if other.higher_is_better else "← less"
        name = f"{better} {noun(other.label)}{', logarithmic' if x.log else ''}"
        positions = {trial.number: x.at(trial.values[other.name]) for trial in trials}
        drawing = _drawing(f"search-{other.name}", record, trials, positions, [*ticks, _name_below(name)])
        title = f"{first.label} on validation against {noun(other.label)}, one mark for each complete trial."
        yield Figure(drawing, title, " ".join(_chart_notes(record, trials)), see="All trials")
    if not others:
        yield _course(record)


def _course(record: SearchRecord) -> Block:
    """Return a drawing of the only objective of each trial, in their order."""
    (first,) = record.objectives
    trials = _drawn(record, [first])
    if not trials:
        return missing(f"no complete trial has {noun(first.label)}")
    x = svg.Axis(-0.5, max(trial.number for trial in trials) + 0.5, LEFT, RIGHT)
    ticks = [svg.tick(x.at(tick), BOTTOM, f"{tick:g}") for tick in x.ticks(5) if float(tick).is_integer()]
    positions = {trial.number: x.at(trial.number) for trial in trials}
    drawing = _drawing("search-course", record, trials, positions, [*ticks, _name_below("trial")])
    title = f"{first.label} on validation of each complete trial, in their order."
    return Figure(drawing, title, " ".join(_chart_notes(record, trials)), see="All trials")


def _name_below(name: str) -> str:
    return svg.text(RIGHT, HEIGHT - 6, name, "name", "end")


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
    header = ("Trial", "State", *(metric.label for metric in record.objectives), "Settings", "Time")
    rows = [_trial_row(trial, record) for trial in record.trials[-MAX_ROWS:]]
    title = "Every trial" if len(rows) == len(record.trials) else f"The last {MAX_ROWS:,} trials; search.json has all"
    yield Details(title, [Table(header, rows)])


def _trial_row(trial: TrialRecord, record: SearchRecord) -> Row:
    violated = ", ".join(name for name, excess in trial.excess.items() if excess > 0)
    state = Cell(trial.status, shorten(trial.reason, 300))
    if trial.status == "complete" and violated:
        state = Cell("complete", f"violates {violated}", "bad")
    return (str(trial.number), state, *_values(trial, record.objectives), _settings(trial), seconds(trial.seconds))


def _chart_notes(record: SearchRecord, trials: Sequence[TrialRecord]) -> list[str]:
    """Return what explains the marks and the axes of a drawing of some trials."""
    first = record.objectives[0]
    sentences = [
        "Filled: on the front, with the number of the trial; hollow: another trial that meets all constraints."
    ]
    if any(not trial.is_feasible for trial in trials):
        sentences.append("Crosses: trials that violate a condition.")
    if record.recommended is not None:
        sentences.append("Ring: the recommended trial.")
    undrawn = len(record.trials) - len(trials)
    if undrawn:
        reasons = ["without a result", "with the settings of another one"]
        reasons += [f"older than the last {MAX_DRAWN:,}"] if len(trials) >= MAX_DRAWN else []
        sentences.append(f"Not drawn: {count(undrawn, 'trial')} {', '.join(reasons[:-1])} or {reasons[-1]}.")
    y = _axis([trial.values[first.name] for trial in trials], BOTTOM - 6, TOP)
    if y.low > 0:
        sentences.append(f"The vertical axis begins at {number(y.low, first.unit)}, not at 0.")
    return sentences


def _drawn(record: SearchRecord, metrics: Sequence[Metric]) -> list[TrialRecord]:
    """Return the trials that a drawing of metrics shows: those of the front, and the last others."""
    complete = [t for t in record.trials if t.status == "complete" and all(m.name in t.values for m in metrics)]
    on_front = {point.number for point in record.front}
    older = max(0, len(complete) - MAX_DRAWN)
    return [trial for index, trial in enumerate(complete) if index >= older or trial.number in on_front]


def _axis(values: Sequence[float], start: float, end: float, *, log: bool = False) -> svg.Axis:
    low, high = min(values), max(values)
    if log and 0 < low * LOG_FROM < high:
        return svg.Axis(low / 1.3, high * 1.3, start, end, log=True)
    span = max(high - low, LEAST_SPAN * abs(high)) or 1.0
    room = 0.08 * (high - low) + 0.5 * (span - (high - low))
    return svg.Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)


def _ticks(axis: svg.Axis, unit: str) -> list[float]:
    base = 1024.0 if unit == "bytes" and axis.high >= 4096 else 1.0
    return axis.ticks(4, base)


def _drawing(
    ident: str, record: SearchRecord, trials: Sequence[TrialRecord], x: dict[int, float], below: Sequence[str]
) -> str:
    """Return a drawing of trials, with the first objective as the vertical axis.

    `x` is the horizontal position of each trial by its number, and `below` the horizontal axis.
    """
    first = record.objectives[0]
    y = _axis([trial.values[first.name] for trial in trials], BOTTOM - 6, TOP)
    levels = [svg.level(y.at(tick), LEFT, RIGHT, number(tick, first.unit)) for tick in _ticks(y, first.unit)]
    at = {trial.number: (x[trial.number], y.at(trial.values[first.name])) for trial in trials}
    on_front = {point.number: point for point in record.front}
    named = [trial for trial in trials if trial.number in on_front]
    way = sorted(at[trial.number] for trial in named if not on_front[trial.number].is_dominated)
    labels = [str(trial.number) for trial in named]
    parts = [
        svg.text(10, 14, svg.fit(f"{first.label}, validation", WIDTH - 20), "name"),
        *levels,
        svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"),
        *below,
        *(_mark(trial, at[trial.number], record) for trial in trials if trial.number not in on_front),
        svg.polyline(way, "way"),
        *(_mark(trial, at[trial.number], record) for trial in named),
        *placed_labels(labels, [at[trial.number] for trial in named], []),
    ]
    words = f"{len(trials)} trials, {len(named)} of them on the front: " + "; ".join(
        f"trial {trial.number}: {first.name} {trial.values[first.name]:.4g}" for trial in named
    )
    return svg.svg(ident, (WIDTH, HEIGHT), f"{first.label} of the trials", words, parts)


def _mark(trial: TrialRecord, at: tuple[float, float], record: SearchRecord) -> str:
    values = ", ".join(number(trial.values[m.name], m.unit) for m in record.objectives if m.name in trial.values)
    tip = svg.tip(f"trial {trial.number}: {values}")
    if not trial.is_feasible:
        left, right, top, low = (svg.n(value) for value in (at[0] - 4, at[0] + 4, at[1] - 4, at[1] + 4))
        return f'<path d="M{left} {top}L{right} {low}M{left} {low}L{right} {top}" class="cut">{tip}</path>'
    if trial.number not in {point.number for point in record.front}:
        return svg.circle(*at, 4, "original ring", tip)
    ring = svg.circle(*at, 9, "whisker") if trial.number == record.recommended else ""
    return ring + svg.circle(*at, 5, "dot", tip)
