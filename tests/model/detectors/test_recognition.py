"""Heads of detectors as their projects export them, with random weights: each is recognized by its output values.

Every case decodes in the graph (or not) as its family does. The decoding of the device must give the same boxes and
scores from the model that is cut at its last convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import compress
from compress.core.errors import ModelError
from compress.model.detectors import box_fit, probing, recognition
from compress.model.detectors import detector_model as detector_models
from compress.model.detectors.detector_model import DetectorModel, detector_model
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detector

pytestmark = pytest.mark.tensorflow

SIDE = 64
CLASSES = 3
GRIDS = ((8, 8), (4, 4))
SIZES = (((10.0, 13.0), (30.0, 16.0)), ((40.0, 20.0), (25.0, 60.0)))
"""Height and width of the anchors of each map, in pixels."""
Arrays = list[np.ndarray]


class Head:
    """A small network with two feature maps, and the layers that heads are built from."""

    def __init__(self, keras: Any) -> None:
        self.keras, self.layers, self.ops = keras, keras.layers, keras.ops
        keras.utils.set_random_seed(1)
        self.image = keras.Input((SIDE, SIDE, 3), name="image")
        fine = self.layers.Conv2D(8, 3, 8, padding="same", activation="relu", name="fine")(self.image)
        coarse = self.layers.Conv2D(8, 3, 2, padding="same", activation="relu", name="coarse")(fine)
        self.features = [fine, coarse]

    def convolution(self, level: int, channels: int, name: str) -> Any:
        spread = self.keras.initializers.RandomNormal(0, 0.5)
        layer = self.layers.Conv2D(
            channels, 1, kernel_initializer=spread, bias_initializer=spread, name=f"{name}_{level}"
        )
        return layer(self.features[level])

    def rows(self, tensor: Any, width: int) -> Any:
        return self.layers.Reshape((-1, width))(tensor)

    def grid(self, level: int, anchors: int = 1) -> np.ndarray:
        """Return column and row of each location, row by row."""
        rows, columns = np.divmod(np.arange(GRIDS[level][0] * GRIDS[level][1]), GRIDS[level][1])
        return np.repeat(np.stack([columns, rows], axis=1), anchors, axis=0).astype(np.float32)

    def stride(self, level: int) -> float:
        return SIDE / GRIDS[level][0]

    def corners(self, level: int, distances: Any) -> tuple[Any, Any]:
        """Return the corners of boxes from distances to the middle of their cell, in cells."""
        points = self.grid(level) + 0.5
        return self.ops.subtract(points, distances[..., :2]), distances[..., 2:] + points

    def corners_from_distributions(self, level: int) -> tuple[Any, Any]:
        raw = self.layers.Reshape((-1, 4, 16))(self.convolution(level, 64, "boxes"))
        bins = np.arange(16, dtype=np.float32)
        return self.corners(level, self.ops.sum(self.ops.softmax(raw, axis=-1) * bins, axis=-1))

    def model(self, *outputs: Any) -> Any:
        return self.keras.Model(self.image, list(outputs) if len(outputs) > 1 else outputs[0])


def yolov8(head: Head, channels_first: bool = True, pixels: bool = True, corners: bool = False) -> Any:
    """Distributions over distances, all maps joined, boxes as centre and size in pixels, classes as sigmoids."""
    ops = head.ops
    boxes, scores = [], []
    for level in (0, 1):
        low, high = head.corners_from_distributions(level)
        pair = (low, high) if corners else ((low + high) / 2, high - low)
        boxes.append(ops.concatenate(pair, axis=-1) * (head.stride(level) / (1 if pixels else SIDE)))
        scores.append(head.rows(head.convolution(level, CLASSES, "scores"), CLASSES))
    joined = ops.concatenate([ops.concatenate(boxes, axis=1), ops.sigmoid(ops.concatenate(scores, axis=1))], axis=-1)
    return head.model(head.layers.Permute((2, 1))(joined) if channels_first else joined)


def yolov5(head: Head) -> Any:
    """Two anchors for each cell in one convolution; the rows of all cells of one anchor are adjacent."""
    ops = head.ops
    outputs = []
    for level in (0, 1):
        tensor = head.convolution(level, 2 * (5 + CLASSES), "head")
        by_anchor = head.layers.Permute((3, 1, 2, 4))(head.layers.Reshape((*GRIDS[level], 2, 5 + CLASSES))(tensor))
        likely = ops.sigmoid(by_anchor)
        cells = head.grid(level).reshape(*GRIDS[level], 2)
        sizes = np.array(SIZES[level], np.float32)[:, ::-1].reshape(2, 1, 1, 2)
        centre = (likely[..., :2] * 2 - 0.5 + cells) * head.stride(level)
        size = (likely[..., 2:4] * 2) ** 2 * sizes
        outputs.append(head.rows(ops.concatenate([centre, size, likely[..., 4:]], axis=-1), 5 + CLASSES))
    return head.model(ops.concatenate(outputs, axis=1))


def yolov5_raw(head: Head) -> Any:
    """The training form of YOLOv5: one tensor for each map, without decoding."""
    return head.model(*(head.convolution(level, 3 * (5 + CLASSES), "head") for level in (0, 1)))


def yolox(head: Head, decoded: bool = True) -> Any:
    """Offsets from the corner of the cell and exponentials; objectness in addition to classes."""
    ops = head.ops
    outputs = []
    for level in (0, 1):
        raw = head.rows(head.convolution(level, 4, "boxes"), 4)
        if decoded:
            centre = (raw[..., :2] + head.grid(level)) * head.stride(level)
            raw = ops.concatenate([centre, ops.exp(raw[..., 2:]) * head.stride(level)], axis=-1)
        objectness = head.rows(ops.sigmoid(head.convolution(level, 1, "objectness")), 1)
        scores = head.rows(ops.sigmoid(head.convolution(level, CLASSES, "scores")), CLASSES)
        outputs.append(ops.concatenate([raw, objectness, scores], axis=-1))
    return head.model(ops.concatenate(outputs, axis=1))


def yunet(head: Head) -> Any:
    """Classes, objectness, boxes and five keypoints in separate outputs for each map."""
    parts: dict[str, list[Any]] = {"classes": [], "objectness": [], "boxes": [], "keypoints": []}
    for level in (0, 1):
        for name, width in (("classes", 1), ("objectness", 1), ("boxes", 4), ("keypoints", 10)):
            rows = head.rows(head.convolution(level, width, name), width)
            parts[name].append(head.ops.sigmoid(rows) if width == 1 else rows)
    return head.model(*(tensor for tensors in parts.values() for tensor in tensors))


def nanodet(head: Head) -> Any:
    """Classes and distributions of one convolution, not decoded."""
    outputs = []
    for level in (0, 1):
        rows = head.rows(head.convolution(level, CLASSES + 32, "head"), CLASSES + 32)
        outputs.append(head.ops.concatenate([head.ops.sigmoid(rows[..., :CLASSES]), rows[..., CLASSES:]], axis=-1))
    return head.model(head.ops.concatenate(outputs, axis=1))


def fcos(head: Head) -> Any:
    """Exponentials of distances, scores as the root of class times centerness, boxes as corners."""
    ops = head.ops
    boxes, scores = [], []
    for level in (0, 1):
        distances = ops.exp(head.rows(head.convolution(level, 4, "boxes"), 4))
        boxes.append(ops.concatenate(head.corners(level, distances), axis=-1) * head.stride(level))
        centerness = ops.sigmoid(head.rows(head.convolution(level, 1, "centerness"), 1))
        likely = ops.sigmoid(head.rows(head.convolution(level, CLASSES, "scores"), CLASSES))
        scores.append(ops.sqrt(likely * centerness))
    return head.model(ops.concatenate(boxes, axis=1), ops.concatenate(scores, axis=1))


def ssd(head: Head, sizes: Any = SIZES) -> Any:
    """Anchors with variances, a softmax with the background in front, boxes as fractions (ymin, xmin, ymax, xmax)."""
    ops = head.ops
    boxes, scores = [], []
    for level in (0, 1):
        raw = head.rows(head.convolution(level, 8, "boxes"), 4)
        centres = (head.grid(level, 2) + 0.5)[:, ::-1] / GRIDS[level][0]
        anchors = np.tile(np.array(sizes[level], np.float32) / SIDE, (len(centres) // 2, 1))
        centre = raw[..., :2] * 0.1 * anchors + centres
        size = ops.exp(raw[..., 2:] * 0.2) * anchors
        boxes.append(ops.concatenate([centre - size / 2, centre + size / 2], axis=-1))
        scores.append(head.rows(head.convolution(level, 2 * (CLASSES + 1), "scores"), CLASSES + 1))
    return head.model(ops.concatenate(boxes, axis=1), ops.softmax(ops.concatenate(scores, axis=1), axis=-1))


def rtmdet(head: Head, cut_off: bool = False, logits: bool = False) -> Any:
    """Distances with a learned scale for each map, before a ReLU; `cut_off` clips boxes to the image."""
    ops = head.ops
    boxes, scores = [], []
    for level, scale in enumerate((1.3, 0.7)):
        distances = ops.relu(head.rows(head.convolution(level, 4, "boxes"), 4) * scale + 0.2)
        corners = ops.concatenate(head.corners(level, distances), axis=-1) * head.stride(level)
        boxes.append(ops.clip(corners, 0, SIDE) if cut_off else corners)
        raw = head.rows(head.convolution(level, CLASSES, "scores"), CLASSES)
        scores.append(raw if logits else ops.sigmoid(raw * 2 - 1))
    return head.model(ops.concatenate(boxes, axis=1), ops.concatenate(scores, axis=1))


def ssd_within_the_image(head: Head, sizes: Any = SIZES) -> Any:
    boxes, scores = ssd(head, sizes).outputs
    return head.model(head.ops.clip(boxes, 0, 1), scores)


def with_anchors(head: Head, scale: float = 1.0, softmax: bool = False) -> Any:
    """YOLOv4 with centres outside of their cells, or YOLOv2 with a softmax over classes; scores with objectness."""
    ops = head.ops
    outputs = []
    for level in (0, 1):
        tensor = head.convolution(level, 2 * (5 + CLASSES), "head")
        raw = head.layers.Reshape((*GRIDS[level], 2, 5 + CLASSES))(tensor)
        cells = head.grid(level).reshape(*GRIDS[level], 1, 2)
        centre = (ops.sigmoid(raw[..., :2]) * scale - (scale - 1) / 2 + cells) * head.stride(level)
        size = ops.exp(raw[..., 2:4]) * np.array(SIZES[level], np.float32)[:, ::-1]
        classes = ops.softmax(raw[..., 5:], axis=-1) if softmax else ops.sigmoid(raw[..., 5:])
        rows = ops.concatenate([centre, size, ops.sigmoid(raw[..., 4:5]) * classes], axis=-1)
        outputs.append(head.rows(rows, 4 + CLASSES))
    return head.model(ops.concatenate(outputs, axis=1))


def centernet(head: Head) -> Any:
    """Maps of scores, of the size and of the position of boxes."""
    scores = head.ops.sigmoid(head.convolution(0, CLASSES, "scores"))
    return head.model(scores, head.convolution(0, 2, "size"), head.convolution(0, 2, "position"))


def pose(head: Head) -> Any:
    """YOLOv8-pose: one class, and keypoints with their visibility."""
    ops = head.ops
    outputs = []
    for level in (0, 1):
        low, high = head.corners_from_distributions(level)
        box = ops.concatenate([(low + high) / 2, high - low], axis=-1) * head.stride(level)
        score = ops.sigmoid(head.rows(head.convolution(level, 1, "scores"), 1))
        raw_points = head.layers.Reshape((-1, 5, 3))(head.convolution(level, 15, "points"))
        positions = (raw_points[..., :2] * 2 + head.grid(level)[:, None]) * head.stride(level)
        seen = ops.sigmoid(raw_points[..., 2:])
        flat = head.layers.Reshape((-1, 15))(ops.concatenate([positions, seen], axis=-1))
        outputs.append(ops.concatenate([box, score, flat], axis=-1))
    return head.model(ops.concatenate(outputs, axis=1))


def from_corners(boxes: np.ndarray, scale: float) -> np.ndarray:
    """Convert (x, y, x, y) to (y, x, y, x) in fractions."""
    return boxes[..., [1, 0, 3, 2]] / scale


def from_centres(boxes: np.ndarray, scale: float) -> np.ndarray:
    """Convert (x, y, width, height) to (ymin, xmin, ymax, xmax) in fractions."""
    centre, half = boxes[..., 1::-1], boxes[..., :1:-1] / 2
    return np.concatenate([centre - half, centre + half], axis=-1) / scale


def by_yolov8(outputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    rows = outputs[0].transpose(0, 2, 1)
    return from_centres(rows[..., :4], SIDE), rows[..., 4:]


def by_columns(outputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    return from_centres(outputs[0][..., :4], SIDE), outputs[0][..., 4:]


CASES: dict[str, tuple[Callable[[Head], Any], dict[str, Any], Callable[[Arrays], Any]]] = {
    "yolov8": (yolov8, {"code": "dfl", "bins": 16, "offset": 0.5}, by_yolov8),
    "rows, fractions": (
        lambda head: yolov8(head, channels_first=False, pixels=False),
        {"code": "dfl"},
        lambda outputs: (from_centres(outputs[0][..., :4], 1), outputs[0][..., 4:]),
    ),
    "corners": (
        lambda head: yolov8(head, channels_first=False, corners=True),
        {"code": "dfl"},
        lambda outputs: (from_corners(outputs[0][..., :4], SIDE), outputs[0][..., 4:]),
    ),
    "yolox": (
        yolox,
        {"code": "yolox", "offset": 0.0},
        lambda outputs: (from_centres(outputs[0][..., :4], SIDE), outputs[0][..., 5:] * outputs[0][..., 4:5]),
    ),
    "fcos": (
        fcos,
        {"code": "ltrb_exp", "objectness": "geometric_mean"},
        lambda outputs: (from_corners(outputs[0], SIDE), outputs[1]),
    ),
    "ssd": (
        ssd,
        {"code": "ssd", "scores": "softmax", "background": "first"},
        lambda outputs: (outputs[0], outputs[1][..., 1:]),
    ),
    "scales of maps": (
        rtmdet,
        {"code": "ltrb_relu", "scores": "logits"},
        lambda outputs: (from_corners(outputs[0], SIDE), outputs[1]),
    ),
    "yolov4": (lambda head: with_anchors(head, scale=1.2), {"code": "yolov3"}, by_columns),
    "yolov2": (
        lambda head: with_anchors(head, softmax=True),
        {"code": "yolov3", "scores": "softmax", "background": None},
        by_columns,
    ),
    "pose": (pose, {"code": "dfl"}, lambda outputs: (from_centres(outputs[0][..., :4], SIDE), outputs[0][..., 4:5])),
}


def answers(model: Any, images: np.ndarray) -> Arrays:
    outputs = model(images, training=False)
    return [np.asarray(output) for output in (outputs if isinstance(outputs, list | tuple) else [outputs])]


def converted_from(model: Any, *arguments: Any, **options: Any) -> DetectorModel[Any]:
    converted = detector_model(model, *arguments, **options)
    assert converted is not None
    return converted


def decoded(converted: DetectorModel[Any], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners and the probabilities that the decoding of the device computes."""
    detector = Detector(converted.specification)
    parts = detector.parts(answers(converted.model, images))
    return detector.corners(parts.boxes), detector.probabilities(parts)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 1, (4, SIDE, SIDE, 3)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_the_decoding_of_the_device_gives_the_boxes_and_scores_of_the_file(
    keras: Any, images: np.ndarray, name: str
) -> None:
    build, expected, read = CASES[name]
    model = build(Head(keras))
    converted = converted_from(model)
    assert {key: converted.specification.get(key) for key in expected} == expected
    assert converted.classes == (1 if name == "pose" else CLASSES)
    assert converted.box_error is not None
    assert converted.box_error < 1e-5
    for actual, of_file in zip(decoded(converted, images), read(answers(model, images)), strict=True):
        np.testing.assert_allclose(actual, of_file, atol=1e-4)
    # Boxes and scores are separate tensors, the outputs of convolutions.
    assert len(converted.model.outputs) == len(converted.specification["tensors"])
    assert all(output._keras_history.operation.kernel is not None for output in converted.model.outputs)


LARGE = (((50.0, 60.0), (70.0, 30.0)), ((90.0, 80.0), (60.0, 60.0)))
"""Anchors whose boxes are mostly cut off: they are on the lattice of the other anchors."""


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda head: rtmdet(head, cut_off=True), "ltrb_relu"),
        (ssd_within_the_image, "ssd"),
        (lambda head: ssd_within_the_image(head, LARGE), "ssd"),
    ],
)
def test_boxes_that_the_file_cuts_off_at_the_border(
    keras: Any, images: np.ndarray, build: Callable[[Head], Any], code: str
) -> None:
    model = build(Head(keras))
    converted = converted_from(model)
    assert converted.specification["code"] == code
    boxes = answers(model, images)[0]
    expected = boxes if code == "ssd" else from_corners(boxes, SIDE)
    np.testing.assert_allclose(decoded(converted, images)[0].clip(0, 1), expected, atol=1e-4)


def test_the_position_of_the_background_is_noted_if_it_is_assumed(keras: Any) -> None:
    head = Head(keras)
    boxes, scores = ssd(head).outputs
    for model, notes in (
        (head.model(boxes, scores), ("the first of the softmax's classes is assumed to be the background",)),
        (head.model(boxes, scores[..., :-1]), ()),
    ):
        converted = converted_from(model)
        assert converted.notes == notes


def test_scores_as_raw_numbers_are_assumed_to_be_for_sigmoids(keras: Any, images: np.ndarray) -> None:
    model = rtmdet(Head(keras), logits=True)
    converted = converted_from(model)
    assert converted.notes == ("the file gives scores as raw values: a sigmoid for each class is assumed",)
    _, scores = decoded(converted, images)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-answers(model, images)[1])), atol=1e-5)


def test_outliers_of_exponents_do_not_hide_the_code(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder limits exponents, and the file does not. Large files have such outliers."""

    monkeypatch.setattr(probing, "BATCH", 400)
    converted = converted_from(with_anchors(Head(keras)))
    assert converted.specification["code"] == "yolov3"


def test_the_rows_of_two_anchors_are_those_of_the_file(keras: Any, images: np.ndarray) -> None:
    model = yolov5(Head(keras))
    converted = converted_from(model)
    assert converted.specification["code"] == "yolov5"
    np.testing.assert_allclose(
        [entry["boxes"] for entry in converted.specification["maps"]], np.array(SIZES) / SIDE, rtol=1e-4
    )
    corners, probabilities = decoded(converted, images)
    rows = answers(model, images)[0]
    order = []  # order on the device: cell, then anchor; in the file: anchor, then cell
    start = 0
    for rows_count, columns in GRIDS:
        cells = np.arange(rows_count * columns)
        order += (start + cells[:, None] + np.array([0, len(cells)])).ravel().tolist()
        start += 2 * len(cells)
    np.testing.assert_allclose(corners, from_centres(rows[:, order, :4], SIDE), atol=1e-4)
    np.testing.assert_allclose(probabilities, rows[:, order, 5:] * rows[:, order, 4:5], atol=1e-4)


def test_keypoints_of_a_pose_are_those_of_the_file(keras: Any, images: np.ndarray) -> None:
    model = pose(Head(keras))
    converted = converted_from(model, {"family": "auto", "least_score": 1e-6, "overlap": 1.0})
    assert converted.specification["keypoints"] == {
        "count": 5,
        "visibility": True,
        "scale": 2.0,
        "offset": 0.0,
        "unit": "cell",
    }
    detections = Detector(converted.specification)([output[0] for output in answers(converted.model, images)])
    row = answers(model, images)[0][0]
    best = row[row[:, 4].argmax()]
    assert detections.keypoints is not None
    expected = best[5:].reshape(5, 3)[:, [1, 0, 2]] / [SIDE, SIDE, 1]
    np.testing.assert_allclose(detections.keypoints[0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "family", "expected"),
    [
        (lambda head: yolox(head, decoded=False), "auto", {"code": "yolox", "offset": 0.0}),
        (yunet, "auto", {"code": "yolox", "objectness": "geometric_mean"}),
        (nanodet, "auto", {"code": "dfl", "bins": 8, "offset": 0.5}),
        (nanodet, "nanodet_plus", {"code": "dfl", "bins": 8, "offset": 0.0, "overlap": 0.6}),
        (centernet, "auto", {"code": "centernet", "offset": 0.0}),
        (centernet, "centernet", {"code": "centernet", "offset": 0.0}),
        (yolov5_raw, "yolov5", {"code": "yolov5", "scores": "logits"}),
    ],
)
def test_files_that_do_not_decode_are_read_as_their_family_or_with_a_note(
    keras: Any, build: Callable[[Head], Any], family: str, expected: dict[str, Any]
) -> None:
    converted = converted_from(build(Head(keras)), family)
    assert {key: converted.specification[key] for key in expected} == expected
    assert converted.box_error is None
    assert "does not decode its boxes" in converted.notes[0]
    assert ("name the family" in converted.notes[0]) == (family == "auto")
    Detector(converted.specification).parts(converted.model(np.zeros((1, SIDE, SIDE, 3)), training=False), keras.ops)


@pytest.mark.parametrize("likely", [True, False])
def test_the_parts_of_centernet_and_centerface_are_in_their_order(keras: Any, images: np.ndarray, likely: bool) -> None:
    """The order is heatmap, size, offset, keypoints. CenterFace has y before x, and keypoints in units of the box."""
    head = Head(keras)
    maps = [
        head.convolution(0, width, name) for name, width in (("size", 2), ("heat", 1), ("offset", 2), ("points", 4))
    ]
    size, heat, offset, points = maps
    model = head.model(head.ops.sigmoid(heat) if likely else heat, size, offset, points)
    _, sizes, offsets, keypoints = (output[0].reshape(-1, output.shape[-1]) for output in answers(model, images))
    cells = np.stack(np.meshgrid(*(np.arange(side) for side in size.shape[1:3]), indexing="ij"), -1).reshape(-1, 2)
    step = 1 / size.shape[1]
    for family in ("centernet", "centerface"):
        converted = converted_from(model, {"family": family, "overlap": 1.0, "least_score": 1e-6})
        detector = Detector(converted.specification)
        outputs = answers(converted.model, images)
        boxes = detector.corners(detector.parts(outputs).boxes)[0]
        if family == "centernet":
            centre, extent = (cells + offsets[:, ::-1]) * step, sizes[:, ::-1] * step
        else:
            centre, extent = (cells + offsets + 0.5) * step, np.exp(sizes) * step
        np.testing.assert_allclose(boxes, np.concatenate([centre - extent / 2, centre + extent / 2], 1), atol=1e-5)
        if family == "centerface":
            best = detector([output[0] for output in outputs])
            place = int(np.argmax(answers(model, images)[0][0]))
            top = centre[place] - extent[place] / 2
            assert best.keypoints is not None
            expected = top + keypoints[place].reshape(2, 2) * extent[place]
            np.testing.assert_allclose(best.keypoints[0], expected, atol=1e-5)


def test_classes_are_cut_from_the_scores(keras: Any, images: np.ndarray) -> None:
    for build in (yolov8, yolov5, ssd):
        model = build(Head(keras))
        complete, kept = converted_from(model), converted_from(model, "auto", [2, 0])
        likely = []
        for converted in (complete, kept):
            detector = Detector(converted.specification)
            likely.append(detector.parts(answers(converted.model, images)).scores)
        background = [0] if complete.specification.get("background") == "first" else []
        columns = [*background, *(number + len(background) for number in (2, 0))]
        np.testing.assert_allclose(likely[1], likely[0][..., columns], atol=1e-5)
        assert ("larger scores" in " ".join(kept.notes)) == (complete.specification["scores"] == "softmax")
        with pytest.raises(ModelError, match="it has 3 classes"):
            detector_model(model, "auto", [3])
    by_name = converted_from(model, "auto", ["c", 0], names=("a", "b", "c"))
    np.testing.assert_array_equal(answers(by_name.model, images)[1], answers(kept.model, images)[1])


@pytest.mark.parametrize(
    ("kept", "names", "message"),
    [
        (["person"], None, "'person' is a name, and the names of the model's 3 classes are not known"),
        (["person"], ("a", "b", "c"), "'person' is not a class of the model"),
        (["a"], ("a", "b"), "model.classes has 2 names, and the model has 3 classes"),
        (["a", 0], ("a", "b", "c"), "the class 0 is there twice"),
        ([-1], None, "no class -1"),
    ],
)
def test_classes_to_keep_that_are_refused(keras: Any, kept: list[Any], names: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        detector_model(yolov8(Head(keras)), "auto", kept, names=names)


@pytest.mark.parametrize("build", [yolov8, yolov5, yolox])
def test_the_input_gets_another_size_with_boxes_of_the_same_pixels(keras: Any, build: Callable[[Head], Any]) -> None:
    model, size = build(Head(keras)), (2 * SIDE, 3 * SIDE)
    small, large = converted_from(model), converted_from(model, size=size)
    assert large.model.inputs[0].shape[1:] == (*size, 3)
    assert f"the input is changed from {SIDE} x {SIDE} to {size[0]} x {size[1]}" in large.notes
    corners = []
    for converted, sides in ((small, (SIDE, SIDE)), (large, size)):
        detector = Detector(converted.specification)
        assert detector.misfit([(1, *output.shape[1:]) for output in converted.model.outputs]) is None
        width = 4 * converted.specification.get("bins", 16) if converted.specification["code"] == "dfl" else 4
        raw = np.random.default_rng(0).normal(size=width).astype(np.float32)
        boxes = detector.corners(np.tile(raw, (1, len(detector.anchors), 1)))[0] * [*sides, *sides]
        counts = [np.prod(entry["cells"]) * len(entry.get("boxes", [1])) for entry in converted.specification["maps"]]
        corners.append(boxes[np.concatenate([[0], np.cumsum(counts)[:-1]])])  # the first location of each map
    np.testing.assert_allclose(corners[1], corners[0], rtol=1e-4, atol=1e-3)


def test_anchors_that_are_listed_one_by_one_have_one_size(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*arguments: Any, **options: Any) -> Any:
        recognized = recognition.recognize(*arguments, **options)
        assert recognized is not None
        anchors = Detector(recognized.specification).anchors.tolist()
        return replace(recognized, specification={**recognized.specification, "maps": [{"anchors": anchors}]})

    monkeypatch.setattr(detector_models, "recognize", listed)
    with pytest.raises(ModelError, match="cannot have an input of 96 x 96: its anchors are listed one by one"):
        detector_model(ssd(Head(keras)), size=(96, 96))


def test_other_models_are_no_detectors(keras: Any) -> None:
    head = Head(keras)
    features = head.features[1]
    pooled = head.layers.GlobalAveragePooling2D()(features)
    classifier = head.model(head.layers.Dense(4, activation="softmax")(pooled))
    segmentation = head.model(head.layers.Softmax()(head.convolution(0, 4, "masks")))
    heads = head.model(head.convolution(1, 4, "values"), head.convolution(1, 3, "others"))
    nine_anchors = head.model(  # their boxes are no distributions
        *(head.convolution(level, width, name) for level in (0, 1) for name, width in (("b", 36), ("s", 54)))
    )
    restored = head.layers.Conv2D(3, 3, padding="same")(head.image)
    reading_the_input = (
        head.model(head.image - restored),
        head.model(head.layers.Concatenate()([restored, head.image])),
        head.model(restored, head.image),
    )
    for model in (classifier, segmentation, heads, nine_anchors, *reading_the_input):
        assert detector_model(model) is None


def test_masks_are_not_probed_location_by_location(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(probing, "_locations", lambda *_: pytest.fail("it is probed"))
    layers = keras.layers
    for size, stride in ((512, 1), (512, 2), (2048, 4)):
        image = keras.Input((size, size, 3))
        assert detector_model(keras.Model(image, layers.Conv2D(21, 1, stride)(image))) is None
    image = keras.Input((128, 128, 3))
    enlarged = layers.UpSampling2D(8, interpolation="bilinear")(layers.Conv2D(21, 1, 8)(image))
    assert detector_model(keras.Model(image, enlarged)) is None


@pytest.mark.parametrize(("build", "bgr"), [(yolov8, False), (yolox, True)])
def test_an_export_takes_photos_as_the_family_does(
    keras: Any, tmp_path: Path, build: Callable[[Head], Any], bgr: bool
) -> None:
    build(Head(keras)).save(tmp_path / "model.keras")
    (tmp_path / "photos").mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        photo = random.integers(0, 256, (40, 60, 3)).astype(np.uint8)
        Image.fromarray(photo).save(tmp_path / "photos" / f"{number}.png")
    result = compress.export(
        tmp_path / "model.keras", calibrate=tmp_path / "photos", out=tmp_path / "out", target="cpu"
    )
    resize, *others = result.facts["preprocess"]
    assert resize["resize"]["fit"] == "letterbox"
    assert (resize["resize"].get("align") == "top_left") is bgr
    assert ({"colour": {"to": "bgr"}} in others) is bgr
    opened = Bundle(next((tmp_path / "out").rglob("*.coralline")).read_bytes())
    assert opened.detector is not None
    assert opened.detector.specification["code"] == ("yolox" if bgr else "dfl")


def test_an_export_with_a_family(keras: Any, tmp_path: Path) -> None:
    yolov5_raw(Head(keras)).save(tmp_path / "raw.keras")
    result = compress.export(tmp_path / "raw.keras", out=tmp_path / "out", target="cpu", detector="yolov5")
    opened = Bundle(next((tmp_path / "out").rglob("*.coralline")).read_bytes())
    assert opened.detector is not None
    assert opened.detector.specification["code"] == "yolov5"
    assert 'detector": "yolov5"' in (tmp_path / "out" / "pipeline.yaml").read_text()
    assert result.run.folder.exists()
    image = keras.Input((32, 32, 3))
    keras.Model(image, keras.layers.Dense(3)(keras.layers.Flatten()(image))).save(tmp_path / "other.keras")
    with pytest.raises(ModelError, match="not recognized as a detector of the family yolov5"):
        compress.export(tmp_path / "other.keras", out=tmp_path / "other", target="cpu", detector="yolov5")
    with pytest.raises(ModelError, match="'yolov99' is not a family of detectors"):
        compress.export(tmp_path / "raw.keras", out=tmp_path / "other", detector="yolov99")


def test_anchors_that_are_not_measured_are_on_the_lattice_of_the_others() -> None:
    rows, columns = np.divmod(np.arange(12), 4)
    centres = np.stack([0.11 + 0.27 * rows, 0.08 + 0.21 * columns], axis=1)
    expected = np.concatenate([centres, np.full((12, 2), 0.7)], axis=1)[:, np.newaxis]
    measured = expected.copy()
    measured[:4] = measured[5, :, 1] = measured[8] = np.nan
    np.testing.assert_allclose(box_fit._lattice(measured, (3, 4)), expected, atol=1e-9)
