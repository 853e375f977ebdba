"""The sections on the classes: the quality of each, confusions, and what the confidence of an answer means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compress.core.measurement import Measurement, origin
from compress.core.measurement import missing as missing_measurement
from compress.report import charts
from compress.report.blocks import Block, Cell, Columns, Details, Figure, Section, Table, Text, missing, table
from compress.report.wording import absence, count, noun, number, shorten, show
from compress.results.encoding import decode
from compress.results.evaluation import ClassRecord, ConfusionRecord
from compress.results.run import BundleRecord, ConfidenceRecord, RunRecord

MAX_DRAWN = 40  # chosen; a chart of 700 px. The table has all classes
MAX_IN_MATRIX = 30  # chosen; cells of 23 px fit the width of the page
MAX_NEXT_TO_CHANGES = 12
"""A matrix of more classes has the width of the page, and the most frequent confusions are listed too."""
MAX_CONFUSIONS = 12  # chosen; about one screen
MAX_LOSSES = 5  # chosen; the table of all classes has the others
HEADER = ("Class", "Original", "Result", "Change")
AT_HALF = "At IoU 0.5"


def section(record: RunRecord) -> Section:
    """Return the section."""
    comparison = record.comparison
    if comparison is None or not comparison.per_class or record.data is None:
        return Section("Classes", [missing(absence(record))])
    classes = [shorten(name, 100) for name in record.data.classes]
    in_charts = {name if len(name) <= 11 else name[:7] + name[-3:] for name in classes}
    if len(in_charts) < len(classes):  # charts would shorten different names to the same text
        classes = [f"{number} {name}" for number, name in enumerate(classes)]
    labels = dict(zip(record.data.classes, classes, strict=True))
    # The worst class first; classes without a value are last.
    changes = [(_change(row), replace(row, name=labels.get(row.name, row.name))) for row in comparison.per_class]
    ranked = [row for change, row in sorted(changes, key=lambda pair: (pair[0].value is None, pair[0].value or 0.0))]
    rows = [_row(row) for row in ranked]
    quality = record.quality.label
    figure = _changes(ranked, quality)
    confusions = _confusions(comparison.confusion, classes)
    return Section(
        "Classes",
        [
            Columns([column for column in ([figure], confusions[:1]) if column]),
            *confusions[1:],
            *_losses(ranked, rows, quality),
            Details(_all_classes(len(rows)), [Table(_header(ranked), rows)]),
        ],
    )


def _all_classes(count: int) -> str:
    """Return the title of the table of all classes."""
    return f"{count} classes as a table"


def _confusions(confusion: ConfusionRecord | None, classes: Sequence[str]) -> list[Block]:
    """Return the matrix; if it is wide, the most frequent confusions before it, or alone if it is too large.

    Empty for a task without confusions.
    """
    if confusion is None:
        return []
    counts = confusion.result
    is_wide = len(counts) > MAX_NEXT_TO_CHANGES
    blocks = [_frequent(classes, counts)] if is_wide else []
    if len(counts) <= MAX_IN_MATRIX:
        caption = "Counted on the test split. Shade: fraction of the row, and "
        caption += "stronger for wrong answers; blue: right, red: wrong; a dot is 0."
        svg = charts.confusion_matrix(classes, counts)
        blocks.append(Figure(svg, "Confusion matrix of the result.", caption, is_wide, _counts(classes, counts)))
    return blocks


def _counts(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Table:
    """Return the counts that are not 0."""
    rows = [
        (shorten(classes[actual]), shorten(classes[predicted]), f"{samples:,}")
        for actual, row in enumerate(counts)
        for predicted, samples in enumerate(row)
        if samples
    ]
    empty = ("no class", "no class", "0")
    return Table(
        ("True class", "Predicted class", "Samples"), rows or [empty], "Pairs of classes without samples are left out."
    )


def _change(row: ClassRecord) -> Measurement:
    if row.original.value is None or row.result.value is None:
        return missing_measurement("fraction", "a value is missing")
    return Measurement(row.result.value - row.original.value, "fraction", origin(row.original, row.result))


def _row(row: ClassRecord) -> tuple[Cell, ...]:
    head = Cell(row.name, count(row.samples, row.counted))
    cells = (head, show(row.original), show(row.result), show(_change(row), "accuracy_change"))
    if row.ap50 is None:
        return cells
    before, after = row.ap50.get("original"), row.ap50.get("result")
    if before is None or after is None:
        return (*cells, Cell("no object"))
    return (*cells, Cell(f"{number(before, 'fraction')} → {number(after, 'fraction')}"))


def _header(rows: Sequence[ClassRecord]) -> tuple[str, ...]:
    return HEADER if rows[0].ap50 is None else (*HEADER, AT_HALF)


def _changes(ranked: Sequence[ClassRecord], quality: str) -> Block:
    drawn = [row for row in ranked if row.original.value is not None and row.result.value is not None][:MAX_DRAWN]
    if not drawn:
        return missing("no class has both values")
    caption = "Measured on the test split. Ring: original; dot: result; thin line: 95% interval of the result."
    if len(drawn) < len(ranked):
        caption += f" The {len(drawn)} worst of {len(ranked)} classes are drawn; all are in the table."
    title = f"Change of {noun(quality)} per class, worst first."
    caption = " ".join([caption, *charts.class_notes(drawn)])
    return Figure(charts.class_changes(drawn, quality), title, caption, see=_all_classes(len(ranked)))


def _losses(ranked: Sequence[ClassRecord], rows: Sequence[tuple[Cell, ...]], quality: str) -> list[Block]:
    """Return the classes with the largest loss; a sentence if no class lost anything."""
    losses = sum((_change(row).value or 0) < 0 for row in ranked)
    caption = "Classes with the largest loss."
    no_loss = Text(f"None of {len(rows)} classes lost {noun(quality)}.")
    return table(_header(ranked), rows[: min(losses, MAX_LOSSES)], caption) or [no_loss]


def _frequent(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Block:
    """Return the most frequent confusions."""
    rows = [
        (shorten(classes[actual]), shorten(classes[predicted]), f"{samples:,}", f"{sum(counts[actual]):,}")
        for samples, actual, predicted in charts.confusions(counts)[:MAX_CONFUSIONS]
    ]
    caption = "Most frequent confusions of the result, counted on the test split."
    if len(counts) > MAX_IN_MATRIX:
        caption += f" The matrix is drawn for up to {MAX_IN_MATRIX} classes."
    if not rows:
        return Text("The result confuses no classes.")
    return Table(("True class", "Predicted class", "Samples", "Of"), rows, caption)


ROWS = {
    "ece_before": "Calibration error (ECE) before",
    "ece_after": "Calibration error (ECE) after",
    "false_reject": "False rejects: a known class, answered unknown",
}
FALSE_ACCEPTS = "False accepts: no known class, answered with a class"


def confidence(record: RunRecord) -> Iterator[Section]:
    """Yield the section on the last `package` that calibrated a classifier."""
    bundles = [decode(BundleRecord, stage.facts) for stage in record.stages if stage.stage == "package"]
    confidences = [bundle.confidence for bundle in bundles if bundle.confidence is not None]
    if confidences:
        yield Section("Confidence", list(_blocks(confidences[-1])))


def _blocks(facts: ConfidenceRecord) -> Iterator[Block]:
    threshold = "none" if facts.threshold is None else number(facts.threshold, "fraction")
    fitted = f"temperature {number(facts.temperature, 'fraction')}, threshold of the answer unknown {threshold}"
    yield Text(f"Fitted on the validation split, for a false-reject rate of {facts.false_reject_rate:g}: {fitted}.")
    rows: list[tuple[Cell | str, ...]] = []
    for key, title in ROWS.items():
        splits = [facts.measured.get(split, {}) for split in ("validation", "test")]
        rows.append((title, *(show(measured.get(key), absent="the split is empty") for measured in splits)))
    accepted = facts.measured.get("unknown", {}).get("false_accept")
    needed = show(None, absent="it needs images without the classes")
    rows.append((FALSE_ACCEPTS, needed, show(accepted, absent="not measured")))
    yield Table(("Measurement", "Validation", "Test"), rows)
