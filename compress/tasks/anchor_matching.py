"""Matching of anchors with objects, for the training of detectors with anchors.

Source: Liu et al., SSD: Single Shot MultiBox Detector, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.model.ir.tensorflow import keras
from deploy.contract.detection import Detector

MATCHED, UNMATCHED = 0.5, 0.4
"""Overlap above which an anchor is positive, and below which it is negative; between them it is ignored."""


@dataclass(frozen=True)
class AnchorTargets:
    """The training targets of the anchors for a batch of images: tensors [n, anchors].

    Attributes:
        positive: 1 where an anchor is assigned to an object, otherwise 0.
        counted: 0 where the scores do not contribute to the loss, because the overlap is between UNMATCHED and MATCHED;
            otherwise 1.
        classes: the class of the assigned object, -1 for none.
        boxes: [n, anchors, 4], the raw values that decode to the box of the assigned object.
    """

    positive: Any
    counted: Any
    classes: Any
    boxes: Any


def match(detector: Detector, objects: Any) -> AnchorTargets:
    """Match each anchor with the object of largest overlap, if that is enough, and each object with its best anchor.

    Args:
        detector: with the anchors.
        objects: [n, most, 5] as `padded` makes them.
    """
    ops = keras().ops
    classes, boxes = objects[..., 0], objects[..., 1:]
    there = ops.cast(classes >= 0, "float32")
    shared = _overlaps(boxes, detector) * there[..., None]  # [n, most, anchors]
    best = ops.argmax(shared, axis=1)
    most = ops.max(shared, axis=1)
    favourite = ops.one_hot(ops.argmax(shared, axis=2), shared.shape[-1], dtype="float32") * there[..., None]
    favourite = favourite * ops.cast(shared > 0, "float32")
    forced = ops.max(favourite, axis=1) > 0
    owner = ops.where(forced, ops.argmax(favourite, axis=1), best)
    positive = ops.cast(ops.logical_or(forced, most >= MATCHED), "float32")
    counted = ops.maximum(positive, ops.cast(most < UNMATCHED, "float32"))
    matched_objects = ops.take_along_axis(objects, ops.repeat(ops.expand_dims(owner, -1), 5, axis=-1), axis=1)
    matched_classes = ops.where(positive > 0, matched_objects[..., 0], -1.0)
    return AnchorTargets(positive, counted, matched_classes, _raw(matched_objects[..., 1:], detector))


def _overlaps(boxes: Any, detector: Detector) -> Any:
    """Return the intersection over union of each object with each anchor: [n, objects, anchors]."""
    ops, anchors = keras().ops, detector.anchors
    low, high = anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2
    boxes = ops.expand_dims(boxes, 2)
    sides = ops.maximum(ops.minimum(boxes[..., 2:], high) - ops.maximum(boxes[..., :2], low), 0)
    shared = sides[..., 0] * sides[..., 1]
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return shared / ops.maximum(areas + anchors[:, 2] * anchors[:, 3] - shared, 1e-9)


def _raw(boxes: Any, detector: Detector) -> Any:
    """Encode boxes relative to their anchors; `Detector.located` decodes them."""
    ops, anchors = keras().ops, detector.anchors
    variances = np.asarray(detector.specification["variances"], np.float32)
    middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, ops.maximum(boxes[..., 2:] - boxes[..., :2], 1e-6)
    moved = (middle - anchors[:, :2]) / anchors[:, 2:]
    return ops.concatenate([moved, ops.log(size / anchors[:, 2:])], axis=-1) / variances
