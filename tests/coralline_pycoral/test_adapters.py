"""The adapters, on prepared outputs. Expected values are those of pycoral 2.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coralline_pycoral.adapters import classify, common, detect, segment
from coralline_pycoral.adapters.detect import BBox
from coralline_pycoral.utils.dataset import read_label_file

BOXES = np.array([[[0.1, 0.2, 0.5, 0.6], [0.0, 0.0, 1.0, 1.0]]], np.float32)
CLASSES = np.array([[7, 3]], np.float32)
SCORES = np.array([[0.9, 0.4]], np.float32)
COUNT = np.array([2], np.float32)


def test_the_geometry_of_boxes() -> None:
    box = BBox(2, 4, 10, 20)
    assert (box.width, box.height, box.area, box.valid) == (8, 16, 128, True)
    assert box.scale(2, 0.5) == (4, 2, 20, 10)
    assert box.translate(-2, 1) == (0, 5, 8, 21)
    assert BBox(0.6, 1.2, 2.9, 3.1).map(int) == (0, 1, 2, 3)
    other = BBox(6, 12, 14, 28)
    assert BBox.intersect(box, other) == (6, 12, 10, 20)
    assert BBox.union(box, other) == (2, 4, 14, 28)
    assert BBox.iou(box, other) == 32 / (128 + 128 - 32)
    assert BBox.iou(box, box.translate(9, 0)) == 0
    assert not BBox.intersect(box, box.translate(9, 0)).valid


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ([BOXES, CLASSES, SCORES, COUNT], None),
        ([SCORES, BOXES, COUNT, CLASSES], None),
        ([CLASSES, COUNT, BOXES, SCORES], {"output_0": 1, "output_1": 3, "output_2": 0, "output_3": 2}),
    ],
    ids=["TensorFlow 1", "TensorFlow 2", "signature"],
)
def test_objects_from_every_order_of_outputs(prepared: Any, outputs: list[Any], names: Any) -> None:
    interpreter = prepared(outputs, signatures={"serving_default": {"outputs": names}} if names else None)
    objects = detect.get_objects(interpreter, 0.5, (0.5, 0.25))
    assert [(detection.id, detection.bbox) for detection in objects] == [(7, BBox(40, 20, 120, 100))]
    assert objects[0].score == pytest.approx(0.9)
    assert len(detect.get_objects(interpreter)) == 2


def test_two_signatures_are_refused(prepared: Any) -> None:
    with pytest.raises(ValueError, match="one signature"):
        detect.get_objects(prepared([], signatures={"a": {}, "b": {}}))


def test_classes_of_a_quantized_output(prepared: Any) -> None:
    interpreter = prepared([np.array([[0, 200, 100, 255]], np.uint8)], quantization=(0.5, 100))
    assert classify.num_classes(interpreter) == 4
    assert classify.get_scores(interpreter).tolist() == [-50, 50, 0, 77.5]
    assert classify.get_classes(interpreter, top_k=2) == [(3, 77.5), (1, 50)]
    assert classify.get_classes(interpreter, score_threshold=0) == [(3, 77.5), (1, 50), (2, 0)]


def test_float_scores_are_a_copy(prepared: Any) -> None:
    interpreter = prepared([np.array([[0.25, 0.75]], np.float32)])
    scores = classify.get_scores(interpreter)
    interpreter.tensors[0][:] = 0
    assert scores.tolist() == [0.25, 0.75]


def test_an_image_keeps_its_aspect_ratio(prepared: Any) -> None:
    interpreter = prepared([], size=(8, 4))
    interpreter.tensors[-1].fill(9)
    resized, scale = common.set_resized_input(
        interpreter, (16, 16), lambda size: np.full((size[1], size[0], 3), 5, np.uint8)
    )
    assert common.input_size(interpreter) == (8, 4)
    assert (resized.shape, scale) == ((4, 4, 3), (0.25, 0.25))
    tensor = common.input_tensor(interpreter)
    assert (tensor[:, :4] == 5).all()
    assert (tensor[:, 4:] == 0).all()


def test_masks(prepared: Any) -> None:
    mask = segment.get_output(prepared([np.array([[[0, 20], [3, 1]]], np.int64)]))
    assert mask.dtype == np.uint8
    assert mask.tolist() == [[0, 20], [3, 1]]


def test_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("0: cat\n2 big dog\nbird\n\n", encoding="utf-8")
    assert read_label_file(str(tmp_path / "labels.txt")) == {0: "cat", 2: "bird", 3: ""}
