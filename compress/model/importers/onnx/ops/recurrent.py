"""Import rules for the ONNX operators LSTM, GRU and RNN.

The states before the first time step may be zeros, constants or computed, and so may be inputs of the model. The states
after the last one may be outputs.

Source: ONNX' operator specification, opsets 7 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common import shape_rules
from compress.model.importers.common.graph_builder import LAYERS, NUMPY, UNKNOWN, NotImportedError, entry
from compress.model.importers.onnx.layout import OnnxValue, in_shape, laid
from compress.model.importers.onnx.network_builder import OnnxCall
from compress.model.ir.keras_graph import LayerOutput

Floats = NDArray[np.float32]
BIAS, LENGTHS, STATE, PEEPHOLES = 3, 4, 5, 7
"""Positions of inputs. The second state of an LSTM follows the first one."""
FUNCTIONS = {
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "relu": "relu",
    "hardsigmoid": "hard_sigmoid",
    "softsign": "softsign",
    "softplus": "softplus",
    "elu": "elu",
}
"""Names in Keras of the activation functions."""


@dataclass(frozen=True)
class RecurrentOperator:
    """A recurrent operator of ONNX, and its layer in Keras.

    Attributes:
        gates: the index in ONNX of each gate, in Keras' order.
        functions: for each gate the index of its activation function in ONNX.
    """

    layer: str
    gates: tuple[int, ...]
    functions: tuple[int, ...]
    defaults: tuple[str, ...]
    states: int = 1


KINDS: Mapping[str, RecurrentOperator] = {
    "LSTM": RecurrentOperator("LSTM", (0, 2, 3, 1), (0, 0, 1, 0), ("Sigmoid", "Tanh", "Tanh"), states=2),
    "GRU": RecurrentOperator("GRU", (0, 1, 2), (0, 0, 1), ("Sigmoid", "Tanh")),
    "RNN": RecurrentOperator("SimpleRNN", (0,), (0,), ("Tanh",)),
}


def recurrent(call: OnnxCall) -> list[OnnxValue]:
    """LSTM, GRU and RNN, in one direction or both."""
    kind = KINDS[call.node.operator]
    _check(call)
    source = call.value(0)
    if len(source.shape) != 3 or source.shape[1] != 1:
        raise NotImportedError(f"its input is {list(source.shape)}, and its batch (the second dimension) must be 1")
    sequence = call.arranged(source, (1, 0, 2))
    functions = _functions(call, kind)
    weights = _weights(call, kind, functions)
    states = _initial_states(call, kind, sequence)
    uses = [bool(name) and call.builder.takers[name] > 0 for name in call.node.outputs]
    config = _config(call, kind, functions)
    config |= {"return_sequences": uses[0], "return_state": any(uses[1:])}
    arguments = [sequence, states] if states else [sequence]
    add = _both_directions if len(weights) > 1 else _one_direction
    return add(call, config, arguments, weights)


def _check(call: OnnxCall) -> None:
    if call.setting("layout"):
        raise NotImportedError("its batch is the first dimension (layout 1), which onnxruntime does not support")
    if call.setting("clip"):
        raise NotImportedError(f"it limits the sums of its gates to {call.setting('clip')} (clip)")
    if call.setting("input_forget"):
        raise NotImportedError("its input gate and its forget gate are one (input_forget)")
    if call.has(PEEPHOLES) and not (call.is_constant(PEEPHOLES) and not call.weights(PEEPHOLES).any()):
        raise NotImportedError("its gates read the cell state (peepholes)")
    if call.has(LENGTHS) and not (
        call.is_constant(LENGTHS) and call.constant(LENGTHS).item() == call.value(0).shape[0]
    ):
        raise NotImportedError("its sequence_lens differ from the number of time steps")


def _functions(call: OnnxCall, kind: RecurrentOperator) -> list[str]:
    stored = call.setting("activations") or kind.defaults
    names = [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in stored]
    count = len(kind.defaults)
    unknown = [name for name in names if name.lower() not in FUNCTIONS]
    if unknown or len(names) % count or names != names[:count] * (len(names) // count):
        raise NotImportedError(f"its activation functions are {', '.join(names)[:80]}")
    functions = [FUNCTIONS[name.lower()] for name in names[:count]]
    if len(functions) == 3 and (functions[1] != functions[2] or functions[2] == "hard_sigmoid"):
        raise NotImportedError(f"its cell state has the activation functions {names[1]} and {names[2]}")
    if call.setting("activation_alpha") and set(functions) - {"hard_sigmoid", "sigmoid", "tanh", "relu"}:
        raise NotImportedError("its activation functions have parameters (activation_alpha)")
    return functions


def _hard_sigmoid_factor(call: OnnxCall) -> float:
    """Return the factor of the weights for which Keras' clip(x / 6 + 0.5) is ONNX' clip(alpha x + beta)."""
    alphas, betas = (set(call.setting(name) or [default]) for name, default in _HARD_SIGMOID.items())
    if len(alphas) > 1 or betas != {0.5}:
        raise NotImportedError(f"its HardSigmoid has alpha {sorted(alphas)} and beta {sorted(betas)}")
    return 6.0 * float(alphas.pop())


_HARD_SIGMOID = {"activation_alpha": 0.2, "activation_beta": 0.5}
"""The default parameters of HardSigmoid."""


def _weights(call: OnnxCall, kind: RecurrentOperator, functions: Sequence[str]) -> list[list[Floats]]:
    kernels, recurrents = call.weights(1), call.weights(2)
    gates = len(kind.gates)
    if kernels.ndim != 3 or recurrents.ndim != 3 or recurrents.shape[1] != gates * recurrents.shape[2]:
        raise NotImportedError(f"its weights are {list(kernels.shape)} and {list(recurrents.shape)}")
    directions, units = recurrents.shape[0], recurrents.shape[2]
    biases = call.weights(BIAS) if call.has(BIAS) else np.zeros((directions, 2 * gates * units), np.float32)
    factors = [_hard_sigmoid_factor(call) if functions[index] == "hard_sigmoid" else 1.0 for index in kind.functions]

    def ordered(array: Floats) -> Floats:
        """Return [..., gates x units] in Keras' order."""
        parts = array.reshape(*array.shape[:-1], gates, units)[..., kind.gates, :]
        scaled = parts * np.array(factors, np.float32)[:, None]
        return np.asarray(scaled.reshape(array.shape), np.float32)

    weights = []
    for kernel, recurrent_kernel, bias in zip(kernels, recurrents, biases, strict=True):
        both = ordered(bias.reshape(2, gates * units))
        summed = both if call.setting("linear_before_reset", 0) and kind.layer == "GRU" else both.sum(0)
        weights.append([ordered(kernel.T), ordered(recurrent_kernel.T), summed])
    return weights


def _config(call: OnnxCall, kind: RecurrentOperator, functions: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"units": call.weights(2).shape[2], "activation": functions[-1]}
    if len(functions) > 1:
        config["recurrent_activation"] = functions[0]
    if kind.layer == "GRU":
        config["reset_after"] = bool(call.setting("linear_before_reset", 0))
    return config


def _initial_states(call: OnnxCall, kind: RecurrentOperator, sequence: OnnxValue) -> list[OnnxValue]:
    """Return the states before the first time step, those of the forward direction first; none if all are zero."""
    indices = range(STATE, STATE + kind.states)
    zero = [not call.has(index) or (call.is_constant(index) and not call.weights(index).any()) for index in indices]
    if all(zero):
        return []
    directions, _, units = call.weights(2).shape
    by_input = [_split_state(call, index, sequence, (directions, units)) for index in indices]
    return [states[direction] for direction in range(directions) for states in by_input]


def _split_state(call: OnnxCall, index: int, sequence: OnnxValue, shape: tuple[int, int]) -> list[OnnxValue]:
    """Return one state of each direction, [units]."""
    directions, units = shape
    if not call.has(index) or call.is_constant(index):
        stored = call.weights(index) if call.has(index) else np.zeros(shape, np.float32)
        return [_constant_state(call, sequence, values) for values in np.reshape(stored, shape)]
    value = call.value(index)
    if prod(value.shape) != directions * units:
        raise NotImportedError(f"its initial state is {list(value.shape)}")
    value = in_shape(value, (1, directions * units))
    parts = shape_rules.split(call, value, 1, [units] * directions) if directions > 1 else [value]
    return [call.arranged(part, (0, 1)) for part in parts]


def _constant_state(call: OnnxCall, sequence: OnnxValue, values: Floats) -> OnnxValue:
    """Return a constant state, as the bias of a dense layer whose kernel is zero."""
    features = sequence.network_shape[-1]
    mean = call.layer("GlobalAveragePooling1D", {}, [sequence], laid(UNKNOWN, (1, features), (0, 1)))
    kernel = np.zeros((features, values.size), np.float32)
    like = laid(UNKNOWN, (1, values.size), (0, 1))
    return call.layer("Dense", {"units": values.size}, [mean], like, [kernel, values])


def _one_direction(
    call: OnnxCall, config: dict[str, Any], arguments: list[Any], weights: list[list[Floats]]
) -> list[OnnxValue]:
    kind = KINDS[call.node.operator]
    config["go_backwards"] = call.setting("direction", "forward") == "reverse"
    units, steps = config["units"], arguments[0].network_shape[0]
    output = call.layer(kind.layer, config, arguments, _output_like(call, config, steps, units), weights[0])
    states = _state_outputs(call, output, units, kind.states if config["return_state"] else 0)
    if config["go_backwards"] and config["return_sequences"] and steps > 1:
        output = call.operation(NUMPY, "Flip", {"axis": 1}, [output], output)
    return _with_unused(call, output if config["return_sequences"] else None, states)


def _both_directions(
    call: OnnxCall, config: dict[str, Any], arguments: list[Any], weights: list[list[Floats]]
) -> list[OnnxValue]:
    kind = KINDS[call.node.operator]
    units, steps = config["units"], arguments[0].network_shape[0]
    halves = {
        "layer": config | {"name": "forward"},
        "backward_layer": config | {"name": "backward", "go_backwards": True},
    }
    settings = {name: entry(LAYERS, kind.layer, half) for name, half in halves.items()} | {"merge_mode": "concat"}
    like = _output_like(call, config, steps, 2 * units)
    output = call.layer("Bidirectional", settings, arguments, like, [*weights[0], *weights[1]])
    by_direction = _state_outputs(call, output, units, 2 * kind.states if config["return_state"] else 0)
    states = []
    for forward, backward in zip(by_direction[: kind.states], by_direction[kind.states :], strict=True):
        joined = laid(UNKNOWN, (1, 2 * units), (0, 1))
        states.append(call.layer("Concatenate", {"axis": -1}, [[forward, backward]], joined))
    return _with_unused(call, output if config["return_sequences"] else None, states)


def _output_like(call: OnnxCall, config: Mapping[str, Any], steps: int, features: int) -> OnnxValue:
    """Return a template of the layer's first output: a sequence, or the last state."""
    if not config["return_sequences"]:
        return laid(UNKNOWN, (1, features), (0, 1))
    shape = call.output_shape()
    return laid(UNKNOWN, shape, tuple(range(len(shape))), (steps, features))


def _state_outputs(call: OnnxCall, output: OnnxValue, units: int, count: int) -> list[OnnxValue]:
    """Return the further outputs of a layer, which are its states."""
    states = []
    for number in range(1, count + 1):
        tensor = LayerOutput(output.tensor.layer, 0, number)
        call.builder.shapes[tensor] = (units,)
        states.append(laid(tensor, (1, units), (0, 1)))
    return states


def _with_unused(call: OnnxCall, sequence: OnnxValue | None, states: list[OnnxValue]) -> list[OnnxValue]:
    """Return a value for each output of the operator, with placeholders for those that nothing uses."""
    values: list[OnnxValue | None] = [sequence, *states]
    outputs = []
    for index in range(len(call.node.outputs)):
        if not call.node.outputs[index]:
            outputs.append(laid(UNKNOWN, (1,), (0,)))
            continue
        shape = call.output_shape(index)
        value = values[index] if index < len(values) else None
        unused = laid(UNKNOWN, shape, tuple(range(len(shape))))
        outputs.append(in_shape(value, shape) if value is not None else unused)
    return outputs


RULES = dict.fromkeys(KINDS, recurrent)
