"""Removal of TFLite_Detection_PostProcess from a file: the detector that it describes, compared with the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import detector_files
import numpy as np
import pytest
import tiny

from compress.core.errors import ModelError
from compress.model.detectors.detector_model import detector_model
from compress.model.importers import model_file
from compress.model.tflite import detection_postprocess, graph
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Quantization
from compress.pipeline.runner import run
from compress.pipeline.schema import load
from deploy.contract import preprocessing
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detector
from deploy.runner.accuracy import compare
from deploy.runner.runtime import RuntimeOptions

SIDE, CLASSES = 64, 3
GRIDS = ((8, 8), (4, 4))
SIZES = (((10.0, 13.0), (30.0, 16.0)), ((40.0, 20.0), (25.0, 60.0)))
"""Height and width of the anchors of each map, in pixels."""
STEP = 1 / 250
"""The scale of 8-bit anchors."""


def anchors() -> np.ndarray:
    """Return the centre and the size of all anchors, as fractions: map by map, cell by cell."""
    boxes = []
    for cells, sizes in zip(GRIDS, SIZES, strict=True):
        for row, column in np.ndindex(cells):
            boxes += [[(row + 0.5) / cells[0], (column + 0.5) / cells[1], h / SIDE, w / SIDE] for h, w in sizes]
    return np.array(boxes, np.float32)


def ended(
    model: graph.Graph, *, classes: int = CLASSES, table: np.ndarray | None = None, **changes: Any
) -> graph.Graph:
    """Return the model of boxes [1, n, 4] and scores [1, n, columns] with the operator at its end."""
    edit = Edit(model)
    boxes, scores = model.outputs
    settings = {"most": 12, "least_score": 0.3, "overlap": 0.6, "class_agnostic": False, "scales": (10, 10, 5, 5)}
    anchor_boxes = anchors() if table is None else table
    edit.outputs = [
        *detection_postprocess.append(edit, boxes, scores, anchor_boxes, classes=classes, **{**settings, **changes})
    ]
    if model.tensors[boxes].dtype == "UINT8":  # the operator then reads anchors as uint8, too
        codes = (anchor_boxes / STEP).round().astype(np.uint8)
        constant = edit.tensor("anchors in 8 bits", codes.shape, "UINT8", Quantization((STEP,), (0,), 0), codes)
        edit.added[-1].inputs[2] = constant
    return edit.graph()


def heads(columns: int = CLASSES, dtype: str = "FLOAT32") -> graph.Graph:
    """Return a model whose inputs, boxes and scores, are its outputs."""
    described = {
        "maps": [{"anchors": anchors().tolist()}],
        "scores": "probabilities",
        "background": "first" if columns > CLASSES else None,
    }
    model = detector_files.from_inputs({**described, "tensors": None}, CLASSES, dtype, flat=True)
    assert model.tensors[model.outputs[1]].shape == (1, len(anchors()), columns)
    return model


def values(model: graph.Graph, seed: int = 0) -> list[np.ndarray]:
    random, inputs = np.random.default_rng(seed), []
    for index in model.inputs:
        tensor = model.tensors[index]
        if tensor.dtype == "FLOAT32":
            drawn = (
                random.normal(0, 1, tensor.shape)
                if tensor.shape[2] == 4 and not inputs
                else random.random(tensor.shape)
            )
            inputs.append(drawn.astype(np.float32))
        else:
            limits = np.iinfo(tensor.dtype.lower())
            inputs.append(random.integers(limits.min, limits.max, tensor.shape, tensor.dtype.lower()))
    return inputs


@pytest.mark.parametrize("dtype", ["FLOAT32", "UINT8"])
@pytest.mark.parametrize("columns", [CLASSES, CLASSES + 1])
@pytest.mark.parametrize("class_agnostic", [False, True])
def test_our_decoding_finds_what_the_operator_finds(dtype: str, columns: int, class_agnostic: bool) -> None:
    model = heads(columns, dtype)
    full_model = ended(model, class_agnostic=class_agnostic, overlap=1.0)
    postprocess = detection_postprocess.read(full_model)
    assert postprocess is not None
    np.testing.assert_allclose(postprocess.anchors, anchors(), atol=STEP / 2 if dtype == "UINT8" else 0)
    assert (postprocess.classes, postprocess.background) == (CLASSES, columns > CLASSES)
    assert postprocess.thresholds == {
        "least_score": pytest.approx(0.3),
        "overlap": 1.0,
        "most": 12,
        "class_agnostic": class_agnostic,
    }
    rest = detection_postprocess.without(full_model, postprocess)
    assert [rest.tensors[index].shape for index in rest.outputs] == [(1, 160, 4), (1, 160, columns)]
    detector = Detector(postprocess.specification)
    for seed in range(3):
        inputs = values(model, seed)
        boxes, classes, scores, count = detector_files.answers(graph.serialize(full_model), inputs)
        ours = detector(detector_files.answers(graph.serialize(rest), inputs))
        assert int(count[0]) == len(ours) == 12
        if not class_agnostic:
            np.testing.assert_allclose(scores[0], ours.scores, atol=1e-6)
        for box, number, score in zip(boxes[0], classes[0], scores[0], strict=True):
            if score < scores[0].min() + 0.01:
                continue  # of equal scores at the end, either may be left out
            distances = np.abs(ours.boxes - box.clip(0, 1)).max(axis=1) + np.abs(ours.scores - score)
            assert (distances + (ours.classes != number)).min() < 1e-4


@pytest.mark.parametrize("columns", [CLASSES, CLASSES + 1])
def test_the_decoded_model_has_the_boxes_of_our_decoding(columns: int) -> None:
    model = heads(columns)
    full_model = ended(model)
    postprocess = detection_postprocess.read(full_model)
    assert postprocess is not None
    inputs = values(model)
    boxes, scores = detector_files.answers(
        graph.serialize(detection_postprocess.decoded(full_model, postprocess)), inputs
    )
    detector = Detector(postprocess.specification)
    np.testing.assert_allclose(boxes[0], detector.corners(inputs[0])[0], atol=1e-5)
    np.testing.assert_array_equal(scores, inputs[1][..., columns - CLASSES :])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"scales": (10, 10, 5, 0)}, "scales or anchors that are not above 0"),
        ({"table": np.zeros((160, 4), np.float32)}, "scales or anchors that are not above 0"),
        ({"table": np.ones((159, 4), np.float32)}, "inputs of the shapes"),
        ({"classes": 7}, "for 7 classes"),
        ({"classes": 0}, "has 0 classes"),
        ({"table": np.float32(1)}, "inputs of the shapes"),
        ({"table": np.full((160, 4), 1e7, np.float32)}, "cannot be decoded: anchors"),
        ({"scales": (1e-9, 10, 5, 5)}, "cannot be decoded: variances"),
        ({"least_score": float("nan")}, "the option nms_score_threshold .* is not a number"),
    ],
)
def test_operators_that_cannot_be_understood(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=part):
        detection_postprocess.read(ended(heads(), **changes), "x.tflite")


def test_thresholds_of_0_and_less_keep_all_boxes() -> None:
    assert detection_postprocess.read(heads()) is None  # a model without the operator
    for least_score in (0.0, -float("inf")):
        postprocess = detection_postprocess.read(ended(heads(), least_score=least_score, overlap=0.0))
        assert postprocess is not None
        assert Detector(postprocess.specification).specification["least_score"] == pytest.approx(1e-6)


def test_damaged_options_are_refused_with_a_message() -> None:
    full_model = ended(heads())
    (operator,) = full_model.custom_operators(detection_postprocess.NAME)
    stored = full_model.source.subgraphs[0].operators[operator.index]
    options = np.array(stored.customOptions, np.uint8)
    random, refused = np.random.default_rng(0), 0
    for _ in range(500):
        damaged = options.copy()
        damaged[random.integers(len(damaged), size=3)] = random.integers(256, size=3)
        stored.customOptions = damaged
        try:
            detection_postprocess.read(full_model)
        except ModelError as error:
            refused += detection_postprocess.NAME in str(error)
    assert refused > 100


# --- whole files -------------------------------------------------------------------------


def ssd(keras: Any) -> Any:
    """A network with raw boxes and sigmoid scores, the background first, as the Object Detection API exports."""
    layers = keras.layers
    keras.utils.set_random_seed(1)
    image = keras.Input((SIDE, SIDE, 3), batch_size=1)
    fine = layers.Conv2D(8, 3, 8, padding="same", activation="relu")(image)
    coarse = layers.Conv2D(8, 3, 2, padding="same", activation="relu")(fine)
    boxes, scores = [], []
    for features in (fine, coarse):
        spread = keras.initializers.RandomNormal(0, 0.5)
        boxes.append(layers.Reshape((-1, 4))(layers.Conv2D(8, 1, kernel_initializer=spread)(features)))
        spread = keras.initializers.RandomNormal(0, 0.5)
        scores.append(layers.Reshape((-1, 4))(layers.Conv2D(8, 1, kernel_initializer=spread)(features)))
    joined = [layers.Concatenate(axis=1)(parts) for parts in (boxes, scores)]
    return keras.Model(image, [joined[0], layers.Activation("sigmoid")(joined[1])])


def file_of(keras: Any, folder: Path, samples: np.ndarray | None = None) -> tuple[Path, graph.Graph]:
    """Write the float file, or the quantized one if there are samples; return its path and its graph."""
    from compress.learning.quantization import export

    model = ssd(keras)
    content = export.convert_float(model) if samples is None else export.convert_calibrated(model, samples, "uint8")
    parsed = graph.parse(content)
    if parsed.tensors[parsed.outputs[0]].shape[2] != 4 or "sigmoid" in parsed.tensors[parsed.outputs[0]].name:
        edit = Edit(parsed)
        edit.outputs.reverse()
        parsed = edit.graph()
    full_model = ended(parsed)
    (folder / "ssd.tflite").write_bytes(graph.serialize(full_model))
    return folder / "ssd.tflite", full_model


PIPELINE = """
schema_version: 1
name: ssd
model: {{file: ssd.tflite, detector: {detector}}}
data:
  source: {{npz: {{file: photos.npz, x: images, y: null}}}}
  task: unlabelled_detection
stages: {stages}
"""


@pytest.mark.tensorflow
@pytest.mark.parametrize("quantized", [False, True])
def test_a_file_becomes_a_bundle_that_finds_the_same(keras: Any, tmp_path: Path, quantized: bool) -> None:
    images = np.random.default_rng(0).random((64, SIDE, SIDE, 3), np.float32)
    np.savez(tmp_path / "photos.npz", images=images, places=np.arange(64) % 2)
    file_of(keras, tmp_path, images if quantized else None)
    stages = "[package: {labels: [a, b, c]}]" if quantized else "[quantize: {}, package: {labels: [a, b, c]}]"
    detector = "{family: auto, most: 12, overlap: 1.0, least_score: 0.3}"
    text = PIPELINE.format(detector=detector, stages=stages)
    if quantized:  # the classes of the data, such as places, are not those of the detector
        text = text.replace("y: null", "y: places")
    (tmp_path / "p.yaml").write_text(text)
    record = run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes()).to_json()
    assert record["status"] in ("ok", "warnings"), record
    opened = Bundle(next((tmp_path / "runs").rglob("*.coralline")).read_bytes())
    assert opened.detector is not None
    settings = opened.detector.specification
    assert (settings["most"], settings["overlap"], settings["least_score"]) == (12, 1.0, 0.3)
    content = opened.content("int8")
    assert not graph.parse(content).custom_operators(detection_postprocess.NAME)
    assert opened.labels == ["a", "b", "c"]
    host = record["models"]["original"]["measurements"]["ap"]
    assert host["value"] == 1.0
    assert "with the original's objects of a score of 0.3 or more as labels" in host["note"]
    assert {row["name"] for row in record["comparison"]["per_class"]} <= set(opened.labels)
    measured = compare(opened, RuntimeOptions())["models"]
    assert "with the original's objects as labels" in measured["original"]["ap"]["note"]
    for role in opened.roles:
        assert measured[role]["ap"]["value"] == pytest.approx(
            opened.manifest["evaluation"]["metrics"][f"ap_{role}"]["value"], abs=1e-6
        )
    agreeing = 0.0
    tensor = opened.models["int8"].inputs[0]
    for image in images[:8]:
        values = preprocessing.quantize(image, tensor.scale, tensor.zero_point, tensor.dtype)
        ours = opened.detector(detector_files.answers(content, [values[np.newaxis]]), opened.labels)
        boxes, classes, scores, _ = detector_files.answers(
            (tmp_path / "ssd.tflite").read_bytes(), [values[np.newaxis] if quantized else image[np.newaxis]]
        )
        close = 1e-4 if quantized else 0.1
        for box, number, score in zip(boxes[0], classes[0], scores[0], strict=True):
            distances = np.abs(ours.boxes - box.clip(0, 1)).max(axis=1) + np.abs(ours.scores - score)
            agreeing += (distances + (ours.classes != number)).min() < close
    assert agreeing / (8 * 12) > (0.9 if quantized else 0.6)  # of equal scores at the end, either may be left out


@pytest.mark.tensorflow
def test_another_task_reads_the_file_again(keras: Any, tmp_path: Path) -> None:
    """A run in the same store that knows the model as a detector does not get the file of one that does not."""
    images = np.random.default_rng(0).random((64, SIDE, SIDE, 3), np.float32)
    np.savez(tmp_path / "photos.npz", images=images)
    file_of(keras, tmp_path, images)
    as_detector = PIPELINE.format(detector="auto", stages="[package: {}]")
    as_numbers = as_detector.replace(", detector: auto", "").replace("  task: unlabelled_detection\n", "")
    models = []
    for text in (as_numbers, as_detector, as_numbers):
        (tmp_path / "p.yaml").write_text(text)
        run(load(tmp_path / "p.yaml"), tmp_path / "runs", tiny.Notes())
        bundle = Bundle((tmp_path / "runs" / "ssd" / "ssd.coralline").read_bytes())
        ends_with_operator = bool(graph.parse(bundle.content("int8")).custom_operators(detection_postprocess.NAME))
        models.append((ends_with_operator, bundle.detector is not None))
    assert models == [(True, False), (False, True), (True, False)]


@pytest.mark.tensorflow
def test_a_float_file_says_its_anchors_and_thresholds(keras: Any, tmp_path: Path) -> None:
    path, _ = file_of(keras, tmp_path)
    file = model_file.read(path)
    assert file.becomes == "keras"
    assert "TFLite_Detection_PostProcess is taken off: its 160 anchors" in file.notes[0]
    imported = model_file.load(file)
    assert not imported.file_is_float_tflite
    assert imported.detection["most"] == 12
    converted = detector_model(imported.model, {"family": "auto", **imported.detection})
    assert converted is not None
    assert converted.classes == CLASSES
    assert converted.box_error is not None
    assert converted.box_error < 1e-4
    detector = Detector(converted.specification)
    np.testing.assert_allclose(detector.anchors, anchors(), atol=1e-4)
    np.testing.assert_allclose(detector.specification["variances"], [0.1, 0.1, 0.2, 0.2], rtol=1e-3)
    assert detector.specification["overlap"] == pytest.approx(0.6)
