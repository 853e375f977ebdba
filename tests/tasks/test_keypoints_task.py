"""Keypoints: points that are not marked count nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compress.tasks.keypoints import Keypoints

pytestmark = pytest.mark.tensorflow


@dataclass(frozen=True)
class PointsOnly:
    """The part of a data set that a head reads."""

    points: NDArray[np.float32]
    input_shape: tuple[int, ...] = (8,)
    class_names: tuple[str, ...] = ("a", "b", "c")

    def targets(self, split: Any) -> NDArray[np.float32]:
        return self.points


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
