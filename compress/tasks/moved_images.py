"""Random shifts, rotations, changes of size and mirrorings of images and of their objects, in one interpolation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from compress.tasks.base import Change, Draws, RandomChanges
from deploy.contract.image_geometry import VISIBLE


class Motion(NamedTuple):
    """One motion for each image of a batch.

    Attributes:
        scale: factors of the positions of y and x, from the middle of the image; negative: mirrored. [n, 2].
        angle: the angle in radians: [n].
        shift: the shifts of y and x, fractions of the image's size: [n, 2].
    """

    scale: Any
    angle: Any
    shift: Any


def drawn(augment: RandomChanges, draws: Draws) -> Motion:
    """Return random motions within the largest changes that `augment` allows."""
    import tensorflow as tf

    values = tf.random.stateless_uniform((draws.size, 5), draws.seeds, -1.0, 1.0)
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


def augmentation(augment: RandomChanges) -> Change:
    """Return the function that moves images together with their objects.

    The visible rest of an object at the edge counts, if it is large enough. Rotation is refused beforehand.
    """

    def change(images: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        if not (augment.flip or augment.shift or augment.zoom):
            return images, targets
        motion = drawn(augment, draws)
        objects = _moved_objects(targets["labels"], motion.scale, motion.shift)
        return moved(images, motion), {"labels": objects}

    return change


def _moved_objects(objects: Any, scale: Any, shift: Any) -> Any:
    """Return the objects at their positions after `moved`, without those that are hardly visible."""
    import tensorflow

    scale, shift = scale[:, None], shift[:, None]
    ends = [(objects[..., start : start + 2] - 0.5 - shift) / scale + 0.5 for start in (1, 3)]
    low, high = tensorflow.minimum(*ends), tensorflow.maximum(*ends)
    seen_low, seen_high = tensorflow.clip_by_value(low, 0.0, 1.0), tensorflow.clip_by_value(high, 0.0, 1.0)
    area, seen = (tensorflow.reduce_prod(b - a, axis=-1) for a, b in ((low, high), (seen_low, seen_high)))
    kept = tensorflow.logical_and(objects[..., 0] >= 0, seen >= VISIBLE * area)
    classes = tensorflow.where(kept, objects[..., 0], -1.0)
    return tensorflow.concat([classes[..., None], seen_low, seen_high], axis=-1)
