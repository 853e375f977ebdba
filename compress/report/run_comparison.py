"""The comparison of runs as values, each run against the first one.

Every difference says whether it is certain. Two runs with the same test samples are compared sample by sample where
their records say which samples are answered correctly; otherwise their intervals are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import isfinite
from typing import Any, Literal

from compress.core.measurement import LATENCIES, SIZES, Measurement, Metric, mcnemar, missing, paired_drop
from compress.report.json_values import encode
from compress.report.record import PlacementRecord, RightAnswersRecord, RunRecord
from compress.report.wording import MINUS, count, noun, number

Certain = Literal["yes", "no", "unknown", "exact"]
SIGNIFICANT = 0.05
"""Probability of a chance result below which a difference is certain."""
ALIKE = 0.002
"""Costs that differ by a smaller fraction are nearly the same."""
MOST_MOVED = 200
MOST_ALIGNED = 2000
"""Operators of a model of which placements are compared one by one."""
MOST_SETTINGS = 400
MEMORY = {
    "cached_bytes": "Parameters in the memory of the chip",
    "streamed_bytes": "Parameters that are sent at every inference",
    "activation_bytes": "Activations in a tile",
}
"""The names of the predicted sizes of the placement."""
DEPTH = 8


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
    certain: Certain
    reason: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparedValues:
    """A quantity in each run.

    Attributes:
        name: its key.
        label: its name.
        unit: its unit.
        higher_is_better: whether a larger value is better.
        values: the measurement in each run.
        differences: from the first run, for every other run.
    """

    name: str
    label: str
    unit: str
    higher_is_better: bool
    values: tuple[Measurement, ...]
    differences: tuple[RunDifference, ...]


@dataclass(frozen=True)
class ComparedSetting:
    """A setting with its value in each run; None where a run does not have it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class ComparedStage:
    """A stage in each run.

    Attributes:
        id: its id.
        statuses: its status in each run; None in a run without it.
        seconds: the time that it took when it was made.
        values: the quality on the validation split, then the costs.
    """

    id: str
    statuses: tuple[str | None, ...]
    seconds: tuple[float | None, ...]
    values: tuple[ComparedValues, ...]


@dataclass(frozen=True)
class MovedOperator:
    """An operator whose placement differs from that in the first run.

    Attributes:
        op: its name.
        indices: its index in the first run, and in the other one.
        placements: its placement in both.
        reason: the reason of the placement in the other run, or in the first one.
    """

    op: str
    indices: tuple[int, int]
    placements: tuple[str, str]
    reason: str


@dataclass(frozen=True)
class ComparedPlacement:
    """The placement of a run against the first one.

    Attributes:
        summary: one line about each of the two.
        moved: the operators that are in both, and run elsewhere.
        only_first: operators that only the first run has, with their number, such as "2 CONV_2D".
        only_this: those that only this run has.
        note: why the operators were not compared one by one; "" if they were.
    """

    summary: tuple[str, str]
    moved: tuple[MovedOperator, ...] = ()
    only_first: tuple[str, ...] = ()
    only_this: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class ComparedRun:
    """A run of the comparison.

    Attributes:
        letter: its name in the comparison.
        path: where it was read.
        name: the name of the pipeline.
        status: its status.
        verdict: the level of the verdict; "" without one.
        finished: when it ended.
        coralline: the version.
    """

    letter: str
    path: str
    name: str
    status: str
    verdict: str
    finished: str
    coralline: str


@dataclass(frozen=True)
class RunComparison:
    """The comparison of runs.

    Attributes:
        runs: the runs.
        limits: what cannot be compared, as sentences.
        settings: the settings that differ.
        results: quality on the test split, and costs.
        stages: stage by stage, the quality on the validation split.
        latency: the predicted latency of each host.
        cpu_latency: times on the CPU of the machine of the run.
        memory: predicted sizes on the target.
        placement: for every run but the first.
    """

    runs: tuple[ComparedRun, ...]
    limits: tuple[str, ...]
    settings: tuple[ComparedSetting, ...]
    results: tuple[ComparedValues, ...]
    stages: tuple[ComparedStage, ...]
    latency: tuple[ComparedValues, ...]
    cpu_latency: tuple[ComparedValues, ...]
    memory: tuple[ComparedValues, ...]
    placement: tuple[ComparedPlacement | None, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, schema 1."""
        return {"schema_version": 1, **encode(self)}


def compare(records: Sequence[RunRecord], paths: Sequence[str]) -> RunComparison:
    """Compare runs with the first one.

    Args:
        records: two or more.
        paths: where they were read.
    """
    return RunComparison(
        runs=tuple(_run(record, path, index) for index, (record, path) in enumerate(zip(records, paths, strict=True))),
        limits=tuple(_limits(records)),
        settings=tuple(_settings(records)),
        results=tuple(_results(records)),
        stages=tuple(_stages(records)),
        latency=tuple(_latency(records)),
        cpu_latency=tuple(_cpu_latency(records)),
        memory=tuple(_memory(records)),
        placement=tuple(_placement(records[0], record) for record in records[1:]),
    )


def _run(record: RunRecord, path: str, index: int) -> ComparedRun:
    verdict = "" if record.verdict is None else record.verdict.level
    letter = chr(ord("A") + index)
    return ComparedRun(letter, path, record.name, record.status, verdict, record.finished, record.coralline)


def _letters(records: Sequence[RunRecord], kept: Iterable[bool]) -> str:
    """Return the letters of some runs."""
    return ", ".join(chr(ord("A") + index) for index, is_kept in enumerate(kept) if is_kept)


def _limits(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what cannot be compared."""
    first = records[0]
    other_task = [_quality_names(record) != _quality_names(first) for record in records]
    if any(other_task):
        yield (
            f"The task of {_letters(records, other_task)} has other metrics than that of A: their quality cannot be "
            "compared."
        )
    early = [record.models is None for record in records]
    if any(early):
        yield f"{_letters(records, early)} ended before the models were compared: the results are missing."
    other_data = [not _same_samples(first, record) and record.data is not None for record in records]
    if first.data is not None and any(other_data):
        yield (
            f"The test samples of {_letters(records, other_data)} are not known to be those of A: differences of the "
            "quality may come from the data."
        )
    other_target = [record.target.name != first.target.name for record in records]
    if any(other_target):
        yield f"{_letters(records, other_target)} has another target than A, so placement and latency differ."
    if any(_machine(record) != _machine(first) for record in records):
        yield "The runs were on different machines: their times, and latencies on the CPU, cannot be compared."


def _quality_names(record: RunRecord) -> list[str]:
    return [metric.name for metric in record.metrics]


def _machine(record: RunRecord) -> tuple[str, str]:
    return (record.environment.node, record.environment.cpu)


def _same_samples(first: RunRecord, second: RunRecord) -> bool:
    """Whether two runs are known to have the same test samples in the same order."""
    if first is second:
        return True
    if first.data is None or second.data is None or not first.data.samples_digest:
        return False
    return first.data.samples_digest == second.data.samples_digest


def _settings(records: Sequence[RunRecord]) -> Iterator[ComparedSetting]:
    """Yield the settings that differ."""
    maps = [dict(itertools.islice(_all_settings(record), MOST_SETTINGS * 10)) for record in records]
    keys = dict.fromkeys(key for settings in maps for key in settings)
    differing = (ComparedSetting(key, tuple(settings.get(key) for settings in maps)) for key in keys)
    yield from itertools.islice((row for row in differing if len(set(row.values)) > 1), MOST_SETTINGS)


def _all_settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield every setting of a run: the pipeline file, the settings of each stage with the defaults, the tools."""
    pipeline = {key: value for key, value in record.pipeline.items() if key not in ("stages", "name")}
    yield from _flat(pipeline, "", DEPTH)
    yield "stages", ", ".join(stage.id for stage in record.stages)
    yield "target", record.target.name
    for stage in record.stages:
        yield from _flat(stage.settings, stage.id, DEPTH)
    yield "coralline", record.coralline
    yield from ((f"version of {tool}", version) for tool, version in record.environment.tools.items())
    yield "python", record.environment.python
    yield "cpu", record.environment.cpu


def _flat(value: Any, key: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield plain values with dotted keys."""
    if isinstance(value, Mapping) and value and depth:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}".lstrip("."), depth - 1)
    elif isinstance(value, list | tuple) and depth and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{key}[{index}]", depth - 1)
    else:
        yield key, _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _results(records: Sequence[RunRecord]) -> Iterator[ComparedValues]:
    """Yield the quality of the results on the test split, and their costs."""
    same_task = all(_quality_names(record) == _quality_names(records[0]) for record in records)
    for metric in records[0].metrics if same_task else ():
        values = [_result(record, metric) for record in records]
        differences = [_quality_difference(records[0], record, metric) for record in records[1:]]
        yield _compared(metric, values, differences)
    for metric in SIZES:
        values = [_result(record, metric) for record in records]
        yield _compared(metric, values, [_exact(values[0], value) for value in values[1:]])


def _compared(metric: Metric, values: Sequence[Measurement], differences: Sequence[RunDifference]) -> ComparedValues:
    better = metric.higher_is_better
    return ComparedValues(metric.name, metric.label, metric.unit, better, tuple(values), tuple(differences))


def _result(record: RunRecord, metric: Metric) -> Measurement:
    if record.models is None:
        return missing(metric.unit, "the run ended before the models were compared")
    return _finite(record.models.result.measurements.get(metric.name), metric, "not recorded")


def _finite(measurement: Measurement | None, metric: Metric, absent: str) -> Measurement:
    """Return a measurement if its value can be compared, otherwise a missing one with the reason."""
    if measurement is None:
        return missing(metric.unit, absent)
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
    values = [_result(record, metric) for record in (first, second)]
    if _same_samples(first, second) and metric == first.quality and metric.unit == "fraction":
        answers = [_right(record) for record in (first, second)]
        if answers[0] is not None and answers[1] is not None and answers[0][1] == answers[1][1]:
            return _paired(answers[0][0], answers[1][0], answers[0][1])
    return _by_intervals(values[0], values[1])


def _right(record: RunRecord) -> tuple[int, int] | None:
    """Return the samples that the result answers correctly, as bits, and the number of samples; None if unknown."""
    answers = None if record.comparison is None else record.comparison.right
    if answers is None or not _is_complete(answers):
        return None
    padding = -answers.samples % 8
    return int(answers.result, 16) >> padding, answers.samples


def _is_complete(answers: RightAnswersRecord) -> bool:
    """Whether there is a bit for each sample."""
    digits = set(answers.result) <= set("0123456789abcdef")
    return digits and answers.samples > 0 and len(answers.result) == 2 * -(-answers.samples // 8)


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
    low = None if drop.high is None else -drop.high
    high = None if drop.low is None else -drop.low
    certain: Certain = "yes" if probability < SIGNIFICANT else "no"
    return RunDifference(-(drop.value or 0.0) or 0.0, certain, reason, low, high)


def _by_intervals(first: Measurement, second: Measurement) -> RunDifference:
    """Compare two measurements by their 95% intervals."""
    if first.value is None or second.value is None:
        return RunDifference(None, "unknown", "a value is missing")
    difference = second.value - first.value
    ends = (first.low, first.high, second.low, second.high)
    if any(end is None for end in ends):
        return RunDifference(difference, "unknown", "without intervals it is not known whether this is chance")
    low, high, other_low, other_high = (float(end) for end in ends if end is not None)
    if other_low > high or other_high < low:
        return RunDifference(difference, "yes", "the 95% intervals do not overlap")
    return RunDifference(difference, "no", "the 95% intervals overlap")


def _stages(records: Sequence[RunRecord]) -> Iterator[ComparedStage]:
    """Yield the stages of all runs by id, in the order of the first run that has them."""
    maps = [{stage.id: stage for stage in record.stages} for record in records]
    same_task = all(_quality_names(record) == _quality_names(records[0]) for record in records)
    metrics = [*records[0].metrics[: 1 if same_task else 0], *(metric for metric in SIZES if metric.name in _HEADLINE)]
    for ident in dict.fromkeys(ident for stages in maps for ident in stages):
        run_stages = [stages.get(ident) for stages in maps]
        rows = []
        for metric in metrics:
            absent = "the run has no such stage"
            measured = [None if stage is None else stage.measurements.get(metric.name) for stage in run_stages]
            values = [_finite(measurement, metric, absent) for measurement in measured]
            compare = _exact if metric in SIZES else _by_intervals
            rows.append(_compared(metric, values, [compare(values[0], value) for value in values[1:]]))
        yield ComparedStage(
            ident,
            tuple(None if stage is None else stage.status for stage in run_stages),
            tuple(None if stage is None else stage.seconds for stage in run_stages),
            tuple(rows),
        )


def _latency(records: Sequence[RunRecord]) -> Iterator[ComparedValues]:
    """Yield the predicted latency on every host."""
    maps = [record.placement.expected_latency if record.placement else {} for record in records]
    for host in dict.fromkeys(host for hosts in maps for host in hosts):
        values = []
        for hosts in maps:
            expected = hosts.get(host)
            if expected is None:
                values.append(missing("ms", "not predicted"))
            else:
                values.append(Measurement(expected.latency_ms, "ms", "predicted", expected.low_ms, expected.high_ms))
        differences = [_by_intervals(values[0], value) for value in values[1:]]
        yield ComparedValues(host, f"Latency on {host}", "ms", False, tuple(values), tuple(differences))


def _cpu_latency(records: Sequence[RunRecord]) -> Iterator[ComparedValues]:
    """Yield times on the CPU: they are compared on one machine only, and vary from run to run."""
    for metric in LATENCIES:
        values = [_result(record, metric) for record in records]
        differences = []
        for record, value in zip(records[1:], values[1:], strict=True):
            if _machine(record) != _machine(records[0]):
                differences.append(RunDifference(None, "unknown", "measured on another machine"))
            else:
                exact = _exact(values[0], value)
                differences.append(RunDifference(exact.value, "unknown", "measured at another time"))
        label = metric.label.replace("Latency", "Time on the CPU of the machine")
        yield ComparedValues(metric.name, label, "ms", False, tuple(values), tuple(differences))


def _memory(records: Sequence[RunRecord]) -> Iterator[ComparedValues]:
    """Yield the predicted sizes on the target."""
    for name, label in MEMORY.items():
        values = []
        for record in records:
            size = getattr(record.placement, name, None)
            if size is None:
                values.append(missing("bytes", "not predicted"))
            else:
                values.append(Measurement(float(size), "bytes", "predicted"))
        if any(value.value is not None for value in values):
            differences = [_exact(values[0], value) for value in values[1:]]
            yield ComparedValues(name, label, "bytes", False, tuple(values), tuple(differences))


def _placement(first: RunRecord, second: RunRecord) -> ComparedPlacement | None:
    """Return the operators whose placement differs; None if a run has no placement."""
    if first.placement is None or second.placement is None:
        return None
    before, after = first.placement, second.placement
    summary = (before.summary, after.summary)
    if max(len(before.ops), len(after.ops)) > MOST_ALIGNED:
        note = f"with more than {MOST_ALIGNED:,} operators they are not compared one by one"
        return ComparedPlacement(summary, note=note)
    return _aligned(before, after, summary)


def _aligned(before: PlacementRecord, after: PlacementRecord, summary: tuple[str, str]) -> ComparedPlacement:
    """Compare two sequences of operators; their names have no meaning across runs, but their order has."""
    names = [operator.op for operator in before.ops]
    other_names = [operator.op for operator in after.ops]
    moved: list[MovedOperator] = []
    removed: list[str] = []
    added: list[str] = []
    matcher = SequenceMatcher(None, names, other_names, autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag != "equal":
            removed += names[start:end]
            added += other_names[other_start:other_end]
            continue
        for one, two in zip(before.ops[start:end], after.ops[other_start:other_end], strict=True):
            if one.placement != two.placement:
                reason = two.reason if not two.on_tpu else one.reason
                processors = (one.processor, two.processor)
                moved.append(MovedOperator(two.op, (one.index, two.index), processors, reason))
    return ComparedPlacement(summary, tuple(moved[:MOST_MOVED]), _counted(removed), _counted(added))


def _counted(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with their numbers, the most frequent first."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return tuple(f"{number:,} {name}" for name, number in sorted(counts.items(), key=lambda pair: -pair[1]))


def in_words(row: ComparedValues, index: int, *, with_reason: bool = True) -> str:
    """Return a difference with its sign, and whether it is certain.

    Args:
        row: the quantity.
        index: the index of the difference.
        with_reason: whether to add how that was decided.
    """
    difference, unit = row.differences[index], row.unit
    if difference.value is None:
        return difference.reason
    base = row.values[0].value or 0.0
    if difference.value == 0 and difference.low is None:
        return "no difference"
    if difference.low is None and unit != "fraction" and abs(difference.value) < ALIKE * abs(base):
        return "nearly the same"
    text = signed(difference.value, unit)
    if difference.low is not None and difference.high is not None:
        text += f" [{signed(difference.low, unit)}, {signed(difference.high, unit)}]"
    if difference.certain in ("yes", "exact") and difference.value:
        text += ", better" if (difference.value > 0) == row.higher_is_better else ", worse"
    verdicts = {"yes": ", certain", "no": ", not certain", "unknown": "", "exact": ""}
    text += verdicts[difference.certain]
    return f"{text}: {difference.reason}" if with_reason and difference.certain != "exact" else text


def signed(value: float, unit: str) -> str:
    """Return a number with its sign."""
    text = number(abs(value), unit)
    return text if value == 0 else f"{'+' if value > 0 else MINUS}{text}"


def summary(comparison: RunComparison) -> list[str]:
    """Return one sentence for each run but the first: what changed."""
    lines = []
    for index, run in enumerate(comparison.runs[1:]):
        parts = []
        for row in comparison.results:
            difference = row.differences[index]
            if difference.value is None or (row.name not in _HEADLINE and row is not comparison.results[0]):
                continue
            parts.append(f"{noun(row.label)} {signed(difference.value, row.unit)}{_doubt(difference)}")
        moved = comparison.placement[index]
        if moved is not None and moved.moved:
            parts.append(f"{count(len(moved.moved), 'operator')} placed differently")
        lines.append(f"{run.letter} against A: {', '.join(parts) or 'no value can be compared'}.")
    return lines


def _doubt(difference: RunDifference) -> str:
    return {"no": " (not certain)", "yes": " (certain)", "unknown": " (uncertain: no interval)", "exact": ""}[
        difference.certain
    ]


_HEADLINE = ("size_bytes", "macs")
