"""What Frigate's edgetpu detector gets, and which models it cannot have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_op
import packages
import pytest
from devices import packed
from flatbuffers import flexbuffers
from one_op import Op, Tensor

from compress.cli.main import main
from compress.errors import ModelError, StoreError
from compress.exporters import frigate
from compress.pipeline.yaml_file import read
from compress.tflite import graph

OUTPUTS = {
    "boxes": Tensor((1, 10, 4), "FLOAT32", scales=()),
    "classes": Tensor((1, 10), "FLOAT32", scales=()),
    "scores": Tensor((1, 10), "FLOAT32", scales=()),
    "count": Tensor((1,), "FLOAT32", scales=()),
}


def detector(
    given: Tensor | None = None,
    outputs: Any = tuple(OUTPUTS),
    name: str = frigate.POSTPROCESS,
    options: Mapping[str, Any] | None = None,
) -> bytes:
    """A model that ends as SSD models do."""
    tensors = {
        "image": given or Tensor((1, 300, 320, 3), "UINT8", scales=(1 / 128,), zero_point=128),
        "encodings": Tensor((1, 8, 4), "UINT8", scales=(0.1,)),
        "predictions": Tensor((1, 8, 3), "UINT8", scales=(0.1,)),
        "anchors": Tensor((8, 4), "UINT8", 1, scales=(0.1,)),
        **OUTPUTS,
    }
    heads = [Op("Heads", ["image"], ["encodings", "predictions"], custom=True)]
    last = Op(name, ["encodings", "predictions", "anchors"], list(OUTPUTS), custom=True)
    made = one_op.model(tensors, [*heads, last], ["image"], outputs)
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, value in {"max_detections": 10, "num_classes": 3, **(options or {})}.items():
            builder.Int(key, value)
    made.subgraphs[0].operators[-1].customOptions = np.frombuffer(bytes(builder.Finish()), np.uint8)
    return graph.serialize(SimpleNamespace(source=made))


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    (tmp_path / "labels.txt").write_text("person\ncar\ncat\n")
    return tmp_path / "labels.txt"


def exported(content: bytes, labels: Path | None, tmp_path: Path) -> frigate.Export:
    (tmp_path / "shop cam.tflite").write_bytes(content)
    return frigate.export(tmp_path / "shop cam.tflite", tmp_path / "out" / "here", labels)


def as_frigate_reads(path: Path) -> dict[int, str]:
    """The label map, by the rule of Frigate: all lines are numbered if the first one is."""
    lines = path.read_text().splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    assert pairs[0][0].isdigit()
    return {int(number): name.strip() for number, name in pairs}


def test_the_three_files(labels: Path, tmp_path: Path) -> None:
    content = detector()
    found = exported(content, labels, tmp_path)
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
    assert (found.classes, found.compiled) == (3, False)
    assert "NOT COMPILED" in (folder / "frigate.yml").read_text()


def test_a_compiled_model(labels: Path, tmp_path: Path) -> None:
    found = exported(packages.compiled(detector(), on_cpu=1), labels, tmp_path)
    assert found.compiled
    assert "NOT COMPILED" not in (tmp_path / "out" / "here" / "frigate.yml").read_text()


def test_numbered_labels_with_gaps(labels: Path, tmp_path: Path) -> None:
    labels.write_text("0  person\n2: traffic light\n")
    exported(detector(), labels, tmp_path)
    assert as_frigate_reads(tmp_path / "out/here/labelmap.txt") == {0: "person", 2: "traffic light"}


def float_input() -> bytes:
    return detector(Tensor((1, 300, 300, 3), "FLOAT32", scales=()))


def two_inputs() -> bytes:
    parsed = graph.parse(detector())
    parsed.source.subgraphs[0].inputs = [0, 1]
    return graph.serialize(parsed)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (float_input, "has a float32 input; Frigate needs uint8"),
        (lambda: detector(Tensor((1, 300, 300, 3))), "has an input of int8; Frigate needs uint8.*legalize"),
        (lambda: detector(Tensor((1, 300, 300, 1), "UINT8")), r"Frigate needs \[1, height, width, 3\]"),
        (lambda: detector(Tensor((1, 9, 9, 3), "UINT8", signature=(1, -1, -1, 3))), "Frigate needs"),
        (lambda: detector(name="Something_Else"), "has no TFLite_Detection_PostProcess"),
        (lambda: detector(outputs=["scores", "boxes", "count", "classes"]), "Frigate needs boxes, classes, scores"),
        (lambda: detector(outputs=["boxes", "classes", "scores"]), "in this order"),
        (two_inputs, "has 2 inputs"),
        (lambda: detector(options={"num_classes": 2}), "class 2, and the model has 2 classes.*background"),
        (lambda: detector(options={"num_classes": -1}), "has -1 classes"),
        (lambda: b"nonsense", "neither a .tflite file nor a bundle"),
    ],
)
def test_others_are_refused_with_the_reason(make: Callable[[], bytes], told: str, labels: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told):
        exported(make(), labels, tmp_path)
    assert not (tmp_path / "out").exists()


def test_options_that_are_garbage(labels: Path, tmp_path: Path) -> None:
    parsed = graph.parse(detector())
    for garbage in (b"\xff" * 40, b"\x00", bytes(range(64))):
        parsed.source.subgraphs[0].operators[-1].customOptions = np.frombuffer(garbage, np.uint8)
        with suppress(ModelError):  # refused in words, or nothing is known of the classes
            assert exported(graph.serialize(parsed), labels, tmp_path).classes is None


def test_a_bundle_of_a_classifier(tmp_path: Path) -> None:
    (tmp_path / "b.coralline").write_bytes(packed(samples=0))
    with pytest.raises(ModelError, match="has no TFLite_Detection_PostProcess"):
        frigate.export(tmp_path / "b.coralline", tmp_path / "out")


def test_names_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="class names are missing"):
        exported(detector(), None, tmp_path)
    with pytest.raises(ModelError, match="labels cannot be read"):
        exported(detector(), tmp_path / "nowhere", tmp_path)


def test_a_folder_that_cannot_be(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError):
        exported(detector(), labels, tmp_path)


def test_the_command(labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.tflite").write_bytes(detector())
    arguments = ["frigate", str(tmp_path / "m.tflite"), "-o", str(tmp_path / "o"), "--labels", str(labels)]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["width"] == 320
    assert main(arguments) == 0
    assert "not compiled" in capsys.readouterr().out
    (tmp_path / "m.tflite").write_bytes(float_input())
    assert main(arguments) == 4
