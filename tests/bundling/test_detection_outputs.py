"""The outputs that Frigate reads, compared with our own decoding of the same values."""

from __future__ import annotations

from typing import Any

import detector_files
import numpy as np
import pytest

from compress.bundling import detection_outputs
from compress.core.errors import ModelError
from compress.model.tflite import graph
from deploy.contract.detection import Detector

CASES = [
    ("ssd", {"scores": "softmax", "background": "first"}),
    ("ssd", {"variances": [0.2, 0.1, 0.3, 0.2], "order": "xy"}),
    ("yolox", {"with_objectness": True}),
    ("yolox", {"with_objectness": True, "scores": "probabilities", "objectness": "geometric_mean"}),
    ("centernet", {"scores": "probabilities"}),
    ("ltrb", {"order": "yx"}),
    ("ltrb_exp", {"with_objectness": True}),
    ("ltrb_relu", {"background": "last", "scores": "softmax"}),
    ("dfl", {"bins": 16}),
    ("dfl", {"bins": 8, "offset": 0.0}),
]


def random_inputs(model: graph.Graph, seed: int = 0) -> list[np.ndarray]:
    """Return random input values: most scores are low, and no box is inverted."""
    random, values = np.random.default_rng(seed), []
    for index in model.inputs:
        tensor = model.tensors[index]
        drawn = random.normal(-1.5, 2, tensor.shape)
        if "boxes" in tensor.name:
            drawn = abs(drawn)
        if tensor.quantization is not None:
            limits = np.iinfo(tensor.dtype.lower())
            codes = drawn / tensor.quantization.scale[0] + tensor.quantization.zero_point[0]
            if tensor.quantization.scale[0] == 1 / 256:  # probabilities
                codes = random.integers(limits.min, limits.max, tensor.shape)
            drawn = codes.round().clip(limits.min, limits.max)
        values.append(drawn.astype(tensor.dtype.lower()))
    return values


def rows(scores: np.ndarray, classes: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the objects above the lowest score: of equal scores at the end, either may be left out."""
    return np.column_stack([scores, 100 * classes, boxes.clip(0, 1)])[scores > scores.min() + 1e-4]


def compared(described: dict[str, Any], dtype: str, seed: int) -> int:
    """Compare the operator with our decoding; return the number of objects."""
    detector = Detector({**described, "least_score": detection_outputs.LEAST_SCORE, "most": detection_outputs.MOST})
    model = detector_files.from_inputs(described, 3, dtype)
    finished = detection_outputs.with_postprocess(model, detector)
    assert [finished.tensors[index].shape for index in finished.outputs] == [(1, 20, 4), (1, 20), (1, 20), (1,)]
    values = random_inputs(model, seed)
    boxes, classes, scores, count = detector_files.answers(graph.serialize(finished), values)
    expected = detector(detector_files.answers(graph.serialize(model), values))
    number = int(count[0])
    assert number == len(expected)
    np.testing.assert_allclose(scores[0][:number], expected.scores, atol=1e-4)
    actual_rows = rows(*(output[0][:number] for output in (scores, classes, boxes)))
    expected_rows = rows(expected.scores, expected.classes, expected.boxes)
    distances = np.abs(actual_rows[:, np.newaxis] - expected_rows).max(axis=2)
    assert distances.min(axis=0).max() < 3e-4
    assert distances.min(axis=1).max() < 3e-4
    return number


@pytest.mark.parametrize("dtype", ["INT8", "UINT8", "FLOAT32"])
@pytest.mark.parametrize(("code", "changes"), CASES)
def test_the_operator_finds_what_our_decoding_finds(code: str, changes: dict[str, Any], dtype: str) -> None:
    described = detector_files.specification(code, overlap=1.0, **changes)
    if dtype == "FLOAT32" and described.get("scores") == "probabilities":
        pytest.skip("random floats are no probabilities")
    assert all(compared(described, dtype, seed) >= 3 for seed in range(3))


@pytest.mark.parametrize("class_agnostic", [False, True])
def test_the_operator_suppresses_what_our_decoding_suppresses(class_agnostic: bool) -> None:
    """Only boxes within the image are compared: our decoding clips boxes before suppression, the operator does not."""
    described = detector_files.specification("ssd", side=128, class_agnostic=class_agnostic)
    for entry in described["maps"]:
        entry["boxes"] = [[0.05, 0.05], [0.05, 0.06]]
    for seed in range(3):
        detector = Detector({**described, "least_score": 0.4})
        assert compared(described, "INT8", seed) == 20
        assert len(detector.anchors) == 2 * (16 * 16 + 8 * 8 + 4 * 4)


@pytest.mark.parametrize("classes", [1, 3, 64])
@pytest.mark.parametrize("dtype", ["INT8", "UINT8"])
def test_two_tensors_hold_the_numbers_of_all_maps(dtype: str, classes: int) -> None:
    described = detector_files.specification("dfl")
    detector = Detector(described)
    assert detection_outputs.yolo_misfit(detector, (64, 64)) is None
    model = detector_files.from_inputs(described, classes, dtype)
    joined = detection_outputs.as_yolo(model, detector)
    boxes, scores = (joined.tensors[index] for index in joined.outputs)
    columns = classes + (classes in (1, 64))
    assert (boxes.shape, scores.shape) == ((1, 84, 64), (1, 84, columns))
    assert boxes.dtype == scores.dtype == "INT8"
    assert scores.quantization is not None
    assert boxes.quantization is not None
    assert scores.quantization.zero_point[0] >= 0  # Frigate subtracts the zero point in int8
    values = random_inputs(model)
    outputs = detector_files.answers(graph.serialize(joined), values)
    before = detector_files.answers(graph.serialize(model), values)
    for tensor, now, parts in ((boxes, outputs[0], before[::2]), (scores, outputs[1][..., :classes], before[1::2])):
        rows = np.concatenate([part.reshape(-1, now.shape[-1]) for part in parts])
        assert tensor.quantization is not None
        assert (
            np.abs(now[0] - rows).max() <= tensor.quantization.scale[0] * 1.01
        )  # a step at the ends, half a step elsewhere
    if columns > classes:
        assert (outputs[1][..., classes] == outputs[1].min()).all()


@pytest.mark.parametrize(
    ("code", "changes", "part"),
    [
        ("ltrb", {}, "code is 'ltrb' instead of 'dfl'"),
        ("dfl", {"bins": 8}, "bins is 8 instead of 16"),
        ("dfl", {"scores": "probabilities"}, "scores is 'probabilities'"),
        ("dfl", {"with_objectness": True}, "objectness"),
        ("dfl", {"side": 128}, "strides 8, 16, 32"),
    ],
)
def test_other_detectors_have_no_form_as_two_tensors(code: str, changes: dict[str, Any], part: str) -> None:
    misfit = detection_outputs.yolo_misfit(Detector(detector_files.specification(code, **changes)), (64, 64))
    assert misfit is not None
    assert part in misfit


def test_codes_and_outputs_that_do_not_fit_are_refused() -> None:
    described = detector_files.specification("dfl")
    model = detector_files.from_inputs(described, 3)
    with pytest.raises(ModelError, match="not those of its detector"):
        detection_outputs.with_postprocess(model, Detector(detector_files.specification("ltrb")), "x")
    corners = {**detector_files.specification("corners"), "input_size": [64, 64]}
    with pytest.raises(ModelError, match="the code corners"):
        detection_outputs.with_postprocess(detector_files.from_inputs(corners, 3), Detector(corners), "x")
    with pytest.raises(ModelError, match="not all in 8 bits"):
        detection_outputs.as_yolo(detector_files.from_inputs(described, 3, "FLOAT32"), Detector(described))
