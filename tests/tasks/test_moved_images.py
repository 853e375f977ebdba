"""Random motions of images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compress.learning.training.augmentation import Augment
from compress.tasks import moved_images
from compress.tasks.base import Draws

HEIGHT, WIDTH = 41, 61


@pytest.fixture(scope="module")
def images() -> Any:
    """Return two images with a bright square at (row 12, column 38)."""
    values = np.zeros((2, HEIGHT, WIDTH, 1), np.float32)
    values[:, 10:15, 36:41] = 1
    return values


def centre(image: Any) -> tuple[float, float]:
    """Return the row and the column of the centre of the bright pixels, relative to the middle of the image."""
    weights = np.asarray(image)[..., 0]
    rows, columns = np.indices(weights.shape)
    total = weights.sum()
    row, column = float((weights * rows).sum() / total), float((weights * columns).sum() / total)
    return row - (HEIGHT - 1) / 2, column - (WIDTH - 1) / 2


@pytest.mark.parametrize(
    ("scale", "degrees", "shift"),
    [
        ((1.0, 1.0), 0, (0.0, 0.0)),
        ((1.0, -1.0), 0, (0.0, 0.0)),
        ((1.0, 1.0), 0, (0.1, -0.2)),
        ((1.25, 1.25), 0, (0.0, 0.0)),
        ((1.0, 1.0), 90, (0.0, 0.0)),
        ((1.0, 1.0), -30, (0.0, 0.0)),
        ((1.1, -1.1), 20, (0.05, 0.1)),
    ],
)
def test_a_motion_reads_each_position_from_its_scaled_rotated_and_shifted_position(
    keras: Any, images: Any, scale: tuple[float, float], degrees: float, shift: tuple[float, float]
) -> None:
    import tensorflow as tf

    angle = math.radians(degrees)
    motion = moved_images.Motion(*(tf.constant([part, part], tf.float32) for part in (scale, angle, shift)))
    result = np.asarray(moved_images.moved(tf.constant(images), motion))
    row, column = centre(result[0])
    y, x = row * scale[0], column * scale[1]
    read_from = (
        math.sin(angle) * x + math.cos(angle) * y + shift[0] * HEIGHT,
        math.cos(angle) * x - math.sin(angle) * y + shift[1] * WIDTH,
    )
    assert read_from == pytest.approx(centre(images[0]), abs=0.2)  # interpolation moves the centre a little
    np.testing.assert_array_equal(result[0], result[1])
    if scale == (1.0, 1.0) and not degrees and not any(shift):
        np.testing.assert_allclose(result, images, atol=1e-5)


def test_motions_depend_on_the_seeds_and_stay_within_the_settings(keras: Any) -> None:
    import tensorflow as tf

    augment = Augment(flip=True, shift=0.1, zoom=0.2, rotate=30)
    draws = [Draws(tf.constant(seeds), 500) for seeds in ([1, 2], [1, 2], [1, 3])]
    one, again, other = (moved_images.drawn(augment, draw) for draw in draws)
    for mine, same, different in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(mine, same)
        assert not np.array_equal(mine, different)
    size, shift, angle = np.asarray(one.scale), np.asarray(one.shift), np.degrees(np.asarray(one.angle))
    np.testing.assert_array_equal(size[:, 0], abs(size[:, 1]))
    assert 200 < (size[:, 1] < 0).sum() < 300
    for values, largest in ((size[:, 0] - 1, 0.2), (shift[:, 0], 0.1), (shift[:, 1], 0.1), (angle, 30)):
        assert 0.9 * largest < values.max() <= largest * 1.0001
        assert -0.9 * largest > values.min() >= -largest * 1.0001
    still = moved_images.drawn(Augment(), Draws(tf.constant([1, 2]), 9))
    assert (np.asarray(still.scale) == 1).all()
    assert not np.asarray(still.angle).any()
    assert not np.asarray(still.shift).any()
