"""Refusals of `execution: {strategy: multi_worker}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import worker_processes

from compress.core.errors import PipelineError
from compress.core.execution import Execution
from compress.learning.training import strategies
from compress.pipeline import runner, schema

ADDRESSES = ("localhost:2222", "localhost:2223")
MULTI = {"strategy": "multi_worker"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"cluster": {"worker": []}}',
        *(
            json.dumps({"cluster": cluster, "task": task})
            for cluster, task in [
                ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, {"type": "worker", "index": 0}),
                ({"worker": ["a:1"]}, {"type": "worker", "index": 0}),
                ({"worker": "a:"}, {"type": "worker", "index": 0}),
                ({"worker": ["a:1", 7]}, {"type": "worker", "index": 0}),
                ({"worker": ["a:1", "a"]}, {"type": "worker", "index": 0}),
                ({"worker": ["a:1", "a:1"]}, {"type": "worker", "index": 0}),
                ({"worker": ["a:1", "b:1"]}, {"type": "chief", "index": 0}),
                ({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 2}),
                ({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": -1}),
                ({"worker": ["a:1", "b:1"]}, {"type": "worker"}),
            ]
        ),
    ],
)
def test_an_invalid_tf_config_is_refused(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("TF_CONFIG", content)
    with pytest.raises(PipelineError, match="multi_worker needs the addresses of two or more workers"):
        strategies.worker(Execution(strategy="multi_worker"))
    assert strategies.worker(Execution(strategy="mirrored")) is None


def test_tf_config_has_the_index_of_this_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", worker_processes.tf_config(ADDRESSES, 1))
    assert strategies.worker(Execution(strategy="multi_worker")) == 1


def load(folder: Path, *stages: Any, **keys: Any) -> schema.Pipeline:
    keys = {"target": "cpu", "execution": MULTI, **keys}
    return schema.load(tiny.project(folder, stages, **keys))


def test_what_cannot_run_on_several_workers_is_refused(tmp_path: Path) -> None:
    keras: dict[str, Any] = {"model": {"builder": "digits_cnn"}, "data": {"source": {"digits": {}}}}
    with pytest.raises(PipelineError, match="multi_worker is for `python -m compress run` alone"):
        runner.run(load(tmp_path, "train", **keras), tmp_path / "runs", tiny.Notes())
    with pytest.raises(PipelineError, match="a recipe tries several"):
        load(tmp_path, recipe="auto")
    for stage in ("sparsify", {"quantize": {"method": "qat", "engine": "tfmot"}}):
        with pytest.raises(PipelineError, match="tfmot cannot train on several workers"):
            load(tmp_path, "train", stage, **keras)
    for strategy in ("multi_worker", "mirrored"):
        with pytest.raises(PipelineError, match="steps_per_execution: devices exchange gradients after every step"):
            load(tmp_path, "train", **keras, execution={"strategy": strategy, "steps_per_execution": 2})
        with pytest.raises(PipelineError, match="jit_compile: XLA cannot exchange gradients between devices"):
            load(tmp_path, "train", **keras, execution={"strategy": strategy, "jit_compile": True})
    assert Execution(jit_compile=True, steps_per_execution=2)


def test_the_command_says_what_is_missing(tmp_path: Path, coralline: tiny.Coralline) -> None:
    tiny.project(tmp_path, [], execution=MULTI, target="cpu")
    done = coralline("pipeline.yaml")
    assert done.returncode == 2
    assert "TF_CONFIG: strategy: multi_worker needs the addresses of two or more workers" in done.stderr


def test_tf_config_without_workers_is_noted(
    tmp_path: Path, coralline: tiny.Coralline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", worker_processes.tf_config(ADDRESSES, 0))
    tiny.project(tmp_path, [], target="cpu")
    done = coralline("pipeline.yaml")
    assert done.returncode == 0, done.stderr
    assert "TF_CONFIG is set, but is used with `execution: {strategy: multi_worker}` only" in done.stderr
