"""Runs of a pipeline: cached steps, steps that run again, and the files that remain after an error."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from stand_in import Programs, success
from tiny import Coralline, command, environment

from compress.core.errors import (
    BudgetError,
    CorallineError,
    DataError,
    ModelError,
    NotUsableError,
    StageError,
    StoreError,
)
from compress.pipeline import runner as runs
from compress.pipeline.schema import load
from deploy.contract import bundle

Record = dict[str, Any]
Project = Callable[..., Path]
REPORTS = {"report.html", "report.json", "report.md"}
DRAWN = {"model_explorer.json"}
"""The file with the placement of the operators."""
STAMPS = [{"stamp": {"text": "one"}}, {"stamp": {"text": "two", "id": "second"}}, "compile", "package"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def run(path: Path, out: Path, *forced: str) -> tuple[dict[str, str], Record, tiny.Notes]:
    """Run a project; return the status of each step, the record, and the notes."""
    notes = tiny.Notes()
    record = runs.run(load(path, tiny.STAGES), out, notes, frozenset(forced)).to_json()
    return tiny.statuses(record), record, notes


def failed(path: Path, out: Path, kind: type[BaseException]) -> tuple[Any, Record, tiny.Notes]:
    """Run a project that must fail; return the error, the record in report.json, and the notes."""
    notes = tiny.Notes()
    with pytest.raises(kind) as caught:
        runs.run(load(path, tiny.STAGES), out, notes)
    assert type(caught.value) is kind
    return caught.value, report(out), notes


def report(out: Path) -> Record:
    """Check that the three reports are complete; return the content of report.json."""
    folder = out / "tiny"
    assert {path.name for path in folder.iterdir()} >= REPORTS
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    record: Record = json.loads((folder / "report.json").read_text())
    assert record["schema_version"] == 1
    return record


def outputs(out: Path) -> dict[str, bytes]:
    """Return the content of the output files, without the reports and the log."""
    return {path.name: path.read_bytes() for path in (out / "tiny").iterdir() if path.name not in {*REPORTS, "run.log"}}


# --- a run, and a second one ------------------------------------------------------------


def test_a_run_leaves_outputs_and_reports_and_a_second_one_keeps_everything(project: Project, out: Path) -> None:
    path = project(STAMPS)
    statuses, record, notes = run(path, out)
    assert statuses == dict.fromkeys(["model", "stamp", "second", "compile", "package"], "done")
    assert (record["status"], record["error"]) == ("ok", None)
    assert report(out) == json.loads(json.dumps(record))
    left = outputs(out)
    assert left.keys() == {"model.tflite", "tiny.coralline", "runner.pyz", *DRAWN} == record["outputs"].keys()
    assert os.access(out / "tiny" / "runner.pyz", os.X_OK)
    assert bundle.read(str(out / "tiny" / "tiny.coralline")).members["int8.tflite"] == left["model.tflite"]
    assert b"two" in left["model.tflite"]
    assert tiny.unsound(out / ".store") == []

    statuses, record, notes = run(path, out)
    assert set(statuses.values()) == {"cached"}
    assert notes.worked == []  # no stage and no probe
    assert notes.statuses == statuses
    assert outputs(out) == left

    statuses, _, _ = run(project(STAMPS, execution={"strategy": "mirrored"}), out)
    assert set(statuses.values()) == {"cached"}
    assert record["models"]["result"]["measurements"]["accuracy"]["how"] == "measured"


def test_the_record_says_what_was_measured(project: Project, out: Path) -> None:
    _, record, _ = run(project(STAMPS), out)
    model = record["models"]["result"]["measurements"]
    assert model["macs"]["value"] == tiny.macs()
    assert model["size_bytes"]["value"] == (out / "tiny" / "model.tflite").stat().st_size
    assert record["cpu_latency"]["conditions"]["runs"] == 5
    assert len(record["cpu_latency"]["result"]) == 5
    assert record["data"]["samples"] == {"train": 66, "validation": 6, "test": 18}
    assert [row["seconds"] is not None for row in record["stages"]] == [True] * 5


def test_skipped_stages_are_in_the_record(project: Project, out: Path) -> None:
    statuses, record, notes = run(project(["train", "compile", "package"], target="cpu"), out)
    assert statuses == {"model": "done", "train": "skipped", "compile": "skipped", "package": "done"}
    assert record["stages"][1]["reason"].startswith("the model came trained, from a file")
    assert notes.statuses["train"] == "skipped"


def test_the_original_is_the_model_before_the_first_change(project: Project, out: Path) -> None:
    _, record, _ = run(project(["train", {"stamp": {"text": "x"}}, "seeded"]), out)
    assert record["models"]["original"]["stage"] == "model"
    assert record["models"]["result"]["stage"] == "seeded"
    assert record["stages"][3]["facts"]["original"] != ""


# --- steps that run again ---------------------------------------------------------------


OF_DATA = ["model", "seeded", "package"]
"""The stages whose results depend on the data: a quantized model is read for the task and the classes."""


def changed(first: dict[str, str]) -> list[str]:
    return [name for name, status in first.items() if status == "done"]


@pytest.mark.parametrize(
    ("stages", "rerun"),
    [
        ([{"stamp": {"text": "other"}}, *STAMPS[1:]], ["stamp", "second"]),  # whose output is unchanged
        ([STAMPS[0], {"stamp": {"text": "other", "id": "second"}}, *STAMPS[2:]], ["second", "compile", "package"]),
        ([STAMPS[0], {"stamp": {"text": "two", "remark": "x", "id": "second"}}, *STAMPS[2:]], ["second"]),
        ([*STAMPS[:2], {"compile": {"timeout_s": 9.0}}, "package"], ["compile"]),
        ([*STAMPS[:2], "package"], ["package"]),
        ([STAMPS[0], {"stamp": {"text": "two", "id": "renamed"}}, *STAMPS[2:]], []),
        ([*STAMPS[:3], {"package": {"golden": 3}}], ["package"]),
        (STAMPS[:3], []),
    ],
)
def test_a_changed_setting_makes_anew_only_what_depends_on_it(
    project: Project, out: Path, stages: list[Any], rerun: list[str]
) -> None:
    run(project(STAMPS), out)
    assert changed(run(project(stages), out)[0]) == rerun


@pytest.mark.parametrize(
    ("keys", "rerun"),
    [
        ({"seed": 1}, ["seeded"]),
        ({"name": "other"}, ["package"]),
        ({"budget": {"size_bytes": 10**6}}, []),
        ({"measure": {"latency": {"runs": 6}}}, []),
        ({"data": {"source": {"npz": {"file": "data.npz"}}, "split": {"seed": 3}}}, OF_DATA),
        ({"data": {"source": {"npz": {"file": "data.npz"}}, "preprocess": [{"scale": {"from": [0, 2]}}]}}, OF_DATA),
    ],
)  # fmt: skip
def test_a_changed_key_makes_anew_only_what_depends_on_it(
    project: Project, out: Path, keys: dict[str, Any], rerun: list[str]
) -> None:
    stages = [{"stamp": {"text": "x"}}, "seeded", "package"]
    run(project(stages), out)
    assert changed(run(project(stages, **keys), out)[0]) == rerun


def test_other_data_and_another_model_are_noticed(project: Project, out: Path) -> None:
    path = project(["seeded", "package"])
    run(path, out)
    x = np.load(path.parent / "data.npz")["x"]
    x[0, 0, 0, 0] += 0.25
    np.savez(path.parent / "data.npz", x=x, y=np.arange(len(x)) % 3)
    assert changed(run(path, out)[0]) == OF_DATA
    (path.parent / "model.tflite").write_bytes(tiny.classifier(seed=5))
    assert changed(run(path, out)[0]) == ["model", "seeded", "package"]


def test_a_project_may_be_moved(project: Project, out: Path, tmp_path: Path) -> None:
    path = project(STAMPS)
    run(path, out)
    shutil.copytree(path.parent, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "model.tflite").rename(tmp_path / "elsewhere" / "renamed.tflite")
    text = (tmp_path / "elsewhere" / "pipeline.yaml").read_text().replace("model.tflite", "renamed.tflite")
    (tmp_path / "elsewhere" / "pipeline.yaml").write_text(text)
    assert changed(run(tmp_path / "elsewhere" / "pipeline.yaml", out)[0]) == []


def test_force_makes_a_stage_anew_and_later_ones_only_if_its_output_changed(project: Project, out: Path) -> None:
    chance = project().parent / "chance"
    chance.write_text("first")
    path = project([{"stamp": {"file": str(chance)}}, "compile", "package"])
    run(path, out)
    statuses, _, notes = run(path, out, "stamp")
    assert changed(statuses) == notes.worked == ["stamp"]
    chance.write_text("second")
    assert changed(run(path, out)[0]) == []
    statuses, record, _ = run(path, out, "stamp")
    assert changed(statuses) == ["stamp", "compile", "package"]
    assert record["stages"][1]["facts"] == {"text": "second"}
    statuses, record, _ = run(path, out)
    assert changed(statuses) == []
    assert record["stages"][1]["facts"] == {"text": "second"}


def test_a_damaged_artifact_is_made_again(project: Project, out: Path) -> None:
    path = project(STAMPS)
    run(path, out)
    before = outputs(out)
    (damaged,) = (out / ".store" / "artifacts").glob("*/bundle.coralline")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert changed(run(path, out)[0]) == ["package"]
    assert outputs(out) == before
    assert tiny.unsound(out / ".store") == []


# --- failures ---------------------------------------------------------------------------


def test_a_run_goes_on_after_a_failure(project: Project, out: Path, tmp_path: Path) -> None:
    path = project([STAMPS[0], {"fail": {"unless": str(tmp_path / "repaired")}}, "package"])
    error, record, notes = failed(path, out, StageError)
    assert str(error) == "fail: there is nothing to do it with; allowed: something; get something"
    assert record["status"] == "failed"
    assert record["error"] == {"stage": "fail", "message": str(error), "exit_code": 5}
    assert tiny.statuses(record) == {"model": "done", "stamp": "done", "fail": "failed", "package": "not run"}
    assert (record["models"], record["outputs"]) == (None, {})
    assert outputs(out) == {}
    assert tiny.unsound(out / ".store") == []
    assert "traceback" not in "".join(notes.logged).lower()

    (tmp_path / "repaired").touch()
    statuses, record, _ = run(path, out)
    assert statuses == {"model": "cached", "stamp": "cached", "fail": "done", "package": "done"}
    assert report(out)["status"] == "ok"


def test_outputs_that_no_longer_hold_are_removed_after_a_failure(project: Project, out: Path) -> None:
    run(project(STAMPS), out)
    (out / "tiny" / "notes.txt").write_text("the user's own")
    failed(project([*STAMPS[:2], "fail"]), out, StageError)
    assert outputs(out) == {"notes.txt": b"the user's own"}


def test_segments_are_outputs_and_are_removed_like_others(project: Project, out: Path, programs: Programs) -> None:
    names = [f"model_segment_{index}_of_2_edgetpu.tflite" for index in range(2)]
    compiler = programs.compiler(success(tiny.classifier(), names=names))
    _, record, _ = run(project([{"compile": {"compiler": str(compiler), "num_segments": 2}}]), out)
    assert outputs(out).keys() == {"model.tflite", *names, *DRAWN} == record["outputs"].keys()
    compiler.unlink()
    run(project(["compile"]), out)
    assert outputs(out).keys() == {"model.tflite", *DRAWN}


def test_too_little_memory_in_a_stage_is_named(project: Project, out: Path) -> None:
    error, record, notes = failed(project([{"fail": {"how": "memory"}}]), out, StageError)
    assert str(error).startswith("fail: there is not enough memory")
    assert "use smaller samples (resize in data.preprocess)" in str(error)
    assert record["error"]["exit_code"] == 5
    assert "MemoryError" in notes.logged[-1]


def test_stages_are_numbered_and_probes_are_not(project: Project, out: Path) -> None:
    path = project([STAMPS[0], "package"])
    _, _, notes = run(path, out)
    jobs = {job.title: (job.number, job.count) for job in notes.jobs}
    assert (jobs["model"], jobs["stamp"], jobs["package"]) == ((1, 3), (2, 3), (3, 3))
    assert jobs["latency"] == (0, 3)


def test_a_full_disk_in_a_stage_is_told_as_such(project: Project, out: Path) -> None:
    error, record, _ = failed(project([{"fail": {"how": "disk"}}]), out, StoreError)
    assert "fail: the disk is full; free some space and run again: finished stages are kept" in str(error)
    assert record["error"]["exit_code"] == 6
    assert record["error"]["stage"] == "fail"


@pytest.mark.parametrize("reports_interruption", [True, False])
def test_an_interruption_that_is_not_reported_leaves_earlier_results(
    project: Project, out: Path, reports_interruption: bool
) -> None:
    run(project([STAMPS[0], "package"]), out)
    before = {path.name: path.read_bytes() for path in (out / "tiny").iterdir() if path.is_file()}
    interrupted = load(project([STAMPS[0], {"fail": {"how": "interrupt"}}, "package"]), tiny.STAGES)
    with pytest.raises(KeyboardInterrupt):
        runs.run(interrupted, out, tiny.Notes(), reports_interruption=reports_interruption)
    after = {path.name: path.read_bytes() for path in (out / "tiny").iterdir() if path.is_file()}
    assert (after == before) is not reports_interruption
    assert ("tiny.coralline" in after) is not reports_interruption


def test_a_model_that_is_none(project: Project, out: Path) -> None:
    path = project(["package"])
    (path.parent / "model.tflite").write_bytes(b"not a model")
    with pytest.raises(ModelError) as caught:  # before any work is done
        load(path)
    assert f": model: {path.parent / 'model.tflite'}: is not a .tflite file; " in str(caught.value)
    assert not out.exists()


def test_data_that_does_not_fit_the_model(project: Project, out: Path) -> None:
    path = project([])
    tiny.data(path.parent / "data.npz", inputs=(5, 5, 1))
    error, record, _ = failed(path, out, ModelError)
    assert str(error).startswith("accuracy of model: takes [1, 4, 4, 1], but the data gives [1, 5, 5, 1]; add `resize")
    assert record["error"]["stage"] is None
    assert tiny.statuses(record) == {"model": "done"}


def test_missing_data_is_reported_before_any_work_on_it(project: Project, out: Path) -> None:
    path = project(["compile", "package"])
    (path.parent / "data.npz").unlink()
    error, record, _ = failed(path, out, DataError)
    assert f"{path.parent}/data.npz: cannot be read: No such file or directory" in str(error)
    assert set(tiny.statuses(record).values()) == {"not run"}


def test_a_file_where_the_folder_should_be(project: Project, out: Path) -> None:
    out.mkdir()
    (out / "tiny").write_text("a file")
    with pytest.raises(StoreError, match=r"the report cannot be written: a file is in the way"):
        run(project([]), out)
    assert (out / "tiny").read_text() == "a file"


def test_an_unwritable_folder_is_told_before_any_work(project: Project, unwritable: Path) -> None:
    notes = tiny.Notes()
    with pytest.raises(StoreError, match="the store cannot be written"):
        runs.run(load(project(STAMPS), tiny.STAGES), unwritable / "runs", notes)
    assert notes.worked == []
    assert list(unwritable.iterdir()) == []


def test_what_failed_first_is_told_when_the_report_cannot_be_written_either(project: Project, out: Path) -> None:
    out.mkdir()
    (out / "tiny").write_text("a file")
    with pytest.raises(StageError, match="there is nothing to do it with"):
        run(project(["fail"]), out)


# --- the budget -------------------------------------------------------------------------


def test_a_budget_that_holds(project: Project, out: Path) -> None:
    budget = {"accuracy_drop": 0.0, "latency_ms": 1000, "size_bytes": len(tiny.classifier())}
    _, record, _ = run(project([], budget=budget), out)
    assert record["status"] == "ok"
    assert {row["name"]: row["holds"] for row in record["budget"]} == dict.fromkeys(budget, True)
    assert record["budget"][2]["measured"]["value"] == budget["size_bytes"]  # the limit itself is allowed


@pytest.mark.parametrize("name", ["accuracy_drop", "latency_ms", "size_bytes"])
def test_a_budget_that_is_broken(project: Project, out: Path, name: str) -> None:
    limits = {"accuracy_drop": -0.5, "latency_ms": 1e-9, "size_bytes": 1}
    _, record, _ = run(project(["package"], budget={name: limits[name]}), out)
    assert record["status"] == report(out)["status"] == "over budget"
    (row,) = record["budget"]
    assert (row["name"], row["limit"], row["holds"]) == (name, limits[name], False)
    assert row["measured"]["value"] > limits[name]
    assert outputs(out).keys() == {"model.tflite", "tiny.coralline", "runner.pyz", *DRAWN}


def test_the_latency_is_that_of_the_host(project: Project, out: Path) -> None:
    values = {}
    for host in ("usb3", "usb2"):
        _, record, _ = run(project([], measure={"host": host, "latency": {"runs": 5}}), out)
        latency = record["latency"]["measurement"]
        assert (record["latency"]["host"], latency["how"]) == (host, "predicted")
        assert latency["low"] < latency["value"] < latency["high"]
        values[host] = latency["value"]
    assert values["usb3"] < values["usb2"]
    _, record, _ = run(project([], target="cpu"), out)
    assert record["latency"]["measurement"]["how"] == "measured"
    assert record["latency"]["measurement"] == record["models"]["result"]["measurements"]["latency_ms"]


def test_a_budget_without_measurement_says_why(project: Project, out: Path) -> None:
    _, record, _ = failed(project(["fail"], budget={"size_bytes": 1}), out, StageError)
    (row,) = record["budget"]
    assert (row["holds"], row["measured"]["how"]) == (None, "missing")
    assert row["measured"]["note"]


# --- signals ----------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the command line in tmp_path with piped output; the process ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments),
            cwd=tmp_path,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_once_and_goes_on_later(
    project: Project, tmp_path: Path, out: Path, start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    pause = {"pause": {"started": str(tmp_path / "started"), "go": str(tmp_path / "go")}}
    path = project([STAMPS[0], pause, "package"])
    process = start(path)
    wait_for(tmp_path / "started", process)
    process.send_signal(number)
    results, messages = process.communicate()
    assert process.returncode == 130
    assert results == ""
    assert messages.splitlines()[-1] == "coralline: interrupted; run the same command to continue"
    assert messages.count("coralline: ") == 2  # one line about the run, and one about the interruption
    assert "Traceback" not in messages
    assert report(out)["status"] == "interrupted"
    assert tiny.unsound(out / ".store") == []
    assert outputs(out) == {}

    (tmp_path / "go").touch()
    process = start(path)
    results, messages = process.communicate()
    assert process.returncode == 0, messages
    assert tiny.statuses(report(out)) == {"model": "cached", "stamp": "cached", "pause": "done", "package": "done"}


def undisturbed(project: Project, tmp_path: Path, stages: list[Any]) -> dict[str, bytes]:
    """Return the outputs of a run that is not killed."""
    run(project(stages), tmp_path / "undisturbed")
    return outputs(tmp_path / "undisturbed")


KILLS = int(os.environ.get("CORALLINE_KILLS", "15"))
"""The number of times that the next test kills its run. The requirements ask for `CORALLINE_KILLS=180`."""


def test_a_run_that_is_killed_again_and_again_ends_right(
    project: Project, tmp_path: Path, out: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    dice = random.Random(2)
    expected = undisturbed(project, tmp_path, STAMPS)
    path = project(STAMPS)
    killed = 0
    for attempt in range(10 * KILLS):
        if killed == KILLS:
            break
        if attempt % 5 == 4:  # from the beginning
            shutil.rmtree(out, ignore_errors=True)
        if attempt % 2:  # kill after a random time; in the other attempts, before an operation on a file
            process = start(path)
            assert process.stderr is not None
            process.stderr.readline()
            time.sleep(dice.uniform(0, 0.12))
            process.kill()
        else:
            process = start(path, TINY_KILL_AFTER=str(dice.randrange(250)), TINY_KILL_FOLDER="runs")
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL)
        if (out / "tiny" / "report.json").exists():
            assert report_or_none(out) is not None
        assert [name for name in unsound(out) if "/scratch/" not in name] == []
    assert killed == KILLS

    process = start(path)
    _, messages = process.communicate()
    assert process.returncode == 0, messages
    assert outputs(out) == expected
    assert bundle.read(str(out / "tiny" / "tiny.coralline")).manifest["name"] == "tiny"
    assert report(out)["status"] == "ok"
    assert unsound(out) == []


KILLED_BEFORE_RENAMING = """
import os, signal, sys

def hook(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("report.json"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
from compress.__main__ import main
main(sys.argv[1:])
"""


def test_a_run_that_is_killed_while_it_writes_the_report_leaves_nothing_beside_it(
    project: Project, tmp_path: Path, out: Path
) -> None:
    path = project(STAMPS[2:])
    script = [sys.executable, "-c", KILLED_BEFORE_RENAMING, str(path), "--out", str(out)]
    done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    run(path, out)
    assert [file.name for file in (out / "tiny").iterdir() if file.name.startswith(".")] == []


def unsound(out: Path) -> list[str]:
    return tiny.unsound(out / ".store") if (out / ".store" / "scratch").exists() else []


def report_or_none(out: Path) -> Record | None:
    record: Record = json.loads((out / "tiny" / "report.json").read_text())
    return record if record["schema_version"] == 1 else None


def test_runs_at_the_same_time_share_the_work_and_end_right(
    project: Project, tmp_path: Path, out: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    expected = undisturbed(project, tmp_path, STAMPS)
    path = project(STAMPS)
    processes = [start(path, "--json") for _ in range(3)]
    done = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], done
    statuses = [tiny.statuses(json.loads(results)) for results, _ in done]
    for step in statuses[0]:
        assert sorted(row[step] for row in statuses) == ["cached", "cached", "done"]
    assert outputs(out) == expected
    assert unsound(out) == []


def test_when_the_one_that_was_waited_for_is_killed_the_other_does_the_work(
    project: Project, tmp_path: Path, out: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    pause = {"pause": {"started": str(tmp_path / "started"), "go": str(tmp_path / "go")}}
    path = project([pause, "package"])
    first = start(path)
    wait_for(tmp_path / "started", first)
    second = start(path)
    assert second.stderr is not None
    while second.stderr.readline() != "pause: another run is making this; waiting for it\n":
        assert second.poll() is None
    (tmp_path / "started").unlink()
    first.kill()
    first.communicate()
    wait_for(tmp_path / "started", second)
    (tmp_path / "go").touch()
    second.communicate()
    assert second.returncode == 0
    assert tiny.statuses(report(out)) == {"model": "cached", "pause": "done", "package": "done"}
    run(path, out)
    assert unsound(out) == []


def test_a_full_disk_ends_a_run_in_one_message_and_with_room_it_goes_on(
    project: Project, tmp_path: Path, mounted: Callable[..., Path], coralline: Coralline
) -> None:
    expected = undisturbed(project, tmp_path, STAMPS)
    folder = mounted("size=2M,nr_inodes=1k")
    path = project(STAMPS)
    for free in (0, 4, 8, 16, 24):  # each time, the disk is full a little later
        tiny.fill(folder)
        os.truncate(folder / "filler", (folder / "filler").stat().st_size - 4096 * free)
        done = coralline(path, "--out", folder)
        assert done.returncode == 6, done.stderr
        assert "Traceback" not in done.stderr
        messages = [line for line in done.stderr.splitlines() if "disk is full" in line]
        assert messages == done.stderr.splitlines()[-1:]
        assert "the disk is full; free some space and run again: finished stages are kept" in messages[0]
        if (folder / ".store" / "artifacts").exists():
            assert [name for name in unsound(folder) if "/scratch/" not in name] == []
        (folder / "filler").unlink()
    done = coralline(path, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert outputs(folder) == expected
    assert unsound(folder) == []


def test_every_error_has_the_exit_code_of_its_class() -> None:
    codes = {kind.__name__: kind.exit_code for kind in (CorallineError, *CorallineError.__subclasses__())}
    assert codes == {
        "CorallineError": 1,
        "PipelineError": 2,
        "DataError": 3,
        "ModelError": 4,
        "StageError": 5,
        "StoreError": 6,
        "ResultError": 7,
        "SigningError": 8,
        "DeploymentError": 15,
    }
    assert {kind.exit_code for kind in (BudgetError, NotUsableError)} == {7}
