"""The section on the classes: the change of each, and the confusions of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.measurement import Measurement
from compress.measurement import missing as missing_measurement
from compress.report import charts
from compress.report.blocks import Block, Cell, Columns, Details, Figure, Section, Table, Text, missing
from compress.report.record import ClassRecord, ComparisonRecord, RunRecord
from compress.report.verdict import absence
from compress.report.wording import noun, shorten, show

MAX_DRAWN = 40
MAX_IN_MATRIX = 30
MAX_NEXT_TO_CHANGES = 12
"""A matrix of more classes has the width of the page, and the most frequent confusions are listed too."""
MAX_CONFUSIONS = 12
MAX_LOSSES = 5
HEADER = ("Class", "Original", "Result", "Change")


def section(record: RunRecord) -> Section:
    """Return the section."""
    comparison = record.comparison
    if comparison is None or not comparison.per_class:
        return Section("Classes", [missing(absence(record))])
    names = _distinct([shorten(row.name, 100) for row in comparison.per_class])
    ranked = sorted(zip(names, comparison.per_class, strict=True), key=lambda pair: _rank(_change(pair[1])))
    rows = [_row(name, row) for name, row in ranked]
    quality = record.quality.label
    return Section(
        "Classes",
        [
            *_figures(comparison, ranked, names, quality),
            *_losses(ranked, rows, quality),
            Details(f"All {len(rows)} classes as a table", [Table(HEADER, rows)]),
        ],
    )


def _figures(
    comparison: ComparisonRecord, ranked: Sequence[tuple[str, ClassRecord]], names: Sequence[str], quality: str
) -> list[Block]:
    """Return the changes next to the matrix; next to the most frequent confusions if the matrix is wide."""
    changes = _changes(ranked, quality)
    counts = comparison.confusion.result if comparison.confusion is not None else ()
    if len(counts) != len(names):
        return [Columns([[changes], [missing("no confusion matrix was recorded for these classes")]])]
    caption = "Counted on the test split. Shade: fraction of the row; blue: right, red: wrong; a dot is 0."
    is_wide = len(counts) > MAX_NEXT_TO_CHANGES
    matrix = Figure(charts.confusion_matrix(names, counts), "Confusion matrix of the result.", caption, is_wide)
    if not is_wide:
        return [Columns([[changes], [matrix]])]
    side_by_side = Columns([[changes], [_confusions(names, counts)]])
    return [side_by_side, matrix] if len(counts) <= MAX_IN_MATRIX else [side_by_side]


def _distinct(names: list[str]) -> list[str]:
    """Return the names, numbered if charts would shorten different names to the same text."""
    shortened = {name if len(name) <= 11 else name[:7] + name[-3:] for name in names}
    return names if len(shortened) == len(names) else [f"{i} {name}" for i, name in enumerate(names)]


def _change(row: ClassRecord) -> Measurement:
    before, after = row.original.value, row.result.value
    if before is None or after is None:
        return missing_measurement("fraction", "a value is missing")
    is_measured = row.original.how == row.result.how == "measured"
    return Measurement(after - before, "fraction", "measured" if is_measured else "predicted")


def _rank(change: Measurement) -> tuple[bool, float]:
    """Return the sort key, worst class first; classes without a value are last."""
    return change.value is None, change.value or 0.0


def _row(name: str, row: ClassRecord) -> tuple[Cell, ...]:
    change = show(_change(row), "accuracy_change")
    return Cell(name, f"{row.samples:,} samples"), show(row.original), show(row.result), change


def _changes(ranked: Sequence[tuple[str, ClassRecord]], quality: str) -> Block:
    drawn = [change for name, row in ranked if (change := _drawn(name, row)) is not None][:MAX_DRAWN]
    if not drawn:
        return missing("no class has both values")
    caption = "Measured on the test split. Ring: original; dot: result; light band: 95% interval of the result."
    if len(drawn) < len(ranked):
        caption += f" The {len(drawn)} worst of {len(ranked)} classes are drawn; all are in the table."
    title = f"Change of {noun(quality)} per class, worst first."
    return Figure(charts.class_changes(drawn), title, caption)


def _drawn(name: str, row: ClassRecord) -> charts.ClassChange | None:
    before, after = row.original.value, row.result.value
    if before is None or after is None:
        return None
    return charts.ClassChange(name, row.samples, before, after, row.result.low, row.result.high)


def _losses(
    ranked: Sequence[tuple[str, ClassRecord]], rows: Sequence[tuple[Cell, ...]], quality: str
) -> Iterator[Block]:
    """Yield the classes with the largest loss."""
    changes = [_change(row).value for _, row in ranked]
    losses = [row for row, change in zip(rows, changes, strict=True) if change is not None and change < 0]
    if losses:
        yield Table(HEADER, losses[:MAX_LOSSES], "Classes with the largest loss.")
    else:
        yield Text(f"None of {len(changes)} classes lost {noun(quality)}.")


def _confusions(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Block:
    """Return the most frequent confusions."""
    rows = []
    for confusion in charts.confusions(counts)[:MAX_CONFUSIONS]:
        actual, predicted = shorten(names[confusion.actual]), shorten(names[confusion.predicted])
        rows.append((actual, predicted, f"{confusion.samples:,}", f"{sum(counts[confusion.actual]):,}"))
    if not rows:
        return Text("The result confuses no classes.")
    limit = "" if len(counts) <= MAX_IN_MATRIX else f" The matrix is drawn for up to {MAX_IN_MATRIX} classes."
    caption = f"Most frequent confusions of the result, counted on the test split.{limit}"
    return Table(("True class", "Predicted class", "Samples", "Of"), rows, caption)
