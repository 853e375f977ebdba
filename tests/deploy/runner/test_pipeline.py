"""Segments as a pipeline: order, back-pressure, errors, interruption and copies; the command on every interpreter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import devices
import numpy as np
import pytest
from tiny import TfliteBuilder

from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.several.split import split
from deploy import __main__ as command
from deploy.contract.errors import ArgumentError, EdgeTpuError
from deploy.contract.tensors import TensorDescription
from deploy.runner.pipeline import LoadedSegment, SegmentPipeline, _devices
from deploy.runner.pipeline import load as load_segments


class Session:
    """A stand-in for `InferenceSession` that adds a number."""

    def __init__(self, source: str, target: str, number: int, seconds: float = 0.0) -> None:
        describe = lambda name: TensorDescription(name, name, (1,), "int32", None, 0)  # noqa: E731
        self.inputs = [describe(source)]
        self.outputs = [describe(target)]
        self.options = SimpleNamespace(device="cpu")
        self.number = number
        self.seconds = seconds
        self.runs = 0

    def run_tensors(self, tensors: Any) -> list[Any]:
        self.runs += 1
        time.sleep(self.seconds)
        if tensors[0][0] < 0:
            raise RuntimeError("negative")
        return [tensors[0] + self.number]

    def close(self) -> None:
        pass


def pipeline(copies: int = 1, seconds: float = 0.0) -> SegmentPipeline:
    replicas = []
    for _ in range(copies):
        sessions: list[Any] = [Session("a", "b", 1), Session("b", "c", 10, seconds), Session("c", "d", 100)]
        replicas.append([LoadedSegment(f"part {index}", session) for index, session in enumerate(sessions)])
    return SegmentPipeline(replicas)


def samples(count: int) -> Iterator[dict[str, Any]]:
    return ({"a": np.array([index], np.int32)} for index in range(count))


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_answers_come_in_order(copies: int) -> None:
    used = pipeline(copies, 0.001)
    outputs = [int(row["d"][0]) for row in used.stream(samples(50))]
    assert outputs == [index + 111 for index in range(50)]
    statistics = used.statistics()
    assert statistics["samples"] == 50
    assert statistics["bottleneck"] == "part 1"
    assert len(statistics["segments"]) == 3 * copies


def test_a_slow_reader_holds_the_source_back() -> None:
    read: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        for index in range(1000):
            read.append(index)
            yield {"a": np.array([index], np.int32)}

    stream = pipeline().stream(source())
    next(stream)
    time.sleep(0.2)
    assert len(read) < 20  # four queues of two, and one sample in each thread
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("part ")]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_an_error_comes_after_the_answers_before_it(copies: int) -> None:
    used = pipeline(copies, 0.02)
    inputs = [{"a": np.array([value], np.int32)} for value in (1, 2, -500, 4)]
    answers = (int(row["d"][0]) for row in used.stream(inputs))
    outputs: list[int] = []
    with pytest.raises(EdgeTpuError, match="part 0 did not run: negative"):
        outputs.extend(answers)
    assert outputs == [112, 113]
    assert [int(row["d"][0]) for row in used.stream(inputs[:2])] == [112, 113]  # it can be used again
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("part ")]


def test_an_error_of_the_source_is_raised() -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"a": np.array([1], np.int32)}
        raise OSError("the camera is gone")

    stream = pipeline().stream(source())
    next(stream)
    with pytest.raises(OSError, match="camera"):
        next(stream)


def test_a_sample_without_an_input_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no input a"):
        list(pipeline().stream([{"b": np.array([1])}]))


def test_wrong_orders_and_devices_are_refused() -> None:
    sessions: list[Any] = [Session("b", "c", 1), Session("a", "b", 1)]
    with pytest.raises(ArgumentError, match="in their order"):
        SegmentPipeline([[LoadedSegment("x", session) for session in sessions]])
    with pytest.raises(ArgumentError, match="3 segments and 2 devices"):
        _devices(["a", "b", "c"], ["usb:0", "usb:1"])
    with pytest.raises(ArgumentError, match="twice"):
        _devices(["a", "b"], ["usb:0", "usb:0"])
    assert _devices(["a_edgetpu.tflite", "b_edgetpu.tflite"], []) == [":0", ":1"]
    assert _devices(["a", "b"], ["cpu"]) == ["cpu", "cpu"]


def network() -> bytes:
    """Three convolutions with a skip connection."""
    random = np.random.default_rng(1)
    model = TfliteBuilder(int8=True)
    image = model.activation("image", [1, 8, 8, 4], (0.0, 1.0))
    layers = [image]
    for index in range(3):
        layers.append(model.activation(f"layer {index}", [1, 8, 8, 4], (0.0, 4.0)))
        model.convolution(layers[-2], random.uniform(-1, 1, (4, 3, 3, 4)), np.zeros(4), layers[-1])
    total = model.activation("total", [1, 8, 8, 4], (0.0, 8.0))
    model.operator("ADD", [layers[1], layers[3]], total, model.schema.AddOptionsT())
    return model.finish([image], [total])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The segments of a network, as `split` writes them."""
    path = tmp_path_factory.mktemp("segments")
    for name, content in split(graph.parse(network()), load("edgetpu"), 3, "usb3", "max").all_files().items():
        (path / name).write_bytes(content)
    return path


def test_segments_give_the_outputs_of_the_model(folder: Path, tmp_path: Path) -> None:
    model_path = tmp_path / "whole.tflite"
    model_path.write_bytes(network())
    random = np.random.default_rng(2)
    inputs = [{"image": random.integers(-128, 128, (1, 8, 8, 4)).astype(np.int8)} for _ in range(5)]
    with load_segments([str(folder)], ["cpu"] * 6, kernels="reproducible") as segments:
        actual = [row["total"] for row in segments.stream(inputs)]
    with load_segments([str(model_path)], kernels="reproducible") as one:
        expected = [row["total"] for row in one.stream(inputs)]
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("python", devices.pythons())
def test_the_command_on_every_interpreter(folder: Path, python: str, tmp_path: Path) -> None:
    np.save(tmp_path / "given.npy", np.zeros((3, 8, 8, 4), np.int8))
    more = ["--inputs", tmp_path / "given.npy", "--save", tmp_path / "out.npz", "--runs", "6", "--warmup", "2"]
    done = devices.runner("pipeline", folder, "--json", *more, python=python)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verb"], report["samples"], len(report["segments"])) == ("pipeline", 6, 3)
    assert np.load(tmp_path / "out.npz")["total"].shape == (3, 1, 8, 8, 4)


def test_compiled_segments_run_through_the_delegate(folder: Path, tmp_path: Path) -> None:
    """The last operator of each segment is a custom operator, which the stand-in for libedgetpu runs as a copy."""
    for path in folder.glob("model_segment_*_of_3.tflite"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        compiled = tmp_path / f"{path.stem}_edgetpu.tflite"
        compiled.write_bytes(devices.compiled(path.read_bytes()))
    np.save(tmp_path / "given.npy", np.arange(2 * 256, dtype=np.int16).astype(np.int8).reshape(2, 1, 8, 8, 4))
    more = ["--inputs", tmp_path / "given.npy", "--runs", "6", "--warmup", "2"]
    results = []
    for name, chosen in (("tpu.npz", ["usb:0", "usb:1", "usb:2"]), ("cpu.npz", ["cpu"])):
        device_options = [word for device in chosen for word in ("--device", device)]
        environment = {"LD_LIBRARY_PATH": devices.stand_in(), "CORALLINE_ROOT": devices.host(tmp_path / name[:3])}
        options = [*more, *device_options, "--save", tmp_path / name]
        done = devices.runner("pipeline", tmp_path, "--json", *options, python=sys.executable, **environment)
        assert done.returncode == 0, done.stderr
        results.append([row["name"] for row in json.loads(done.stdout)["segments"]])
    assert results[0][1] == "model_segment_1_of_3_edgetpu.tflite"
    assert results[1][1] == "model_segment_1_of_3.tflite"
    assert np.array_equal(np.load(tmp_path / "tpu.npz")["total"], np.load(tmp_path / "cpu.npz")["total"])


def test_ctrl_c_ends_the_command(folder: Path) -> None:
    """The signal comes after a hundred answers."""
    told = """
import sys
from deploy import __main__ as command
from deploy.runner.pipeline import SegmentPipeline
stream = SegmentPipeline.stream
def telling(pipeline, samples):
    for number, answer in enumerate(stream(pipeline, samples)):
        if number == 100:
            print("running", flush=True)
        yield answer
SegmentPipeline.stream = telling
sys.exit(command.main(sys.argv[1:]))
"""
    arguments = [sys.executable, "-c", told, "pipeline", str(folder), "--runs", "1000000"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(arguments, env=devices.environment(), stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "Traceback" not in stderr
    assert process.returncode == 130, stderr


def test_damaged_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["pipeline", str(tmp_path)]) == 2
    (tmp_path / "x_segment_0_of_1.tflite").write_bytes(network())
    (tmp_path / "split.json").write_text('{"outputs": [{}]}')
    assert command.main(["pipeline", str(tmp_path)]) == 2
    assert "damaged" in capsys.readouterr().err
