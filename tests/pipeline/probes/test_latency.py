"""The latency probe: its values and their conditions. The tests assert no durations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from compress.core.errors import ModelError
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.probes import Latency
from compress.pipeline.probes.latency import WARMUP

Make = Callable[..., Any]


def test_what_is_reported(artifact: Make, context: Make) -> None:
    facts = Latency(runs=7, threads=1).run({"float": artifact(int8=False), "int8": artifact()}, context())
    assert list(facts) == ["conditions", "float", "int8"]
    conditions = facts["conditions"]
    assert (conditions["threads"], conditions["runs"], conditions["warmup"]) == (1, 7, WARMUP)
    assert conditions["runtime"].endswith("default kernels")
    assert all(conditions[key] for key in ("node", "cpu", "system", "order"))
    for name in ("float", "int8"):
        times = facts[name]["times_ms"]
        assert len(times) == 7
        assert min(times) > 0
        shares = {"latency_ms": 50, "latency_p90_ms": 90, "latency_p99_ms": 99}
        assert set(facts[name]) == {*shares, "times_ms"}
        for key, share in shares.items():
            row = facts[name][key]
            assert row["value"] == pytest.approx(np.percentile(times, share), abs=2e-5)
            assert (row["unit"], row["how"]) == ("ms", "measured")
            assert row["note"] == f"1 thread, 7 runs after {WARMUP} of warm-up"
        assert facts[name]["latency_ms"]["value"] <= facts[name]["latency_p99_ms"]["value"]
    json.dumps(facts, allow_nan=False)


def test_models_take_turns_after_the_warm_up(artifact: Make, context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    run = LoadedModel.duration_ms
    monkeypatch.setattr(LoadedModel, "duration_ms", lambda self, tensor: turns.append(id(self)) or run(self, tensor))
    Latency(runs=3, threads=1).run({"a": artifact(), "b": artifact(seed=1)}, context())
    assert len(turns) == 2 * (WARMUP + 3)
    assert len(set(turns[::2])) == len(set(turns[1::2])) == 1
    assert turns[0] != turns[1]


def test_threads_are_passed_on(artifact: Make, context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    start = LoadedModel.__init__
    monkeypatch.setattr(
        LoadedModel, "__init__", lambda self, path, **more: calls.append(more) or start(self, path, **more)
    )
    facts = Latency(runs=1, threads=2).run({"a": artifact()}, context())
    assert calls == [{"reproducible": False, "threads": 2}]
    assert facts["a"]["latency_ms"]["note"].startswith("2 threads, 1 runs")


def test_the_machine_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Latency(runs=1, threads=1)
    before = probe.environment()
    assert {"ai-edge-litert", "node", "cpu", "system"} <= set(before)
    monkeypatch.setattr("platform.node", lambda: "another")
    assert probe.environment() == {**before, "node": "another"}
    assert probe.identity() == {"runs": 1, "threads": 1}


@pytest.mark.parametrize(
    "settings", [{"runs": 0, "threads": 1}, {"runs": 1, "threads": 0}, {"runs": 1}, {"runs": 1.5, "threads": 1}]
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Latency(**settings)


def test_a_model_for_other_samples(artifact: Make, context: Make) -> None:
    with pytest.raises(ModelError, match="but the data gives"):
        Latency(runs=1, threads=1).run({"a": artifact(inputs=(5, 4, 1))}, context())
