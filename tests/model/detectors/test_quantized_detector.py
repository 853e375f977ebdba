"""Quantized files of YOLO exporters: boxes and scores in one tensor of 8 bits become boxes again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import exported_yolo
import numpy as np
import pytest
import tiny
from exported_yolo import CLASSES, SIDE
from PIL import Image

import compress
from compress.core.errors import DataError
from compress.learning.procedures.importing import quantized_detector
from compress.model.tflite import graph
from compress.model.tflite.interpreter import LoadedModel
from compress.surface.cli import main
from deploy.contract.detection import Detector
from deploy.runner.model import Model

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:Statistics for quantized inputs:UserWarning"),  # from the converter
]
NAMES = ("cat", "dog", "bird")
AS_IMAGENET = (-2.13, 2.63)
"""The range of a file that was calibrated with normalized photos, although its programs feed values from 0 to 1."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3)).astype(np.uint8)
        Image.fromarray(np.kron(pixels, np.ones((8, 8, 1), np.uint8))).save(folder / f"{number}.png")
    (tmp_path / "labels.txt").write_text("\n".join(NAMES))
    return folder


def expected(model: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return corners (ymin, xmin, ymax, xmax) and scores of the float model."""
    rows = np.asarray(model(images, training=False)).transpose(0, 2, 1)
    centre, half = rows[..., 1::-1], rows[..., 3:1:-1] / 2
    return np.concatenate([centre - half, centre + half], axis=-1), rows[..., 4:]


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("int8", {}),
        ("uint8", {"dtype": "uint8"}),
        ("float input and output", {"float_ends": True}),
        ("calibrated with normalized photos", {"limits": AS_IMAGENET}),
    ],
)
def test_the_boxes_of_the_cut_file_are_those_of_the_float_model(
    keras: Any, tmp_path: Path, form: str, settings: dict[str, Any]
) -> None:
    model = exported_yolo.network(keras)
    (tmp_path / "m.tflite").write_bytes(exported_yolo.quantized(model, **settings))
    found = quantized_detector(tmp_path / "m.tflite")
    assert found is not None, form
    assert found.model is not None
    assert (found.classes, found.specification["code"], found.specification["offset"]) == (CLASSES, "dfl", 0.5)
    (tmp_path / "cut.tflite").write_bytes(graph.serialize(found.model))
    loaded = LoadedModel(tmp_path / "cut.tflite", reproducible=True)
    assert loaded.input_tensors[0].is_quantized
    detector = Detector(found.specification)
    images = np.random.default_rng(3).uniform(0, 1, (4, SIDE, SIDE, 3)).astype(np.float32)
    boxes, scores = expected(model, images)
    rows = np.concatenate([loaded.dequantized(loaded.raw(loaded.feed(image))) for image in images])
    parts = detector.parts(detector.split(rows))
    likely = detector.probabilities(parts)
    assert np.abs(likely - scores).mean() < 0.02
    assert np.abs(detector.corners(parts.boxes) - boxes).mean() < 0.01
    # The file itself has one scale for boxes and scores: the cut one is nearer to the float model.
    assert float(np.quantile(np.abs(likely - scores), 0.99)) < 0.1


def test_the_order_of_the_dimensions_makes_no_difference(keras: Any, tmp_path: Path) -> None:
    both = []
    for channels_first in (True, False):
        content = exported_yolo.quantized(exported_yolo.network(keras, channels_first=channels_first))
        (tmp_path / "m.tflite").write_bytes(content)
        both.append(quantized_detector(tmp_path / "m.tflite"))
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].specification == both[1].specification


def test_a_quantized_classifier_and_a_float_file_are_no_quantized_detectors(tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier())
    assert quantized_detector(tmp_path / "m.tflite") is None


def test_a_range_that_is_not_known_is_a_question(
    keras: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "yolo.tflite"
    path.write_bytes(exported_yolo.quantized(exported_yolo.network(keras), limits=AS_IMAGENET))
    with pytest.raises(DataError, match=r"-2\.1.* to 2\.6.*no usual range.*holds without a cut: 0 1, -1 1") as caught:
        compress.export(path, calibrate=photos, out=tmp_path / "out")
    assert "--range 0 1" in str(caught.value)
    assert not (tmp_path / "out" / "pipeline.yaml").exists()
    arguments = ["export", str(path), "--calibrate", str(photos), "-o", str(tmp_path / "out"), "--range", "0", "1"]
    assert main.main(arguments) == 0
    output = capsys.readouterr().out
    assert "boxes: ymin, xmin, ymax, xmax, as fractions of the image's height and width" in output
    found = re.search(r"average precision (\d\.\d+), with the ([\d,]+) objects that the original finds", output)
    assert found is not None, output
    assert float(found[1]) > 0.5


def test_the_device_answers_with_boxes(keras: Any, photos: Path, tmp_path: Path) -> None:
    model = exported_yolo.network(keras)
    path = tmp_path / "yolo.tflite"
    path.write_bytes(exported_yolo.quantized(model, limits=AS_IMAGENET))
    compress.export(path, calibrate=photos, out=tmp_path / "out", value_range=(0.0, 1.0))
    image = np.asarray(Image.open(photos / "3.png"))
    boxes, scores = expected(model, image[np.newaxis] / np.float32(255))
    best = int(scores[0].max(axis=1).argmax())
    with Model(tmp_path / "out" / "yolo" / "yolo.coralline") as loaded:
        first = loaded(image).top(1)[0]
    assert first.label == NAMES[int(scores[0, best].argmax())]
    assert abs(first.score - scores[0, best].max()) < 0.05
    np.testing.assert_allclose(first.box, np.clip(boxes[0, best], 0, 1), atol=0.06)


def test_the_file_becomes_a_float_model_if_the_pipeline_asks_for_it(keras: Any, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "yolo.tflite"
    path.write_bytes(exported_yolo.quantized(exported_yolo.network(keras)))
    compress.export(path, calibrate=photos, out=tmp_path / "out")
    text = (tmp_path / "out" / "pipeline.yaml").read_text()
    text = re.sub(r'"detector": "auto"', '"detector": "auto", "dequantize": true', text)
    (tmp_path / "again.yaml").write_text(text.replace("stages:\n", "stages:\n  - quantize: {}\n"))
    result = compress.run(tmp_path / "again.yaml", out=tmp_path / "runs")
    assert result.record.comparison is not None
    assert [output.shape for output in result.record.comparison.outputs][:2] == [(12, 12, 64), (12, 12, CLASSES)]
