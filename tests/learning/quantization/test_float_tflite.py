"""Float .tflite files quantized as they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny

from compress.core.errors import StageError
from compress.learning.quantization import export, float_tflite
from compress.learning.quantization.search import file_outputs
from compress.model.tflite import graph
from compress.tasks.base import snr_db

pytestmark = pytest.mark.tensorflow
SAMPLES = np.random.default_rng(0).random((40, 4, 4, 1), np.float32)


def test_a_file_is_quantized_as_it_is() -> None:
    original = tiny.classifier(int8=False)
    content = float_tflite.convert(original, SAMPLES, "uint8")
    assert not export.float_operators(content)
    parsed = graph.parse(content)
    assert {parsed.tensors[index].dtype for index in (*parsed.inputs, *parsed.outputs)} == {"UINT8"}
    weights = [parsed.tensors[op.inputs[1]] for op in parsed.operators if op.name == "FULLY_CONNECTED"]
    assert [tensor.quantization.per_channel for tensor in weights if tensor.quantization] == [False]
    assert snr_db(*(file_outputs(file, SAMPLES) for file in (original, content))).mean() > 25


def test_what_the_quantizer_does_not_take_is_told() -> None:
    damaged = graph.parse(tiny.classifier(int8=False))
    damaged.source.operatorCodes[0].builtinCode = 32  # CUSTOM
    damaged.source.operatorCodes[0].deprecatedBuiltinCode, damaged.source.operatorCodes[0].customCode = 32, b"own"
    with pytest.raises(StageError, match=r"TensorFlow's quantizer refuses the file: .*own"):
        float_tflite.convert(graph.serialize(damaged), SAMPLES)


def _killed(folder: Path, io: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_quantizer_that_the_system_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(float_tflite.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(float_tflite, "_quantize", _killed)
    with pytest.raises(StageError, match="was killed: most likely memory was short") as caught:
        float_tflite.convert(tiny.classifier(), np.zeros((1, 4), np.float32))
    assert caught.value.exit_code == 5
    assert "lower calibration_samples" in str(caught.value)
