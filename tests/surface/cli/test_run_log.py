"""run.log: times, the output of libraries, its size, and the last lines after a crash."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from compress.surface.cli import log_writer, run_log
from compress.surface.cli.log_writer import END, OWN, LogLines
from compress.surface.cli.run_log import RunLog

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def written(path: Path, work: str = "") -> list[str]:
    """Run statements with the log `log`; return the lines of the log file."""
    with open(os.devnull, "w") as terminal:
        log = RunLog(path, terminal.fileno())
        exec(work, {"log": log, "os": os})
        log.close()
    return path.read_text().splitlines()


def lines_of(*parts: bytes) -> tuple[list[str], LogLines]:
    """Return the lines that the writer makes from bytes of the pipe, and the writer."""
    stream = io.BytesIO()
    lines = LogLines(stream)
    for part in parts:
        lines.feed(part)
    lines.close()
    return [re.sub(TIME, "T", line) for line in stream.getvalue().decode().splitlines()], lines


def test_every_line_has_the_time_the_seconds_and_the_stage(tmp_path: Path) -> None:
    work = "log.write('first'); log.stage = 'train'; log.write('train: note'); log.write('one\\n  two')"
    head, *lines = written(tmp_path / "made" / "run.log", work)
    assert re.fullmatch(rf"===== {TIME}: coralline \S+, process {os.getpid()} =====", head)
    patterns = (r"first", r"train: note", r"train: one")
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(rf"{TIME} +\d+\.\d s  {pattern}", line)
    assert lines[3] == "      two"


def test_a_second_run_is_appended_with_a_mark(tmp_path: Path) -> None:
    first = written(tmp_path / "run.log", "log.write('a')")
    second = written(tmp_path / "run.log", "log.write('b')")
    assert second[: len(first)] == first
    assert [line for line in second if line.startswith("=====")] == [second[0], second[2]]


def test_the_output_of_libraries_is_marked_and_in_order(tmp_path: Path) -> None:
    work = "log.write('before'); os.write(log.fileno(), b'W0000 noise\\npart'); log.write('after')"
    lines = written(tmp_path / "run.log", work)
    assert [re.sub(rf"{TIME} +(\d+\.\d s +)?", "", line) for line in lines[1:]] == [
        *("before", "| W0000 noise", "| part", "after"),
    ]


def test_repeated_lines_are_counted_even_if_their_times_differ() -> None:
    header = "W0000 00:00:1795519533.40780{}    8290 "
    lines, _ = lines_of(
        *(f"{header.format(second)}node.cc:31] slow\n".encode() for second in range(3)),
        b"2026-11-24 11:25:39.783992: W graph\n2026-11-24 11:25:41.1: W graph\n",
        b"step 1\nstep 2\n",  # printed by a user's function
    )
    assert lines == [
        f"T | {header.format(0)}node.cc:31] slow",
        *("T | 2026-11-24 11:25:39.783992: W graph", "T | step 1", "T | step 2"),
        "T | left out of the output of libraries: 3 repeated lines",
    ]


def test_own_lines_are_never_left_out() -> None:
    lines, _ = lines_of(OWN + b"same\n" + OWN + b"same\n")
    assert lines == ["same", "same"]


def test_bytes_that_are_no_text_and_a_bar_that_is_overwritten() -> None:
    lines, _ = lines_of(b"\x1b[31mred\x07\n", b"10%\r20%\r30%\n", b"\n  \n", b"x" * 9000 + b"\n")
    assert lines[:2] == ["T | [31mred", "T | 30%"]
    assert len(lines) == 3
    assert len(lines[2]) == len("T | ") + log_writer.MAX_LINE_BYTES


def test_a_library_cannot_fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MAX_LIBRARY_BYTES", 100)
    noise = b"".join(b"line " + bytes([97 + index % 26]) * (index + 1) + b"\n" for index in range(50))
    lines, _ = lines_of(noise, OWN + b"ours\n")
    assert sum(map(len, lines)) < 400
    left_out = 50 - len(lines) + 2
    summary = f"0 repeated lines, and {left_out} lines above 100 bytes"
    assert lines[-2:] == ["ours", f"T | left out of the output of libraries: {summary}"]


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MAX_BYTES", 100)
    lines, _ = lines_of(*(OWN + b"y" * 20 + b"\n" for _ in range(100)))
    assert len(lines) == 5


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    _, lines = lines_of(*[b"z" * 60_000] * 20)
    assert len(lines.last[0]) == log_writer.MAX_LINE_BYTES


def test_a_large_log_loses_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "LARGE_BYTES", 1000)
    monkeypatch.setattr(run_log, "KEPT_BYTES", 200)
    path = tmp_path / "run.log"
    path.write_text("".join(f"line {index:03}\n" for index in range(200)))
    lines = written(path)
    assert lines[0] == "===== earlier lines are removed ====="
    assert lines[1] == "line 178"
    assert lines[-2] == "line 199"
    assert list(tmp_path.iterdir()) == [path]


def test_the_end_in_order_and_a_crash() -> None:
    _, lines = lines_of(OWN + b"a\n" + OWN + END + b"\n")
    assert lines.ended
    _, lines = lines_of(OWN + b"a\n", b"F0000 Check failed\n")
    assert not lines.ended
    report = log_writer.crash_report(lines, "runs/x/run.log", killed=False)
    assert report.splitlines() == [
        "coralline: the process ended without a message. The last lines of runs/x/run.log:",
        *("  a", "  F0000 Check failed", "coralline: run the same command to continue"),
    ]
    assert "because memory was short" in log_writer.crash_report(lines, "x", killed=True)


def test_the_counter_of_killed_processes(tmp_path: Path) -> None:
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 5\noom_kill 3\n")
    assert log_writer.killed_processes(str(path)) == 3
    path.write_text("nr_free_pages 5\n")
    assert log_writer.killed_processes(str(path)) is None
    assert log_writer.killed_processes(str(tmp_path / "none")) is None


CRASH = """
import os, sys
from pathlib import Path
from compress.surface.cli.console import Console
from compress.core.progress import RunStep
with Console(Path(sys.argv[1])) as console, console.working(RunStep("train", 1, 2)) as progress:
    progress.note("on the way")
    os.write(2, b"F0000 check failed: rank\\n")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("os.abort()", -signal.SIGABRT), ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("os._exit(3)", 3)],
)
def test_a_crash_shows_the_last_lines(tmp_path: Path, end: str, status: int) -> None:
    log = tmp_path / "run.log"
    code = CRASH.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert done.returncode == status
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "on the way"
    assert lines[1] == f"coralline: the process ended without a message. The last lines of {log}:"
    assert "  F0000 check failed: rank" in lines
    assert lines[-1] == "coralline: run the same command to continue"
    assert "F0000 check failed: rank" in log.read_text()
    assert log.read_text().splitlines()[-1].endswith(" the process ended without a message")


def test_an_end_in_order_shows_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(end="pass"), str(tmp_path / "run.log")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "on the way\n")


def test_without_another_process_the_log_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    lines = written(tmp_path / "run.log", "log.write('here'); os.write(log.fileno(), b'noise\\n')")
    assert lines[1].endswith("here")
    assert lines[2] == "noise"
