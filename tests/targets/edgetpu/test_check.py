"""The prediction as a whole: memory on the compiler's own reports, real models, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import compiler_evidence
import one_op
import operator_tables
import pytest
import tiny
from compiler_evidence import CompiledModel
from one_op import Op, Tensor
from paths import EDGETPU

from compress.core.errors import PipelineError
from compress.surface.cli.main import main
from compress.targets import load
from compress.targets.edgetpu import parameter_memory
from compress.targets.edgetpu.check import Check, check
from compress.targets.edgetpu.parameter_memory import Parameters

TARGET = load("edgetpu")
MIB = 1 << 20
shared = pytest.mark.skipif(not EDGETPU.exists(), reason=f"{EDGETPU} is not there; see CORALLINE_SHARED")


@pytest.fixture(scope="module")
def models() -> list[CompiledModel]:
    """29 real models, rebuilt from their operator tables, with what the real compiler did with them."""
    return compiler_evidence.recorded_models()


def test_placement_of_real_models(models: list[CompiledModel]) -> None:
    assert len(models) == 29
    assert {model.name: model.misplaced() for model in models if model.misplaced()} == {}
    assert {side for model in models for side in model.placement} == {"tpu", "cpu"}


def test_the_reports_two_numbers_on_the_sweep() -> None:
    sweep = operator_tables.load()["memory_reports"]
    assert len(sweep) == 177
    assert sum(compiler_evidence.reported(row) for row in sweep) >= 176


def test_parameter_bytes_of_real_models(models: list[CompiledModel]) -> None:
    errors = [abs(model.predicted_parameter_bytes() / model.parameter_bytes - 1) for model in models]
    assert sum(error == 0 for error in errors) >= 26
    assert sum(error <= 0.02 for error in errors) >= 27


def test_activations_of_real_models(models: list[CompiledModel]) -> None:
    assert sum(model.predicted_narrow_bytes() == model.narrow_bytes_per_tile for model in models) >= 5


@shared
def test_the_recorded_tables_are_those_of_the_real_models(models: list[CompiledModel]) -> None:
    """After a change of the tables, run `python benchmarks/edgetpu.py --write-fixture`."""
    rows = operator_tables.load()["models"]
    for row, recorded, real in zip(rows, models, compiler_evidence.real_models(), strict=True):
        assert row["table"] == json.loads(json.dumps(operator_tables.table_of(real.parsed))), real.name
        assert recorded.misplaced() == real.misplaced(), real.name
        assert recorded.predicted_parameter_bytes() == real.predicted_parameter_bytes(), real.name
        assert recorded.predicted_narrow_bytes() == real.predicted_narrow_bytes(), real.name
        assert recorded.parameter_bytes == real.parameter_bytes, real.name


def test_everything_is_cached_where_it_fits_and_the_largest_given_up_where_it_nearly_does() -> None:
    def kept(*sizes: float, streamed: float = 0.0) -> str:
        layers = [Parameters(int(size * MIB), int(size * MIB), (1, 1)) for size in sizes]
        layers += [Parameters(int(streamed * MIB), int(streamed * MIB), (1, 1), always_streamed=True)] * bool(streamed)
        allocation = parameter_memory.allocate_cache(layers)
        assert allocation.cached_bytes + allocation.streamed_bytes == sum(layer.size_bytes for layer in layers)
        return "".join("-+"[not streamed] for streamed in allocation.streamed)

    assert kept(3, 3, 1.75) == "+++"
    assert kept(3, 2.5, 2.4) == "-++"
    assert kept(6, 1, 4, 0.5) == "++-+"
    assert kept(3, 3, 0.9, streamed=9) == "+++-"
    assert kept(3, 3.1, 0.9, streamed=9) == "+-+-"


def test_a_chain_of_partitions_and_what_blocks() -> None:
    def dense(input_name: str, output_name: str) -> Op:
        return Op("FULLY_CONNECTED", [input_name, "w", ""], [output_name], 4)

    tensors = {letter: Tensor((1, 4)) for letter in "abcdef"} | {"w": Tensor((4, 4), data=1)}
    operators = [dense("a", "b"), Op("ABS", "b", "c"), dense("c", "d"), dense("d", "e")]
    operators.append(Op("ABS", "e", "f"))
    parsed = one_op.read(tensors, operators, "a", "f")
    one: Check = check(parsed, TARGET)
    assert (one.subgraphs, [blocker.index for blocker in one.blockers]) == (1, [1])
    assert one.blockers[0].macs == 32
    assert check(parsed, TARGET, all_subgraphs=True).subgraphs == 2


def test_a_refused_model_has_no_sizes_and_an_unknown_compiler_is_refused() -> None:
    parsed = one_op.one("QUANTIZE", [Tensor((1, 4))], Tensor((1, 4)), 3)
    report = check(parsed, TARGET).to_json()
    assert report["compiles"] is False
    assert "QUANTIZE version 3" in report["failure"]
    sizes = ("cached_bytes", "streamed_bytes", "report_on_chip_bytes", "report_off_chip_bytes", "activation_bytes")
    assert {report[name] for name in sizes} == {None}
    assert report["subgraphs"] == 0
    with pytest.raises(PipelineError, match=r"unknown compiler '17'.*16\.0, 15\.0, 2\.1, 1\.0"):
        TARGET.compiled_by("17")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, *more: str) -> int:
        return main(["check", str(tmp_path / name), *more])

    (tmp_path / "whole.tflite").write_bytes(tiny.classifier())
    (tmp_path / "float.tflite").write_bytes(tiny.classifier(int8=False))
    tensors = {letter: Tensor((1, 4)) for letter in "abc"}
    chain = [Op("RELU", "a", "b"), Op("ABS", "b", "c")]
    (tmp_path / "part.tflite").write_bytes(one_op.content(tensors, chain, "a", "c"))
    assert [run(name) for name in ("whole.tflite", "part.tflite", "float.tflite")] == [0, 9, 10]
    capsys.readouterr()
    assert run("part.tflite", "--json") == 9
    report = json.loads(capsys.readouterr().out)
    names = "schema_version compiles failure subgraphs cached_bytes streamed_bytes report_on_chip_bytes"
    names += " report_off_chip_bytes macs blockers activation_bytes risk ops"
    assert set(names.split()) <= set(report)
    assert {"index", "op", "version", "output", "placement", "status", "reason", "advice"} <= set(report["ops"][0])
    assert run("part.tflite", "--compiler", "9") == 2
    assert run("none.tflite") == 4


def test_what_is_not_predicted_is_said() -> None:
    """A slope for each channel is stored once in each pass. Maps larger than a tile's memory need several passes."""
    warnings = []
    for size in (8, 512):
        image = Tensor((1, size, size, 64))
        graph_of_one = one_op.one("PRELU", [image, Tensor((1, 1, 64), data=1)], image)
        warnings.append(check(graph_of_one, load("edgetpu")).parameter_warning)
    assert warnings[0] == ""
    assert "each pass" in warnings[1]
