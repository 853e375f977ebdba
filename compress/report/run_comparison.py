"""`compare`: two or more runs in one table, each against the first one.

Every difference says whether it is certain. Two runs with the same test samples are compared sample by sample where
their records say which samples are answered correctly; otherwise their intervals are compared.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from compress.core.measurement import SIZES, Measurement, Metric, mcnemar, missing, paired_drop
from compress.report import markdown
from compress.report.blocks import Cell, Section, Table
from compress.report.wording import MINUS, moment, number, shorten, show
from compress.results.encoding import encode
from compress.results.run import RunRecord

SIGNIFICANT = 0.05
"""Probability of a chance result below which a difference is certain."""
LETTERS = string.ascii_uppercase
MEMORY = {
    "cached_bytes": "Parameters in the memory of the chip",
    "streamed_bytes": "Parameters that are sent at every inference",
    "activation_bytes": "Activations in a tile",
}
"""The names of the predicted sizes of the placement."""
VERDICTS = {"yes": ", certain", "no": ", not certain", "unknown": "", "exact": ""}


@dataclass(frozen=True)
class RunDifference:
    """The difference of a value from that of the first run.

    Attributes:
        value: this run minus the first one; None if it cannot be calculated.
        certain: whether it is more than chance: "yes", "no", "unknown"; "exact" for values that do not vary.
        reason: how that was decided.
        low: the lower end of the 95% interval of a paired comparison.
        high: the upper end.
    """

    value: float | None
    certain: Literal["yes", "no", "unknown", "exact"]
    reason: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparedValues:
    """A quantity: its measurement in each run, and for every run but the first the difference from the first."""

    name: str
    label: str
    unit: str
    higher_is_better: bool
    values: tuple[Measurement, ...]
    differences: tuple[RunDifference, ...]

    def cells(self) -> Iterator[Cell]:
        """Yield the value of each run, with its difference in words; a certain difference has a colour."""
        yield show(self.values[0], self.name)
        for value, difference in zip(self.values[1:], self.differences, strict=True):
            shown = show(value, self.name)
            if shown.style == "missing":
                yield shown
                continue
            is_certain = difference.value and difference.certain in ("yes", "exact")
            is_better = ((difference.value or 0) > 0) == self.higher_is_better
            text = self._in_words(difference)
            if is_certain:
                yield Cell(shown.text, f"{text}, {'better' if is_better else 'worse'}", "good" if is_better else "bad")
            else:
                yield Cell(shown.text, text)

    def _in_words(self, difference: RunDifference) -> str:
        if difference.value is None:
            return difference.reason
        if difference.value == 0 and difference.low is None:
            return "no difference"
        text = _signed(difference.value, self.unit)
        if difference.low is not None and difference.high is not None:
            text += f" [{_signed(difference.low, self.unit)}, {_signed(difference.high, self.unit)}]"
        reason = "" if difference.certain == "exact" else f": {difference.reason}"
        return text + VERDICTS[difference.certain] + reason


@dataclass(frozen=True)
class RunComparison:
    """The comparison of runs.

    Attributes:
        runs: the path of each run, by its letter.
        limits: what cannot be compared, as sentences.
        values: quality on the test split, sizes, latencies, and memory on the target.
        settings: the settings that differ, with their value in each run; None where a run does not have one.
        table: all that for people.
    """

    runs: Mapping[str, str]
    limits: tuple[str, ...]
    values: tuple[ComparedValues, ...]
    settings: Mapping[str, tuple[str | None, ...]]
    table: Table

    def to_json(self) -> dict[str, Any]:
        """Return plain values, schema 1."""
        content = encode(self)
        del content["table"]
        return {"schema_version": 1, **content}

    def text(self) -> str:
        """Return the comparison as text for a terminal."""
        limits = "".join(f"! {limit}\n" for limit in self.limits)
        return markdown.plain_text([Section("Comparison of runs", [self.table])]) + limits


def compare(records: Sequence[RunRecord], paths: Sequence[str]) -> RunComparison:
    """Compare runs, which were read from `paths`, with the first one."""
    values, settings = tuple(_values(records)), _settings(records)
    rows: list[tuple[Cell | str, ...]] = [("Run", *(Cell(shorten(path, 80)) for path in paths))]
    rows.append(("Status", *(Cell(record.judgement, moment(record.finished)) for record in records)))
    rows += [(row.label, *row.cells()) for row in values]
    for key, differing in settings.items():
        shown = ("not in this run" if value is None else shorten(value, 200) or "empty" for value in differing)
        rows.append((shorten(key, 80), *shown))
    heads = [f"{LETTERS[index]}: {shorten(record.name, 40)}" for index, record in enumerate(records)]
    caption = "Differences are from A; the quality is that of the test split. "
    caption += "The settings that differ follow." if settings else "All settings are the same."
    table = Table(("Quantity or setting", *heads), rows, caption)
    return RunComparison(dict(zip(LETTERS, paths, strict=False)), tuple(_limits(records)), values, settings, table)


def _signed(value: float, unit: str) -> str:
    text = number(abs(value), unit)
    return text if value == 0 else f"{'+' if value > 0 else MINUS}{text}"


def _limits(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what cannot be compared."""
    first = records[0]
    for letter, record in zip(LETTERS, records, strict=False):
        if _quality_names(record) != _quality_names(first):
            yield f"The task of {letter} has other metrics than that of A: their quality cannot be compared."
        if record.models is None:
            yield f"{letter} ended before the models were compared: the results are missing."
        if first.data is not None and record.data is not None and not _same_samples(first, record):
            yield (
                f"The test samples of {letter} are not known to be those of A: "
                "differences of the quality may come from the data."
            )
        if record.target.name != first.target.name:
            yield f"{letter} has another target than A, so placement and latency differ."


def _quality_names(record: RunRecord) -> list[str]:
    return [metric.name for metric in record.metrics]


def _same_samples(first: RunRecord, second: RunRecord) -> bool:
    """Whether two runs are known to have the same test samples in the same order."""
    if first is second:
        return True
    digests = [record.data.samples_digest if record.data else "" for record in (first, second)]
    return digests[0] == digests[1] != ""


def _settings(records: Sequence[RunRecord]) -> dict[str, tuple[str | None, ...]]:
    """Return the settings that differ: of the pipeline file, of each stage with the defaults, and versions of tools."""
    of_runs = []
    for record in records:
        pipeline = {key: value for key, value in record.pipeline.items() if key not in ("stages", "name")}
        stages = {stage.id: stage.settings for stage in record.stages}
        versions = {"coralline": record.coralline, **record.environment.tools}
        of_runs.append(dict(_flat({**pipeline, "stages": ", ".join(stages), **stages, "version of": versions}, "")))
    keys = dict.fromkeys(key for settings in of_runs for key in settings)
    rows = {key: tuple(settings.get(key) for settings in of_runs) for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _flat(value: Any, key: str, depth: int = 8) -> Iterator[tuple[str, str]]:
    """Yield the values of nested maps as text with dotted keys, down to a depth that only a foreign record exceeds."""
    if isinstance(value, Mapping) and value and depth:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}".lstrip("."), depth - 1)
    else:
        yield key, f"{value:.6g}" if isinstance(value, float) else str(value)


def _values(records: Sequence[RunRecord]) -> Iterator[ComparedValues]:
    """Yield quality, sizes, latencies and memory."""
    first = records[0]
    same_task = all(_quality_names(record) == _quality_names(first) for record in records)
    for metric in first.metrics if same_task else ():
        values = [_result(record, metric) for record in records]
        differences = [_quality_difference(first, record, metric) for record in records[1:]]
        yield _compared(metric, values, differences)
    for metric in SIZES:
        values = [_result(record, metric) for record in records]
        yield _compared(metric, values, [_exact(values[0], value) for value in values[1:]])
    placements = [record.placement for record in records]
    hosts = [placement.expected_latency if placement else {} for placement in placements]
    for host in dict.fromkeys(host for of_run in hosts for host in of_run):
        predictions = [of_run.get(host) for of_run in hosts]
        values = [missing("ms", "not predicted") if each is None else each.measurement for each in predictions]
        differences = [_by_intervals(values[0], value) for value in values[1:]]
        yield _compared(Metric(host, f"Latency on {host}", "ms", ""), values, differences)
    for name, label in MEMORY.items():
        sizes = [getattr(placement, name, None) for placement in placements]
        unknown = missing("bytes", "not predicted")
        values = [unknown if size is None else Measurement(size, "bytes", "predicted") for size in sizes]
        if any(size is not None for size in sizes):
            differences = [_exact(values[0], value) for value in values[1:]]
            yield _compared(Metric(name, label, "bytes", ""), values, differences)


def _compared(metric: Metric, values: Sequence[Measurement], differences: Sequence[RunDifference]) -> ComparedValues:
    better = metric.higher_is_better
    return ComparedValues(metric.name, metric.label, metric.unit, better, tuple(values), tuple(differences))


def _result(record: RunRecord, metric: Metric) -> Measurement:
    """Return a measurement of the result if it can be compared, otherwise a missing one with the reason."""
    if record.models is None:
        return missing(metric.unit, "the run ended before the models were compared")
    measurement = record.models.result.measurements.get(metric.name)
    if measurement is None:
        return missing(metric.unit, "not recorded")
    ends = (measurement.value, measurement.low, measurement.high)
    if any(end is not None and not isfinite(end) for end in ends):
        return missing(metric.unit, "no finite value was recorded")
    return measurement


def _exact(first: Measurement, second: Measurement) -> RunDifference:
    """Return the difference of values that do not vary by chance."""
    if first.value is None or second.value is None:
        return RunDifference(None, "unknown", "a value is missing")
    return RunDifference(second.value - first.value, "exact", "counted")


def _quality_difference(first: RunRecord, second: RunRecord, metric: Metric) -> RunDifference:
    """Return the difference of a quality of the results, by samples if that is possible."""
    if _same_samples(first, second) and metric == first.quality and metric.unit == "fraction":
        answers = [_right(record) for record in (first, second)]
        if answers[0] is not None and answers[1] is not None and answers[0][1] == answers[1][1]:
            return _paired(answers[0][0], answers[1][0], answers[0][1])
    return _by_intervals(_result(first, metric), _result(second, metric))


def _right(record: RunRecord) -> tuple[int, int] | None:
    """Return the samples that the result answers correctly, as bits, and the number of samples; None if unknown."""
    answers = None if record.comparison is None else record.comparison.right
    if answers is None or answers.samples <= 0 or len(answers.result) != 2 * -(-answers.samples // 8):
        return None
    if not set(answers.result) <= set("0123456789abcdef"):
        return None
    return int(answers.result, 16) >> -answers.samples % 8, answers.samples


def _paired(first: int, second: int, samples: int) -> RunDifference:
    """Compare two models sample by sample: McNemar's test, and Newcombe's interval."""
    lost = (first & ~second).bit_count()
    gained = (second & ~first).bit_count()
    both = (first & second).bit_count()
    drop = paired_drop(both, lost, gained, samples - both - lost - gained)
    probability = mcnemar(lost, gained)
    reason = (
        f"the same {samples:,} test samples: {gained:,} are answered correctly only by this run, {lost:,} only by A; "
        f"McNemar's test: p = {probability:.2g}"
    )
    low, high = (None if end is None else -end for end in (drop.high, drop.low))
    return RunDifference(-(drop.value or 0.0) or 0.0, "yes" if probability < SIGNIFICANT else "no", reason, low, high)


def _by_intervals(first: Measurement, second: Measurement) -> RunDifference:
    """Compare two measurements by their 95% intervals."""
    if first.value is None or second.value is None:
        return RunDifference(None, "unknown", "a value is missing")
    difference = second.value - first.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return RunDifference(difference, "unknown", "without intervals it is not known whether this is chance")
    if second.low > first.high or second.high < first.low:
        return RunDifference(difference, "yes", "the 95% intervals do not overlap")
    return RunDifference(difference, "no", "the 95% intervals overlap")
