"""The training loss of detectors without anchors: locations are assigned to objects by what they predict.

Of the locations inside an object, those count whose score for its class and whose overlap with the object are best, so
that scores and boxes learn to agree. An untrained model must predict boxes that overlap objects: distances `ltrb` need
a bias above 0.

Sources: Feng et al., TOOD: Task-aligned One-stage Object Detection, ICCV 2021 (assignment); Rezatofighi et al.,
Generalized Intersection over Union, CVPR 2019 (boxes); Li et al., Generalized Focal Loss, NeurIPS 2020 (distributions
over distances).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compress.model.ir.tensorflow import keras
from deploy.contract.detection import Detector, DetectorParts

SCORE_POWER, OVERLAP_POWER = 0.5, 6.0
"""Powers of score and overlap in the alignment of a location with an object."""
BEST_LOCATIONS = 10
"""Locations that an object is assigned to."""
SCORE_GAIN, BOX_GAIN, BINS_GAIN = 0.5, 7.5, 1.5
"""Weights of the parts of the loss."""
SMALL = 1e-9
"""Keeps products and quotients of scores that are 0 finite, and orders candidates that are otherwise equal."""


@dataclass(frozen=True)
class Assignment:
    """The training targets of the locations.

    Attributes:
        positive: [n, locations], 1 where a location is assigned to an object.
        boxes: [n, locations, 4], the box of that object.
        scores: [n, locations, classes]: for the class of that object, the quality of the location relative to the best
            location.
    """

    positive: Any
    boxes: Any
    scores: Any


def loss_parts(detector: Detector, objects: Any, parts: DetectorParts) -> tuple[Any, Any]:
    """Return the losses of scores and boxes of each image, [n] each; the loss is their sum.

    The scores of the detector must be logits; the objects [n, most, 5] are those of `detection.padded`.
    """
    ops = keras().ops
    boxes = detector.corners(parts.boxes, maths=ops)
    likely = detector.probabilities(parts, ops)
    assignment = assign(detector, objects, ops.stop_gradient(boxes), ops.stop_gradient(likely))
    weights = ops.sum(assignment.scores, axis=-1)
    count = ops.maximum(ops.sum(weights, axis=1), 1.0)
    score_loss = _score_loss(detector, parts, assignment)
    box_loss = ops.sum((1 - generalized_overlap(boxes, assignment.boxes)) * weights, axis=1)
    box_loss = BOX_GAIN * box_loss
    if detector.specification["code"] == "dfl":
        box_loss += BINS_GAIN * ops.sum(_bins_loss(detector, parts.boxes, assignment.boxes) * weights, axis=1)
    return SCORE_GAIN * score_loss / count, box_loss / count


def _score_loss(detector: Detector, parts: DetectorParts, assignment: Assignment) -> Any:
    """Return the cross-entropy of the scores with their targets: [n]."""
    ops = keras().ops
    background = detector.specification["background"]
    logits = parts.scores
    if background is not None:
        logits = logits[..., 1:] if background == "first" else logits[..., :-1]
    entropy = ops.softplus(logits) - assignment.scores * logits
    if parts.objectness is None:
        return ops.sum(entropy, axis=(1, 2))
    quality = ops.sum(assignment.scores, axis=-1, keepdims=True)
    objectness_loss = ops.sum(ops.softplus(parts.objectness) - quality * parts.objectness, axis=(1, 2))
    classes = ops.cast(assignment.scores > 0, "float32")
    class_entropy = (ops.softplus(logits) - classes * logits) * assignment.positive[..., None]
    return objectness_loss + ops.sum(class_entropy, axis=(1, 2))


def _bins_loss(detector: Detector, raw: Any, boxes: Any) -> Any:
    """Return the cross-entropy of the distributions with the distances, averaged over the sides: [n, locations]."""
    ops = keras().ops
    bins = detector.specification["bins"]
    points = (detector.at.cells + detector.specification["offset"]) * detector.at.steps
    steps = detector.at.steps
    low, high = (points - boxes[..., :2]) / steps, (boxes[..., 2:] - points) / steps
    top, left, bottom, right = low[..., 0], low[..., 1], high[..., 0], high[..., 1]
    sides = (left, top, right, bottom) if detector.specification["order"] == "xy" else (top, left, bottom, right)
    distances = ops.clip(ops.stack(sides, axis=-1), 0.0, bins - 1.01)
    below = ops.floor(distances)
    share = (distances - below)[..., None]
    first = ops.one_hot(ops.cast(below, "int32"), bins, dtype="float32")
    second = ops.one_hot(ops.cast(below, "int32") + 1, bins, dtype="float32")
    logs = ops.log_softmax(ops.reshape(raw, (-1, raw.shape[1], 4, bins)))
    return ops.mean(-ops.sum((first * (1 - share) + second * share) * logs, axis=-1), axis=-1)


def assign(detector: Detector, objects: Any, boxes: Any, likely: Any) -> Assignment:
    """Return the targets of the locations, from objects [n, most, 5], decoded boxes [n, locations, 4] and probabilities
    `likely` [n, locations, classes]."""
    ops = keras().ops
    classes = objects[..., 0]
    object_boxes = objects[..., 1:]
    is_object = ops.cast(classes >= 0, "float32")
    overlaps = ops.maximum(overlap(object_boxes[:, :, None], boxes[:, None]), 0.0)  # [n, most, locations]
    of_class = ops.one_hot(ops.cast(classes, "int32"), likely.shape[-1], dtype="float32")
    score = ops.einsum("noc,nlc->nol", of_class, likely)
    inside = _inside(detector, object_boxes) * is_object[..., None]
    aligned = (score + SMALL) ** SCORE_POWER * overlaps**OVERLAP_POWER * inside + SMALL * inside * overlaps
    chosen = _best(aligned + SMALL * SMALL * inside, inside)
    # A location belongs to one object: the one that it overlaps most.
    owner = ops.argmax(ops.where(chosen > 0, overlaps + 1.0, 0.0), axis=1)
    positive = ops.cast(ops.max(chosen, axis=1) > 0, "float32")
    chosen = chosen * ops.transpose(ops.one_hot(owner, classes.shape[1], dtype="float32"), (0, 2, 1))
    aligned = aligned * chosen
    top = ops.max(aligned, axis=2, keepdims=True)
    best_overlap = ops.max(overlaps * chosen, axis=2, keepdims=True)
    quality = ops.max(aligned / (top + SMALL * SMALL) * best_overlap, axis=1)
    owners = ops.take_along_axis(objects, ops.repeat(owner[..., None], 5, axis=-1), axis=1)
    labels = ops.one_hot(ops.cast(owners[..., 0], "int32"), likely.shape[-1], dtype="float32")
    scores = labels * (quality * positive)[..., None]
    return Assignment(positive, owners[..., 1:], scores)


def _inside(detector: Detector, boxes: Any) -> Any:
    """Return 1 for the locations in an object, or for the nearest if no location is in it: [n, most, locations]."""
    ops = keras().ops
    points = (detector.at.cells + 0.5) * detector.at.steps
    low = points - boxes[:, :, None, :2]
    high = boxes[:, :, None, 2:] - points
    nearest_side = ops.minimum(ops.min(low, axis=-1), ops.min(high, axis=-1))
    inside = ops.cast(nearest_side > 0, "float32")
    nearest = ops.one_hot(ops.argmax(nearest_side, axis=-1), len(points), dtype="float32")
    return ops.where(ops.sum(inside, axis=-1, keepdims=True) > 0, inside, nearest)


def _best(aligned: Any, inside: Any) -> Any:
    """Return 1 for the best locations of each object: [n, most, locations]."""
    ops = keras().ops
    count = min(BEST_LOCATIONS, aligned.shape[-1])
    limit = ops.top_k(aligned, count)[0][..., -1:]
    return ops.cast(aligned >= limit, "float32") * inside


def overlap(boxes: Any, others: Any) -> Any:
    """Return the intersection over union of pairs of boxes (ymin, xmin, ymax, xmax), which broadcast: [...]."""
    return _areas(boxes, others)[0]


def generalized_overlap(boxes: Any, others: Any) -> Any:
    """Return the generalized intersection over union of pairs of boxes: -1 to 1, [...]."""
    ops = keras().ops
    ratio, union = _areas(boxes, others)
    low = ops.minimum(boxes[..., :2], others[..., :2])
    high = ops.maximum(boxes[..., 2:], others[..., 2:])
    enclosing = ops.prod(ops.maximum(high - low, 0.0), axis=-1)
    return ratio - (enclosing - union) / ops.maximum(enclosing, SMALL)


def _areas(boxes: Any, others: Any) -> tuple[Any, Any]:
    ops = keras().ops
    low = ops.maximum(boxes[..., :2], others[..., :2])
    high = ops.minimum(boxes[..., 2:], others[..., 2:])
    intersection = ops.prod(ops.maximum(high - low, 0.0), axis=-1)
    sizes = [ops.prod(ops.maximum(corners[..., 2:] - corners[..., :2], 0.0), axis=-1) for corners in (boxes, others)]
    union = sizes[0] + sizes[1] - intersection
    return intersection / ops.maximum(union, SMALL), union
