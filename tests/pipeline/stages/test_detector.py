"""A detector from end to end: trained, quantized, packed, reported, and run as a device runs it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import tiny

from compress.core.artifact import MODEL_TFLITE
from compress.model.tflite.interpreter import LoadedModel as HostModel
from compress.pipeline.runner import run
from compress.pipeline.schema import load
from deploy.__main__ import main as runner
from deploy.contract.bundle import Bundle, BundleError, pack, read
from deploy.contract.detection import Detections
from deploy.contract.errors import LoadError
from deploy.contract.preprocessing import Preprocessing
from deploy.runner import accuracy, golden
from deploy.runner.model import Model
from deploy.runner.runtime import RuntimeOptions

pytestmark = pytest.mark.tensorflow

BUILDER = """
import keras

def detector(input_shape):
    sizes = [[0.35, 0.35], [0.5, 0.5]]
    return {"maps": [{"cells": [8, 8], "boxes": sizes}], "scores": "logits", "least_score": 0.02}

def build(input_shape, classes):
    layers = keras.layers
    image = keras.Input(input_shape, name="image")
    x = image
    for block, filters in enumerate([8, 16, 24]):
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False, name=f"conv{block}")(x)
        x = layers.BatchNormalization(momentum=0.9, name=f"norm{block}")(x)
        x = layers.ReLU(name=f"relu{block}")(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name="wide")(x)
    rare = keras.initializers.Constant(-2.0)
    boxes = layers.Reshape((-1, 4), name="boxes")(layers.Conv2D(8, 1, name="box")(x))
    scores = layers.Conv2D(2 * classes, 1, bias_initializer=rare, name="score")(x)
    return keras.Model(image, [boxes, layers.Reshape((-1, classes), name="scores")(scores)], name="finder")
"""
EPOCHS = 8


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run a pipeline; yield the folder of its outputs, and its record."""
    folder = tmp_path_factory.mktemp("found")
    (folder / "finder.py").write_text(BUILDER)
    stages = [
        {"train": {"epochs": EPOCHS, "batch_size": 16, "learning_rate": 0.01, "augment": {"flip": True}}},
        {"quantize": {"ranges": "minmax", "equalize": "off", "held_out_samples": 40}},
        "compile",
        {"package": {"evaluation": 12}},
    ]
    more = {"measure": {"latency": {"runs": 3}}, "budget": {"ap_drop": 0.1}}
    path = scenes.pipeline(folder, (160, 24), {"builder": "finder.py", "trust": True}, stages, **more)
    record = run(load(path), folder / "runs", tiny.Notes()).to_json()
    yield folder / "runs" / "found", record
    shutil.rmtree(folder)


def value(record: dict[str, Any], side: str, name: str) -> float:
    return float(record["models"][side]["measurements"][name]["value"])


@pytest.mark.essential
def test_objects_are_found_and_int8_finds_them_too(finished_run: tuple[Path, dict[str, Any]]) -> None:
    _, record = finished_run
    assert value(record, "original", "ap50") > 0.3
    assert abs(value(record, "original", "ap") - value(record, "result", "ap")) < 0.06
    assert record["status"] == "ok"
    assert [row["name"] for row in record["budget"]] == ["ap_drop"]
    compared = record["comparison"]["measurements"]
    drop = value(record, "original", "ap") - value(record, "result", "ap")
    assert compared["ap_drop"]["value"] == pytest.approx(drop)
    assert compared["agreement"]["value"] > 0.7
    assert [row["name"] for row in record["comparison"]["per_class"]] == ["block", "ring"]
    assert "accuracy" not in record["models"]["result"]["measurements"]


def test_the_report_shows_classes_and_examples(finished_run: tuple[Path, dict[str, Any]]) -> None:
    folder, record = finished_run
    examples = record["examples"]["examples"]
    assert [example["kind"] for example in examples][-2:] == ["typical", "typical"]
    assert record["examples"]["samples"] == 24
    text = (folder / "report.md").read_text()
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 3 * len(examples) == len(list((folder / "examples").iterdir()))
    labels = {"block", "ring"}
    for example in examples:
        label, original, result = example["pictures"]
        assert {object_text.split()[1] for object_text in label["text"].split(", ")} <= labels
        object_texts = (original["text"] + ", " + result["text"]).replace("no object", "").split(", ")
        assert {object_text.split()[0] for object_text in object_texts if object_text} <= labels
        assert f"examples/{result['file']}" in text
    assert "At IoU 0.5<" in page
    assert re.search(r"\d+ objects", page)


def test_the_plan_is_judged_by_objects_and_the_specification_goes_on(finished_run: tuple[Path, dict[str, Any]]) -> None:
    _, record = finished_run
    facts = {row["stage"]: row["facts"] for row in record["stages"]}
    assert facts["quantize"]["agreement"] > 0.7
    assert {trial["step"] for trial in facts["quantize"]["tried"]} == {"ranges", "bias"}
    assert [facts[stage]["specification"]["least_score"] for stage in ("load", "train", "quantize", "compile")] == [
        0.02
    ] * 4
    assert facts["load"]["specification"]["overlap"] == 0.5  # the defaults are in the record
    history = facts["train"]["history"]
    assert len(history) == EPOCHS
    assert history[-1]["val_loss"] < history[0]["val_loss"] / 2


def test_boxes_and_scores_have_scales_of_their_own(finished_run: tuple[Path, dict[str, Any]]) -> None:
    model = HostModel(finished_run[0] / MODEL_TFLITE, reproducible=True)
    assert [list(output["shape"]) for output in model.outputs] == [[1, 128, 4], [1, 128, 2]]
    scales = [float(output["quantization"][0]) for output in model.outputs]
    assert all(scales)
    assert scales[0] != scales[1]


def test_every_operator_is_one_of_the_edge_tpu(finished_run: tuple[Path, dict[str, Any]]) -> None:
    assert finished_run[1]["placement"]["summary"].startswith("all ")


def test_the_report_speaks_of_average_precision(finished_run: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished_run
    text, page = ((folder / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "average precision 0." in text.splitlines()[2]
    assert "Average precision on validation against size" in page
    assert "ccuracy" not in text
    assert "onfusion" not in text + page


def test_the_bundle_answers_as_the_host_does(finished_run: tuple[Path, dict[str, Any]]) -> None:
    opened = read(str(finished_run[0] / "found.coralline"))
    assert [tensor.shape for tensor in opened.models["int8"].outputs] == [(1, 128, 4), (1, 128, 2)]
    verification = golden.verify(opened, RuntimeOptions("cpu"))
    assert verification["ok"]
    assert {role: comparison["verdict"] for role, comparison in verification["golden"].items()} == {
        "original": "equal",
        "int8": "equal",
    }
    assert verification["golden"]["int8"].get("same_answers", {"share": 1.0})["share"] == 1


def test_the_average_precision_of_the_device_is_that_of_the_host(finished_run: tuple[Path, dict[str, Any]]) -> None:
    opened = read(str(finished_run[0] / "found.coralline"))
    result = accuracy.compare(opened, RuntimeOptions("cpu"))
    metrics = opened.manifest["evaluation"]["metrics"]
    for role in ("original", "int8"):
        for name in ("ap", "ap50"):
            assert result["models"][role][name]["value"] == pytest.approx(metrics[f"{name}_{role}"]["value"], abs=1e-9)
    assert result["pairs"][0]["ap_drop"]["value"] == pytest.approx(metrics["ap_drop"]["value"], abs=1e-9)
    assert result["pairs"][0]["agreement"]["value"] == pytest.approx(metrics["agreement"]["value"])
    assert "AP 0." in accuracy.text(result)
    assert accuracy.compare(opened, RuntimeOptions("cpu"), 5)["samples"] == 5


def test_the_service_and_the_command_tell_boxes(
    finished_run: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner(["run", str(finished_run[0] / "found.coralline"), "--role", "int8", "--top", "2", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert len(answers) == 4
    assert all(
        set(row) == {"label", "score", "box"} and len(row["box"]) == 4 for answer in answers for row in answer["top"]
    )
    assert runner(["run", str(finished_run[0] / "found.coralline"), "--role", "int8", "--top", "1"]) == 0
    assert " at ymin 0." in capsys.readouterr().out
    assert runner(["run", str(finished_run[0] / "found.coralline"), "--role", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["box_format"].startswith("ymin, xmin, ymax, xmax")


def test_an_application_is_given_labels_scores_and_boxes(finished_run: tuple[Path, dict[str, Any]]) -> None:
    opened = read(str(finished_run[0] / "found.coralline"))
    samples, ground_truth = accuracy.objects(opened)
    near = 0
    with Model(opened, device="cpu") as model:
        for image, (boxes, _) in zip(samples, ground_truth, strict=True):
            answer = model(image)
            assert isinstance(answer, Detections)
            best = answer.top(1)[0]
            centres = (boxes[:, :2] + boxes[:, 2:]) / 2
            middle = np.array([(best.box[0] + best.box[2]) / 2, (best.box[1] + best.box[3]) / 2])
            near += bool((np.abs(centres - middle).max(axis=1) < 0.15).any())
            assert best.label in ("block", "ring")
            assert set(answer.rows(1)[0]) == {"label", "score", "box"}
            assert all(detection.score >= 0.5 for detection in answer.above(0.5).top())
    assert near >= 9


def changed(path: Path, change: Any) -> bytes:
    """Return the bundle with a changed manifest or members."""
    opened = read(str(path))
    manifest = {key: entry for key, entry in opened.manifest.items() if key not in ("members", "schema_version")}
    members = dict(opened.members)
    change(manifest, members)
    return pack(manifest, members)


def test_bundles_whose_boxes_cannot_be_read_are_refused(finished_run: tuple[Path, dict[str, Any]]) -> None:
    path = finished_run[0] / "found.coralline"
    with pytest.raises(BundleError, match="detection cannot be used: least_score must be below 1"):
        changed(path, lambda manifest, _: manifest["detection"].update(least_score=2))
    with pytest.raises(BundleError, match="detection cannot be used: maps give"):
        changed(path, lambda manifest, _: manifest["detection"]["maps"][0].update(cells=[4096, 4096]))
    with pytest.raises(BundleError, match=r"not those of its detector: boxes \[128, 4\], not 32 locations x 4"):
        changed(path, lambda manifest, _: manifest["detection"]["maps"][0].update(cells=[4, 4]))
    with pytest.raises(BundleError, match="outputs of the int8 model are not those of its detector"):
        changed(path, lambda manifest, _: manifest["models"]["int8"]["outputs"].pop())
    other = Bundle(changed(path, lambda manifest, _: manifest["models"]["int8"]["outputs"][0].update(scale=0.5)))
    with pytest.raises(LoadError, match=r"the model's output .* differs from the manifest"):
        Model(other, device="cpu")

    def wrong(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members["evaluation-labels.npy"] = members["evaluation-labels.npy"].replace(b"<f4", b"<i4")

    with pytest.raises(BundleError, match="is not 12 samples with their objects"):
        accuracy.objects(Bundle(changed(path, wrong)))


def test_boxes_of_letterboxed_photos_are_fractions_of_the_photo(finished_run: tuple[Path, dict[str, Any]]) -> None:
    def letterboxed(manifest: dict[str, Any], _: Any) -> None:
        resize = {"resize": {"size": [64, 64], "fit": "letterbox", "fill": 114}}
        steps = [resize, *(step for step in manifest["preprocessing"]["steps"] if "resize" not in step)]
        manifest["preprocessing"].update(steps=steps, digest=Preprocessing(steps).digest)

    path = finished_run[0] / "found.coralline"
    opened = Bundle(changed(path, letterboxed))
    (scene, *_), _ = accuracy.objects(opened)
    wide = np.full((64, 128, 3), 80, np.uint8)
    wide[:, 32:96] = scene  # in the input, the photo fills the middle half of the rows
    with Model(opened, device="cpu") as model:
        in_input = model.answer(model.prepare(wide))
        in_photo = model(wide)
        worker = model.answer(model.prepare(wide), wide.shape)
    assert len(in_photo) > 0
    expected = [
        (
            detection.label,
            detection.score,
            (2 * detection.box[0] - 0.5, detection.box[1], 2 * detection.box[2] - 0.5, detection.box[3]),
        )
        for detection in in_input.top()
    ]
    expected = [row for row in expected if row[2][2] > 0 and row[2][0] < 1]
    assert len(expected) == len(in_photo)
    for row, detected in zip(expected, in_photo.top(), strict=True):
        assert detected[:2] == row[:2]
        assert detected.box == pytest.approx(np.clip(row[2], 0, 1), abs=1e-5)
    assert worker.rows() == in_photo.rows()


def test_a_detector_is_pruned_and_distilled(tmp_path: Path) -> None:
    (tmp_path / "finder.py").write_text(BUILDER)
    stages = [
        {"train": {"epochs": EPOCHS, "batch_size": 16, "learning_rate": 0.01}},
        {"prune": {"keep_macs": 0.7, "epochs": 4, "batch_size": 16, "samples": 64, "allocation": "sensitivity"}},
        {"distill": {"epochs": 4, "batch_size": 16, "weight": 0.5, "temperature": 1}},
        {"quantize": {"ranges": "minmax", "equalize": "off"}},
    ]
    more = {"measure": {"latency": {"runs": 3}, "sensitivity": {"samples": 32}}}
    path = scenes.pipeline(tmp_path, (160, 24), {"builder": "finder.py", "trust": True}, stages, **more)
    record = run(load(path), tmp_path / "runs", tiny.Notes()).to_json()
    macs = [value(record, side, "macs") for side in ("original", "result")]
    assert macs[1] < 0.75 * macs[0]
    assert value(record, "original", "ap50") > 0.3
    assert value(record, "result", "ap50") > 0.6 * value(record, "original", "ap50")
    assert record["sensitivity"]["missing"] == ""
    assert max(record["sensitivity"]["curves"][0]["divergence"]) > 0
