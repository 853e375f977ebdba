"""The output that a user sees while a stage runs: on a terminal, in a file, and when memory is short."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import ROOT
from tiny import command, environment

from compress.core import memory
from compress.core.memory import Memory
from compress.core.progress import Phase, RunStep
from compress.core.progress.tracker import Reading
from compress.surface.cli import console
from compress.surface.cli.console import Console

JOB = RunStep("train", 2, 3, ("batch_size",))
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all intervals, so that a test soon sees the output that a user sees after minutes."""
    monkeypatch.setattr(console, "REFRESH_S", 0.01)
    monkeypatch.setattr(console, "STARTED_S", 0.02)
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0.05)
    monkeypatch.setattr(console, "MEMORY_INTERVAL_S", 0.02)


def shown(capfd: pytest.CaptureFixture[str], log: Path, seconds: float = 0.3) -> tuple[list[str], str]:
    """Run a stage that takes some time; return its plain lines and its log."""
    with Console(log) as monitor, monitor.working(JOB) as progress:
        progress.plan(Phase("training", rounds=2, references={"loss": 2.3}, note="the loss is x"))
        with progress.phase(Phase("training", rounds=2, references={"loss": 2.3}, note="the loss is x")):
            progress.update(3, 10, loss=0.25)
            time.sleep(seconds)
            os.write(2, b"noise\n")
            progress.note("a note")
    return capfd.readouterr().err.splitlines(), log.read_text()


def test_plain_lines_have_the_time_and_no_control_characters(
    quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines, log = shown(capfd, tmp_path / "run.log")
    assert re.fullmatch(r"\d\d:\d\d:\d\dZ \[2/3\] train: started", lines[0])
    pattern = r"\d\d:\d\d:\d\dZ \[2/3\] train: training, epoch 1 of 2, 30%, 0:00:00, loss 0\.250 \(guessing 2\.30\)"
    assert re.fullmatch(pattern, lines[1])
    assert lines[-1] == "a note"
    assert not any("\r" in line or "\x1b" in line or "noise" in line for line in lines)
    assert "train: stage 2 of 3\n" in log
    assert "train: training: the loss is x\n" in log
    assert "training, epoch 1 of 2, 30%" in log
    assert "\nnoise\n" in log


def test_short_work_has_no_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines, _ = shown(capfd, tmp_path / "run.log", 0.0)
    assert lines == ["a note"]


def test_memory_that_is_short_is_named_once(
    quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory", lambda: Memory(4 << 30, 100 << 20, 3 << 30, limited=True))
    lines, log = shown(capfd, tmp_path / "run.log")
    (note,) = [line for line in lines if "memory" in line]
    assert note == (
        "train: memory is short: 105 MB of 4.3 GB of the limit of this container are left; this process takes 3.2 GB; "
        "lower batch_size, use smaller samples (resize in data.preprocess), or end other programs"
    )
    assert note in log


def test_the_thread_ends_with_the_stage_after_an_error_too(tmp_path: Path) -> None:
    import threading

    before = threading.active_count()
    with Console(tmp_path / "run.log") as monitor, pytest.raises(ValueError, match="x"), monitor.working(JOB):
        raise ValueError("x")
    assert threading.active_count() == before


def stage_state(times: list[tuple[float, float]], phase: Phase) -> str:
    """Return the text of the last of several readings: the seconds of the stage, and the fraction that is done."""
    now = 0.0
    display = console._Display(sys.stderr, JOB, print, False)
    display._rich.get_time = lambda: now
    state = ""
    for now, fraction in times:
        state = display.refresh(Reading((phase,), round(100 * fraction), 100, fraction, now, {"loss": 123_456.0}))
    return state


def test_the_time_left_follows_the_steps_after_the_first() -> None:
    """The first step traces the graph: it takes 10 s, and the others 0.5 s."""
    phase = Phase("training", unit="batch")
    times = [(0.0, 0.0), (10.0, 0.01), *((10 + 0.5 * step, 0.01 + step / 100) for step in range(1, 11))]
    assert "left" not in stage_state(times[:2], phase)
    assert stage_state(times, phase) == ("training, batch 11 of 100, 11%, 0:00:15, about 0:00:45 left, loss 1.23e+05")


def test_the_time_left_follows_the_present_phase() -> None:
    now = 0.0
    display = console._Display(sys.stderr, JOB, print, False)
    display._rich.get_time = lambda: now
    texts = []
    for phase, step in [(phase, step) for phase in ("slow", "fast") for step in range(1, 51)]:
        now += 10.0 if phase == "slow" else 1.0
        fraction = (step + 50 * (phase == "fast")) / 100
        texts.append(display.refresh(Reading((Phase(phase),), step, 50, fraction, now, {})))
    assert "about 0:10:00 left" in texts[39]  # at 10 s for each percent
    assert "left" not in texts[50]
    assert "about 0:00:10 left" in texts[89]


@pytest.mark.parametrize(
    ("phase", "done", "total", "expected"),
    [
        (Phase("x", unit="sample"), 1200, 31_000, "sample 1,200 of 31,000"),
        (Phase("x"), 0, 0, ""),
        (Phase("x", rounds=4), 10, 40, "epoch 1 of 4"),
        (Phase("x", rounds=4), 11, 40, "epoch 2 of 4"),
        (Phase("x", rounds=4), 3, 2, "epoch 3 of 4"),
        (Phase("x", rounds=1), 7, 40, "step 7 of 40"),
        (Phase("x", unit="layer"), 9, 8, "layer 8 of 8"),
    ],
)
def test_steps(phase: Phase, done: int, total: int, expected: str) -> None:
    assert console._steps(Reading((phase,), done, total, None, 0.0, {})) == expected


# --- the log ---


def test_a_second_run_is_appended_and_a_large_log_loses_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "run.log"
    for text in ("a", "one\n  two"):
        with Console(path) as monitor:
            monitor.log(text)
    mark, line = rf"===== {TIME}: coralline \S+, process {os.getpid()} =====\n", rf"{TIME} +\d+\.\d s  "
    assert re.fullmatch(f"{mark}{line}a\n{mark}{line}one\n      two\n", path.read_text())
    monkeypatch.setattr(console, "LARGE_BYTES", 1000)
    monkeypatch.setattr(console, "KEPT_BYTES", 200)
    path.write_text("".join(f"line {index:03}\n" for index in range(200)))
    with Console(path):
        pass
    lines = path.read_text().splitlines()
    assert (lines[0], lines[1], lines[-2]) == ("===== earlier lines are removed =====", "line 178", "line 199")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("end", "status", "shown"), [
    ("os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
    ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ("pass", 0, ""),
])  # fmt: skip
def test_a_crash_shows_the_stack_and_the_log_has_the_last_line(
    tmp_path: Path, end: str, status: int, shown: str
) -> None:
    code = f"""
import os, subprocess, sys
from pathlib import Path
from compress.surface.cli.console import Console
from compress.core.progress import RunStep
with Console(Path(sys.argv[1])) as console, console.working(RunStep("train", 1, 2)) as progress:
    progress.note("on the way")
    subprocess.run(["echo", "from a helper process"])
    os.write(2, b"F0000 check failed: rank\\n")
    {end}
"""
    log = tmp_path / "run.log"
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("on the way\n" + shown)
    assert bool(shown) == ("File" in done.stderr)
    assert log.read_text().endswith("from a helper process\nF0000 check failed: rank\n")


# --- terminals --------------------------------------------------------------------------


def on_terminal(tmp_path: Path, seconds: float = 1.5, interrupt: bool = False, **variables: str) -> tuple[str, int]:
    """Return the output of a run on a terminal, and its exit code; `interrupt` sends Ctrl-C in the second stage."""
    started = tmp_path / "started"
    stages = [{"pause": {"started": str(started), "seconds": 60 if interrupt else seconds}}]
    path = tiny.project(tmp_path / "project", stages)
    controlling, terminal = pty.openpty()
    chosen = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with (tmp_path / "results.txt").open("wb") as results:
        process = subprocess.Popen(
            command(path),
            cwd=tmp_path,
            env=chosen | {"TERM": "xterm", "COLUMNS": "100"} | variables,
            stdout=results,
            stderr=terminal,
        )
    os.close(terminal)
    received = b""
    interrupted = False
    try:
        while chunk := os.read(controlling, 4096):
            received += chunk
            if interrupt and not interrupted and b"pause" in received and b"loss" in received:
                interrupted = True
                process.send_signal(signal.SIGINT)
    except OSError:  # Linux: the other end is closed
        pass
    os.close(controlling)
    return received.decode(), process.wait()


def visible(text: str) -> list[str]:
    """Return the lines that stay on a terminal: the progress line is overwritten, and removed at the end."""
    lines = [""]
    for part in re.split(r"(\r|\n|\x1b\[\d*A|\x1b\[2K)", text):
        if part == "\n":
            lines.append("")
        elif part.endswith("A") and part.startswith("\x1b"):
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += ESCAPE.sub("", part)
    return [line.rstrip() for line in lines if line.strip()]


def test_the_line_of_a_terminal(tmp_path: Path) -> None:
    text, status = on_terminal(tmp_path)
    assert status == 0
    plain = ESCAPE.sub("", text)
    assert re.search(r"\[2/2\] pause  step 1 of 2  50%  0:00:0\d  loss 0\.500 ━+", plain)
    stays = visible(text)
    assert [line.split()[0] for line in stays][:3] == ["coralline:", "model", "pause"]
    assert text.rstrip().rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again
    assert re.fullmatch(r"pause +done +\d+\.\d s", stays[2])
    assert b"\x1b" not in (tmp_path / "results.txt").read_bytes()
    assert "loss" not in (tmp_path / "runs" / "tiny" / "run.log").read_text()


def test_ctrl_c_leaves_a_clean_line(tmp_path: Path) -> None:
    text, status = on_terminal(tmp_path, interrupt=True)
    assert status == 130
    assert visible(text)[-1] == "coralline: interrupted; run the same command to continue"
    assert not any("50%" in line for line in visible(text))
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_narrow_terminal_never_wraps(tmp_path: Path) -> None:
    text, _ = on_terminal(tmp_path, COLUMNS="30")
    lines = [ESCAPE.sub("", line).strip() for line in re.split(r"[\r\n]", text)]
    progress = [line for line in lines if line.startswith("[2/2]")]
    assert progress
    assert all(len(line) < 30 for line in progress if "done" not in line)


def test_no_color(tmp_path: Path) -> None:
    text, _ = on_terminal(tmp_path, NO_COLOR="1")
    assert "50%" in text
    assert not re.search(r"\x1b\[3\dm", text)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    text, status = on_terminal(tmp_path, 2.6, TERM="dumb")
    assert status == 0
    assert "\x1b" not in text
    assert re.search(r"\d\d:\d\d:\d\dZ \[2/2\] pause: started", text)


def test_the_progress_of_a_run_costs_little(tmp_path: Path) -> None:
    """The test asserts no time: of 20,000 reports of a fast loop, at most one is shown."""
    code = (
        "import sys; from pathlib import Path; from compress.surface.cli.console import Console; "
        "from compress.core.progress import RunStep\n"
        "with Console(Path(sys.argv[1])) as console, console.working(RunStep('x', 1, 1)) as progress:\n"
        "    for done in range(20_000): progress.update(done, 20_000, loss=1.0)\n"
    )
    arguments: Any = [sys.executable, "-c", code, str(tmp_path / "run.log")]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stderr.count("\n") <= 1
