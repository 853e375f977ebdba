"""Functions for detectors: models with TFLite_Detection_PostProcess, and bundles of detectors without it."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

from coralline_pycoral.adapters import common
from coralline_pycoral.utils.edgetpu import BundledInterpreter, bundle_of
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription
from deploy.runner import runtime
from deploy.runner.answers import decoder


class BBox(NamedTuple):
    """A box: its left, upper, right and lower border."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float

    @property
    def width(self) -> float:
        """The width."""
        return self.xmax - self.xmin

    @property
    def height(self) -> float:
        """The height."""
        return self.ymax - self.ymin

    @property
    def area(self) -> float:
        """The product of width and height."""
        return self.width * self.height

    @property
    def valid(self) -> bool:
        """True if neither width nor height is negative."""
        return self.width >= 0 and self.height >= 0

    def scale(self, sx: float, sy: float) -> BBox:
        """Return the box with x multiplied by `sx` and y by `sy`."""
        return BBox(sx * self.xmin, sy * self.ymin, sx * self.xmax, sy * self.ymax)

    def translate(self, dx: float, dy: float) -> BBox:
        """Return the box moved by `dx` and `dy`."""
        return BBox(dx + self.xmin, dy + self.ymin, dx + self.xmax, dy + self.ymax)

    def map(self, f: Callable[[float], float]) -> BBox:
        """Return the box with a function applied to each coordinate."""
        return BBox(f(self.xmin), f(self.ymin), f(self.xmax), f(self.ymax))

    @staticmethod
    def intersect(a: BBox, b: BBox) -> BBox:
        """Return the area that two boxes share. It is not `valid` if they share none."""
        return BBox(max(a.xmin, b.xmin), max(a.ymin, b.ymin), min(a.xmax, b.xmax), min(a.ymax, b.ymax))

    @staticmethod
    def union(a: BBox, b: BBox) -> BBox:
        """Return the smallest box around two boxes."""
        return BBox(min(a.xmin, b.xmin), min(a.ymin, b.ymin), max(a.xmax, b.xmax), max(a.ymax, b.ymax))

    @staticmethod
    def iou(a: BBox, b: BBox) -> float:
        """Return the intersection over union of two boxes.

        Raises:
            ZeroDivisionError: both boxes are empty and at the same place.
        """
        shared = BBox.intersect(a, b)
        if not shared.valid:
            return 0.0
        return shared.area / (a.area + b.area - shared.area)


class Object(NamedTuple):
    """A detected object: the index of its class, its score, and its box in pixels of the image."""

    id: int
    score: float
    bbox: BBox


class _Detected(NamedTuple):
    """The outputs of a detector: boxes [n, 4] as (ymin, xmin, ymax, xmax), fractions of the input's size."""

    boxes: Array
    class_ids: Array
    scores: Array


def get_objects(
    interpreter: Any,
    score_threshold: float = -float("inf"),
    image_scale: Tuple[float, float] = (1.0, 1.0),
) -> List[Object]:
    """Return the objects of the last inference, in the order of the model.

    Args:
        interpreter: the interpreter.
        score_threshold: the lowest score.
        image_scale: the scale along x and y with which the image was written into the input
            (`common.set_resized_input`): boxes are then in pixels of the image.

    Raises:
        ValueError: the model has several signatures.
    """
    detected = _detected(interpreter)
    width, height = common.input_size(interpreter)
    scale_x, scale_y = image_scale
    objects = []
    for class_id, score, box in zip(detected.class_ids, detected.scores, detected.boxes):
        if score >= score_threshold:
            ymin, xmin, ymax, xmax = box
            bbox = BBox(xmin, ymin, xmax, ymax).scale(width / scale_x, height / scale_y).map(int)
            objects.append(Object(int(class_id), float(score), bbox))
    return objects


def _detected(interpreter: Any) -> _Detected:
    opened = bundle_of(interpreter)
    if opened is not None and opened.bundle.detector is not None:
        return _decoded(interpreter, opened)
    # Runtimes before 2.5 have no signatures.
    signatures: Any = getattr(interpreter, "_get_full_signature_list", dict)()
    if signatures:
        if len(signatures) > 1:
            raise ValueError("Only support model with one signature.")
        # A detector of TensorFlow 2 names its outputs: 1 scores, 2 classes, 3 boxes. Their order in the file differs.
        (named,) = signatures.values()
        outputs = named["outputs"]
        indices = [outputs["output_%d" % number] for number in (3, 2, 1)]
        return _Detected(*[interpreter.tensor(index)()[0] for index in indices])
    # Of the four outputs, the number of objects has one value. TensorFlow 1: boxes, classes, scores, number;
    # TensorFlow 2: scores, boxes, number, classes.
    output_indices = (0, 1, 2) if common.output_tensor(interpreter, 3).size == 1 else (1, 3, 0)
    return _Detected(*[common.output_tensor(interpreter, output_index)[0] for output_index in output_indices])


def _decoded(interpreter: Any, opened: BundledInterpreter) -> _Detected:
    """Return the outputs of a bundle's detector after decoding and non-maximum suppression."""
    details = interpreter.get_output_details()
    expected = opened.bundle.models[opened.role].outputs
    order = runtime.matching_order(TensorDescription.of(details), expected)
    outputs = [common.output_tensor(interpreter, index) for index in order]
    detections = decoder(opened.bundle, expected)(outputs)
    return _Detected(detections.boxes, detections.classes, detections.scores)
