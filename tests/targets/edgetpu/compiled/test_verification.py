"""`verify-compiled`: whether a compiled file contains a model; real compiled models, some with one changed number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packages
import pytest
import tiny
from paths import EDGETPU
from retrained import changed

from compress.cli.main import main
from compress.errors import EXIT_PARTLY, EXIT_REFUSED, ModelError
from compress.targets.edgetpu.compiled import compiled_file
from compress.targets.edgetpu.compiled.verification import Verification, verify
from compress.tflite import graph
from compress.tflite.graph import Graph

PAIRS = EDGETPU / "pairs"
needs_pairs = pytest.mark.skipif(not PAIRS.is_dir(), reason="the shared compiled models are not here")
NAMES = [
    *("bright_16x16", "dense_256", "deeplabv3_mnv2_dm05_pascal_quant", "mobilenet_v1_0.25_128_quant", "split_concat"),
    *("gabor_64x64_7k_4o_2s", "posenet_mobilenet_v1_075_353_481_16_quant_decoder", "ASR_Model", "yamnet_spectra_in"),
]


def model(name: str) -> bytes:
    return (PAIRS / name / "model.tflite").read_bytes()


def verified(name: str, content: bytes) -> Verification:
    return verify(compiled_file.read(PAIRS / name / "compiled.tflite"), graph.parse(content))


@needs_pairs
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model_holds_its_model(name: str) -> None:
    result = verified(name, model(name))
    assert result.holds
    assert result.compared["weights"] > 0 or name == "split_concat"
    assert result.describe().startswith("yes: ")


@needs_pairs
@pytest.mark.parametrize("name", NAMES)
def test_it_holds_no_other_model(name: str) -> None:
    for other in NAMES:
        if other != name:
            assert verified(name, model(other)).holds is False


def _weighted(parsed: Graph, number: int = 0) -> Any:
    return [operator for operator in parsed.operators if operator.name in ("CONV_2D", "FULLY_CONNECTED")][number]


@needs_pairs
@pytest.mark.parametrize(
    ("name", "number", "position", "kind"),
    [
        ("mobilenet_v1_0.25_128_quant", 0, 1, "weight"),
        ("mobilenet_v1_0.25_128_quant", 0, 2, "bias"),
        ("color_red_64x64", 0, 1, "weight"),
        ("yamnet_spectra_in", 0, 1, "weight"),
        ("yamnet_spectra_in", 0, 2, "bias"),
        # Its region has lines of zeros, as a constant of another operator would have.
        ("movenet_single_pose_lightning_ptq", 2, 1, "weight"),
    ],
)
def test_one_number_that_differs_by_one_is_named(name: str, number: int, position: int, kind: str) -> None:
    parsed = graph.parse(model(name))
    operator = _weighted(parsed, number)
    tensor = parsed.tensors[operator.inputs[position]]
    values = tensor.array().copy()
    index = tuple(int(size) // 2 for size in values.shape)
    old = int(values[index])
    values[index] = old + (1 if old < 100 else -1)

    def change(source: Graph) -> None:
        number = source.source.subgraphs[0].tensors[tensor.index].buffer
        source.source.buffers[number].data = np.frombuffer(values.tobytes(), np.uint8)

    result = verified(name, changed(model(name), change))
    (difference,) = result.differences
    assert (difference.operator, difference.kind, difference.tensor, difference.count) == (
        operator.index,
        kind,
        tensor.name,
        1,
    )
    assert difference.numbers == ((index, int(values[index]), old),)
    assert f"{list(index)}: {values[index]} -> {old}" in result.describe()


@needs_pairs
@pytest.mark.parametrize("field", ["scale", "zeroPoint"])
def test_another_scale_or_zero_point_of_an_activation(field: str) -> None:
    name = "mobilenet_v1_0.25_128_quant"
    output = _weighted(graph.parse(model(name))).outputs[0]

    def change(source: Graph) -> None:
        stored = source.source.subgraphs[0].tensors[output].quantization
        values = np.asarray(getattr(stored, field)).copy()
        values[0] = values[0] * 1.01 if field == "scale" else values[0] + 1
        setattr(stored, field, values)

    result = verified(name, changed(model(name), change))
    assert result.holds is False
    assert any(difference.kind in ("scale", "bias", "multiplier") for difference in result.differences)


@needs_pairs
def test_an_operator_without_an_instruction_leaves_it_undecided() -> None:
    output = _weighted(graph.parse(model("pong_10_quant8")), -1).outputs[0]

    def change(source: Graph) -> None:
        stored = source.source.subgraphs[0].tensors[output].quantization
        stored.zeroPoint = np.asarray(stored.zeroPoint) + 1

    result = verified("pong_10_quant8", changed(model("pong_10_quant8"), change))
    assert result.holds is None
    assert any("no instruction with its scales and zero points" in undecided.reason for undecided in result.undecided)


@needs_pairs
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    folder = PAIRS / "color_red_64x64"
    assert main(["verify-compiled", str(folder / "model.tflite"), str(folder / "compiled.tflite"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["answer"], document["differences"]) == (1, "yes", [])
    other = PAIRS / "color_blue_64x64" / "compiled.tflite"
    assert main(["verify-compiled", str(folder / "model.tflite"), str(other)]) == EXIT_REFUSED
    assert "no: the compiled file does not hold this model" in capsys.readouterr().out


def test_parameters_that_are_not_found_leave_it_undecided_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = tiny.classifier((16, 16, 3))
    (tmp_path / "model.tflite").write_bytes(content)
    (tmp_path / "compiled.tflite").write_bytes(packages.compiled(content))
    arguments = [str(tmp_path / "model.tflite"), str(tmp_path / "compiled.tflite")]
    assert main(["verify-compiled", *arguments]) in (EXIT_PARTLY, EXIT_REFUSED)
    assert "were not found in the compiled file" in capsys.readouterr().out
    assert main(["verify-compiled", *reversed(arguments)]) == ModelError.exit_code
    assert "is not compiled for the Edge TPU" in capsys.readouterr().err


def test_too_many_instructions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = packages.compiled(tiny.classifier())
    monkeypatch.setattr(compiled_file, "MAX_INSTRUCTION_BYTES", 1)
    with pytest.raises(ModelError, match=r"bytes of instructions; allowed: 1 bytes|bytes of instructions"):
        compiled_file.parse(content)
