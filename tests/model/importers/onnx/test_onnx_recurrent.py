"""LSTM, GRU and RNN of ONNX graphs as Keras layers, compared with onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_node import Model, constant, floats, imported, node, whole

from compress.model.importers.onnx import onnx_file
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.usefixtures("onnx_at_once"),
]
STEPS, FEATURES, UNITS = 5, 3, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
OUTPUTS = {"LSTM": ["y", "h", "c"], "GRU": ["y", "h"], "RNN": ["y", "h"]}


def recurrent(kind: str, directions: int = 1, states: Sequence[Any] = (), **settings: Any) -> list[Any]:
    """Return an LSTM, GRU or RNN operator with weights and a bias."""
    rows = GATES[kind] * UNITS
    weights = [floats(directions, rows, FEATURES), floats(directions, rows, UNITS), floats(directions, 2 * rows)]
    outputs = settings.pop("outputs", OUTPUTS[kind])
    return [node(kind, ["x", *weights, "", *states], outputs, hidden_size=UNITS, **settings)]


def saved(path: Path, nodes: list[Any], outputs: list[str], **inputs: Sequence[int]) -> Path:
    model = Model(nodes, {"x": (STEPS, 1, FEATURES), **inputs}, outputs, 17)
    (path / "model.onnx").write_bytes(model.proto().SerializeToString())
    return path / "model.onnx"


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_a_recurrent_operator_becomes_a_layer_in_each_direction(tmp_path: Path, kind: str, direction: str) -> None:
    nodes = recurrent(kind, 1 + (direction == "bidirectional"), direction=direction)
    _, model, _ = imported(saved(tmp_path, nodes, OUTPUTS[kind]))
    network = canonical(keras_graph.read(model))  # exact after unrolling, too
    assert not {"LSTM", "GRU", "SimpleRNN", "Bidirectional", "Flip"} & {layer.kind for layer in network.layers.values()}
    inputs = np.random.default_rng(0).standard_normal((2, STEPS, FEATURES)).astype(np.float32)
    for expected, actual in zip(model(inputs), keras_graph.build(network)(inputs), strict=True):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize("output", ["y", "h", "c"])
def test_one_output_of_an_lstm_needs_no_others(tmp_path: Path, output: str) -> None:
    unused = [name if name == output else "" for name in OUTPUTS["LSTM"]]
    for outputs in (OUTPUTS["LSTM"], unused):
        file = saved(tmp_path, recurrent("LSTM", direction="reverse", outputs=outputs), [output])
        _, model, _ = imported(file)
        (lstm,) = [layer for layer in model.layers if type(layer).__name__ == "LSTM"]
        assert (lstm.return_sequences, lstm.return_state) == (output == "y", output != "y")


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
def test_states_may_be_inputs_and_outputs_of_the_model(tmp_path: Path, kind: str, directions: int) -> None:
    names = ["h0", "c0"][: len(OUTPUTS[kind]) - 1]
    direction = "bidirectional" if directions == 2 else "forward"
    nodes = recurrent(kind, directions, names, direction=direction)
    _, model, _ = imported(saved(tmp_path, nodes, OUTPUTS[kind], **dict.fromkeys(names, (directions, 1, UNITS))))
    assert [tensor.name for tensor in model.inputs] == ["x", *names]
    assert len(model.outputs) == len(OUTPUTS[kind])


@pytest.mark.parametrize("directions", [1, 2])
def test_states_may_be_constants(tmp_path: Path, directions: int) -> None:
    zeros = constant(np.zeros((directions, 1, UNITS), np.float32))
    direction = "bidirectional" if directions == 2 else "forward"
    nodes = recurrent("LSTM", directions, [floats(directions, 1, UNITS), zeros], direction=direction)
    imported(saved(tmp_path, nodes, ["y", "c"]))
    _, _, kinds = imported(saved(tmp_path, recurrent("LSTM", directions, [zeros, zeros], direction=direction), ["y"]))
    assert "Dense" not in kinds


@pytest.mark.parametrize(
    "settings",
    [
        {"linear_before_reset": 0},
        {"linear_before_reset": 1},
        {"activations": ["Sigmoid", "Relu"]},
        {"activations": ["HardSigmoid", "Tanh"]},
        {"activations": ["Sigmoid", "Softsign"]},
    ],
)
def test_settings_of_a_gru(tmp_path: Path, settings: dict[str, Any]) -> None:
    imported(saved(tmp_path, recurrent("GRU", **settings), ["y", "h"]))


def test_a_model_of_one_time_step_with_its_states_in_one_tensor(tmp_path: Path) -> None:
    """As in noise suppression that runs frame by frame: one input has the states of two layers."""
    nodes = []
    source, states = "x", []
    nodes.append(node("Unsqueeze", ["x", whole(0)], ["x3"]))
    source = "x3"
    for number in range(2):
        parts = []
        for place, name in enumerate(("h", "c")):
            nodes.append(node("Gather", ["state", constant(np.int64(place))], [f"{name}{number}all"], axis=3))
            nodes.append(
                node("Gather", [f"{name}{number}all", constant(np.array([number]))], [f"{name}{number}b"], axis=1)
            )
            parts.append(f"{name}{number}b")
        features = FEATURES if number == 0 else UNITS
        weights = [floats(1, 16, features), floats(1, 16, UNITS), floats(1, 32)]
        outputs = [f"{name}{number}out" for name in ("y", "h", "c")]
        nodes.append(node("LSTM", [source, *weights, "", *parts], outputs, hidden_size=UNITS))
        nodes.append(node("Squeeze", [outputs[0], whole(1)], [f"next{number}"]))
        source = f"next{number}"
        states += outputs[1:]
    nodes.append(node("Concat", states[0::2], ["hs"], axis=0))
    nodes.append(node("Concat", states[1::2], ["cs"], axis=0))
    nodes += [node("Unsqueeze", [name, whole(3)], [f"{name}4"]) for name in ("hs", "cs")]
    nodes.append(node("Concat", ["hs4", "cs4"], ["stacked"], axis=3))
    nodes.append(node("Transpose", ["stacked"], ["state_out"], perm=[1, 0, 2, 3]))
    path = saved(tmp_path, nodes, [source, "state_out"], x=(1, FEATURES), state=(1, 2, UNITS, 2))
    _, model, _ = imported(path)
    assert len(model.inputs) == len(model.outputs) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"clip": 1.0}, "clip"),
        ({"input_forget": 1}, "input_forget"),
        ({"layout": 1}, "layout 1"),
        ({"activations": ["Sigmoid", "Tanh", "Relu"]}, "activation functions tanh and relu"),
        ({"activations": ["Affine", "Tanh", "Tanh"]}, "activation functions are Affine"),
    ],
)
def test_what_keras_lacks_is_refused_with_the_reason(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    file = onnx_file.read(saved(tmp_path, recurrent("LSTM", **settings), ["y"]))
    assert re.search(reason, str(file.problems[0]), re.IGNORECASE)


def test_several_sequences_in_a_batch_are_refused(tmp_path: Path) -> None:
    file = onnx_file.read(saved(tmp_path, recurrent("GRU"), ["y"], x=(STEPS, 2, FEATURES)))
    assert "its batch (the second dimension) must be 1" in str(file.problems[0])
