"""The command line: output on stdout and stderr, exit codes, and closed streams."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import ROOT
from tiny import Coralline, command, environment

import compress
from compress.pipeline.stages import STAGES
from compress.surface.cli import manual
from compress.surface.cli.main import build_parser, main

Done = subprocess.CompletedProcess[str]
SHELL = "/bin/sh"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny.project(tmp_path / "project")


def refusal(done: Done, exit_code: int) -> str:
    """Check that a command did nothing, and return its one message."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("coralline: ")
    return line.removeprefix("coralline: ")


def lasting(stderr: str) -> list[str]:
    """Return the lines of stderr without progress lines, which appear only on a slow machine."""
    return [line for line in stderr.splitlines() if not re.match(r"\d\d:\d\d:\d\dZ ", line)]


# --- arguments --------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--help", "check"]])
def test_help(coralline: Coralline, arguments: list[str]) -> None:
    done = coralline(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m compress")
    for word in ("--dry-run", "--out DIR", "--force STAGE", "--json", "stages", "schema"):
        assert word in done.stdout
    listed = re.findall(r"^    ([a-z-]+)(?: +\w.*)?$", done.stdout, flags=re.MULTILINE)
    assert listed == build_parser()[1]
    codes = re.findall(r"(?:^|  )(\d+) \w", done.stdout.partition("exit codes:")[2], flags=re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "14", "15", "130", "141"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: pipeline; see --help"),
        (["pipeline.yaml", "--nothing"], "unrecognized arguments: --nothing; see --help"),
        (["pipeline.yaml", "--dry"], "unrecognized arguments: --dry; did you mean '--dry-run'?"),
        (["check", "m.tflite", "--compilr=15.0"], "unrecognized arguments: --compilr=15.0; did you mean '--compiler'?"),
        (["pipeline.yaml", "other.yaml"], "unrecognized arguments: other.yaml; see --help"),
        (["pipeline.yaml", "--out"], "argument --out: expected one argument; see --help"),
        (["pipeline.yaml", "--json=yes"], "argument --json: ignored explicit argument 'yes'; see --help"),
        (["gone.yaml"], "gone.yaml: cannot be read: No such file or directory; give the path of a pipeline file"),
        (["."], ".: cannot be read: Is a directory; give the path of a pipeline file"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    code = main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err) == (2, "", f"coralline: {message}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["pipeline.yaml", "--help"], ["run", "-h"], ["--json", "--help"]])
def test_help_of_a_run(coralline: Coralline, arguments: list[str]) -> None:
    done = coralline(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--dry-run ", "--out DIR ", "--force STAGE ", "--json "):
        assert re.search(rf"^  {option} +\w", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("name", build_parser()[1])
def test_help_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m compress {'[run]' if name == 'run' else name} ")


def test_the_version(coralline: Coralline) -> None:
    done = coralline("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"coralline {compress.__version__}\n", "")


def test_the_word_run_may_be_written(coralline: Coralline, path: Path) -> None:
    assert coralline("run", path, "--dry-run").stdout == coralline(path, "--dry-run").stdout != ""
    assert coralline("--dry-run", path).stdout == coralline(path, "--dry-run").stdout


def test_a_file_without_a_suffix_is_a_pipeline_file(coralline: Coralline, tmp_path: Path, path: Path) -> None:
    (tmp_path / "project" / "pipeline").write_text(path.read_text())
    done = coralline(tmp_path / "project" / "pipeline", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_command(coralline: Coralline) -> None:
    message = refusal(coralline("chek", "model.tflite"), 2)
    assert message.startswith(
        "unknown command 'chek'; allowed: a pipeline file, run, search, init, export, frigate, import, "
    )
    assert message.endswith("; did you mean 'check'?")
    assert "did you mean" not in refusal(coralline("xyzxyz"), 2)


# --- stages and schema ------------------------------------------------------------------


def module(*arguments: str) -> Done:
    """Run `python -m compress`, without the light stages of the tests."""
    return subprocess.run(
        [sys.executable, "-m", "compress", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_stages_and_schema() -> None:
    done = module("stages")
    assert (done.stdout, done.stderr) == (manual.stages(), "")
    assert [line for line in done.stdout.splitlines() if re.match(r"\w", line)] == [*STAGES]
    done = module("stages", "--json")
    assert (json.loads(done.stdout), done.stderr) == (json.loads(json.dumps(manual.stages_json())), "")
    done = module("schema")
    assert (json.loads(done.stdout), done.stderr) == (manual.schema(), "")


# --- dry runs ---------------------------------------------------------------------------


def test_a_dry_run_creates_nothing(coralline: Coralline, tmp_path: Path, path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = coralline(path, "--dry-run", "--out", "some/where")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["model", "to", "do"],
        ["compile", "to", "do"],
        ["package", "to", "do"],
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_as_json(coralline: Coralline, tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", ["train", {"compile": {"id": "c"}}, "package"])

    def rows(*arguments: str) -> list[tuple[str, str]]:
        done = coralline(path, "--dry-run", "--json", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
        assert (report["schema_version"], report["name"]) == (1, "tiny")
        assert report["steps"][1]["reason"].startswith("the model came trained, from a file")
        assert [row["stage"] for row in report["steps"]] == ["load", "train", "compile", "package"]
        return [(row["id"], row["status"]) for row in report["steps"]]

    assert rows() == [("model", "to do"), ("train", "skipped"), ("c", "to do"), ("package", "to do")]
    assert coralline(path).returncode == 0
    assert rows() == [("model", "cached"), ("train", "skipped"), ("c", "cached"), ("package", "cached")]
    assert rows("--force", "c") == [("model", "cached"), ("train", "skipped"), ("c", "to do"), ("package", "to do")]
    assert rows("--out", "elsewhere")[0] == ("model", "to do")


# --- runs -------------------------------------------------------------------------------


def test_a_run(coralline: Coralline, tmp_path: Path, path: Path) -> None:
    done = coralline(path)
    assert done.returncode == 0
    latency, *results = done.stdout.splitlines()
    assert latency.startswith("latency ")
    assert "predicted" in latency
    assert results[0].split() == ["original", "result"]
    shown = ["accuracy", "macs", "parameters", "size_bytes", "compressed_bytes", "cpu_ms"]
    assert [line.split()[0] for line in results[1:7]] == shown
    assert results[2].split()[1:] == [str(tiny.macs())] * 2
    not_compiled = (
        "not compiled: edgetpu_compiler was not found; run `edgetpu_compiler -s model.tflite` on x86-64 Linux"
    )
    assert results[7] == "verdict: usable with warnings"
    assert f"- {not_compiled}" in results
    assert "all 2 operators would run on the Edge TPU" in results
    assert any(line.startswith("next, in runs/tiny: edgetpu_compiler -s model.tflite") for line in results)
    assert results[-1] == "report: runs/tiny/report.html"
    lines = lasting(done.stderr)
    assert lines[0] == f"coralline: {path} -> runs/tiny"
    assert [line.split()[:2] for line in lines[1:]] == [["model", "done"], ["compile", "done"], ["package", "done"]]
    assert all(re.search(r"\d+\.\d s$", line) for line in lines[1:])
    assert {file.name for file in (tmp_path / "runs" / "tiny").iterdir()} == {
        *("model.tflite", "tiny.coralline", "runner.pyz", "report.html", "report.json", "report.md", "run.log"),
        "model_explorer.json",
    }


def test_results_as_json_are_the_report(coralline: Coralline, tmp_path: Path, path: Path) -> None:
    done = coralline(path, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    assert len(lasting(done.stderr)) == 4


def test_the_noise_of_libraries_goes_to_the_log(coralline: Coralline, tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", [{"fail": {"how": "noise"}}])
    done = coralline(path)
    assert done.returncode == 0
    assert "noise" not in done.stdout
    assert "noise" not in done.stderr.replace(str(tmp_path), "")
    log = (tmp_path / "runs" / "tiny" / "run.log").read_text()
    for text in ("noise from Python", "noise from C on 1", "noise from C on 2"):
        assert log.count(f"{text}\n") == 1
    assert " coralline: " in log.splitlines()[1]
    assert coralline(path).returncode == 0
    assert (tmp_path / "runs" / "tiny" / "run.log").read_text().startswith(log)


# --- failures ---------------------------------------------------------------------------


def test_a_failed_stage(coralline: Coralline, tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", ["fail", "package"])
    done = coralline(path, "--json")
    message = "fail: there is nothing to do it with; allowed: something; get something"
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1] == f"coralline: {message}"
    assert json.loads(done.stdout) == {
        "schema_version": 1,
        "status": "failed",
        "error": {"message": message, "exit_code": 5},
    }
    assert json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())["error"]["message"] == message


def test_the_traceback_of_a_library_is_in_the_log_alone(coralline: Coralline, tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", [{"fail": {"how": "library"}}])
    done = coralline(path)
    assert (done.returncode, done.stdout) == (5, "")
    assert lasting(done.stderr)[2:] == [
        "coralline: fail: ValueError: the first line; the traceback is in runs/tiny/run.log"
    ]
    log = (tmp_path / "runs" / "tiny" / "run.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "the second line" in log


def test_an_interruption_that_a_library_made_an_error_of_its_own(coralline: Coralline, tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", [{"fail": {"how": "swallow"}}])
    done = coralline(path)
    assert (done.returncode, done.stdout) == (130, "")
    assert lasting(done.stderr)[2:] == ["coralline: interrupted; run the same command to continue"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_broken_budget_says_by_how_much(coralline: Coralline, tmp_path: Path, as_json: bool) -> None:
    size = len(tiny.classifier())
    budget = {"size_bytes": size - 456, "accuracy_drop": -0.25}
    path = tiny.project(tmp_path / "project", [], budget=budget)
    done = coralline(path, *["--json"] * as_json)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == (
        "coralline: budget: accuracy_drop is 0 fraction, over the limit of -0.25 by 0.25; "
        f"size_bytes is {size} bytes, over the limit of {size - 456} by 456"
    )
    if as_json:
        assert json.loads(done.stdout)["status"] == "over budget"
    else:
        assert done.stdout.endswith("report: runs/tiny/report.html\n")


def test_a_file_where_results_should_go(coralline: Coralline, tmp_path: Path, path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    message = refusal(coralline(path), 6)
    assert message.startswith("runs/tiny: the run's folder cannot be written: ")
    assert message.endswith("choose another folder with --out")
    assert (tmp_path / "runs").read_text() == "a file"


# --- streams ----------------------------------------------------------------------------


def closed_pipe(stream: str, *arguments: object, cwd: Path) -> Done:
    """Run a command whose stdout or stderr is a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writing}
    try:
        return subprocess.run(command(*arguments), cwd=cwd, env=environment(), text=True, check=False, **streams)
    finally:
        os.close(writing)


@pytest.mark.parametrize("arguments", [["--help"], ["stages"], ["schema"], ["project/pipeline.yaml", "--dry-run"]])
def test_nobody_reads_the_results(tmp_path: Path, path: Path, arguments: list[str]) -> None:
    done = closed_pipe("stdout", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_reads_the_results_of_a_run(tmp_path: Path, path: Path) -> None:
    done = closed_pipe("stdout", path, cwd=tmp_path)
    assert (done.returncode, len(lasting(done.stderr))) == (0, 4)
    done = closed_pipe("stdout", path, "--json", cwd=tmp_path)
    assert (done.returncode, len(lasting(done.stderr))) == (0, 4)


def test_nobody_reads_the_results_of_a_failure(tmp_path: Path) -> None:
    path = tiny.project(tmp_path / "project", ["fail"])
    done = closed_pipe("stdout", path, "--json", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith("coralline: fail: ")
    path = tiny.project(tmp_path / "project", [], budget={"size_bytes": 1})
    done = closed_pipe("stdout", path, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith("coralline: budget: ")


def test_nobody_reads_the_progress(tmp_path: Path, path: Path) -> None:
    done = closed_pipe("stderr", path, "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "ok"
    log = (tmp_path / "runs" / "tiny" / "run.log").read_text()
    assert [line.split()[3:5] for line in log.splitlines() if "done" in line][-1] == ["package", "done"]


@pytest.mark.parametrize("stream", ["<", ">", "2>"])
def test_a_stream_that_is_closed_from_the_start(tmp_path: Path, path: Path, stream: str) -> None:
    done = subprocess.run(
        [SHELL, "-c", f'exec "$0" "$@" {stream}&-', *command(path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("report: " in done.stdout) is (stream != ">")
    assert ("package " in done.stderr) is (stream != "2>")
    assert json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())["status"] == "ok"
    assert tiny.unsound(tmp_path / "runs" / ".store") == []
    log = (tmp_path / "runs" / "tiny" / "run.log").read_text()
    assert f" coralline: {path}" in log.splitlines()[1]
    assert "report: " not in log


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["schema"], ["project/pipeline.yaml"], ["project/pipeline.yaml", "--json"]]
)
def test_no_room_for_the_results(tmp_path: Path, path: Path, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 6
    assert done.stderr.splitlines()[-1].startswith(
        "coralline: the results cannot be written to stdout: the disk is full"
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_names_that_are_not_unicode_and_streams_that_are_ascii(tmp_path: Path, path: Path) -> None:
    odd = os.fsencode(path.parent) + b"/caf\xe9-\xe2\x98\x95.yaml"
    os.rename(path, odd)
    done = subprocess.run(
        [*command(), os.fsdecode(odd)],
        cwd=tmp_path,
        env=environment() | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout.endswith(b"report: runs/tiny/report.html\n")
