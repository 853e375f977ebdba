"""Keypoints and masks: points and pixels that do not count, and preprocessing that would move images only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compress.tasks.keypoints import Keypoints
from compress.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class PointsOnly:
    """The part of a data set that a head reads."""

    points: NDArray[np.float32]
    input_shape: tuple[int, ...] = (8,)
    class_names: tuple[str, ...] = ("a", "b", "c")

    def targets(self, split: Any) -> NDArray[np.float32]:
        return self.points


@pytest.mark.tensorflow
def test_points_that_are_not_marked_do_not_count(keras: Any) -> None:
    random = np.random.default_rng(0)
    points = np.concatenate([random.normal(0.5, 0.1, (40, 3, 2)), np.full((40, 3, 1), 2)], axis=2).astype(np.float32)
    unmarked = random.random((40, 3)) < 0.4
    image = keras.Input((8,))
    model = keras.Model(image, keras.layers.Dense(6)(image))
    rows = points[..., :2].reshape(40, 6)
    task = Keypoints()
    scales = []
    for place in (0, 77):
        targets = points.copy()
        targets[unmarked] = (place, place, 0)
        data: Any = PointsOnly(targets)
        head = task.head(model, data)
        assert not np.asarray(head.loss(targets, rows)).any()
        assert task.measured(task.kept(rows, targets, None), targets, "")["distance"].value == 0
        scales.append(head.scale)
    assert scales[0] == pytest.approx(scales[1])
    assert scales[0] == pytest.approx([0.1] * 6, rel=0.4)


@pytest.mark.parametrize(("task", "sources"), [(Keypoints(), ("coco", "yolo")), (Segmentation(), ("masks",))])
@pytest.mark.parametrize("step", [{"crop": {"share": 0.5}}, {"resize": {"size": [8, 8], "fit": "letterbox"}}])
def test_arrays_do_not_move_with_images(task: Any, sources: tuple[str, ...], step: dict[str, Any]) -> None:
    steps = [{"resize": {"size": [8, 8]}}, step, {"scale": {"from": [0, 255]}}, {"squeeze": {}}]
    settings: dict[str, Any] = {"model": {}, "data": {"preprocess": steps, "source": {"npz": {}}}}
    ((place, refusal),) = task.refused_settings(settings)
    assert place == ("data", "preprocess", 1)
    assert f"{next(iter(step))} changes positions in the image, but not in the" in refusal.what
    for source in sources:
        settings["data"]["source"] = {source: {}}
        assert task.refused_settings(settings) == []


def test_pixels_without_a_class_do_not_count() -> None:
    task = Segmentation()
    truth = np.array([[[0, 1], [255, 255]]], np.uint8)
    scores = np.array([[[[1, 0], [0, 1]], [[1, 0], [0, 1]]]], np.float32)
    measured = task.measured(task.kept(scores.reshape(1, -1), truth, None), truth, "")
    assert measured["miou"].value == 1
    assert measured["pixel_accuracy"].value == 1
