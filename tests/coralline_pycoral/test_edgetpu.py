"""Interpreters from files, contents and bundles; raw inputs; the list of Edge TPUs."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import detector_files
import devices
import numpy as np
import pytest
import tiny
from one_op import Tensor

from compress.model.tflite import graph
from coralline_pycoral.adapters import classify, common, detect
from coralline_pycoral.utils import edgetpu
from deploy.contract import bundle
from deploy.contract.bundle import BundleError
from deploy.contract.errors import EdgeTpuError
from deploy.runner.model import Model


def test_a_file_and_its_content_run_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(tiny.classifier())
    values = np.arange(16, dtype=np.int8).reshape(4, 4, 1)
    scores = []
    for model in (str(path), path, path.read_bytes()):
        interpreter = edgetpu.make_interpreter(model)
        interpreter.allocate_tensors()
        common.set_input(interpreter, values)
        interpreter.invoke()
        scores.append(classify.get_scores(interpreter).tolist())
        assert edgetpu.bundle_of(interpreter) is None
    assert scores[0] == scores[1] == scores[2]
    assert len(set(scores[0])) > 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.tflite"):
        edgetpu.make_interpreter(str(tmp_path / "missing.tflite"))


def test_a_compiled_model_is_refused_for_the_cpu() -> None:
    with pytest.raises(EdgeTpuError, match="the device is cpu"):
        edgetpu.make_interpreter(devices.models()["compiled"], "cpu")


def test_a_bundle_without_an_edge_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    path = tmp_path / "shelf.coralline"
    path.write_bytes(devices.packed())
    interpreter = edgetpu.make_interpreter(str(path))
    opened = edgetpu.bundle_of(interpreter)
    assert opened is not None
    assert opened.role == "int8"
    model = Model(str(path))
    for image in devices.images(4, seed=5):
        pixels = image[:4, :4]
        common.set_input(interpreter, pixels)
        interpreter.invoke()
        assert classify.get_scores(interpreter) == pytest.approx(np.asarray(model(pixels).scores))


def test_a_changed_bundle_is_refused() -> None:
    content = bytearray(devices.packed())
    content[-200] ^= 1
    with pytest.raises(BundleError):
        edgetpu.make_interpreter(bytes(content))


def test_objects_of_a_bundle_without_postprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    maps = [{"cells": [64 // stride, 96 // stride]} for stride in (8, 16, 32)]
    described = detector_files.specification("ltrb", maps=maps)
    image = Tensor((1, 64, 96, 3), "INT8", scales=(1 / 255,), zero_point=-128)
    model = graph.serialize(detector_files.from_image(described, 3, image))
    content = detector_files.bundle_of(model, described, [], ["a", "b", "c"])
    opened = bundle.Bundle(content)
    interpreter = edgetpu.make_interpreter(content)
    values = detector_files.photo(3, 80, 100)[:64, :96].astype(np.int8)
    common.set_input(interpreter, values)
    interpreter.invoke()
    outputs = detector_files.answers(opened.content("int8"), [values[np.newaxis]])
    assert opened.detector is not None
    expected = opened.detector(outputs, opened.labels).above(0.5)
    objects = detect.get_objects(interpreter, 0.5, (0.1, 0.2))
    assert len(objects) == len(expected) > 0
    for detection, score, index, box in zip(objects, expected.scores, expected.classes, expected.boxes, strict=True):
        ymin, xmin, ymax, xmax = box * [64 / 0.2, 96 / 0.1, 64 / 0.2, 96 / 0.1]
        assert (detection.id, detection.score) == (index, score)
        assert detection.bbox == pytest.approx((xmin, ymin, xmax, ymax), abs=1)


@pytest.mark.parametrize("kind", ["array", "bytes", "pointer"])
def test_raw_inputs(kind: str) -> None:
    interpreter = edgetpu.make_interpreter(tiny.classifier())
    values = np.arange(20, dtype=np.int8)
    memory = ctypes.create_string_buffer(values.tobytes())
    pointer = (ctypes.cast(memory, ctypes.c_void_p), 20)
    data: dict[str, Any] = {"array": values, "bytes": values.tobytes(), "pointer": pointer}
    edgetpu.run_inference(interpreter, data[kind])
    scores = classify.get_scores(interpreter)
    common.set_input(interpreter, values[:16].reshape(4, 4, 1))
    interpreter.invoke()
    assert scores.tolist() == classify.get_scores(interpreter).tolist()


@pytest.mark.parametrize("device", ["usb:0", "pci", ":7"])
def test_a_named_device_must_exist_for_every_file(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    asked = []

    def missing(library: str, options: Any) -> Any:
        asked.append(options)
        raise ValueError(f"Failed to load delegate from {library}")

    monkeypatch.setattr(edgetpu.runtime.find().module, "load_delegate", missing)
    for model in (tiny.classifier(), devices.models()["compiled"], devices.packed()):
        with pytest.raises(ValueError, match="Failed to load delegate"):
            edgetpu.make_interpreter(model, device)
    assert asked == [{"device": device}] * 3
    edgetpu.make_interpreter(tiny.classifier(), "cpu")


@pytest.mark.parametrize("kind", [np.asarray, bytes])
def test_a_view_shows_the_output_of_the_next_inference(kind: Any) -> None:
    interpreter = edgetpu.make_interpreter(tiny.classifier())
    first, second = np.arange(16, dtype=np.int8), np.arange(16, dtype=np.int8)[::-1] * np.int8(5)
    edgetpu.run_inference(interpreter, kind(first))
    view = common.output_tensor(interpreter, 0)
    before = view.copy()
    edgetpu.run_inference(interpreter, kind(second))
    index = interpreter.get_output_details()[0]["index"]
    assert view.tolist() == interpreter.get_tensor(index).tolist()
    assert view.tolist() != before.tolist()


def test_raw_inputs_that_are_refused() -> None:
    interpreter = edgetpu.make_interpreter(tiny.classifier())
    with pytest.raises(ValueError, match="input size=15, expected=16"):
        edgetpu.run_inference(interpreter, bytes(15))
    with pytest.raises(TypeError, match="not supported"):
        edgetpu.run_inference(interpreter, [0] * 16)


@pytest.mark.parametrize(("usb", "kind", "node"), [(True, "usb", "dev/bus/usb/002/007"), (False, "pci", "dev/apex_0")])
def test_edge_tpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usb: bool, kind: str, node: str) -> None:
    root = devices.host(tmp_path, usb=usb)
    monkeypatch.setenv("CORALLINE_ROOT", str(root))
    assert edgetpu.list_edge_tpus() == [{"type": kind, "path": str(root / node)}]
