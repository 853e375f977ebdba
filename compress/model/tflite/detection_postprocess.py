"""`TFLite_Detection_PostProcess`: the custom operator that decodes the boxes of SSD models and suppresses overlaps.

Its inputs are raw boxes [1, n, 4] (y, x, height, width), scores [1, n, classes] and anchors [n, 4] (y, x, height,
width); its outputs boxes [1, k, 4], classes [1, k], scores [1, k] and their number [1], all float32.

Source: tensorflow/lite/kernels/detection_postprocess.cc.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite.dequantization import constant_values
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Operator, Tensor
from deploy.contract.detection import Detector
from deploy.contract.detector_specification import DetectionError

NAME = "TFLite_Detection_PostProcess"
OUTPUTS = ("boxes", "classes", "scores", "count")
PER_CLASS = 100
"""Objects of one class that are kept before the best of all classes are chosen: the default of the operator."""
OPTIONS = ("max_detections", "num_classes", "use_regular_nms", "nms_score_threshold", "nms_iou_threshold")
SCALES = ("y_scale", "x_scale", "h_scale", "w_scale")
MAX_CLASSES = 100_000
"""A damaged value would make the decoding allocate for it."""
MOST, LEAST = 1000, 1e-6
"""Limits of a detector's specification: the number of objects, and a threshold that stands for 0."""


@dataclass(frozen=True)
class PostProcess:
    """The operator of a model.

    Attributes:
        boxes: the tensor of raw boxes, [1, n, 4].
        scores: the tensor of probabilities, [1, n, classes], perhaps with a background before them.
        anchors: [n, 4]: y, x, height, width, as fractions of the image.
        scales: divisors of y, x, height and width.
        classes: the number of classes, without the background.
        least_score: the score below which boxes are ignored.
        overlap: the intersection over union above which the box with the lower score is removed.
        class_agnostic: boxes of different classes suppress each other.
    """

    operator: Operator
    boxes: Tensor
    scores: Tensor
    anchors: NDArray[np.float32]
    scales: tuple[float, ...]
    classes: int
    most: int
    least_score: float
    overlap: float
    class_agnostic: bool

    @property
    def background(self) -> bool:
        """Whether the first score is that of the background."""
        return self.scores.shape[2] == self.classes + 1

    @property
    def note(self) -> str:
        """The handling of the operator, as a sentence."""
        return f"{NAME} is taken off: its {len(self.anchors):,} anchors and its thresholds are used on the device"

    @property
    def thresholds(self) -> dict[str, Any]:
        """The thresholds, as keys of a detector's specification."""
        return {name: getattr(self, name) for name in ("least_score", "overlap", "most", "class_agnostic")}

    @property
    def specification(self) -> dict[str, Any]:
        """The specification of a detector with the outputs boxes and scores (`deploy.contract.detection`)."""
        return {
            "maps": [{"anchors": [[float(f"{value:.7g}") for value in row] for row in self.anchors]}],
            "code": "ssd",
            "order": "yx",
            "variances": [1 / scale for scale in self.scales],
            "scores": "probabilities",
            **({"background": "first"} if self.background else {}),
            **self.thresholds,
        }


def read(graph: Graph, where: str = "") -> PostProcess | None:
    """Return the operator at the end of a model; None without one.

    Raises:
        ModelError: the options, the inputs or the anchors of the operator are invalid.
    """
    operators = graph.custom_operators(NAME)
    if len(operators) != 1 or not set(graph.outputs) <= set(operators[0].outputs):
        return None
    operator = operators[0]
    options = options_of(graph, operator, where)
    tensors = [graph.tensors[index] for index in operator.inputs if index >= 0]
    if len(tensors) != 3 or not tensors[2].is_constant:
        raise ModelError(f"its {NAME} has no boxes, scores and constant anchors", where=where)
    boxes, scores, anchors = tensors
    try:
        values = constant_values(anchors)
    except ModelError as error:
        error.where = where
        raise
    count, classes = values.shape[0] if values.ndim else 0, int(options.get("num_classes", 0))
    fits = boxes.shape == (1, count, 4) and scores.shape[:2] == (1, count) and len(scores.shape) == 3
    if values.shape != (count, 4) or not fits or scores.shape[2] not in (classes, classes + 1):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ModelError(f"its {NAME} has inputs of the shapes {shapes} for {classes} classes", where=where)
    scales = tuple(float(options.get(name, 0)) for name in SCALES)
    if not all(0 < scale < np.inf for scale in scales) or not np.isfinite(values).all() or (values[:, 2:] <= 0).any():
        raise ModelError(f"its {NAME} has scales or anchors that are not above 0", where=where)
    postprocess = PostProcess(
        operator,
        boxes,
        scores,
        values,
        scales,
        classes,
        most=int(np.clip(options.get("max_detections", 100), 1, MOST)),
        # 0 or less is common: keep all boxes.
        least_score=float(np.clip(options.get("nms_score_threshold", 0.01), LEAST, 1 - LEAST)),
        overlap=float(np.clip(options.get("nms_iou_threshold", 0.5), LEAST, 1)),
        class_agnostic=not options.get("use_regular_nms", False),
    )
    try:
        Detector(postprocess.specification)
    except DetectionError as error:
        raise ModelError(f"its {NAME} cannot be decoded: {error}", where=where) from error
    return postprocess


def options_of(graph: Graph, operator: Operator, where: str = "") -> Mapping[str, float]:
    """Return the numeric options of the operator, which are a FlexBuffer map.

    Raises:
        ModelError: the options cannot be read, or the number of classes is invalid.
    """
    from flatbuffers import flexbuffers

    stored = graph.source.subgraphs[0].operators[operator.index].customOptions
    if stored is None or len(stored) == 0:
        return {}
    options: dict[str, float] = {}
    try:
        root = flexbuffers.GetRoot(bytes(bytearray(stored)))
        entries: Any = root.AsMap if root.IsMap else {}
        for name in (*OPTIONS, *SCALES):
            try:
                value = entries[name]
            except KeyError:
                continue
            if value.IsBool or value.IsNumeric:
                options[name] = value.AsFloat if value.IsFloat else int(value.AsBool if value.IsBool else value.AsInt)
    except (struct.error, LookupError, ValueError, RecursionError, OverflowError) as error:
        raise ModelError(f"the options of its {NAME} cannot be read: {error}", where=where) from error
    unclear = next((name for name, value in options.items() if math.isnan(value)), None)
    if unclear is not None:
        raise ModelError(f"the option {unclear} of its {NAME} is not a number", where=where)
    classes = options.get("num_classes", 1)
    if not 0 < classes <= MAX_CLASSES:
        raise ModelError(f"its {NAME} has {classes} classes", where=where, allowed=f"1 to {MAX_CLASSES:,}")
    return options


def without(graph: Graph, postprocess: PostProcess) -> Graph:
    """Return the model with raw boxes and scores as outputs instead of the operator's."""
    edit = Edit(graph)
    edit.remove(postprocess.operator)
    edit.outputs = [postprocess.boxes.index, postprocess.scores.index]
    return edit.graph()


def decoded(graph: Graph, postprocess: PostProcess) -> Graph:
    """Return a float model with decoded boxes (ymin, xmin, ymax, xmax) and scores as outputs, in plain operators.

    The column of a background is left out, unless the scores are a softmax, which needs it.
    """
    edit = Edit(graph)
    edit.remove(postprocess.operator)
    count = len(postprocess.anchors)

    def step(name: str, inputs: Sequence[int], shape: Sequence[int], options: str = "", **values: Any) -> int:
        output = edit.tensor(f"decoded/{name}", shape, "FLOAT32")
        edit.add(name, inputs, [output], edit.options(options, **values) if options else None, 1)
        return output

    def constant(values: Any) -> int:
        array = np.asarray(values, np.float32)
        return edit.tensor("decoded/constant", array.shape, "FLOAT32", values=array)

    def part(tensor: int, column: int, columns: int) -> int:
        begin, size = edit.integers("begin", 0, 0, column), edit.integers("size", 1, count, columns)
        return step("SLICE", [tensor, begin, size], (1, count, columns), "SliceOptions")

    anchors = postprocess.anchors[np.newaxis]
    pair = (1, count, 2)
    position = part(postprocess.boxes.index, 0, 2)
    moved = step("MUL", [position, constant(anchors[..., 2:] / postprocess.scales[:2])], pair, "MulOptions")
    centre = step("ADD", [moved, constant(anchors[..., :2])], pair, "AddOptions")
    size = part(postprocess.boxes.index, 2, 2)
    scaled = step("MUL", [size, constant(1 / np.array(postprocess.scales[2:]))], pair, "MulOptions")
    grown = step("EXP", [scaled], pair, "ExpOptions")
    half = step("MUL", [grown, constant(anchors[..., 2:] / 2)], pair, "MulOptions")
    corners = [step(name, [centre, half], pair, f"{name.title()}Options") for name in ("SUB", "ADD")]
    boxes = step("CONCATENATION", corners, (1, count, 4), "ConcatenationOptions", axis=2)
    scores = postprocess.scores.index
    maker = graph.producer.get(scores)
    if postprocess.background and not (maker is not None and maker.name == "SOFTMAX"):
        scores = part(scores, 1, postprocess.classes)
    edit.outputs = [boxes, scores]
    return edit.graph()


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

    The arguments mean the same as the attributes of `PostProcess`; `boxes` and `scores` are float32.
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
        for name, scale in zip(SCALES, scales, strict=True):
            builder.Float(name, scale)
    edit.add_custom(NAME, [boxes, scores, constant], outputs, bytes(builder.Finish()))
    return outputs
