"""Real ONNX models: imported, or refused for the right reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compress.learning.quantization import export
from compress.model.importers.onnx import onnx_file
from compress.model.tflite import comparison, graph

pytestmark = pytest.mark.tensorflow
EXACT = 1e-5
MOBILENET = "onnx/stm_mobilenet_v2_0.35_128_tfs_channel_first.onnx"
MODELS: dict[str, tuple[tuple[int, ...], int, set[str]]] = {
    "onnx/ort_mnist.onnx": ((28, 28, 1), 5_994, set()),
    MOBILENET: ((128, 128, 3), 401_925, set()),
    "onnx/stm_yamnet_256_64x96_tl.onnx": ((64, 96, 1), 134_730, {"Permute"}),  # it transposes the spectrogram itself
    "onnx/ultraface_version-RFB-320_simplified.onnx": ((240, 320, 3), 273_888, {"Reshape"}),
    "onnx/yunet_s_320_320.onnx": ((320, 320, 3), 53_104, {"Reshape"}),
}
"""Input shape, number of parameters, and the allowed layers that only move values, by file."""


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_is_imported(name: str, real_model: Callable[[str], Path]) -> None:
    sides, parameters, moving = MODELS[name]
    file = onnx_file.read(real_model(name))
    assert file.problems == ()
    model, parity = onnx_file.load(file)
    assert parity.max_rel < EXACT
    assert (model.inputs[0].shape[1:], model.count_params()) == (sides, parameters)
    kinds = Counter(type(operation).__name__ for operation in model.operations)
    assert {"Permute", "Reshape"} & set(kinds) <= moving


def test_control_flow_is_refused(real_model: Callable[[str], Path]) -> None:
    file = onnx_file.read(real_model("onnx/silero_vad_16k_op15.onnx"))
    assert {problem.operator for problem in file.problems} == {"If"}
    assert len(file.problems) == 3
    assert all("control flow" in problem.reason for problem in file.problems)


def test_a_pitch_model_answers_as_its_twin(real_model: Callable[[str], Path]) -> None:
    """For synthetic tones, the outputs agree with those of onnxruntime and of the .tflite file of the same model."""
    time = np.arange(43_844) / 22_050
    tones = [np.sin(2 * np.pi * pitch * time) * np.exp(-3 * (time % 0.5)) for pitch in (220.0, 277.2, 329.6)]
    noise = np.random.default_rng(0).normal(0, 0.01, time.size)
    sound = np.asarray(0.2 * sum(tones) + noise, np.float32)[None, :, None]
    file = onnx_file.read(real_model("onnx/basic_pitch_nmp.onnx"))
    model, _ = onnx_file.load(file, sound)
    outputs = [np.asarray(tensor) for tensor in model(sound)]
    twin = comparison.Runner(graph.read(real_model("onnx/basic_pitch_nmp.tflite"))).run([sound])
    for output in outputs:
        assert min(np.abs(output - other).max() if output.shape == other.shape else 1 for other in twin) < 1e-4


def test_a_mobilenet_is_converted_without_moving_numbers(real_model: Callable[[str], Path]) -> None:
    model, _ = onnx_file.load(onnx_file.read(real_model(MOBILENET)))
    counts = Counter(operator.name for operator in graph.parse(export.convert_float(model)).operators)
    assert counts == {"CONV_2D": 35, "DEPTHWISE_CONV_2D": 17, "ADD": 10, "MEAN": 1, "FULLY_CONNECTED": 1, "SOFTMAX": 1}
