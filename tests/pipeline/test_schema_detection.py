"""Pipelines on data with boxes: valid settings, and errors before any work is done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.core.errors import PipelineError
from compress.pipeline.schema import load

SOURCE = {"coco": {"file": "all.json"}}
ANCHORS = {"maps": [{"cells": [2, 2], "boxes": [[0.5, 0.5]]}]}
STAGES = ["train", {"replace_activations": {"epochs": 0}}, "quantize", "compile", "package"]


def pipeline(folder: Path, **keys: Any) -> Path:
    content = {
        "schema_version": 1,
        "name": "found",
        "model": {"builder": "ssd_small"},
        "data": {"source": SOURCE, "preprocess": [{"resize": {"size": [64, 64]}}, {"scale": {"from": [0, 255]}}]},
        "stages": STAGES,
        "budget": {"ap_drop": 0.02, "size_bytes": 1000000},
    } | keys
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(content, indent=1))
    return path


def refused(path: Path) -> str:
    with pytest.raises(PipelineError) as caught:
        load(path)
    assert re.match(rf"{re.escape(str(path))}:\d+: ", str(caught.value))
    return str(caught.value).partition(": ")[2]


def test_what_goes_with_boxes_is_taken(tmp_path: Path) -> None:
    loaded = load(pipeline(tmp_path))
    assert loaded.data.task == "detection"
    assert [step.stage.name for step in loaded.steps] == [
        "load",
        *(s if isinstance(s, str) else "replace_activations" for s in STAGES),
    ]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("cluster", "stages[1]: stage 2 (cluster): it trains with tfmot"),
        ("sparsify", "stages[1]: stage 2 (sparsify): it trains with tfmot"),
        ({"train": {"class_weights": "balanced"}}, "class_weights: the loss of a detector"),
        (
            {"train": {"augment": {"rotate": 10}}},
            "augment.rotate: the box around a rotated object is not the rotated box",
        ),
        ({"quantize": {"method": "qat", "class_weights": "balanced"}}, "stage 2 (quantize): class_weights"),
        ({"quantize": {"method": "qat", "engine": "tfmot"}}, "engine: tfmot trains classifiers only"),
    ],
)
def test_stages_and_settings_for_classes_are_refused(tmp_path: Path, stage: Any, expected: str) -> None:
    message = refused(pipeline(tmp_path, stages=["train", stage]))
    assert expected in message
    assert "(the data is for detection)" in message
    assert "; allowed: " in message or "leave it out" in message


def test_nothing_is_asked_of_a_stage_that_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier())
    model = {"file": "model.tflite", "detector": ANCHORS}
    loaded = load(pipeline(tmp_path, model=model, stages=["compile", "package"]))
    assert loaded.steps[0].stage.identity()["detector"] == ANCHORS


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"budget": {"accuracy_drop": 0.1}}, "budget.accuracy_drop: accuracy_drop limits classifiers"),
        ({"model": {"builder": "ssd_small", "detector": {"maps": []}}}, "maps must be a list of 1 to 64 maps"),
        ({"model": {"builder": "ssd_small", "detector": {**ANCHORS, "most": 0}}}, "most must be a whole number"),
    ],
)
def test_settings_that_do_not_go_with_boxes_are_refused(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    assert expected in refused(pipeline(tmp_path, **keys))


def test_steps_that_crop_and_pad_are_allowed(tmp_path: Path) -> None:
    steps = [{"crop": {"share": 0.9}}, {"pad": {"size": [80, 80]}}, {"resize": {"size": [64, 64], "fit": "letterbox"}}]
    data = {"source": SOURCE, "preprocess": steps}
    assert load(pipeline(tmp_path, data=data)).data.preprocessing == steps


@pytest.mark.parametrize("step", [{"reshape": {"shape": [-1]}}, {"squeeze": {}}, {"length": {"samples": 8}}])
def test_steps_after_which_positions_are_not_known_are_refused(tmp_path: Path, step: dict[str, Any]) -> None:
    data = {"source": SOURCE, "preprocess": [{"scale": {"from": [0, 255]}}, step]}
    message = refused(pipeline(tmp_path, data=data))
    assert f"data.preprocess[1]: after {next(iter(step))}, the positions of objects are not known" in message


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"budget": {"ap_drop": 0.1}}, "budget.ap_drop: ap_drop limits detectors"),
        (
            {"model": {"builder": "digits_cnn", "detector": ANCHORS}},
            "model.detector: model.detector describes",
        ),
    ],
)
def test_what_is_for_boxes_is_refused_beside_classes(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    settings = {"data": {"source": "digits"}, "budget": {}} | keys
    message = refused(pipeline(tmp_path, **settings))
    assert expected in message
    assert "(the data is for classification)" in message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"detector": {"family": "yolov8", "least_score": 5}}, "least_score must be below 1"),
        ({"detector": {"family": "auto", "most": 0}}, "most must be a whole number"),
        ({"detector": "yolov0"}, "unknown family 'yolov0'; allowed: auto, yolov3"),
        ({"detector": {"family": "auto", "bins": 3}}, "'bins' cannot be set together with a family"),
        ({"detector": "auto", "keep_classes": []}, "keep_classes"),
    ],
)
def test_families_and_their_thresholds_are_checked_before_the_model_is_read(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.onnx").write_bytes(b"")
    assert message in refused(pipeline(tmp_path, model={"file": "x.onnx", **model}))
