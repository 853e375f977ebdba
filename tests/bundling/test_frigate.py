"""The export for Frigate's edgetpu detector, and the models that it does not support."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import detector_files
import frigate_stand_ins
import numpy as np
import one_op
import packages
import pytest
from flatbuffers import flexbuffers
from one_op import Op, Tensor

from compress.bundling import frigate
from compress.core.errors import DataError, ModelError, StoreError
from compress.model.tflite import graph
from compress.pipeline.yaml_file import read
from compress.surface.cli.main import main
from deploy.contract import preprocessing
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detector

OUTPUTS = {
    "boxes": Tensor((1, 10, 4), "FLOAT32", scales=()),
    "classes": Tensor((1, 10), "FLOAT32", scales=()),
    "scores": Tensor((1, 10), "FLOAT32", scales=()),
    "count": Tensor((1,), "FLOAT32", scales=()),
}


def detector(
    image: Tensor | None = None,
    outputs: Any = tuple(OUTPUTS),
    name: str = frigate.POSTPROCESS,
    options: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a model that ends as SSD models do."""
    tensors = {
        "image": image or Tensor((1, 300, 320, 3), "UINT8", scales=(1 / 128,), zero_point=128),
        "encodings": Tensor((1, 8, 4), "UINT8", scales=(0.1,)),
        "predictions": Tensor((1, 8, 3), "UINT8", scales=(0.1,)),
        "anchors": Tensor((8, 4), "UINT8", 1, scales=(0.1,)),
        **OUTPUTS,
    }
    heads = [Op("Heads", ["image"], ["encodings", "predictions"], custom=True)]
    last = Op(name, ["encodings", "predictions", "anchors"], list(OUTPUTS), custom=True)
    schema_model = one_op.model(tensors, [*heads, last], ["image"], outputs)
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, value in {"max_detections": 10, "num_classes": 3, **(options or {})}.items():
            builder.Int(key, value)
    schema_model.subgraphs[0].operators[-1].customOptions = np.frombuffer(bytes(builder.Finish()), np.uint8)
    return graph.serialize(SimpleNamespace(source=schema_model))


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    (tmp_path / "labels.txt").write_text("person\ncar\ncat\n")
    return tmp_path / "labels.txt"


def exported(content: bytes, labels: Path | None, tmp_path: Path) -> frigate.Export:
    (tmp_path / "shop cam.tflite").write_bytes(content)
    return frigate.export(tmp_path / "shop cam.tflite", tmp_path / "out" / "here", labels)


def as_frigate_reads(path: Path) -> dict[int, str]:
    """Return the label map by the rule of Frigate: all lines are numbered if the first one is."""
    lines = path.read_text().splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    assert pairs[0][0].isdigit()
    return {int(number): name.strip() for number, name in pairs}


def test_the_three_files(labels: Path, tmp_path: Path) -> None:
    content = detector()
    export = exported(content, labels, tmp_path)
    folder = tmp_path / "out" / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["frigate.yml", "labelmap.txt", "shop-cam.tflite"]
    assert (folder / "shop-cam.tflite").read_bytes() == content
    assert as_frigate_reads(folder / "labelmap.txt") == {0: "person", 1: "car", 2: "cat"}
    assert read(folder / "frigate.yml").value == {
        "detectors": {"coral": {"type": "edgetpu", "device": "usb"}},
        "model": {
            "path": "/config/model_cache/shop-cam.tflite",
            "labelmap_path": "/config/model_cache/labelmap.txt",
            "width": 320,
            "height": 300,
            "input_tensor": "nhwc",
            "input_pixel_format": "rgb",
            "model_type": "ssd",
        },
    }
    assert (export.classes, export.compiled) == (3, False)
    assert "NOT COMPILED" in (folder / "frigate.yml").read_text()


def test_a_compiled_model(labels: Path, tmp_path: Path) -> None:
    export = exported(packages.compiled(detector(), on_cpu=1), labels, tmp_path)
    assert export.compiled
    assert "NOT COMPILED" not in (tmp_path / "out" / "here" / "frigate.yml").read_text()


def test_label_files_of_other_forms_become_frigates(labels: Path, tmp_path: Path) -> None:
    labels.write_bytes(b'item {\n id: 1\n name: "person"\n}\nitem {\n id: 3\n name: "cat"\n}\n')
    exported(detector(), labels, tmp_path)
    assert as_frigate_reads(tmp_path / "out/here/labelmap.txt") == {0: "person", 2: "cat"}


def test_labels_of_another_number_of_classes(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names 3 classes, and the model has 2"):
        exported(detector(options={"num_classes": 2}), labels, tmp_path)
    assert not (tmp_path / "out").exists()


def float_input() -> bytes:
    return detector(Tensor((1, 300, 300, 3), "FLOAT32", scales=()))


def two_inputs() -> bytes:
    parsed = graph.parse(detector())
    parsed.source.subgraphs[0].inputs = [0, 1]
    return graph.serialize(parsed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (float_input, "has a float32 input; Frigate needs uint8"),
        (lambda: detector(Tensor((1, 300, 300, 3))), "has an input of int8; Frigate needs uint8.*legalize"),
        (lambda: detector(Tensor((1, 300, 300, 1), "UINT8")), r"Frigate needs \[1, height, width, 3\]"),
        (lambda: detector(Tensor((1, 9, 9, 3), "UINT8", signature=(1, -1, -1, 3))), "Frigate needs"),
        (lambda: detector(name="Something_Else"), "has no TFLite_Detection_PostProcess"),
        (lambda: detector(outputs=["scores", "boxes", "count", "classes"]), "Frigate needs boxes, classes, scores"),
        (lambda: detector(outputs=["boxes", "classes", "scores"]), "in this order"),
        (two_inputs, "has 2 inputs"),
        (lambda: detector(options={"num_classes": -1}), "has -1 classes"),
        (lambda: b"nonsense", "neither a .tflite file nor a bundle"),
    ],
)
def test_others_are_refused_with_the_reason(
    make: Callable[[], bytes], message: str, labels: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        exported(make(), labels, tmp_path)
    assert not (tmp_path / "out").exists()


def test_options_that_are_garbage(labels: Path, tmp_path: Path) -> None:
    parsed = graph.parse(detector())
    for garbage in (b"\xff" * 40, b"\x00", bytes(range(64))):
        parsed.source.subgraphs[0].operators[-1].customOptions = np.frombuffer(garbage, np.uint8)
        with suppress(ModelError):  # refused with a message, or exported without classes
            assert exported(graph.serialize(parsed), labels, tmp_path).classes is None


def test_names_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="class names are missing"):
        exported(detector(), None, tmp_path)
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        exported(detector(), tmp_path / "nowhere", tmp_path)


def test_a_folder_that_cannot_be(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError):
        exported(detector(), labels, tmp_path)


@pytest.mark.essential
def test_the_command(labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.tflite").write_bytes(detector())
    arguments = ["frigate", str(tmp_path / "m.tflite"), "-o", str(tmp_path / "o"), "--labels", str(labels)]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["width"] == 320
    assert main(arguments) == 0
    assert "not compiled" in capsys.readouterr().out
    (tmp_path / "m.tflite").write_bytes(float_input())
    assert main(arguments) == 4


# --- detectors in bundles ----------------------------------------------------------------

SIDE = 64
TO_1 = [{"resize": {"size": [SIDE, SIDE]}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]
FROM_MINUS_1 = [
    {"resize": {"size": [SIDE, SIDE], "fit": "letterbox"}},
    {"colour": {"to": "bgr"}},
    {"scale": {"from": [0, 255], "to": [-1, 1]}},
]
INPUTS = {
    "int8, 0 to 1": (TO_1, Tensor((1, SIDE, SIDE, 3), "INT8", scales=(1 / 255,), zero_point=-128)),
    "uint8, 0 to 1": (TO_1, Tensor((1, SIDE, SIDE, 3), "UINT8", scales=(1 / 255,))),
    "int8, -1 to 1": (FROM_MINUS_1, Tensor((1, SIDE, SIDE, 3), "INT8", scales=(2 / 255,), zero_point=-1)),
    "calibrated": (TO_1, Tensor((1, SIDE, SIDE, 3), "INT8", scales=(0.9 / 255,), zero_point=-128)),
}
NAMES = ("person", "car", "cat")


def bundled(tmp_path: Path, code: str, steps: Any = TO_1, image: Tensor = INPUTS["int8, 0 to 1"][1]) -> Bundle:
    described = detector_files.specification(code, SIDE, overlap=1.0)  # boxes leave the image: test_detection_outputs
    content = graph.serialize(detector_files.from_image(described, len(NAMES), image))
    (tmp_path / "d.coralline").write_bytes(detector_files.bundle_of(content, described, steps, NAMES))
    return Bundle((tmp_path / "d.coralline").read_bytes())


def photo(seed: int) -> np.ndarray:
    """Return an image of coloured rectangles, so that cells differ."""
    random = np.random.default_rng(seed)
    return np.kron(random.integers(0, 256, (8, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)


def our_answer(opened: Bundle, image: np.ndarray) -> Any:
    """Return the objects that the bundle finds, with Frigate's limits for the score and the number of objects."""
    model = opened.content("int8")
    detail = opened.models["int8"].inputs[0]
    stored = preprocessing.quantize(opened.preprocessing(image), detail.scale, detail.zero_point, detail.dtype)
    values = stored[np.newaxis]
    assert opened.detector is not None
    settings = {**opened.detector.specification, "least_score": 0.4, "most": 20}
    return Detector(settings)(detector_files.answers(model, [values]), NAMES)


@pytest.mark.parametrize("form", list(INPUTS))
def test_a_detector_gets_an_input_of_pixels_and_the_outputs_of_ssd(form: str, tmp_path: Path) -> None:
    opened = bundled(tmp_path, "ltrb", *INPUTS[form])
    export = frigate.export(tmp_path / "d.coralline", tmp_path / "out")
    bgr = form == "int8, -1 to 1"
    assert (export.model_type, export.pixel_format) == ("ssd", "bgr" if bgr else "rgb")
    assert export.labels == dict(enumerate(NAMES))
    model = read(tmp_path / "out" / "frigate.yml").value["model"]
    assert (model["model_type"], model["input_pixel_format"]) == ("ssd", "bgr" if bgr else "rgb")
    content = (tmp_path / "out" / "d.tflite").read_bytes()
    parsed = graph.parse(content)
    assert parsed.tensors[parsed.inputs[0]].dtype == "UINT8"  # all versions of Frigate support it
    if form == "uint8, 0 to 1":
        assert parsed.operators[0].inputs[0] == parsed.inputs[0]
        assert sum(op.name == "QUANTIZE" for op in parsed.operators) == 1  # the model's own
    image = photo(0)
    expected = our_answer(opened, image)
    boxes, classes, scores, count = detector_files.answers(content, [(image[..., ::-1] if bgr else image)[np.newaxis]])
    assert len(expected) > 3
    # -1 to 1 has no exact zero among the pixels: half a step of the input is lost
    agree(np.column_stack([classes[0], scores[0], boxes[0]])[: int(count[0])], expected, 0.1 if bgr else 1e-4)


def agree(rows: np.ndarray, expected: Any, tolerance: float) -> None:
    """Compare rows of class, score and box with the expected ones, except for those with the lowest scores."""
    assert len(rows) == len(expected)
    assert_found(rows[rows[:, 1] > rows[-1, 1] + tolerance], expected, tolerance)


def assert_found(rows: np.ndarray, expected: Any, tolerance: float) -> None:
    """Check that each of the rows is among the expected ones."""
    for number, score, *box in rows:
        distances = np.abs(expected.boxes - np.clip(box, 0, 1)).max(axis=1)
        distances += np.abs(expected.scores - score) + (expected.classes != number)
        assert distances.min() < tolerance


@pytest.mark.parametrize("form", ["int8, 0 to 1", "uint8, 0 to 1", "calibrated"])
@pytest.mark.parametrize(("code", "model_type"), [("ltrb", None), ("dfl", "ssd"), ("dfl", None)])
def test_frigates_own_program_finds_what_the_bundle_finds(
    form: str, code: str, model_type: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = bundled(tmp_path, code, *INPUTS[form])
    export = frigate.export(tmp_path / "d.coralline", tmp_path / "out", model_type=model_type)
    assert export.model_type == ("yolo-generic" if (code, model_type) == ("dfl", None) else "ssd")
    plugin = frigate_stand_ins.plugin(monkeypatch)
    detect = frigate_stand_ins.detector(plugin, tmp_path / "out" / "d.tflite", export)
    for seed in range(5):
        image = photo(seed)
        expected = our_answer(opened, image)
        rows = detect(image[np.newaxis])
        rows = rows[rows[:, 1] > 0]
        assert len(rows) > 3
        if export.model_type == "ssd":
            agree(rows, expected, 1e-4)
        else:  # one class for each location, boxes of all classes are suppressed together, one scale for all logits
            assert_found(rows[:3], expected, 0.05)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"normalize": {"mean": [123.0, 116.0, 103.0], "std": [58.0, 57.0, 57.0]}}], "Frigate does not preprocess"),
        # The bundle of an export with random samples has no preprocessing: all pixels would be white.
        ([], r"values from 0 to 255 of pixels, and its input holds 0 to 1; set data"),
    ],
)
def test_preprocessing_that_frigate_or_the_input_does_not_have(steps: list[Any], message: str, tmp_path: Path) -> None:
    bundled(tmp_path, "ltrb", [TO_1[0], *steps])
    with pytest.raises(ModelError, match=message):
        frigate.export(tmp_path / "d.coralline", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_type_that_a_detector_does_not_have(tmp_path: Path, labels: Path) -> None:
    bundled(tmp_path, "ltrb")
    with pytest.raises(ModelError, match="no form as yolo-generic: code is 'ltrb'"):
        frigate.export(tmp_path / "d.coralline", tmp_path / "out", model_type="yolo-generic")
    (tmp_path / "m.tflite").write_bytes(detector())
    with pytest.raises(ModelError, match="says nothing about its outputs"):
        frigate.export(tmp_path / "m.tflite", tmp_path / "out", labels, "yolo-generic")
