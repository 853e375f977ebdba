"""Random shifts, changes of size and mirrorings of images with objects."""

from __future__ import annotations

from typing import Any

from compress.tasks import moved_images
from compress.tasks.base import Change, Draws, RandomChanges
from deploy.contract.image_geometry import VISIBLE


def augmentation(augment: RandomChanges) -> Change:
    """(images, targets, random numbers) -> both with random shifts, changes of size and mirrorings of the objects too.

    Of what is moved out of the image the rest counts, if there is enough of it. Rotation is refused beforehand.
    """

    def change(images: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        if not (augment.flip or augment.shift or augment.zoom):
            return images, targets
        motion = moved_images.drawn(augment, draws)
        objects = _moved_objects(targets["labels"], motion.scale, motion.shift)
        return moved_images.moved(images, motion), {"labels": objects}

    return change


def _moved_objects(objects: Any, scale: Any, shift: Any) -> Any:
    """Return the objects at their positions after `moved_images.moved`, without those that are hardly visible."""
    import tensorflow

    scale, shift = scale[:, None], shift[:, None]
    ends = [(objects[..., start : start + 2] - 0.5 - shift) / scale + 0.5 for start in (1, 3)]
    low, high = tensorflow.minimum(*ends), tensorflow.maximum(*ends)
    seen_low, seen_high = tensorflow.clip_by_value(low, 0.0, 1.0), tensorflow.clip_by_value(high, 0.0, 1.0)
    area, seen = (tensorflow.reduce_prod(b - a, axis=-1) for a, b in ((low, high), (seen_low, seen_high)))
    kept = tensorflow.logical_and(objects[..., 0] >= 0, seen >= VISIBLE * area)
    classes = tensorflow.where(kept, objects[..., 0], -1.0)
    return tensorflow.concat([classes[..., None], seen_low, seen_high], axis=-1)
