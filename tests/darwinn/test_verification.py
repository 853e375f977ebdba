"""`verify-compiled`: whether a compiled file contains a model; real compiled models, some with one changed number."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import one_op
import packages
import pytest
import tiny
from flatbuffers import flexbuffers
from one_op import Op, Tensor
from paths import EDGETPU
from retrained import changed, other_weights

from compress.core.errors import EXIT_PARTLY, EXIT_REFUSED, ModelError
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from compress.surface.cli.main import main
from darwinn import compiled_file
from darwinn.compiled_file import CompiledFile
from darwinn.cpu_part import compare_cpu_part
from darwinn.parameter_layout import ALIGNMENT, ParameterLayout
from darwinn.stored_parameters import stored_parameters
from darwinn.verification import Verification, verify

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


def with_output(content: bytes, operator: int, field: str) -> bytes:
    """Return a model in which the output of an operator has another scale or zero point."""
    output = graph.parse(content).operators[operator].outputs[0]

    def change(source: Graph) -> None:
        stored = source.source.subgraphs[0].tensors[output].quantization
        values = np.asarray(getattr(stored, field)).copy()
        values[0] = values[0] * 1.01 if field == "scale" else values[0] + 1
        setattr(stored, field, values)

    return changed(content, change)


@needs_pairs
@pytest.mark.parametrize(
    ("name", "field", "holds"),
    [
        # One scale for all weights: its effect is in instructions only. A zero point can be the compiler's choice.
        ("mobilenet_v1_0.25_128_quant", "scale", False),
        ("mobilenet_v1_0.25_128_quant", "zeroPoint", None),
        # A scale for each output channel: multipliers are next to the weights that they belong to.
        ("yamnet_spectra_in", "scale", False),
        ("yamnet_spectra_in", "zeroPoint", None),
    ],
)
def test_another_scale_or_zero_point_of_an_activation(name: str, field: str, holds: bool | None) -> None:
    result = verified(name, with_output(model(name), _weighted(graph.parse(model(name))).index, field))
    assert result.holds is holds
    assert {difference.kind for difference in result.differences} <= {"scale"}


@needs_pairs
def test_a_file_of_the_same_weights_that_answers_on_another_scale_is_undecided() -> None:
    """As the vendor's bodypix_mobilenet_v1_075_512_512_16_quant_decoder: the ranges of two outputs were moved."""
    content = model("color_red_64x64")
    moved = with_output(content, len(graph.parse(content).operators) - 1, "scale")
    result = verified("color_red_64x64", moved)
    assert result.holds is None
    assert "all weights and biases that were compared are those of the model" in result.describe()
    assert verified("color_red_64x64", other_weights(moved, [1, 5], 0)).holds is False


@needs_pairs
def test_an_operator_without_an_instruction_leaves_it_undecided() -> None:
    content = model("pong_10_quant8")
    result = verified("pong_10_quant8", with_output(content, _weighted(graph.parse(content), -1).index, "zeroPoint"))
    assert result.holds is None
    assert any("no instruction with its scales and zero points" in undecided.reason for undecided in result.undecided)


@needs_pairs
@pytest.mark.essential
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    folder = PAIRS / "color_red_64x64"
    assert main(["verify-compiled", str(folder / "model.tflite"), str(folder / "compiled.tflite"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["answer"], document["differences"]) == (1, "yes", [])
    other = PAIRS / "color_blue_64x64" / "compiled.tflite"
    assert main(["verify-compiled", str(folder / "model.tflite"), str(other)]) == EXIT_REFUSED
    assert "no: the compiled file does not hold this model" in capsys.readouterr().out


def compiled_by_another(content: bytes, arrange: Callable[[list[ParameterLayout]], Any]) -> CompiledFile:
    """Return a compiled file with the parameters of a model, in an order that the rules do not know.

    Args:
        content: the model.
        arrange: returns the positions of bytes in the expected parameters, given the layout of each operator; -1: zero.
    """
    parsed = graph.parse(content)
    choices = [part.choices[0] for operator in parsed.operators for part in stored_parameters(operator, parsed)]
    layouts = [choice.usual_layout for choice in choices]
    regions = [
        np.pad(layout.encode(choice.values), (0, -layout.size_bytes % ALIGNMENT))
        for layout, choice in zip(layouts, choices, strict=True)
    ]
    parameters = np.concatenate([*regions, np.zeros(ALIGNMENT, np.uint8)])[arrange(layouts)].tobytes()
    executables = (packages.executable(1, parameters), packages.EXECUTION)
    return compiled_file.parse(packages.compiled(content, executables=executables))


def expected(layouts: list[ParameterLayout]) -> Any:
    return np.arange(sum(-(-layout.size_bytes // ALIGNMENT) * ALIGNMENT for layout in layouts))


def reversed_outputs(layouts: list[ParameterLayout]) -> Any:
    """Reverse the outputs of the first operator: its 16 rows, in the header and in each block of 4 input channels."""
    order = expected(layouts)
    words = order[: layouts[0].size_bytes].reshape(-1, 16, 4)
    order[: layouts[0].size_bytes] = words[:, ::-1].ravel()
    return order


def split_outputs(layouts: list[ParameterLayout]) -> Any:
    """Store the second half of the outputs of the first operator at the end, with zeros in their place."""
    order = expected(layouts)
    first = order[: layouts[0].size_bytes].reshape(-1, 16, 4).copy()
    other = np.full_like(first, -1)
    other[:, :8] = first[:, 8:]
    first[:, 8:] = -1
    order[: layouts[0].size_bytes] = first.ravel()
    return np.concatenate([order, other.ravel()])


SMALL = {"inputs": (16, 16, 8), "filters": 16, "classes": 5}


@pytest.mark.parametrize("arrange", [expected, reversed_outputs, split_outputs])
def test_parameters_in_an_unknown_order_prove_nothing(arrange: Any) -> None:
    """A compiler that moves or splits an operator does not turn the right model into another one.

    Retrained weights are refused in any order.
    """
    content = tiny.classifier(**SMALL)
    file = compiled_by_another(content, arrange)
    result = verify(file, graph.parse(content))
    assert (result.holds, result.differences) == (None, ())
    for trained in ([0, 1], [1]):
        result = verify(file, graph.parse(other_weights(content, trained, 0)))
        assert result.holds is False
        assert any("weights were not located" in difference.message for difference in result.differences)


def test_a_changed_output_of_a_model_is_named_in_any_order_of_the_others() -> None:
    content = tiny.classifier(**SMALL)
    bias = graph.parse(content).operators[1].inputs[2]

    def change(parsed: Graph) -> None:
        values = parsed.tensors[bias].array().copy()
        values[3] += 1
        parsed.source.buffers[parsed.source.subgraphs[0].tensors[bias].buffer].data = values.view(np.uint8)

    result = verify(compiled_by_another(content, reversed_outputs), graph.parse(changed(content, change)))
    (difference,) = result.differences
    assert (difference.operator, difference.kind, difference.numbers[0][0]) == (1, "bias", (3,))


def decoder_options(names: Sequence[str]) -> list[int]:
    builder = flexbuffers.Builder()
    with builder.Map():
        for name in names:
            builder.Float(name, float(len(name)))
    return list(builder.Finish())


def with_decoder(names: Sequence[str]) -> bytes:
    """Return a model that ends with a custom operator on the CPU, whose output has no stated shape."""
    tensors = {"in": Tensor((1, 4)), "boxes": Tensor((1, 4)), "out": Tensor((), "FLOAT32", scales=())}
    operators = [Op("LOGISTIC", ["in"], ["boxes"]), Op("PosenetDecoderOp", ["boxes"], ["out"], custom=True)]
    source = one_op.model(tensors, operators, ["in"], ["out"])
    source.subgraphs[0].operators[1].customOptions = decoder_options(names)
    return graph.serialize(SimpleNamespace(source=source))


@pytest.mark.parametrize(
    ("names", "shape", "difference"),
    [
        (["stride", "radius"], (), ""),
        (["radius", "stride"], (), ""),
        (["stride", "radius"], (1, 20, 4), ""),
        (["stride", "radius2"], (), "its options are different"),
    ],
)
def test_an_operator_on_the_cpu_may_be_written_in_another_way(
    names: list[str], shape: tuple[int, ...], difference: str
) -> None:
    """Compilers write options in another order, and shapes that the model does not state."""
    source = graph.parse(packages.compiled(with_decoder(names), on_cpu=1))
    source.source.subgraphs[0].tensors[2].shape = list(shape)
    stored = graph.parse(graph.serialize(source))
    part = compare_cpu_part(stored, graph.parse(with_decoder(["stride", "radius"])), {0})
    assert part.operators == {1}
    assert "".join(part.differences).endswith(difference)
    assert bool(part.differences) is bool(difference)


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
