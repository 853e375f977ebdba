"""`inspect --explain` on real compiled models, on files made here, and on damaged ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import packages
import pytest
import tiny
from edgetpu_programs import ProgramMaker, traversal
from packages import compiled, finished, layer, many, raw, table
from paths import EDGETPU

from compress.core.errors import ModelError
from compress.surface import explanation_page
from compress.surface.cli.main import main
from darwinn import compiled_file, explainer
from darwinn.explanation import ExplainedProgram, Explanation, order_text

PAIRS = EDGETPU / "pairs"
needs_pairs = pytest.mark.skipif(not PAIRS.is_dir(), reason="the shared compiled models are not here")
NAMES = [path.parent.name for path in sorted(PAIRS.glob("*/compiled.tflite"))]
INCOMPLETE_HINTS = {"keras_lstm_mnist_ptq"}
"""The files whose DMA hints do not list all transfers."""


def explained(name: str) -> Explanation:
    return explainer.explain(compiled_file.read(PAIRS / name / "compiled.tflite"), name)


def inference(result: Explanation) -> ExplainedProgram:
    (program,) = (candidate for candidate in result.programs if candidate.type != "PARAMETER_CACHING")
    return program


@needs_pairs
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_is_understood_and_every_byte_is_transferred(name: str) -> None:
    for program in explained(name).programs:
        assert program.understood_bundles == program.bundles
        if name in INCOMPLETE_HINTS and program.operators:
            assert not program.hints_are_complete
            continue
        assert program.hints_are_complete
        assert all(size == covered for _, size, covered in program.coverage)
        assert all(transfer.is_announced for transfer in program.transfers)
        assert all(buffer.stop <= program.memory_bytes for buffer in program.buffers)


@needs_pairs
def test_a_whole_network_is_recovered_without_its_original() -> None:
    program = inference(explained("yamnet_spectra_in"))
    operators = [operator for operator in program.operators if operator.name != "move"]
    assert [operator.certainty for operator in operators[:27]] == ["confirmed"] * 27
    first, second, third, fourth = operators[:4]
    assert (first.window, first.shape) == ("3x3, stride 2", "48x32x32")
    assert (second.name, second.shape) == ("DEPTHWISE_CONV_2D", "48x32x32")
    assert (third.name, third.window, third.shape) == ("CONV_2D", "1x1", "48x32x64")
    assert (fourth.name, fourth.window, fourth.shape) == ("DEPTHWISE_CONV_2D", "3x3, stride 2", "24x16x64")
    assert [operator.name for operator in operators[27:]] == [
        "AVERAGE_POOL_2D or MEAN",
        "FULLY_CONNECTED or CONV_2D",
        "LOGISTIC",
    ]
    assert third.reads == (second.index,)
    assert all(operator.is_cached for operator in operators[:27])


@needs_pairs
def test_operators_that_run_in_passes_are_one() -> None:
    program = inference(explained("deeplabv3_mnv2_dm05_pascal_quant"))
    twice = [operator for operator in program.operators if operator.passes > 1]
    assert [operator.name for operator in twice] == ["CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D"]
    assert [operator.passes for operator in twice] == [2, 2, 2]


@needs_pairs
def test_streamed_parameters_belong_to_their_operators() -> None:
    program = inference(explained("ASR_Model7"))
    streamed = {
        operator.name: operator.parameter_bytes for operator in program.operators if operator.is_cached is False
    }
    assert streamed["FULLY_CONNECTED or CONV_2D"] == 6336
    sizes = [group.size_bytes for group in program.parameters if not group.is_cached]
    assert sizes == [512, 512, 1024, 1024, 82432, 6336]
    transfers = [transfer.offset for transfer in program.transfers if transfer.kind == "parameters"]
    assert transfers == [0, 512, 1024, 2048, 3072, 85504]


@needs_pairs
def test_a_softmax_on_the_scalar_core_is_recovered() -> None:
    result = explained("ASR_Model5")
    last = inference(result).operators[-1]
    assert (last.name, last.certainty) == ("SOFTMAX", "inferred")
    assert any("scalar core" in limit for limit in result.limits)
    assert explanation_page.page(result)


@needs_pairs
def test_damaged_files_are_explained_or_refused() -> None:
    rng = random.Random(7)
    content = (PAIRS / "looming_64x64_3x3" / "compiled.tflite").read_bytes()
    for number in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 5, 200])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            file = compiled_file.parse(bytes(damaged[: rng.randrange(len(damaged))] if number % 5 == 0 else damaged))
            result = explainer.explain(file, "damaged")
        except ModelError:
            continue
        assert explanation_page.page(result)
        assert json.dumps(result.to_json())


def hint(kind: int, content: packages.Write, *, to_host: bool = False) -> packages.Write:
    return table({0: ("Uint8", kind), 1: content, 2: ("Int16", int(to_host))})


def transfer_hint(described: int, name: str, offset: int, size: int, *, to_host: bool = False) -> packages.Write:
    meta = table({0: ("Int16", described), 2: raw(name.encode())})
    return hint(1, table({0: meta, 1: ("Int32", offset), 2: ("Int32", size)}), to_host=to_host)


def executable(kind: int, program: bytes, parameters: bytes, hints: list[packages.Write]) -> bytes:
    content = {
        5: many([table({0: raw(program)})]),
        6: raw(parameters),
        7: table({0: many(hints), 1: ("Uint8", 1)}),
        8: many([layer("in")]) if kind != 1 else many([]),
        9: many([layer("out")]) if kind != 1 else many([]),
        12: ("Int32", 8192),
        13: ("Int16", kind),
    }
    return finished(table(content))


def made_file() -> bytes:
    """A compiled file with one convolution of 1x1, whose parameters are cached."""
    caching, execution = ProgramMaker(), ProgramMaker()
    caching.transfer("parameters", 320)
    caching.parameters([(0, 1)])
    execution.transfer("input", 96)
    execution.tensor(traversal(0, [(1, 2), (2, 6)]), traversal(4096, [(1, 4), (4, 6)]), rows=16, tiles=1)
    execution.transfer("output", 96)
    parameters = bytes([7]) * (16 * (8 + 12))
    hints = [
        hint(2, table({0: ("Int32", 0)})),
        transfer_hint(1, "in", 0, 96),
        transfer_hint(0, "out", 0, 96, to_host=True),
        hint(3, table({0: ("Int16", 0)}), to_host=True),
    ]
    cache = executable(1, caching.finished(), parameters, [transfer_hint(2, "", 0, 320)])
    return compiled(tiny.classifier(), executables=(cache, executable(2, execution.finished(), b"", hints)))


def test_a_made_file_is_explained() -> None:
    result = explainer.explain(compiled_file.parse(made_file()), "made.tflite")
    caching, execution = result.programs
    assert [(group.offset, group.size_bytes, group.tiles) for group in caching.parameters] == [(0, 320, ((0,),))]
    (operator,) = execution.operators
    assert (operator.name, operator.window, operator.certainty) == ("CONV_2D", "1x1", "confirmed")
    assert (operator.input_channels, operator.output_channels, operator.positions) == (8, 16, 6)
    transfers = [(transfer.kind, transfer.name, transfer.size_bytes, transfer.step) for transfer in execution.transfers]
    assert transfers[1:] == [("input", "in", 96, 0), ("output", "out", 96, 1), ("interrupt", "", 0, None)]
    assert execution.coverage == (("input in", 96, 96), ("output out", 96, 96))


def test_a_file_without_known_instructions_says_so() -> None:
    result = explainer.explain(compiled_file.parse(compiled(tiny.classifier())), "unknown.tflite")
    assert all(program.operators == () for program in result.programs)
    assert any("could not be read to its end" in limit for limit in result.limits)
    page = explanation_page.page(result)
    assert "has no steps that are understood" in page


@pytest.mark.parametrize(
    ("hints", "match"),
    [
        ([transfer_hint(9, "in", 0, 96)], "a DMA hint for 9"),
        ([transfer_hint(1, "in", -4, 96)], "negative size"),
        ([hint(2, table({0: ("Int32", 3)}))], "instructions 3 of 1"),
        ([hint(7, table({0: ("Int16", 1)}))], "type 7"),
        ([transfer_hint(1, "in", 0, 96)] * 4, "more than 3 transfers"),
    ],
)
def test_damaged_or_too_many_hints_are_an_error(
    hints: list[packages.Write], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explainer, "MAX_TRANSFERS", 3)
    execution = executable(2, ProgramMaker().finished(), b"", hints)
    file = compiled_file.parse(compiled(tiny.classifier(), executables=(execution,)))
    with pytest.raises(ModelError, match=match):
        explainer.explain(file, "damaged.tflite")


def test_the_command_writes_a_page_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, page = tmp_path / "<b>&.tflite", tmp_path / "page.html"
    model.write_bytes(made_file())
    assert main(["inspect", str(model), "--explain", "-o", str(page)]) == 0
    assert "CONV_2D 1x1" in capsys.readouterr().out
    content = page.read_text()
    assert "<svg" in content
    assert "&lt;b&gt;" in content
    assert "<b>" not in content
    assert "<script" not in content
    assert "http://" not in content.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in content


def test_the_command_prints_json_and_refuses_a_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "made.tflite"
    model.write_bytes(made_file())
    assert main(["inspect", str(model), "--explain", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    assert result["programs"][1]["operators"][0]["kernel"] == [1, 1]
    assert main(["inspect", str(model), "-o", str(tmp_path / "page.html")]) != 0
    assert "--explain" in capsys.readouterr().err
    assert main(["inspect", str(model), "--explain", "--against", str(model)]) != 0
    assert "remove --against" in capsys.readouterr().err
    model.write_bytes(made_file()[:-900])
    assert main(["inspect", str(model), "--explain"]) == ModelError.exit_code


def test_long_orders_are_shortened() -> None:
    assert order_text(("CAST (CPU)", "Edge TPU part 1", *["ADD (CPU)"] * 8)) == (
        "on the CPU CAST; Edge TPU part 1; on the CPU ADD, ADD, ADD, ADD, ADD, ADD and 2 more"
    )
