"""The section on where the time of a profiled run went."""

from __future__ import annotations

from typing import Any

import pytest
from run_records import html_of, markdown_of, with_stages


def training(
    first_step_ms: float = 2000, step_ms: float | None = 30, input_ms: float = 3, steps: int = 999, phase: str = ""
) -> dict[str, Any]:
    times = {"first_step_ms": first_step_ms, "step_ms": step_ms, "input_ms": input_ms, "steps": steps}
    return {**times, "phase": phase}


def trained(*trainings: dict[str, Any]) -> dict[str, Any]:
    phases = {"training": 33.0, "training, batch norms": 0.01}
    facts = {"profile": {"phases": phases, "trainings": [*trainings], "trace": "runs/digits/profile/train"}}
    return {"stage": "train", "seconds": 40.0, "facts": facts}


def test_stages_phases_and_steps() -> None:
    record = with_stages(trained(training()), {"stage": "quantize", "seconds": 10.0})
    for text in (markdown_of(record), html_of(record)):
        assert "Where the time went" in text
        assert "33.0 s" in text
        assert "66%" in text  # of 50 s
        assert "batch norms" not in text.split("Where the time went")[1].split("Settings")[0]  # less than 2%
        assert "runs/digits/profile/train" in text
    assert "(empty)" not in markdown_of(record).split("Where the time went")[1].split("\n## ")[0]
    (row,) = [line for line in markdown_of(record).splitlines() if "2.0 s" in line and "1,000" in line]
    assert "30 ms" in row
    assert "3 ms" in row


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ({"input_ms": 20}, "reading a batch takes 67% of the time of a step"),
        ({"step_ms": 2, "input_ms": 0.1}, "steps_per_execution: 20"),
        ({"steps": 100}, "takes 40% of the training"),
    ],
)
def test_advice(times: dict[str, float], advice: str) -> None:
    assert advice in markdown_of(with_stages(trained(training(**times))))  # type: ignore[arg-type]
    assert advice not in markdown_of(with_stages(trained(training())))


def test_advice_is_about_the_longest_training() -> None:
    trial = training(steps=15, input_ms=20, phase="subset, proxy")
    text = markdown_of(with_stages(trained(trial, training(step_ms=2, input_ms=0.1, steps=9999, phase="training"))))
    assert "train (training): a step takes 2 ms" in text
    assert "reading a batch takes" not in text
    assert "% of the training" not in text


def test_steps_in_one_call_have_no_later_step() -> None:
    text = markdown_of(with_stages(trained(training(step_ms=None, steps=15))))
    (row,) = [line for line in text.splitlines() if "2.0 s" in line and "not measured" in line]
    assert "| 16 |" in row
    assert "% of the training" not in text


def test_long_names_of_phases_differ_at_their_end() -> None:
    around = "pruning, choice of channels, trial trainings, trial training"
    stage = trained(*(training(phase=f"{around}: {kind}") for kind in ("uniform", "balanced")))
    stage["facts"]["profile"]["phases"] = dict.fromkeys(
        (f"{around}: uniform", f"{around}: balanced", f"{around}: balanced, {'x' * 80}"), 20.0
    )
    text = markdown_of(with_stages(stage))
    assert text.count("…, trial trainings, trial training: uniform") == 2
    assert text.count("…, trial trainings, trial training: balanced |") == 2
    assert f"…, {'x' * 56}…" in text


def test_a_run_without_a_profile_has_no_section() -> None:
    assert "Where the time went" not in markdown_of(with_stages({"stage": "train"}))
