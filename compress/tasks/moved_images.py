"""Random shifts, rotations, changes of size and mirrorings of images, in one interpolation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from compress.tasks.base import Draws, RandomChanges


class Motion(NamedTuple):
    """One motion for each image of a batch.

    Attributes:
        scale: factors of the positions of y and x, from the middle of the image; negative: mirrored. [n, 2].
        angle: in radians: [n].
        shift: of y and x, a fraction of the image's size: [n, 2].
    """

    scale: Any
    angle: Any
    shift: Any


def drawn(augment: RandomChanges, draws: Draws) -> Motion:
    """Return random motions.

    Args:
        augment: the largest changes.
        draws: the random numbers of the images.
    """
    import tensorflow as tf

    values = draws.own(tf.random.stateless_uniform((draws.size, 5), draws.seeds, -1.0, 1.0))
    size = 1 + augment.zoom * values[:, :1]
    mirrored = values[:, 1:2] > (0.0 if augment.flip else 1.0)
    scale = tf.concat([size, tf.where(mirrored, -size, size)], axis=1)
    return Motion(scale, math.radians(augment.rotate) * values[:, 4], augment.shift * values[:, 2:4])


def moved(images: Any, motion: Motion) -> Any:
    """Return images [n, height, width, channels] after their motions; the edges are repeated.

    The value at a position is that of the image at the position that is scaled, rotated about the middle, then shifted.
    """
    import tensorflow as tf

    height, width = (tf.cast(side, tf.float32) for side in tf.unstack(tf.shape(images)[1:3]))
    cos, sin = tf.cos(motion.angle), tf.sin(motion.angle)
    from_x = motion.scale[:, 1] * cos, motion.scale[:, 1] * sin
    from_y = -motion.scale[:, 0] * sin, motion.scale[:, 0] * cos
    middle = (width - 1) / 2, (height - 1) / 2
    sides = width, height

    def row(axis: int) -> list[Any]:
        start = middle[axis] + motion.shift[:, 1 - axis] * sides[axis]
        return [from_x[axis], from_y[axis], start - from_x[axis] * middle[0] - from_y[axis] * middle[1]]

    zero = tf.zeros_like(cos)
    result = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.stack([*row(0), *row(1), zero, zero], axis=1),
        output_shape=tf.shape(images)[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="NEAREST",
    )
    return tf.ensure_shape(result, images.shape)  # the operator forgets the size
