"""`recipe: auto`: the recipes that are tried, their order, and the choice."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import Coralline, environment

from compress.core.errors import PipelineError, StageError, StoreError
from compress.pipeline import schema, yaml_file
from compress.pipeline.search.early_stop import TrialProgress, reason_to_stop
from compress.pipeline.search.recipes import RECIPES, RecipeChoice, choose
from compress.pipeline.search.worker import WorkerProcess, WorkRequest
from compress.results.encoding import encode
from compress.results.search import TrialRecord

PTQ, ADAROUND, QAT = (recipe.name for recipe in RECIPES[:3])
ORIGINAL = 0.95


def written(tmp_path: Path, budget: Mapping[str, float], **keys: Any) -> Path:
    content = {
        "schema_version": 1,
        "name": "digits",
        "model": {"builder": "digits_cnn"},
        "data": {
            "source": {"digits": {}},
            "preprocess": [{"resize": {"size": [32, 32]}}, {"scale": {"from": [0, 16]}}],
        },
        "stages": [{"train": {"epochs": 2, "batch_size": 64}}],
        "budget": dict(budget),
        "recipe": "auto",
    } | keys
    path = tmp_path / "digits.yaml"
    path.write_text(json.dumps(content, indent=1))
    return path


class Results:
    """A stand-in for the worker process: it returns accuracies and latencies by recipe, and records the runs."""

    def __init__(self, of: Callable[[list[str], float], tuple[float, float]]) -> None:
        self.of, self.ran, self.stopped = of, list[str](), list[str]()

    def run(self, request: WorkRequest) -> dict[str, Any]:
        stages = [next(iter(stage)) for stage in request.content["stages"]]
        keep = next((stage["prune"]["keep_macs"] for stage in request.content["stages"] if "prune" in stage), 1.0)
        method = next(stage["quantize"] for stage in request.content["stages"] if "quantize" in stage)
        accuracy, latency = self.of([*stages, *map(str, method.values())], keep)
        assert request.goals is not None
        reason = reason_to_stop(TrialProgress("model", (), None, {"latency_ms": latency}), request.goals, ())
        predicted = {"latency_ms": latency}
        if reason:
            self.stopped.append(request.title)
            return {"done": encode(TrialRecord(0, "stopped", predicted=predicted, reason=reason))}
        self.ran.append(request.title)
        values = {"accuracy": accuracy, "latency_ms": latency, "size_bytes": 1000.0}
        record = TrialRecord(0, "complete", values=values, original=ORIGINAL, predicted=predicted)
        return {"done": encode(record)}


def chosen(path: Path, results: Results | WorkerProcess, said: list[str] | None = None) -> RecipeChoice:
    document = yaml_file.read(path)
    show = (said if said is not None else []).append
    return choose(document, schema.load(path), path.parent, results, show)  # type: ignore[arg-type]


def test_a_stage_of_the_recipes_in_the_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"size_bytes": 1_000_000}, stages=[{"train": {"epochs": 1}}, "quantize"])
    with pytest.raises(
        PipelineError, match=r"digits.yaml:\d+: stages\[1\]: `recipe: auto` adds quantize itself; remove"
    ):
        chosen(path, Results(lambda stages, keep: (0.94, 3.0)))


def test_the_cheapest_recipe_within_the_budget_ends_the_trials(tmp_path: Path) -> None:
    results, said = Results(lambda stages, keep: (0.94, 3.0)), list[str]()
    choice = chosen(written(tmp_path, {"accuracy_drop": 0.02, "latency_ms": 4}), results, said)
    assert (choice.chosen, choice.within_budget, results.ran) == (PTQ, True, [PTQ])
    words = "accuracy 0.940, allowed: at least 0.930; latency_ms 3.00 ms, allowed: at most 4.00 ms"
    assert said[0].startswith(f"PTQ: within budget ({words})")
    assert choice.document.value["stages"] == [
        {"train": {"epochs": 2, "batch_size": 64}}, {"quantize": {}}, {"compile": {}}, {"package": {}},
    ]  # fmt: skip
    assert "recipe" not in choice.document.value


def test_a_lack_of_quality_leads_to_better_quantization_and_not_to_pruning(tmp_path: Path) -> None:
    results = Results(lambda stages, keep: (0.94 if "qat" in stages else 0.90, 3.0))
    choice = chosen(written(tmp_path, {"accuracy_drop": 0.02, "latency_ms": 4}), results)
    assert (choice.chosen, results.ran) == (QAT, [PTQ, ADAROUND, QAT])
    results = Results(lambda stages, keep: (0.90, 3.0))
    choice = chosen(written(tmp_path, {"accuracy_drop": 0.02, "latency_ms": 4}), results)
    assert (choice.chosen, choice.within_budget, results.ran) == (PTQ, False, [PTQ, ADAROUND, QAT])
    skipped = [result for result in choice.results if result.status == "skipped"]
    assert len(skipped) == len(RECIPES) - 3
    assert skipped[0].reason == "less pruning meets the limits of the costs, and more of it loses more"


def test_a_lack_of_speed_leads_to_pruning_and_then_to_distillation(tmp_path: Path) -> None:
    def of(stages: list[str], keep: float) -> tuple[float, float]:
        return (0.94 if "distill" in stages else 0.9 if keep < 1 else 0.945), 8.0 * keep

    results = Results(of)
    choice = chosen(written(tmp_path, {"accuracy_drop": 0.02, "latency_ms": 5}), results)
    assert choice.chosen == "pruned to 0.5 of the MACs, distilled, PTQ"
    assert results.stopped == [PTQ, "pruned to 0.7 of the MACs, PTQ"]  # before their training
    assert results.ran == ["pruned to 0.5 of the MACs, PTQ", "pruned to 0.5 of the MACs, distilled, PTQ"]
    reasons = {result.recipe: result.reason for result in choice.results}
    assert reasons[QAT] == "it has the costs of “PTQ”"
    assert "latency_ms is predicted to be 8, and the limit is 5" in reasons[PTQ]
    stages = [next(iter(stage)) for stage in choice.document.value["stages"]]
    assert stages == ["train", "prune", "distill", "quantize", "compile", "package"]


def test_a_recipe_that_fails_is_not_the_end(tmp_path: Path) -> None:
    class Failing(Results):
        def run(self, request: WorkRequest) -> dict[str, Any]:
            if request.title == PTQ:
                return {"failed": "the process of the trial ended with signal 11"}
            return super().run(request)

    results = Failing(lambda stages, keep: (0.94, 3.0))
    choice = chosen(written(tmp_path, {"accuracy_drop": 0.02, "latency_ms": 4}), results)
    assert choice.results[0].describe().startswith("PTQ: failed (the process of the trial ended with signal 11)")
    assert (choice.chosen, choice.results[1].status) == (ADAROUND, "within budget")


def test_an_error_of_the_first_stages_is_not_repeated_for_every_recipe(tmp_path: Path) -> None:
    class Failing(Results):
        def run(self, request: WorkRequest) -> dict[str, Any]:
            self.ran.append(request.title)
            return {"failed": "train: there is not enough memory", "exit_code": StageError.exit_code}

    results = Failing(lambda stages, keep: (0.94, 3.0))
    with pytest.raises(StageError, match="recipe: no recipe can be run: train: there is not enough memory"):
        chosen(written(tmp_path, {"accuracy_drop": 0.02}), results)
    assert results.ran == [PTQ, ADAROUND, QAT]


def test_a_full_disk_ends_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerProcess([])
    failed = {"failed": "the store cannot be written: the disk is full", "exit_code": StoreError.exit_code}
    monkeypatch.setattr(worker, "_started", lambda: SimpleNamespace(stdin=io.StringIO()))
    monkeypatch.setattr(worker, "_received", lambda process: failed)
    with pytest.raises(StoreError, match="the disk is full"):
        chosen(written(tmp_path, {"size_bytes": 4}), worker)


@pytest.mark.parametrize(
    ("budget", "keys", "expected"),
    [
        ({}, {}, "`recipe: auto` needs a budget; allowed: budget: {accuracy_drop, size_bytes, latency_ms}"),
        ({"latency_ms": 3}, {"target": "cpu"}, "latency_ms is not predicted for the target cpu"),
        ({"size_bytes": 3}, {"stages": []}, "no recipe can be used: stage 1 (quantize) needs"),
    ],
)
def test_mistakes(tmp_path: Path, budget: dict[str, float], keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(PipelineError) as caught:
        chosen(written(tmp_path, budget, **keys), Results(lambda stages, keep: (1, 1)))
    assert expected in str(caught.value)


def test_the_dry_run_lists_the_recipes(coralline: Coralline, tmp_path: Path) -> None:
    written(tmp_path, {"accuracy_drop": 0.02})
    done = coralline("digits.yaml", "--dry-run")
    assert done.stdout.splitlines() == [recipe.name for recipe in RECIPES]
    done = coralline("digits.yaml", "--dry-run", "--json")
    assert json.loads(done.stdout)["recipes"] == [recipe.name for recipe in RECIPES]
    assert "--force and --profile cannot be used" in coralline("digits.yaml", "--force", "train").stderr


@pytest.mark.tensorflow
def test_a_recipe_for_digits(tmp_path: Path) -> None:
    written(tmp_path, {"accuracy_drop": 0.2, "latency_ms": 4, "size_bytes": 40_000})
    command = [sys.executable, "-m", "compress", "digits.yaml"]  # without -W error: TensorFlow has warnings
    done = subprocess.run(command, cwd=tmp_path, env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PTQ: within budget (accuracy ")
    assert "cheapest within the budget: PTQ" in done.stdout
    content = json.loads((tmp_path / "runs" / "digits" / "recipes.json").read_text())
    assert content["chosen"] == PTQ
    report = json.loads((tmp_path / "runs" / "digits" / "report.json").read_text())
    assert [stage["id"] for stage in report["stages"]] == ["model", "train", "quantize", "compile", "package"]
    assert (tmp_path / "runs" / "digits" / "digits.coralline").is_file()
