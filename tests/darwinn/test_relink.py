"""`relink` on real compiled models, and its errors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from packages import compiled
from paths import EDGETPU
from retrained import changed, differing_parts, other_scales, other_weights, without_tokens

from compress.core.errors import ModelError
from compress.model.tflite.graph import Graph
from compress.surface.cli.main import main
from darwinn import compiled_file
from darwinn.compiled_file import CompiledFile
from darwinn.relink import Relinked, relink, relink_files

PAIRS = EDGETPU / "pairs"
needs_pairs = pytest.mark.skipif(not PAIRS.is_dir(), reason="the shared compiled models are not here")
SMALL = ("dense_256", "gabor_64x64_7k_4o_2s", "bright_16x16", "color_red_64x64", "checkpoint-90_quant8_noinput")
SEGMENT = "mobilenet_v2_1.0_224_inat_bird_quant_segment_1_of_3"
ARCHITECTURES = (("color_red_64x64", "color_blue_64x64"), ("color_green_128x128", "color_blue_128x128"))


def model(name: str) -> bytes:
    return (PAIRS / name / "model.tflite").read_bytes()


def template(name: str) -> CompiledFile:
    return compiled_file.read(PAIRS / name / "compiled.tflite")


def written(result: Relinked) -> CompiledFile:
    assert result.content is not None, result.problems
    return compiled_file.parse(result.content)


@needs_pairs
@pytest.mark.parametrize("name", SMALL)
def test_a_model_in_its_own_program_changes_the_token_alone(name: str) -> None:
    file = template(name)
    result = written(relink(model(name), model(name), file))
    assert without_tokens(result) == without_tokens(file)
    tokens = {executable.token for executable in result.executables}
    assert len(tokens) == 1
    assert tokens.isdisjoint({0, *(executable.token for executable in file.executables)})


@needs_pairs
@pytest.mark.parametrize(("first", "second"), [pair for names in ARCHITECTURES for pair in (names, names[::-1])])
def test_another_training_has_the_bytes_of_the_real_compiler(first: str, second: str) -> None:
    result = written(relink(model(second), model(first), template(first)))
    assert without_tokens(result) == without_tokens(template(second))


@needs_pairs
@pytest.mark.parametrize("name", [*SMALL, SEGMENT])
def test_other_weights_change_the_parameters_alone(name: str) -> None:
    other = other_weights(model(name), range(7 if name == SEGMENT else 3), 1)
    result = written(relink(other, model(name), template(name)))
    assert differing_parts(result, template(name)) <= {"parameters"}
    back = written(relink(model(name), other, result))
    assert without_tokens(back) == without_tokens(template(name))


@needs_pairs
def test_other_scales_change_the_instructions_and_can_be_undone() -> None:
    other = other_scales(model(SEGMENT), 0)
    result = written(relink(other, model(SEGMENT), template(SEGMENT)))
    assert "instructions" in differing_parts(result, template(SEGMENT))
    back = written(relink(model(SEGMENT), other, result))
    assert without_tokens(back) == without_tokens(template(SEGMENT))


def _tensor(parsed: Graph, operator: int, position: int) -> Any:
    return parsed.source.subgraphs[0].tensors[parsed.operators[operator].inputs[position]]


def _zero_biases(parsed: Graph) -> None:
    buffer = parsed.source.buffers[_tensor(parsed, 1, 2).buffer]
    buffer.data = np.zeros(len(buffer.data), np.uint8)


def _equal_channels(parsed: Graph) -> None:
    quantization = _tensor(parsed, 2, 1).quantization
    quantization.scale = np.full(len(quantization.scale), 0.01, np.float32)


def _other_stride(parsed: Graph) -> None:
    parsed.source.subgraphs[0].operators[1].builtinOptions.strideH = 2


def _one_operator_less(parsed: Graph) -> None:
    parsed.source.subgraphs[0].operators.pop()
    parsed.source.subgraphs[0].outputs = list(parsed.operators[-2].outputs)


def _other_detections(parsed: Graph) -> None:
    operators = parsed.source.subgraphs[0].operators
    operators[-1].customOptions = operators[-1].customOptions.copy()
    operators[-1].customOptions[-2] ^= 1


def _long_name(parsed: Graph) -> None:
    parsed.source.subgraphs[0].tensors[parsed.inputs[0]].name = b"a name that has no room in the place of the old one"


@needs_pairs
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("checkpoint-90_quant8_noinput", _zero_biases, "biases are all zero in one model only"),
        ("pong_10_quant8", _equal_channels, "all equal in one model only"),
        ("color_red_64x64", _other_stride, "its option strideH"),
        ("color_red_64x64", _one_operator_less, "has 7 operators, the new one 6"),
        ("color_red_64x64", _long_name, "has no room for"),
        ("posenet_mobilenet_v1_075_353_481_16_quant_decoder", _other_detections, "its custom options differ"),
    ],
)
def test_what_the_compiler_could_compile_differently_is_refused(
    name: str, change: Callable[[Graph], None], reason: str
) -> None:
    result = relink(changed(model(name), change), model(name), template(name))
    assert result.content is None
    assert any(reason in problem for problem in result.problems), result.problems


@needs_pairs
def test_names_can_stay_and_a_template_of_another_model_is_refused_with_every_reason() -> None:
    name, other = ARCHITECTURES[0]
    result = written(relink(changed(model(name), _long_name), model(name), template(name), keep_names=True))
    assert without_tokens(result) == without_tokens(template(name))
    refused = relink(model(name), model(name), template(other))
    assert refused.content is None
    assert len(refused.problems) > 1
    assert all(problem.startswith("the template: ") for problem in refused.problems)


@needs_pairs
def test_one_wrong_byte_in_the_template_is_refused() -> None:
    name = "checkpoint-90_quant8_noinput"
    file = template(name)
    (parameters,) = (executable.parameters for executable in file.executables if len(executable.parameters))
    for position in range(parameters.start, parameters.stop, 9973):
        content = bytearray(file.content)
        content[position] ^= 1
        assert relink(model(name), model(name), compiled_file.parse(bytes(content))).content is None


@needs_pairs
def test_a_token_at_another_place_is_refused() -> None:
    name = "color_green_128x128"
    file = template(name)
    content = bytearray(file.content)
    stream = file.executables[0].instructions[0]
    content[stream.start : stream.start + 8] = struct.pack("<Q", file.executables[0].token)
    result = relink(model(name), model(name), compiled_file.parse(bytes(content)))
    assert result.content is None
    assert "caching token" in "".join(result.problems)


@needs_pairs
@pytest.mark.essential
def test_the_command_writes_the_file_or_reports_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ARCHITECTURES[0]
    out = tmp_path / "new_edgetpu.tflite"
    files = [str(PAIRS / second / "model.tflite"), "--template"]
    files += [str(PAIRS / first / part) for part in ("model.tflite", "compiled.tflite")]
    assert main(["relink", *files, "--check", "--json"]) == 0
    assert not out.exists()
    assert json.loads(capsys.readouterr().out)["refused"] is False
    assert main(["relink", *files, "-o", str(out)]) == 0
    assert without_tokens(compiled_file.read(out)) == without_tokens(template(second))
    assert "no device has run this file" in capsys.readouterr().out
    other = [str(PAIRS / SEGMENT / "model.tflite"), *files[1:]]
    before = out.read_bytes()
    assert main(["relink", *other, "-o", str(out)]) == 10
    assert out.read_bytes() == before
    assert "refused, for" in capsys.readouterr().out


def test_a_template_whose_parameters_are_not_the_models_is_refused() -> None:
    content = tiny.classifier()
    result = relink(content, content, compiled_file.parse(compiled(content)))
    assert result.content is None
    assert any("the template: " in problem for problem in result.problems)


def test_a_compiled_model_in_the_place_of_a_model_is_an_error(tmp_path: Path) -> None:
    plain, package = tmp_path / "plain.tflite", tmp_path / "compiled.tflite"
    plain.write_bytes(tiny.classifier())
    package.write_bytes(compiled(tiny.classifier()))
    with pytest.raises(ModelError, match=r"compiled\.tflite: is compiled already"):
        relink_files(package, plain, package)
    with pytest.raises(ModelError, match=r"plain\.tflite: has no edgetpu-custom-op"):
        relink_files(plain, plain, plain)
