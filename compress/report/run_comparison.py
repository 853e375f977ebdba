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

import numpy as np
from numpy.typing import NDArray

from compress.core.measurement import SIZES, Measurement, Metric, drop, mcnemar, missing
from compress.report import markdown
from compress.report.blocks import Cell, Section, Table
from compress.report.wording import interval, moment, shorten, show
from compress.results.encoding import encode
from compress.results.run import RunRecord

SIGNIFICANT = 0.05
"""Probability of a chance result below which a difference is certain."""
LETTERS = string.ascii_uppercase
MEMORY = (
    Metric("cached_bytes", "Parameters in the memory of the chip", "bytes", ""),
    Metric("streamed_bytes", "Parameters that are sent at every inference", "bytes", ""),
    Metric("activation_bytes", "Activations in a tile", "bytes", ""),
)
"""The predicted sizes of the placement."""
CHANGE = "difference_change"
"""The name of a difference, by which it is written with its sign."""
VERDICTS = {"yes": ", certain", "no": ", not certain", "unknown": ""}
COUNTED = ("MACs", "parameters", "bytes")
"""The units of values that do not vary by chance."""
Certainty = Literal["yes", "no", "unknown", "exact"]


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
    certain: Certainty
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
            text = self._in_words(difference)
            if shown.style == "missing":
                yield shown
            elif not difference.value or difference.certain not in ("yes", "exact"):
                yield Cell(shown.text, text)
            elif (difference.value > 0) == self.higher_is_better:
                yield Cell(shown.text, f"{text}, better", "good")
            else:
                yield Cell(shown.text, f"{text}, worse", "bad")

    def _in_words(self, difference: RunDifference) -> str:
        if difference.value is None:
            return difference.reason
        if difference.value == 0 and difference.low is None:
            return "no difference"
        change = Measurement(difference.value, self.unit, "measured", difference.low, difference.high)
        text = f"{show(change, CHANGE).text} {interval(change, CHANGE)}".rstrip()
        if difference.certain == "exact":
            return text
        return f"{text}{VERDICTS[difference.certain]}: {difference.reason}"


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


def _limits(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what cannot be compared."""
    first = records[0]
    for letter, record in zip(LETTERS, records, strict=False):
        if _quality_names(record) != _quality_names(first):
            yield f"The task of {letter} has other metrics than that of A: their quality cannot be compared."
        if record.models is None:
            yield f"{letter} ended before the models were compared: the results are missing."
        if record is not first and first.data and record.data and not _same_samples(first, record):
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
    """Yield what at least one run has: quality (only if all have the same metrics), sizes, latencies and memory."""
    first, *others = records
    known = [_measurements(record) for record in records]
    hosts = dict.fromkeys(host for record in records if record.placement for host in record.placement.expected_latency)
    metrics = [*SIZES, *(Metric(host, f"Latency on {host}", "ms", "") for host in hosts), *MEMORY]
    if all(_quality_names(record) == _quality_names(first) for record in others):
        metrics = [*first.metrics, *metrics]
    for metric in metrics:
        if not any(metric.name in of_run for of_run in known):
            continue
        values = tuple(
            of_run.get(metric.name, missing(metric.unit, _reason(record, metric)))
            for of_run, record in zip(known, records, strict=True)
        )
        differences = tuple(
            _paired(first, record, metric) or _difference(values[0], value)
            for record, value in zip(others, values[1:], strict=True)
        )
        yield ComparedValues(metric.name, metric.label, metric.unit, metric.higher_is_better, values, differences)


def _reason(record: RunRecord, metric: Metric) -> str:
    """Return why a run has no value of a quantity."""
    if metric not in (*record.metrics, *SIZES):
        return "not predicted"
    return "no value was recorded" if record.models else "the run ended before the models were compared"


def _measurements(record: RunRecord) -> dict[str, Measurement]:
    """Return the measurements of the result, and the predictions for it, by name."""
    found = dict(record.models.result.measurements) if record.models else {}
    if record.placement is not None:
        found |= {host: latency.measurement for host, latency in record.placement.expected_latency.items()}
        sizes = {metric.name: getattr(record.placement, metric.name) for metric in MEMORY}
        found |= {name: Measurement(size, "bytes", "predicted") for name, size in sizes.items() if size is not None}
    return {
        name: measurement if _is_finite(measurement) else missing(measurement.unit, "no finite value was recorded")
        for name, measurement in found.items()
    }


def _is_finite(measurement: Measurement) -> bool:
    ends = (measurement.value, measurement.low, measurement.high)
    return all(end is None or isfinite(end) for end in ends)


def _paired(first: RunRecord, second: RunRecord, metric: Metric) -> RunDifference | None:
    """Compare two results sample by sample: McNemar's test, and Newcombe's interval. None if that is not possible."""
    if not _same_samples(first, second) or metric != first.quality or metric.unit != "fraction":
        return None
    before = _right(first)
    after = _right(second)
    if before is None or after is None or len(before) != len(after):
        return None
    lost = int((before & ~after).sum())
    gained = int((after & ~before).sum())
    probability = mcnemar(lost, gained)
    reason = (
        f"the same {len(before):,} test samples: {gained:,} are answered correctly only by this run, {lost:,} only by "
        f"A; McNemar's test: p = {probability:.2g}"
    )
    change = drop(after, before)
    certain: Certainty = "yes" if probability < SIGNIFICANT else "no"
    return RunDifference(change.value, certain, reason, change.low, change.high)


def _right(record: RunRecord) -> NDArray[np.bool_] | None:
    """Return for each sample whether the result answers it correctly; None if that is not known."""
    answers = None if record.comparison is None else record.comparison.right
    try:
        content = bytes.fromhex("" if answers is None else answers.result)
    except ValueError:
        return None
    bits = np.unpackbits(np.frombuffer(content, np.uint8))
    if answers is None or not 0 < answers.samples <= len(bits) < answers.samples + 8:
        return None
    return bits[: answers.samples].astype(bool)


def _difference(first: Measurement, second: Measurement) -> RunDifference:
    """Compare two measurements: counts exactly, others by their 95% intervals."""
    if first.value is None or second.value is None:
        return RunDifference(None, "unknown", "a value is missing")
    difference = second.value - first.value
    if first.unit in COUNTED:
        return RunDifference(difference, "exact", "counted")
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return RunDifference(difference, "unknown", "without intervals it is not known whether this is chance")
    if second.low > first.high or second.high < first.low:
        return RunDifference(difference, "yes", "the 95% intervals do not overlap")
    return RunDifference(difference, "no", "the 95% intervals overlap")
