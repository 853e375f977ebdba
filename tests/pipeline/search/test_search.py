"""A search on the command line: its trials, its end, and the files that remain after an error."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Coralline

pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[search]'")

from optuna.trial import TrialState

from compress.core.errors import StageError
from compress.pipeline.search import run
from compress.pipeline.search.study import RECORD, SearchStudy
from compress.pipeline.search.worker import WorkerProcess, WorkRequest
from compress.results.encoding import encode
from compress.results.search import TrialRecord, TrialStatus
from compress.surface.cli.search import worker_process

SETTINGS = {"remade.filters": {"from": 1, "to": 16}, "remade.weights": {"from": 0, "to": 40}}
STAGES = ({"remade": {}}, "compile", "package")


def project(tmp_path: Path, stages: Any = STAGES, **search: Any) -> Path:
    search = {"trials": 6, "settings": SETTINGS} | search
    keys = {name: search.pop(name) for name in ("budget", "target") if name in search}
    return tiny.project(tmp_path, stages, search=search, **keys)


def found(tmp_path: Path) -> dict[str, Any]:
    """The content of search.json."""
    content: dict[str, Any] = json.loads((tmp_path / "runs" / "tiny" / "search" / "search.json").read_text())
    return content


def statuses(content: dict[str, Any]) -> list[str]:
    """Return the statuses of the trials without those that repeat the settings of an earlier one by chance."""
    return [trial["status"] for trial in content["trials"] if trial["status"] != "repeated"]


def test_a_search_writes_its_front_with_a_bundle_for_each_point(coralline: Coralline, tmp_path: Path) -> None:
    project(tmp_path, budget={"size_bytes": 100_000})
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    content = found(tmp_path)
    assert statuses(content) == ["complete"] * 6
    assert [metric["name"] for metric in content["objectives"]] == ["accuracy", "latency_ms"]
    folder = tmp_path / "runs" / "tiny" / "search"
    for point in content["front"]:
        assert (folder / point["bundle"]).is_file()
        assert (folder / point["folder"] / "report.html").is_file()
        assert point["test"]["how"] == "measured"
    assert content["recommended"] == content["front"][0]["number"]
    assert "the budget (size_bytes of at most 100000)" in done.stdout
    shown = re.findall(r"^trial (\d+) \((\d) of 6\): accuracy .*remade.weights (\d+);", done.stderr, re.MULTILINE)
    counted = [trial for trial in content["trials"] if trial["status"] != "repeated"]
    assert shown == [  # a repeated trial has a number, and does not count
        (str(trial["number"]), str(position), str(trial["settings"]["remade.weights"]))
        for position, trial in enumerate(counted, 1)
    ]
    page = (folder / "search.html").read_text()
    assert "<svg" in page
    assert page.count("<script") == page.count("http://") - page.count("http://www.w3.org") == 0
    assert tiny.unsound(tmp_path / "runs" / ".store") == []


def test_an_ordinary_run_ignores_the_search(coralline: Coralline, tmp_path: Path) -> None:
    project(tmp_path)
    done = coralline("pipeline.yaml")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs" / "tiny" / "search").exists()


def test_the_test_split_is_read_for_the_front_only(coralline: Coralline, tmp_path: Path) -> None:
    """Every evaluation is an artifact of the store, and names its split."""
    project(tmp_path)
    done = coralline("search", "pipeline.yaml", "--json")
    assert done.returncode == 0, done.stderr
    evaluated: dict[str, set[str]] = {"validation": set(), "test": set()}
    for path in (tmp_path / "runs" / ".store" / "artifacts").glob("*/artifact.json"):
        facts = json.loads(path.read_text())["facts"]
        for name in ("model", "result"):
            note = facts.get(name, {}).get("accuracy", {}).get("note", "") if isinstance(facts.get(name), dict) else ""
            for split, models in evaluated.items():
                if note.startswith(f"{split} split"):
                    models.add(path.parent.name)
    assert len(evaluated["test"]) == len(json.loads(done.stdout)["front"])
    assert len(evaluated["validation"]) > len(evaluated["test"])


def test_the_same_search_again_runs_nothing(coralline: Coralline, tmp_path: Path) -> None:
    log = tmp_path / "log"
    project(tmp_path, stages=({"remade": {"log": str(log)}}, "compile"))
    assert coralline("search", "pipeline.yaml").returncode == 0
    first, lines = found(tmp_path), log.read_text()
    assert len(lines.splitlines()) == 6
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0
    assert "trial" not in done.stderr
    assert log.read_text() == lines
    again = found(tmp_path)
    assert [again[key] for key in ("trials", "front", "recommended")] == [
        first[key] for key in ("trials", "front", "recommended")
    ]


def test_more_trials_continue_the_search_and_another_space_begins_a_new_one(
    coralline: Coralline, tmp_path: Path
) -> None:
    project(tmp_path, trials=3)
    assert coralline("search", "pipeline.yaml").returncode == 0
    first = found(tmp_path)["trials"]
    project(tmp_path, trials=5)
    assert coralline("search", "pipeline.yaml").returncode == 0
    assert found(tmp_path)["trials"][:3] == first
    project(tmp_path, trials=2, settings={"remade.filters": [1, 2, 3]})
    assert coralline("search", "pipeline.yaml").returncode == 0
    assert statuses(found(tmp_path)) == ["complete"] * 2


def test_the_files_own_values_are_the_first_trial_and_the_seed_decides_the_others(
    coralline: Coralline, tmp_path: Path
) -> None:
    results = []
    for name in ("a", "b"):
        project(tmp_path / name, stages=({"remade": {"filters": 7, "weights": 30}}, "compile"))
        done = coralline("search", "pipeline.yaml", cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        results.append([trial["settings"] for trial in found(tmp_path / name)["trials"]])
    assert results[0] == results[1]
    assert results[0][0] == {"remade.filters": 7, "remade.weights": 30}


@pytest.mark.parametrize("trouble", ["error", "crash", "kill"])
def test_a_trial_that_fails_ends_alone(coralline: Coralline, tmp_path: Path, trouble: str) -> None:
    project(tmp_path, trials=8, settings={"remade.trouble": ["none", trouble], "remade.weights": {"from": 0, "to": 9}})
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    content = found(tmp_path)
    for trial in content["trials"]:
        expected = "failed" if trial["settings"]["remade.trouble"] == trouble else "complete"
        assert trial["status"] in (expected, "repeated")
    reasons = {trial["reason"] for trial in content["trials"] if trial["status"] == "failed"}
    expected = {
        "error": "this cannot work",
        "crash": "the process of the trial ended with exit code 3",
        "kill": "the process of the trial was killed (signal 9); the system ends a process when memory is short",
    }[trouble]
    assert any(expected in reason for reason in reasons)


def test_a_search_in_which_nothing_works_ends_early(coralline: Coralline, tmp_path: Path) -> None:
    project(tmp_path, trials=60, settings={"remade.trouble": ["error"], "remade.weights": {"from": 0, "to": 99}})
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 5
    assert "search: the first 5 trials failed, the last one: remade: this cannot work" in done.stderr
    content = found(tmp_path)
    assert (content["status"], statuses(content)) == ("interrupted", ["failed"] * 5)
    assert content["reason"].startswith("no trial is complete, and 5 failed, the last one: remade: this cannot work")
    assert content["notes"] == ["search: the first 5 trials failed, the last one: remade: this cannot work"]


class Trials:
    """A stand-in for the worker process: each trial is complete at once.

    Args:
        verdict: that of a complete run; "" if complete runs fail.
        values: those of a trial.
        interrupted: the kind of work that is interrupted.
    """

    def __init__(self, verdict: str = "", values: Any = None, interrupted: str = "") -> None:
        self.verdict = verdict
        self.values = values or {"accuracy": 0.5, "latency_ms": 1.0}
        self.interrupted = interrupted

    def run(self, request: WorkRequest) -> dict[str, Any]:
        if request.kind == self.interrupted:
            raise KeyboardInterrupt
        if request.kind == "trial":
            return {"done": encode(TrialRecord(0, "complete", values=self.values))}
        if not self.verdict:
            return {"failed": "not here"}
        test = {"value": 0.5, "unit": "fraction", "how": "measured"}
        return {"done": {"files": ["model.tflite"], "test": test, "verdict": self.verdict}}

    def close(self) -> None:
        pass


class Other:
    """Another process that runs a trial, and ends the trial as soon as the search waits for a moment."""

    def __init__(self, study: SearchStudy, status: TrialStatus, monkeypatch: pytest.MonkeyPatch) -> None:
        self._study = study
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's heartbeats are for `optimize`
            self.trial = study._study.ask()
        self.settings = study._space.suggest(self.trial)
        self._record = TrialRecord(self.trial.number, status, self.settings)
        monkeypatch.setattr(run.time, "sleep", lambda seconds: self._end())

    def _end(self) -> None:
        if self._record.status == "complete":
            values = {"accuracy": 0.9, "latency_ms": 0.5}
            self._record = replace(self._record, values=values)
        if self._record.status == "interrupted":
            self._study._study.enqueue_trial(self.trial.params)
        state = TrialState.FAIL if self._record.status == "interrupted" else TrialState.COMPLETE
        self.trial.set_user_attr(RECORD, encode(self._record))
        values = None if state == TrialState.FAIL else [0.9, 0.5]
        self._study._study.tell(self.trial.number, values, state)


@pytest.mark.parametrize("status", ["complete", "failed", "interrupted"])
def test_a_search_without_new_combinations_waits_for_the_trials_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: TrialStatus
) -> None:
    """The settings of a running trial are not tried at the same time, and of an interrupted trial tried again."""
    search = searching(tmp_path, Trials())
    other = Other(search._plan.study(tmp_path / "runs"), status, monkeypatch)
    record = search.run()
    same = [trial for trial in record.trials if trial.settings == other.settings and trial.status != "repeated"]
    assert [trial.status for trial in same] == [status, *(["complete"] if status == "interrupted" else [])]
    assert record.notes[0] == "The search ended after 2 trials: all combinations were tried."
    assert record.notes[1].endswith("failed: not here")
    assert record.recommended is None
    assert record.reason == "the complete runs of all trials on the front failed"
    if status == "complete":
        assert [point.number for point in record.front] == [other.trial.number]


def searching(tmp_path: Path, worker: Trials, **search: Any) -> run.SettingsSearch:
    """Return a search of two combinations."""
    project(tmp_path, stages=["compile"], settings={"compile.retries": [0, 1]}, **search)
    plan = run.read_plan(tmp_path / "pipeline.yaml")
    return run.SettingsSearch(plan, tmp_path / "runs", plan.study(tmp_path / "runs"), worker, print)  # type: ignore[arg-type]


def test_a_result_that_is_not_usable_is_not_recommended(tmp_path: Path) -> None:
    record = searching(tmp_path, Trials("not usable")).run()
    assert record.recommended is None
    expected = "trial 0 would be recommended (it is the only trial on the front), but its result is not usable"
    assert (record.reason, record.hint) == (expected, "see its report")
    assert searching(tmp_path, Trials("usable with warnings")).run().recommended == 0


def test_an_interruption_keeps_the_complete_runs_of_an_earlier_command(tmp_path: Path) -> None:
    (point,) = searching(tmp_path, Trials("usable"), trials=1).run().front
    assert point.model == f"{point.folder}/model.tflite"
    for kind in ("trial", "front"):
        worse = Trials("usable", {"accuracy": 0.4, "latency_ms": 2.0}, interrupted=kind)
        with pytest.raises(KeyboardInterrupt):
            searching(tmp_path, worse, trials=2).run()
        content = found(tmp_path)
        assert content["status"] == "interrupted"
        assert [kept["model"] for kept in content["front"]] == [point.model]


@pytest.mark.parametrize("changed", ["model.tflite", "other.tflite"])
def test_another_model_in_the_same_file_begins_a_new_search(tmp_path: Path, changed: str) -> None:
    (tmp_path / "other.tflite").write_bytes(tiny.classifier(seed=2))
    path = project(tmp_path, stages=["compile"], settings={"model.file": ["model.tflite", "other.tflite"]})
    first = run.read_plan(path).identity()
    assert run.read_plan(path).identity() == first
    (tmp_path / changed).write_bytes(tiny.classifier(seed=1))
    assert run.read_plan(path).identity() != first


def test_the_process_of_trials_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the working directory')")
    monkeypatch.chdir(tmp_path)
    worker = worker_process()
    try:
        request = WorkRequest("trial", str(tmp_path / "p.yaml"), {}, str(tmp_path), str(tmp_path), "trial 1 of 1")
        assert "the key 'model' is missing" in worker.run(request)["failed"]
    finally:
        worker.close()


def test_an_interruption_while_the_process_starts_ends_it_at_once(tmp_path: Path) -> None:
    """During its imports, SIGINT would print a traceback."""
    worker = WorkerProcess([sys.executable, "-c", "import time; time.sleep(60)"])
    request = WorkRequest("trial", str(tmp_path), {}, str(tmp_path), str(tmp_path), "trial 1 of 1")
    ended = []

    def interrupted(process: subprocess.Popen[str]) -> Any:
        ended.append(process)
        raise KeyboardInterrupt

    worker._received = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        worker.run(request)
    assert [process.returncode for process in ended] == [-signal.SIGKILL]


def test_a_process_that_cannot_start_spoils_no_trial(tmp_path: Path) -> None:
    project(tmp_path, stages=["compile"], settings={"compile.retries": [0, 1]})
    plan = run.read_plan(tmp_path / "pipeline.yaml")
    study = plan.study(tmp_path / "runs")
    worker = WorkerProcess([sys.executable, "-c", "raise SystemExit(3)"])
    search = run.SettingsSearch(plan, tmp_path / "runs", study, worker, lambda text: None)
    with pytest.raises(StageError, match="the process of the trial ended with exit code 3 before its first trial"):
        search.run()
    assert [trial.status for trial in plan.study(tmp_path / "runs").records()] == ["interrupted"]


def test_constraints_decide_who_is_on_the_front(coralline: Coralline, tmp_path: Path) -> None:
    project(tmp_path, trials=10, objectives=["accuracy", "size_bytes"], constraints={"size_bytes": 2000})
    done = coralline("search", "pipeline.yaml")
    content = found(tmp_path)
    sizes = {trial["number"]: trial["values"]["size_bytes"] for trial in content["trials"]}
    assert any(size > 2000 for size in sizes.values())
    assert done.returncode == 0, done.stderr
    assert all(sizes[point["number"]] <= 2000 for point in content["front"])
    project(tmp_path, trials=3, budget={"size_bytes": 10})
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 7
    assert "no trial meets the budget (size_bytes of at most 10)" in done.stderr
    project(tmp_path, trials=3, constraints={"size_bytes": 10})
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 7
    assert "no complete trial meets all constraints" in done.stderr


def test_orders_of_stages(coralline: Coralline, tmp_path: Path) -> None:
    orders = [["remade", "stamp", "compile"], ["remade", "compile"]]
    stages = ({"remade": {}}, {"stamp": {}}, "compile")
    project(tmp_path, stages=stages, settings={"stages": orders, "stamp.text": ["a", "b"]}, trials=4)
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    settings = [json.dumps(trial["settings"]) for trial in found(tmp_path)["trials"] if trial["status"] == "complete"]
    assert len(settings) == len(set(settings)) == 3


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def paused(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a search with a stage that waits."""
    (tmp_path / "go").unlink(missing_ok=True)
    log = tmp_path / "log"
    stages = ({"remade": {"log": str(log)}}, {"pause": {"started": str(tmp_path / "started")}}, "compile")
    project(tmp_path, stages=stages, trials=4)
    text = (tmp_path / "pipeline.yaml").read_text().replace('"pause": {', f'"pause": {{"go": "{tmp_path / "go"}", ')
    (tmp_path / "pipeline.yaml").write_text(text)
    return subprocess.Popen(
        tiny.command("search", "pipeline.yaml"), cwd=tmp_path, env=tiny.environment(), text=True, stderr=subprocess.PIPE
    )


def children_of(process: int) -> list[int]:
    listing = subprocess.run(
        ["/bin/ps", "-o", "pid=", "--ppid", str(process)], check=False, stdout=subprocess.PIPE, text=True
    )
    return [int(line) for line in listing.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_search_that_was_ended_goes_on(coralline: Coralline, tmp_path: Path, number: signal.Signals) -> None:
    process = paused(tmp_path)
    wait_for((tmp_path / "started").exists)
    workers = children_of(process.pid)
    process.send_signal(number)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    for worker in workers:
        wait_for(lambda worker=worker: not Path(f"/proc/{worker}").exists())
    if number != signal.SIGKILL:
        assert "interrupted; run the same command to continue" in stderr
        assert found(tmp_path)["status"] == "interrupted"
    (tmp_path / "go").touch()
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    content = found(tmp_path)
    assert sorted(statuses(content)) == ["complete"] * 4 + ["interrupted"]
    (lost,) = (trial["settings"] for trial in content["trials"] if trial["status"] == "interrupted")
    assert [trial["settings"] for trial in content["trials"] if trial["status"] == "complete"].count(lost) == 1
    assert tiny.unsound(tmp_path / "runs" / ".store") == []
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 4  # no stage of the first search ran again


def test_an_interruption_between_two_trials_has_no_traceback(tmp_path: Path) -> None:
    request = WorkRequest(
        "trial", str(tmp_path / "p.yaml"), {}, str(tmp_path), str(tmp_path / "search"), "trial 1 of 1"
    )
    command = [sys.executable, "-m", "compress.surface.cli.search_worker"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=tiny.environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        assert json.loads(process.stdout.readline()) == {"ready": True}
        process.stdin.write(json.dumps(asdict(request)) + "\n")
        process.stdin.flush()
        assert "the key 'model' is missing" in json.loads(process.stdout.readline())["failed"]
        process.send_signal(signal.SIGINT)
        assert json.loads(process.stdout.readline()) == {"interrupted": True}
        assert process.communicate(timeout=60) == ("", "")


def test_several_processes_share_the_trials(coralline: Coralline, tmp_path: Path) -> None:
    log = tmp_path / "log"
    project(tmp_path, stages=({"remade": {"log": str(log)}}, "compile"), trials=8)
    done = coralline("search", "pipeline.yaml", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert 8 <= statuses(found(tmp_path)).count("complete") <= 9  # each process may begin one more
    assert "for the search tiny-" in (tmp_path / "runs" / "tiny" / "search" / "worker-1.log").read_text()
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines))
    done = coralline("search", "pipeline.yaml", "--workers", "65")
    assert (done.returncode, done.stderr) == (2, "coralline: --workers: 65 processes; allowed: 1 to 64\n")


def test_without_optuna_the_error_says_what_to_install(tmp_path: Path) -> None:
    project(tmp_path, stages=["compile"], settings={"compile.retries": [0, 1]})
    code = "import sys; sys.modules['optuna'] = None; from compress.surface.cli import main as command"
    code += "; sys.exit(command.main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, "search", "pipeline.yaml"]
    done = subprocess.run(arguments, cwd=tmp_path, env=tiny.environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "search needs Optuna; pip install 'optuna~=5.0'" in done.stderr


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (
            {"objectives": ["acuracy"]},
            "search.objectives[0]: unknown quantity 'acuracy'; allowed: accuracy, latency_ms",
        ),
        ({"objectives": ["accuracy", "accuracy"]}, "search.objectives: an objective occurs twice"),
        ({"objectives": ["accuracy", "macs", "size_bytes", "latency_ms"]}, "should have at most 3 items"),
        ({"constraints": {"mapped": True}}, "unknown quantity 'mapped'; allowed: mapped_whole, fits_cache, accuracy"),
        ({"constraints": {"fits_cache": False}}, "search.constraints.fits_cache: false is not true"),
        ({"constraints": {"latency_ms": "5"}}, "search.constraints.latency_ms: '5' should be a valid number"),
        ({"constraints": {"latency_ms": True}}, "search.constraints.latency_ms: true is not a number"),
        ({"trials": 0}, "search.trials: 0 should be greater than or equal to 1"),
        ({"settings": {}}, "search.settings: {} Dictionary should have at least 1 item"),
        (
            {"budget": {"latency_ms": 5}, "target": "cpu"},
            "budget.latency_ms: latency_ms is not predicted for the target",
        ),
        ({"trails": 5}, "unknown key 'trails'; allowed: trials, objectives, constraints, settings"),
    ],
)
def test_mistakes_in_the_goals_are_refused(
    coralline: Coralline, tmp_path: Path, search: dict[str, Any], expected: str
) -> None:
    project(tmp_path, **search)
    done = coralline("search", "pipeline.yaml", "--dry-run")
    assert done.returncode == 2
    assert expected in done.stderr


def test_a_dry_run_shows_what_would_be_varied(coralline: Coralline, tmp_path: Path) -> None:
    project(tmp_path)
    done = coralline("search", "pipeline.yaml", "--dry-run")
    assert done.stdout.splitlines()[0] == "remade.filters               1 to 16, whole numbers"
    done = coralline("search", "pipeline.yaml", "--dry-run", "--json")
    assert json.loads(done.stdout)["combinations"] == 16 * 41
    assert not (tmp_path / "runs").exists()


def test_files_without_a_search_or_without_a_quantized_model_are_refused(coralline: Coralline, tmp_path: Path) -> None:
    tiny.project(tmp_path, STAGES)
    assert "has no key `search`" in coralline("search", "pipeline.yaml").stderr
    project(tmp_path)
    text = (tmp_path / "pipeline.yaml").read_text()
    (tmp_path / "pipeline.yaml").write_text(text.replace('"name": "tiny"', '"name": "tiny", "recipe": "auto"'))
    assert "`recipe: auto` chooses the stages; remove it to search" in coralline("search", "pipeline.yaml").stderr
    (tmp_path / "pipeline.yaml").write_text(text.replace('"name": "tiny"', '"name": "tiny", "target": "cpu"'))
    done = coralline("search", "pipeline.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    (tmp_path / "pipeline.yaml").write_text(
        text.replace('"name": "tiny"', '"name": "tiny", "target": "cpu"').replace(
            '"trials"', '"objectives": ["latency_ms"], "trials"'
        )
    )
    assert "latency_ms is not predicted for the target cpu" in coralline("search", "pipeline.yaml", "--dry-run").stderr


def test_a_store_that_cannot_be_written_ends_the_search_and_loses_no_trial(
    coralline: Coralline, tmp_path: Path
) -> None:
    stages = ({"remade": {}}, {"fail": {"how": "disk", "unless": str(tmp_path / "space")}}, "compile")
    project(tmp_path, stages=stages, trials=3)
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 6
    assert "the disk is full" in done.stderr
    (tmp_path / "space").touch()
    done = coralline("search", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    assert statuses(found(tmp_path)) == ["interrupted", "complete", "complete", "complete"]
