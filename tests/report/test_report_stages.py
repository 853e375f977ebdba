"""What the report says about single stages: training and its time, pruning, and quantization."""

from __future__ import annotations

from typing import Any

import pytest
from run_records import Record, html_of, markdown_of, pruning_step, with_stages

from compress.report import pruning, training
from compress.report.blocks import Figure
from compress.results.run import RunRecord

# --- lines about training ------------------------------------------------------------------

BETTER = {"metric": "accuracy", "validation_before": 0.702, "validation_after": 0.764}
WORSE = {"metric": "loss", "validation_before": 0.5, "validation_after": None}
NOT_KEPT = {"kept": False, "metric": "accuracy", "validation_before": 0.529, "validation_after": 0.451}
HISTORY = [{"loss": 1.284, "accuracy": 0.7}, {"loss": 0.0141, "val_loss": 0.0522}]
LOSS = {"name": "cross-entropy in nats", "guessing": 2.3026}
TRAINED = with_stages(
    {"id": "load"},
    {"id": "train", "facts": {"batch_norms": {"kept": True, **BETTER}}},
    {"id": "finder", "facts": {"batch_norms": {"kept": False, **WORSE}, "healing": {"kept": True, **BETTER}}},
    {
        "id": "prune",
        "facts": {
            "steps": [
                {"healing": NOT_KEPT, "history": [{"loss": None}] * 2, "loss": LOSS},
                {"batch_norms": {"kept": False, "reason": "the model has 2 outputs"}},
            ]
        },
    },
    {"id": "last", "facts": {"history": HISTORY, "loss": LOSS}},
    {"id": "detect", "facts": {"history": HISTORY[:1], "loss": {"name": "", "guessing": None}}},
    {"id": "nothing", "facts": {"history": HISTORY}},
)
LINES = [
    "train: batch norms are recalibrated, which changed validation accuracy from 0.702 to 0.764",
    "finder: batch norms are not recalibrated, because that changed validation loss from 0.5 to not finite",
    "prune, step 1: 2 epochs; the loss (cross-entropy in nats) was not finite in the first and not finite in the last; "
    "guessing gives 2.3",
    "prune, step 1: the training is not kept, because it changed validation accuracy from 0.529 to 0.451",
    "prune, step 2: batch norms are not recalibrated: the model has 2 outputs",
    "last: 2 epochs; the loss (cross-entropy in nats) was 1.28 in the first and 0.0141 in the last, and 0.0522 on the "
    "validation split; guessing gives 2.3",
    "detect: 1 epoch; the loss was 1.28",
]


def test_one_sentence_for_each_fact_of_a_training() -> None:
    assert training.lines(RunRecord.from_json(TRAINED)) == LINES
    text, page = markdown_of(TRAINED), html_of(TRAINED)
    for line in LINES:
        assert f"{line} (measured)" in text
        assert f"{line} (measured).</p>" in page
    assert training.lines(RunRecord.from_json(with_stages())) == []


# --- where the time went -------------------------------------------------------------------


def times(
    first_step_ms: float = 2000, step_ms: float | None = 30, input_ms: float = 3, steps: int = 999, phase: str = ""
) -> Record:
    measured = {"first_step_ms": first_step_ms, "step_ms": step_ms, "input_ms": input_ms, "steps": steps}
    return {**measured, "phase": phase}


def profiled(*trainings: Record, phases: dict[str, float] | None = None) -> str:
    """Return the report of two stages, of which the first is profiled."""
    seconds = phases or {"training": 33.0, "training, batch norms": 0.01}
    profile = {"phases": seconds, "trainings": [*trainings], "trace": "runs/digits/profile/train"}
    stage = {"stage": "train", "seconds": 40.0, "facts": {"profile": profile}}
    return markdown_of(with_stages(stage, {"stage": "quantize", "seconds": 10.0}))


def test_times_of_phases_and_steps() -> None:
    section = profiled(times()).partition("## Where the time went")[2].partition("\n## ")[0]
    assert "33.0 s" in section
    assert "66%" in section  # of 50 s
    assert "batch norms" not in section  # less than 2%
    assert "runs/digits/profile/train" in section
    assert "(empty)" not in section
    (row,) = [line for line in section.splitlines() if "2.0 s" in line and "1,000" in line]
    assert "30 ms" in row
    assert "3 ms" in row
    assert "Where the time went" not in markdown_of(with_stages({"stage": "train"}))


@pytest.mark.parametrize(
    ("measured", "advice"),
    [
        (times(input_ms=20), "reading a batch takes 67% of the time of a step"),
        (times(step_ms=2, input_ms=0.1), "A larger batch_size uses the machine better"),
        (times(steps=100), "takes 40% of the training"),
    ],
)
def test_advice(measured: Record, advice: str) -> None:
    assert advice in profiled(measured)
    assert advice not in profiled(times())


def test_advice_is_about_the_longest_training() -> None:
    trial = times(steps=15, input_ms=20, phase="trial training")
    text = profiled(trial, times(step_ms=2, input_ms=0.1, steps=9999, phase="training"))
    assert "train (training): a step takes 2 ms" in text
    assert "reading a batch takes" not in text
    assert "% of the training" not in text


def test_steps_in_one_call_have_no_later_step() -> None:
    text = profiled(times(step_ms=None, steps=15))
    (row,) = [line for line in text.splitlines() if "2.0 s" in line and "not measured" in line]
    assert "| 16 |" in row
    assert "% of the training" not in text


def test_long_names_of_phases_differ_at_their_end() -> None:
    around = "pruning, choice of channels, trial trainings, trial training"
    names = [f"{around}: uniform", f"{around}: balanced"]
    phases = dict.fromkeys([*names, f"{around}: balanced, {'x' * 80}"], 20.0)
    text = profiled(*(times(phase=name) for name in names), phases=phases)
    assert text.count("…, trial trainings, trial training: uniform") == 2
    assert text.count("…, trial trainings, trial training: balanced |") == 2
    assert f"…, {'x' * 56}…" in text


# --- pruning -------------------------------------------------------------------------------

CURVE = {"layers": ["conv", "other"], "kept": [16, 8, 4], "divergence": [0.0, 0.1, 0.9], "accuracy": [0.9, 0.8, 0.3]}
FLAT = {"layers": ["flat"], "kept": [8, 4], "divergence": [0.0, 0.01], "accuracy": [0.9, 0.9]}


def pruned(**step: Any) -> Record:
    facts = {"objective": {"name": "compute"}, "steps": [pruning_step(**step)]}
    return with_stages({"stage": "prune", "facts": facts})


def drawing(content: Record) -> str:
    (section,) = pruning.sections(RunRecord.from_json(content))
    (figure,) = [block for block in section.blocks if isinstance(block, Figure)]
    return figure.svg


def test_no_section_without_pruning() -> None:
    for stage in ("train", "prune"):  # a stage without facts has failed
        assert [*pruning.sections(RunRecord.from_json(with_stages({"stage": stage})))] == []


def test_what_a_pruning_step_did() -> None:
    content = pruned(trials={"balanced": 0.9, "uniform": 0.8}, unsupported=["norm"])
    text, page = markdown_of(content), html_of(content)
    assert "### prune, step 1" in text
    assert (
        "Objective: compute. Allocation: balanced. "
        "Validation accuracy after one epoch: balanced 0.900, uniform 0.800. "
        "Unchanged, because their channels cannot be followed: norm."
    ) in text
    assert "| multiply-accumulates | 2,000 | 500 | 0.250 |" in text
    assert "| parameters sent at every inference | 0 bytes | 0 bytes | none |" in text  # a share of 0
    assert "Layers with fewer channels: 1" in page
    assert "<polyline" not in page[page.index('id="pruning"') : page.index('id="where-operators-run"')]


def test_the_set_that_means_most_is_drawn_first() -> None:
    svg = drawing({**pruned(), "sensitivity": {"curves": [FLAT, CURVE]}})
    assert svg.index("conv and 1 more") < svg.index("flat")
    assert "conv and 1 more: 8 of 16 kept, accuracy 0.800" in svg
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 5
    # The curves of a stage are drawn where none were measured before.
    assert drawing(pruned(sensitivity=[CURVE])).count("<polyline") == 1


# --- quantization --------------------------------------------------------------------------


def test_what_quantization_tried_and_where_it_lost() -> None:
    trial = {"step": "ranges", "choice": "<b>", "samples": 32, "snr_db": 35.25, "agreement": 0.99, "kept": True}
    error = {"point": "conv0 (weights)", "kind": "Conv2D", "snr_db": None, "share": 0.6, "cause": "wide"}
    change = {"rewrite": "elu", "op": "ELU", "output": "y", "kept": False, "steps": 5.0, "tolerance": 3}
    facts = {
        "calibration_samples": 64,
        "kept": "ptq",
        "ranges": "minmax of 64 samples",
        "agreement": 0.98,
        "tried": [trial],
        "layers": [error | {"setting": "mse"}],
        "rewritten": [change | {"reason": "far"}],
        "warnings": ["few"],
        "separated_gates": [{"activation": "act", "copied": "stem", "macs": 12345}],
    }
    record = with_stages({"id": "q", "stage": "quantize", "facts": facts})
    page = html_of(record)
    for text in (
        *("35.2 dB", "&lt;b&gt;", "✓ kept", "conv0 (weights)", "wide. Setting to change: mse", "not done: far"),
        *("✕ few", "by a copy of stem", "12,345 more"),
    ):
        assert text in page
    text = markdown_of(record)
    assert "Calibrated on 64 training samples. The file agrees with the float model on 0.980 of the held-out" in text
    plain = markdown_of(with_stages({"stage": "quantize", "facts": {"calibration_samples": 64}}))
    assert "Method: not recorded, ranges: not recorded. Calibrated on 64 training samples." in plain
    for title in ("Candidates", "Quantization error", "Rewritten for the compiler"):
        assert f"### {title}" in text
        assert title not in plain
    assert "Quantization error" not in html_of(with_stages())
    column = "Difference of probabilities and boxes"
    seen = markdown_of(
        with_stages({"id": "q", "stage": "quantize", "facts": facts | {"tried": [trial | {"difference_db": -7.5}]}})
    )
    assert column in seen
    assert "-7.5 dB" in seen
    assert column not in text
