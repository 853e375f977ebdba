"""Photos of another aspect ratio than the input, from labels to the device: boxes, masks and points move with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import tiny
from PIL import Image

from compress.pipeline.runner import run
from compress.pipeline.schema import load
from deploy.contract.bundle import read
from deploy.contract.detection import overlaps
from deploy.runner import accuracy, golden
from deploy.runner.model import Model
from deploy.runner.runtime import RuntimeOptions

pytestmark = pytest.mark.tensorflow

BUILDER = """
import keras

layers = keras.layers


def detector(input_shape):
    return {"maps": [{"cells": [8, 8], "boxes": [[0.25, 0.25], [0.4, 0.4]]}], "least_score": 0.02}


def body(x, strides):
    for filters, stride in zip((8, 16, 24), strides):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return layers.Conv2D(32, 3, padding="same", activation="relu")(x)


def build(input_shape, classes):
    image = keras.Input(input_shape)
    x = body(image, (2, 2, 2))
    rare = keras.initializers.Constant(-2.0)
    boxes = layers.Reshape((-1, 4))(layers.Conv2D(8, 1)(x))
    scores = layers.Reshape((-1, classes))(layers.Conv2D(2 * classes, 1, bias_initializer=rare)(x))
    return keras.Model(image, [boxes, scores])


def pixels(input_shape, classes):
    image = keras.Input(input_shape)
    x = layers.Conv2D(classes, 1)(body(image, (2, 1, 1)))
    return keras.Model(image, layers.UpSampling2D(2, interpolation="nearest")(x))


def points(input_shape, classes):
    image = keras.Input(input_shape)
    x = layers.Flatten()(body(image, (2, 2, 2)))
    small = keras.initializers.RandomNormal(stddev=0.001, seed=0)
    return keras.Model(image, layers.Dense(2 * classes, kernel_initializer=small)(x))
"""
COUNTS = {"train": 120, "val": 16, "test": 16}
WIDTH = 96
OPTIONS = RuntimeOptions("cpu")


def photos() -> list[tuple[str, np.ndarray, list[tuple[str, scenes.Box]]]]:
    """Scenes somewhere in photos of 64 rows and 96 columns, with the split of each."""
    random = np.random.default_rng(1)
    result = []
    pictures = iter(scenes.scenes(sum(COUNTS.values())))
    for split, count in COUNTS.items():
        for _ in range(count):
            scene, objects = next(pictures)
            left = int(random.integers(WIDTH - 64))
            photo = random.integers(60, 100, (64, WIDTH, 3)).astype(np.uint8)
            photo[:, left : left + 64] = scene
            result.append((split, photo, [(name, (a + left, b, c + left, d)) for name, (a, b, c, d) in objects]))
    return result


def run_pipeline(folder: Path, function: str, source: dict[str, Any], epochs: int) -> tuple[dict[str, Any], Path]:
    """Return the record of a run, and its bundle."""
    (folder / "net.py").write_text(BUILDER)
    resize = {"size": [64, 64], "fit": "letterbox", "fill": 114}
    content = {
        "schema_version": 1,
        "name": "boxed",
        "target": "cpu",
        "model": {"builder": f"net.py:{function}", "trust": True},
        "data": {"source": source, "preprocess": [{"resize": resize}, {"scale": {"from": [0, 255]}}]},
        "stages": [
            {"train": {"epochs": epochs, "batch_size": 16, "learning_rate": 0.003 if function == "points" else 0.01}},
            {"quantize": {"ranges": "minmax", "equalize": "off"}},
            {"package": {"evaluation": 12}},
        ],
        "measure": {"latency": {"runs": 3}},
    }
    (folder / "p.yaml").write_text(json.dumps(content))
    record = run(load(folder / "p.yaml"), folder / "runs", tiny.Notes()).to_json()
    return record, folder / "runs" / "boxed" / "boxed.coralline"


def values(record: dict[str, Any], name: str) -> list[float]:
    return [float(record["models"][side]["measurements"][name]["value"]) for side in ("original", "result")]


def save(folder: Path, split: str, index: int, photo: np.ndarray) -> None:
    path = folder / "photos" / "images" / split / f"{index}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(photo).save(path)


def test_boxes_of_yolo_labels(tmp_path: Path) -> None:
    for index, (split, photo, objects) in enumerate(photos()):
        save(tmp_path, split, index, photo)
        text = tmp_path / "photos" / "labels" / split / f"{index}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(
            "".join(
                f"{scenes.CLASSES.index(name)} {(a + c) / 2 / WIDTH} {(b + d) / 128} {(c - a) / WIDTH} {(d - b) / 64}\n"
                for name, (a, b, c, d) in objects
            )
        )
    (tmp_path / "photos" / "data.yaml").write_text("train: images/train\nval: images/val\ntest: images/test\nnc: 2\n")
    record, bundle = run_pipeline(tmp_path, "build", {"yolo": {"file": "photos/data.yaml"}}, 10)
    before, after = values(record, "ap50")
    assert before > 0.3
    assert abs(before - after) < 0.1
    opened = read(str(bundle))
    assert golden.verify(opened, OPTIONS)["ok"]
    device, metrics = accuracy.compare(opened, OPTIONS), opened.manifest["evaluation"]["metrics"]
    for role in ("original", "int8"):
        assert device["models"][role]["ap50"]["value"] == pytest.approx(metrics[f"ap50_{role}"]["value"], abs=1e-9)
    near = []
    with Model(opened, device="cpu") as model:
        for split, photo, objects in photos():
            if split == "test":
                boxes = np.array([(b / 64, a / WIDTH, d / 64, c / WIDTH) for _, (a, b, c, d) in objects])
                near.append(overlaps(model(photo).boxes[:3], boxes).max(initial=0.0))
    assert np.median(near) > 0.5  # fractions of the photo; fractions of the input would overlap less


def test_masks(tmp_path: Path) -> None:
    for index, (split, photo, objects) in enumerate(photos()):
        save(tmp_path, split, index, photo)
        mask = np.zeros((64, WIDTH), np.uint8)
        for name, (a, b, c, d) in objects:
            mask[b:d, a:c] = 3 if name == "block" else 255
        path = tmp_path / "photos" / "masks" / split / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
    source = {"masks": {"path": "photos", "classes": 4, "keep": {"block": [3]}}}
    record, bundle = run_pipeline(tmp_path, "pixels", source, 3)
    before, after = values(record, "miou")
    assert before > 0.8
    assert abs(before - after) < 0.02
    with Model(str(bundle), device="cpu") as model:
        assert model(photos()[0][1]).first.shape == (64, 64, 2)


def test_keypoints(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    rows: dict[str, list[Any]] = {split: [] for split in COUNTS}
    images: dict[str, list[Any]] = {split: [] for split in COUNTS}
    for index, (split, photo, objects) in enumerate(photos()):
        save(tmp_path, "", index, photo)
        images[split].append({"id": index, "file_name": f"{index}.png", "width": WIDTH, "height": 64})
        for _, (a, b, c, d) in objects:
            left, top, right, bottom = np.maximum((a, b, WIDTH - c, 64 - d) - random.integers(0, 16, 4), 0).tolist()
            box = [left, top, WIDTH - right - left, 64 - bottom - top]
            points = [a, b, 2, c, b, 1, 0, 0, 0, c, d, 2]
            rows[split].append({"id": len(rows), "image_id": index, "category_id": 1, "bbox": box, "keypoints": points})
    names = ["top_left", "top_right", "hidden", "bottom_right"]
    for split in COUNTS:
        category = {"id": 1, "name": "object", "keypoints": names}
        content = {"images": images[split], "annotations": rows[split], "categories": [category]}
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    files = {"train": "train.json", "validation": "val.json", "test": "test.json"}
    source = {"coco": {**files, "images": "photos/images", "keypoints": {"margin": 0.2}}}
    record, bundle = run_pipeline(tmp_path, "points", source, 25)
    before, after = values(record, "pck")
    assert before > 0.3  # 0.06 for constant points
    assert abs(before - after) < 0.1
    sample = photos()[0][1][:32]  # 32 x 96: a third of the input, in the middle of its rows
    with Model(str(bundle), device="cpu") as model:
        in_input = model.answer(model.prepare(sample)).first.reshape(-1, 2)
        in_sample = model(sample).first.reshape(-1, 2)
    np.testing.assert_allclose(in_sample[:, 0], in_input[:, 0], atol=1e-5)
    rows_of_image = 21 / 64  # 32 * 64 / 96, rounded
    np.testing.assert_allclose(in_sample[:, 1], (in_input[:, 1] - 21 / 64) / rows_of_image, atol=1e-5)
