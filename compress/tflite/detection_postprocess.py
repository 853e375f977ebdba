"""`TFLite_Detection_PostProcess`: the custom operator that decodes the boxes of SSD models and suppresses overlaps.

Its inputs are raw boxes [1, n, 4] (y, x, height, width), scores [1, n, classes] and anchors [n, 4] (y, x, height,
width); its outputs boxes [1, k, 4], classes [1, k], scores [1, k] and their number [1], all float32.

Source: tensorflow/lite/kernels/detection_postprocess.cc.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compress.tflite.edit import Edit

NAME = "TFLite_Detection_PostProcess"
OUTPUTS = ("boxes", "classes", "scores", "count")
PER_CLASS = 100
"""Objects of one class that are kept before the best of all classes are chosen: the default of the operator."""


def append(
    edit: Edit,
    boxes: int,
    scores: int,
    anchors: NDArray[np.float32],
    *,
    classes: int,
    scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    most: int,
    least_score: float,
    overlap: float,
    class_agnostic: bool,
) -> tuple[int, ...]:
    """Append the operator, and return its outputs: boxes, classes, scores, count.

    Args:
        edit: the edit of a model.
        boxes: the tensor of raw boxes, float32 [1, n, 4].
        scores: the tensor of probabilities, float32 [1, n, classes].
        anchors: [n, 4], as fractions of the image.
        classes: the number of classes, without a background.
        scales: divisors of y, x, height and width; the reciprocals of SSD's variances.
        most: the number of objects that are returned.
        least_score: the score below which boxes are ignored.
        overlap: the intersection over union above which the box with the lower score is removed.
        class_agnostic: boxes of different classes suppress each other.
    """
    from flatbuffers import flexbuffers

    constant = edit.tensor("anchors", anchors.shape, "FLOAT32", values=np.asarray(anchors, np.float32))
    shapes = ((1, most, 4), (1, most), (1, most), (1,))
    outputs = tuple(edit.tensor(name, shape, "FLOAT32") for name, shape in zip(OUTPUTS, shapes, strict=True))
    builder = flexbuffers.Builder()
    with builder.Map():
        builder.Int("max_detections", most)
        builder.Int("max_classes_per_detection", 1)
        builder.Int("detections_per_class", PER_CLASS)
        builder.Bool("use_regular_nms", not class_agnostic)
        builder.Float("nms_score_threshold", least_score)
        builder.Float("nms_iou_threshold", overlap)
        builder.Int("num_classes", classes)
        for name, scale in zip(("y_scale", "x_scale", "h_scale", "w_scale"), scales, strict=True):
            builder.Float(name, scale)
    edit.add_custom(NAME, [boxes, scores, constant], outputs, bytes(builder.Finish()))
    return outputs
