"""Random shifts, changes of size and mirrorings of images with objects."""

from __future__ import annotations

from typing import Any

from compress.tasks.base import Change, RandomChanges
from deploy.contract.image_geometry import VISIBLE


def augmentation(augment: RandomChanges) -> Change:
    """(images, targets, two seeds) -> both with random shifts, changes of size and mirrorings of images and objects.

    Of what is moved out of the image the rest counts, if there is enough of it. Rotation is refused beforehand.
    """
    import tensorflow

    def change(images: Any, targets: Any, seeds: Any) -> tuple[Any, Any]:
        if not (augment.flip or augment.shift or augment.zoom):
            return images, targets
        count = tensorflow.shape(images)[0]
        draws = tensorflow.random.stateless_uniform((count, 4), seeds, -1.0, 1.0)
        size = 1 + augment.zoom * draws[:, :1]
        mirrored = draws[:, 1:2] > (0.0 if augment.flip else 1.0)
        scale = tensorflow.concat([size, tensorflow.where(mirrored, -size, size)], axis=1)  # of y and x
        shift = augment.shift * draws[:, 2:]
        return _moved_images(images, scale, shift), {"labels": _moved_objects(targets["labels"], scale, shift)}

    return change


def _moved_images(images: Any, scale: Any, shift: Any) -> Any:
    """Return images sampled at (u - 1/2) * scale + 1/2 + shift for positions u in [0, 1]; edges are repeated."""
    import tensorflow

    sides = tensorflow.cast(tensorflow.shape(images)[1:3], tensorflow.float32)
    offset = (sides - 1) / 2 * (1 - scale) + shift * sides
    zero = tensorflow.zeros_like(scale[:, 0])
    rows = [scale[:, 1], zero, offset[:, 1], zero, scale[:, 0], offset[:, 0], zero, zero]
    moved = tensorflow.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tensorflow.stack(rows, axis=1),
        output_shape=tensorflow.shape(images)[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="NEAREST",
    )
    return tensorflow.ensure_shape(moved, images.shape)  # the operator forgets the size


def _moved_objects(objects: Any, scale: Any, shift: Any) -> Any:
    """Return the objects at their positions after `_moved_images`, without those that are hardly visible."""
    import tensorflow

    scale, shift = scale[:, None], shift[:, None]
    ends = [(objects[..., place : place + 2] - 0.5 - shift) / scale + 0.5 for place in (1, 3)]
    low, high = tensorflow.minimum(*ends), tensorflow.maximum(*ends)
    seen_low, seen_high = tensorflow.clip_by_value(low, 0.0, 1.0), tensorflow.clip_by_value(high, 0.0, 1.0)
    whole, seen = (tensorflow.reduce_prod(b - a, axis=-1) for a, b in ((low, high), (seen_low, seen_high)))
    kept = tensorflow.logical_and(objects[..., 0] >= 0, seen >= VISIBLE * whole)
    classes = tensorflow.where(kept, objects[..., 0], -1.0)
    return tensorflow.concat([classes[..., None], seen_low, seen_high], axis=-1)
