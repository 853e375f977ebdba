"""Bundles as functions: answers, threads, memory, and refused arguments."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import update_attacks

import compress.model.tflite.interpreter as host
from deploy import Answer, Model
from deploy.contract import bundle
from deploy.contract.errors import ArgumentError, EdgeTpuError, ImageError, LoadError
from deploy.contract.preprocessing import Preprocessing, dequantize
from deploy.contract.tensors import TensorDescription
from deploy.contract.trust import TrustError
from deploy.runner.answers import _to_values


@pytest.fixture
def model(path: Path, nowhere: None) -> Any:
    with Model(str(path), kernels="reproducible") as loaded_model:
        yield loaded_model


@pytest.mark.parametrize("role", ["int8", "original"])
def test_answers_are_those_of_the_host(path: Path, tmp_path: Path, role: str) -> None:
    (tmp_path / "m.tflite").write_bytes(devices.models()[role])
    images = devices.images(20)
    inputs = np.stack([Preprocessing(devices.STEPS)(image) for image in images])
    expected = host.LoadedModel(tmp_path / "m.tflite", reproducible=True).scores(inputs)
    answers = Model(path, role, kernels="reproducible").batch(images)
    np.testing.assert_array_equal(np.stack([answer.scores for answer in answers]), expected)
    assert [answer.index for answer in answers] == expected.argmax(axis=1).tolist()
    assert len({answer.label for answer in answers}) > 1


def test_an_answer_names_its_classes() -> None:
    answer = Answer(np.array([1, 3, 3, 2], np.float32), ["a", "b", "c"])
    assert (answer.index, answer.label, answer.score) == (1, "b", 3.0)
    assert answer.top(3) == [("b", 3.0), ("c", 3.0), ("3", 2.0)]
    assert repr(answer) == "Answer(label='b', score=3)"


@pytest.mark.parametrize("shape", [(1, 256), (1, 2, 128), (256,)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.float32])
def test_scores_of_every_type(dtype: Any, shape: tuple[int, ...]) -> None:
    stored = np.arange(-128, 128).astype(dtype).reshape(shape)
    integers = np.issubdtype(dtype, np.integer)
    tensor = TensorDescription("x", "x", shape, np.dtype(dtype).name, 0.1 if integers else None, 3 if integers else 0)
    expected = dequantize(stored.ravel(), 0.1, 3) if integers else stored.ravel()
    np.testing.assert_array_equal(_to_values(tensor)(stored), expected)


def test_a_stream_is_answered_image_by_image(model: Model) -> None:
    captured_images = []

    def camera() -> Any:
        for image in devices.images(3):
            captured_images.append(image)
            yield image

    stream = model.stream(camera())
    assert isinstance(next(stream), Answer)
    assert len(captured_images) == 1
    assert [answer.label for answer in stream] == [answer.label for answer in model.batch(devices.images(3)[1:])]


def test_answers_of_eight_threads_are_not_mixed(model: Model) -> None:
    images = devices.images(40, 5) * 20
    expected = [answer.scores.tolist() for answer in model.batch(images[:40])] * 20
    assert len({str(scores) for scores in expected}) > 10
    with ThreadPoolExecutor(8) as pool:
        actual = [answer.scores.tolist() for answer in pool.map(model, images, chunksize=1)]
    assert actual == expected


def test_input_memory_must_not_be_kept(model: Model) -> None:
    kept: list[Any] = []
    with pytest.raises(ImageError, match="kept a reference to it; to do: write to the tensor, and keep no reference"):
        model.filled(kept.append)
    kept.clear()
    assert isinstance(model(devices.images(1)[0]), Answer)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros(3), "cannot be preprocessed: resize takes an image"),
        (np.zeros((1, 4, 4, 1)), "cannot be preprocessed: a sample must be numbers"),
        (np.zeros((4, 4, 3)), r"has the shape \[4, 4, 3\] after preprocessing, and the model takes \[4, 4, 1\]"),
        ("text", "the bundle takes no texts; to do: pass an array"),
        (b"text", "the sample is bytes"),
    ],
)
def test_images_that_do_not_fit(model: Model, image: Any, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        model(image)


def test_tensors_that_do_not_fit(model: Model) -> None:
    for tensor in (np.zeros((1, 4, 4, 1), np.float32), np.zeros((1, 5, 4, 1), np.int8)):
        with pytest.raises(ImageError, match=r"an input tensor has the wrong shape or type: .*; to do: create it"):
            model.answer([tensor])
    with pytest.raises(ImageError, match=r"2 input tensors were passed, and the model has 1 inputs"):
        model.answer([np.zeros((1, 4, 4, 1), np.int8)] * 2)


def test_a_closed_model_says_so(model: Model) -> None:
    tensor = model.prepare(devices.images(1)[0])
    model.close()
    for ask in (lambda: model.answer(tensor), lambda: model.filled(lambda memory: None)):
        with pytest.raises(ArgumentError, match="the model is closed"):
            ask()


def test_what_runs_where(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    model = Model(path)
    assert (model.role, model.describe()["device"]) == ("int8", "cpu")
    assert model.remark == "no Edge TPU is on USB or PCIe: the int8 model runs on the CPU"
    assert Model(path, device="cpu").remark == ""
    assert Model(bundle.read(str(path)), "original").role == "original"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"role": "other"}, "the bundle has no model 'other'; to do: use one of: compiled, int8, original"),
        ({"role": "int8", "device": "usb"}, "int8 models run on the CPU, not on usb"),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"threads": 0}, "the number of threads is 0"),
    ],
)
def test_arguments_that_do_not_fit(path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Model(path, **arguments)


def test_a_bundle_without_a_compiled_model_runs_on_no_edge_tpu() -> None:
    opened = bundle.Bundle(devices.packed({"int8": devices.models()["int8"]}, samples=0))
    with pytest.raises(ArgumentError, match="has no compiled model for usb:0"):
        Model(opened, device="usb:0")


def test_a_compiled_model_on_the_cpu_is_told_so(path: Path) -> None:
    with pytest.raises(EdgeTpuError, match="compiled for the Edge TPU, and no Edge TPU delegate is loaded") as caught:
        Model(path, "compiled", "cpu")
    assert (caught.value.kind, caught.value.exit_code) == ("no_delegate", 12)


def test_the_model_must_be_the_one_of_the_manifest() -> None:
    opened = bundle.Bundle(devices.packed(samples=0))
    described = opened.models["int8"]
    (output,) = described.outputs
    opened.models["int8"] = described._replace(outputs=(output._replace(scale=0.5),))
    with pytest.raises(LoadError, match="the model's output scores differs from the manifest"):
        Model(opened, "int8")
    opened.models["int8"] = described._replace(outputs=(output, output._replace(name="more")))
    with pytest.raises(LoadError, match="the model has 1 outputs, and the manifest 2"):
        Model(opened, "int8")
    opened.models["int8"] = described
    opened.members["int8.tflite"] = b"TFL3 or not"
    with pytest.raises(LoadError, match="refuses the model"):
        Model(opened, "int8")


def test_the_package_alone_imports_nothing() -> None:
    code = "import sys, deploy; assert 'numpy' not in sys.modules; deploy.nothing"
    done = subprocess.run([sys.executable, "-c", code], env=devices.environment(), capture_output=True, text=True)
    assert "module 'deploy' has no attribute 'nothing'" in done.stderr


def test_a_device_that_trusts_a_root_takes_listed_bundles_only(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = update_attacks.Source()
    source.root()
    source.release(1, {"other.coralline": b"other"})
    update_attacks.Device(tmp_path / "etc/coralline/trust", source)
    update_attacks.set_clock(None)
    monkeypatch.setenv("CORALLINE_ROOT", str(tmp_path))
    with pytest.raises(TrustError, match="not in the signed targets metadata of this device"):
        Model(path)
