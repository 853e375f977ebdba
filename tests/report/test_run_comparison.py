"""`compare`: differences between runs, their certainty, and limits of the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from run_records import RECORDS, Record, failed, full, m, regression

from compress.report import run_comparison
from compress.report.run_comparison import ComparedValues, RunComparison
from compress.results.run import RunRecord


def compared(*records: Record) -> RunComparison:
    return run_comparison.compare(
        [RunRecord.from_json(record) for record in records], [f"runs/{index}" for index in range(len(records))]
    )


def quantity(comparison: RunComparison, name: str) -> ComparedValues:
    return next(row for row in comparison.values if row.name == name)


def answers(record: Record, right: str, samples: int = 16) -> Record:
    """Return the same run with other samples that the result answers correctly, given as bits."""
    text = right.ljust(-(-samples // 8) * 8, "0")
    digits = f"{int(text, 2):0{len(text) // 4}x}"
    record["comparison"]["right"] = {"samples": samples, "original": digits, "result": digits}
    record["models"]["result"]["measurements"]["accuracy"] = m(right.count("1") / samples, "fraction", reach=0.2)
    return record


def test_the_same_run_has_no_difference() -> None:
    comparison = compared(full(), full())
    assert comparison.settings == {}
    assert comparison.limits == ()
    assert {row.differences[0].value for row in comparison.values} == {0}
    assert quantity(comparison, "accuracy").differences[0].certain == "no"
    text = comparison.text()
    assert "All settings are the same." in text


def test_settings_that_differ_are_listed_with_those_that_are_missing() -> None:
    other = full()
    other["seed"] = 1
    other["pipeline"]["model"] = {"file": "m.h5"}
    other["stages"][2]["settings"]["epochs"] = 9
    other["stages"] = other["stages"][:-1]
    other["environment"]["tools"]["numpy"] = "2.5.0"
    rows = compared(full(), other).settings
    assert rows["model.builder"] == ("cnn", None)
    assert rows["model.file"] == (None, "m.h5")
    assert rows["prune.epochs"] == ("4", "9")
    assert rows["stages"] == (
        "load, train, prune, distill, quantize, compile, package",
        "load, train, prune, distill, quantize, compile",
    )
    assert rows["version of.numpy"] == ("2.4.6", "2.5.0")
    assert "name" not in rows


@pytest.mark.parametrize(
    ("second", "certain", "reason"),
    [
        ("1" * 16, "no", "McNemar's test: p = 1"),
        ("0" * 10 + "1" * 6, "yes", "0 are answered correctly only by this run, 10 only by A"),
        ("0" * 3 + "1" * 13, "no", "0 are answered correctly only by this run, 3 only by A"),
    ],
)
def test_the_same_samples_are_compared_one_by_one(second: str, certain: str, reason: str) -> None:
    comparison = compared(answers(full(), "1" * 16), answers(full(), second))
    difference = quantity(comparison, "accuracy").differences[0]
    assert difference.certain == certain
    assert reason in difference.reason
    assert difference.value == pytest.approx(second.count("1") / 16 - 1)
    assert difference.low is not None
    assert difference.high is not None
    assert difference.value is not None
    assert difference.low <= difference.value <= difference.high


def test_bits_of_a_number_of_samples_that_is_no_multiple_of_eight() -> None:
    first, second = answers(full(), "1" * 11, 11), answers(full(), "1" * 10 + "0", 11)
    assert "0 are answered correctly only by this run, 1 only by A" in (
        quantity(compared(first, second), "accuracy").differences[0].reason
    )


@pytest.mark.parametrize(
    "right",
    [
        None,
        {"samples": 0, "original": "", "result": ""},
        {"samples": 16, "original": "ff", "result": "ff"},
        {"samples": 16, "original": "zzzz", "result": "zzzz"},
        {"samples": 10**12, "original": "ffff", "result": "ffff"},
        {"samples": 17, "original": "ffffff", "result": "ffffff"},
    ],
)
def test_without_usable_answers_the_intervals_are_compared(right: Any) -> None:
    other = answers(full(), "0" * 16)
    other["comparison"]["right"] = right
    difference = quantity(compared(answers(full(), "1" * 16), other), "accuracy").differences[0]
    assert (difference.certain, difference.reason) == ("yes", "the 95% intervals do not overlap")


def test_other_samples_are_compared_by_intervals_and_it_is_said() -> None:
    other = answers(full(), "0" * 3 + "1" * 13)
    other["data"]["samples_digest"] = "77" * 32
    comparison = compared(answers(full(), "1" * 16), other)
    difference = quantity(comparison, "accuracy").differences[0]
    assert (difference.certain, difference.reason) == ("no", "the 95% intervals overlap")
    assert comparison.limits == (
        "The test samples of B are not known to be those of A: differences of the quality may come from the data.",
    )
    for record in (old := full(), other):
        record["data"]["samples_digest"] = ""  # written by an older version
    assert compared(old, other).limits


def test_a_quality_without_interval_is_never_certain() -> None:
    other = regression()
    other["models"]["result"]["measurements"]["r2"] = m(0.5, "fraction")
    comparison = compared(regression(), other)
    assert [row.differences[0].certain for row in comparison.values[:2]] == ["unknown", "unknown"]
    assert quantity(comparison, "r2").differences[0].value == pytest.approx(2.1)


def test_what_cannot_be_compared() -> None:
    other = regression()
    other["target"] = {"name": "cpu", "summary": "a CPU"}
    other["environment"] |= {"node": "elsewhere"}
    limits = compared(full(), other, failed()).limits
    assert [limit.partition(":")[0].partition(" than")[0] for limit in limits] == [
        "The task of B has other metrics",
        "B has another target",
        "C ended before the models were compared",
    ]
    assert all(row.name not in ("accuracy", "r2") for row in compared(full(), other).values)


def test_latency_and_memory_are_predicted_for_each() -> None:
    other = full()
    other["placement"]["expected_latency"]["usb3"] |= {"latency_ms": 9.0, "low_ms": 7.0, "high_ms": 11.0}
    other["placement"]["cached_bytes"] = 100_000
    comparison = compared(full(), other)
    usb3 = quantity(comparison, "usb3")
    assert (usb3.differences[0].value, usb3.differences[0].certain) == (pytest.approx(7.1), "yes")
    cached = quantity(comparison, "cached_bytes")
    assert (cached.differences[0].value, cached.differences[0].certain) == (9888, "exact")
    assert "+9.7 KiB, worse" in comparison.text()


def test_three_runs_are_compared_with_the_first() -> None:
    second, third = full(), full()
    second["models"]["result"]["measurements"]["size_bytes"] = m(100_000, "bytes")
    third["models"]["result"]["measurements"]["size_bytes"] = m(200_000, "bytes")
    comparison = compared(full(), second, third)
    assert [difference.value for difference in quantity(comparison, "size_bytes").differences] == [-6824, 93_176]
    assert [heading[:3] for heading in comparison.table.header[1:]] == ["A: ", "B: ", "C: "]


@pytest.mark.parametrize("name", RECORDS)
def test_any_two_runs_can_be_compared(name: str) -> None:
    comparison = compared(full(), RECORDS[name]())
    json.dumps(comparison.to_json(), allow_nan=False)
    text = comparison.text()
    assert not set("\x1b\u202e") & set(text)
    assert ("B ended before the models were compared" in text) == (name in ("failed", "bare"))


# --- the command --------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, record in (("one", full()), ("two", answers(full(), "1" * 16))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(record))
    return tmp_path


def test_the_command(coralline: tiny.Coralline, runs: Path) -> None:
    done = coralline("compare", "one", "two/report.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "two/report.json" in done.stdout
    assert "McNemar's test" in done.stdout
    report = json.loads(coralline("compare", "one", "two", "--json").stdout)
    assert (report["schema_version"], report["runs"]) == (1, {"A": "one", "B": "two"})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["one"], 2, "compare: 1 runs; allowed: 2 to 6 runs"),
        (["one"] * 7, 2, "compare: 7 runs; allowed: 2 to 6 runs"),
        (["one", "three"], 2, "three: cannot be read: No such file or directory; give the folder of a run"),
        (["one", "."], 2, "report.json: cannot be read: No such file or directory; give the folder of a run"),
        (["one", "text"], 2, "text: is not the record of a run (Expecting value"),
        (["one", "list"], 2, "list: is not the record of a run (schema_version is not 1)"),
        (["one", "deep"], 2, "deep: is not the record of a run"),
        (["one", "part"], 2, "part: is not the record of a run"),
    ],
)
def test_arguments_that_are_no_runs(
    coralline: tiny.Coralline, runs: Path, arguments: list[str], code: int, message: str
) -> None:
    (runs / "text").write_text("no JSON")
    (runs / "list").write_text("[]")
    (runs / "deep").write_text("[" * 100_000)
    (runs / "part").write_text('{"schema_version": 1, "name": "x"}')
    done = coralline("compare", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"coralline: {message}")
    assert len(done.stderr.splitlines()) == 1
