"""Unrolling of recurrent layers with a fixed number of time steps: each step becomes dense layers and arithmetic.

The steps share their weights. Each gate has its own layers, and so its own quantization ranges. The inputs of all time
steps are multiplied by one 1x1 convolution per gate. The chip also maps UNIDIRECTIONAL_SEQUENCE_LSTM, but TensorFlow's
converter writes it only for Keras 2 models, and there is no such operator for a GRU.

Formulas: the documentation of Keras' LSTM, GRU and SimpleRNN layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir import layer_specs as specs
from compress.model.ir.keras_graph import Layer
from compress.model.ir.layer_specs import LayerSpec
from compress.model.ir.passes.by_channel import by_channel
from compress.model.ir.tensorflow import keras

MOST_STEPS = 256
"""Largest number of time steps that is unrolled. Each step adds up to 21 operators to the .tflite file."""

Floats = NDArray[np.float32]
States = list[Any]
"""The states of a layer at one time step: h, and for an LSTM also c. Empty if all are zero."""


class NotUnrolledError(Exception):
    """The layer cannot be unrolled; the message is the reason, without the name of the layer."""


@dataclass(frozen=True)
class GateWeights:
    """The weights of one gate, or of the candidate state.

    Attributes:
        kernel: of the input, [in, units]; of a `ConvLSTM2D` [height, width, in, filters].
        recurrent: of the state, [units, units] or [height, width, filters, filters].
        recurrent_bias: added to the product of the state only; None if it is part of `bias`.
    """

    kernel: Floats
    recurrent: Floats
    bias: Floats
    recurrent_bias: Floats | None = None


class UnrolledGate:
    """The layers of one gate; each time step calls the same ones."""

    def __init__(self, gate: GateWeights, sequence: Any) -> None:
        """Multiply the inputs of all time steps by the kernel."""
        layers = keras().layers
        steps, features = sequence.shape[1:]
        units = gate.kernel.shape[1]
        convolution = layers.Conv2D(units, 1)
        products = convolution(layers.Reshape((steps, 1, features))(sequence))
        convolution.set_weights([gate.kernel.reshape(1, 1, features, units), gate.bias])
        self.inputs = layers.Reshape((steps, units))(products)
        self.recurrent_bias = gate.recurrent_bias
        self.dense = layers.Dense(units, use_bias=gate.recurrent_bias is not None)
        self.dense.build((None, units))
        self.dense.set_weights([weight for weight in (gate.recurrent, gate.recurrent_bias) if weight is not None])

    def input(self, step: int) -> Any:
        """Return the product of the input at a time step."""
        return self.inputs[:, step, :]

    def sum(self, step: int, state: Any) -> Any:
        """Return the sum of both products at a time step; `state` None means zeros."""
        return self.input(step) if state is None else keras().layers.Add()([self.input(step), self.dense(state)])


class ConvolvedGate(UnrolledGate):
    """The layers of one gate of a `ConvLSTM2D`, whose products are convolutions."""

    def __init__(self, gate: GateWeights, sequence: Any, config: Mapping[str, Any]) -> None:
        """Convolve the maps of all time steps."""
        layers = keras().layers
        *size, _, filters = gate.kernel.shape
        settings = {name: config[name] for name in ("strides", "padding", "dilation_rate")}
        convolution = layers.Conv2D(filters, size, **settings)
        self.maps = [convolution(time_step) for time_step in time_steps(sequence)]
        convolution.set_weights([gate.kernel, gate.bias])
        self.dense = layers.Conv2D(filters, size, padding="same", use_bias=False)
        self.dense.build(self.maps[0].shape)
        self.dense.set_weights([gate.recurrent])

    def input(self, step: int) -> Any:
        """Return the convolved map of a time step."""
        return self.maps[step]


Step = Callable[[int, States], States]
"""(number of the time step, states before it) -> states after it; no states mean zeros."""


def _lstm(layer: Layer, sequence: Any) -> Step:
    layers = keras().layers
    inner, outer = _function(layer, "recurrent_activation"), _function(layer, "activation")
    kernel, recurrent, *bias = layer.weights
    biases = bias[0] if bias else np.zeros(kernel.shape[-1], np.float32)
    parts = zip(*(np.split(weights, 4, axis=-1) for weights in (kernel, recurrent, biases)), strict=True)
    weights_by_gate = [GateWeights(*gate_arrays) for gate_arrays in parts]
    gates: list[UnrolledGate]
    if specs.spec_of(layer) == specs.CONV_LSTM_2D:
        gates = [ConvolvedGate(weights, sequence, layer.config) for weights in weights_by_gate]
    else:
        gates = [UnrolledGate(weights, sequence) for weights in weights_by_gate]
    input_gate, forget_gate, candidate, output_gate = gates

    def step(number: int, states: States) -> States:
        hidden, cell = states or (None, None)
        added = layers.Multiply()([inner(input_gate.sum(number, hidden)), outer(candidate.sum(number, hidden))])
        if cell is not None:
            kept = layers.Multiply()([inner(forget_gate.sum(number, hidden)), cell])
            added = layers.Add()([kept, added])
        return [layers.Multiply()([inner(output_gate.sum(number, hidden)), outer(added)]), added]

    return step


def _gru(layer: Layer, sequence: Any) -> Step:
    inner, outer = _function(layer, "recurrent_activation"), _function(layer, "activation")
    kernel, recurrent, *bias = layer.weights
    reset_after = bool(layer.config["reset_after"])
    units = recurrent.shape[0]
    biases = bias[0].reshape(-1, 3 * units) if bias else np.zeros((1, 3 * units), np.float32)
    total = biases.sum(0)
    total[2 * units :] = biases[0, 2 * units :]
    parts = zip(*(np.split(weights, 3, axis=-1) for weights in (kernel, recurrent, total)), strict=True)
    update, reset, candidate = (GateWeights(*gate_arrays) for gate_arrays in parts)
    if reset_after:
        recurrent_bias = biases[-1, 2 * units :] if len(biases) > 1 else np.zeros(units, np.float32)
        candidate = GateWeights(candidate.kernel, candidate.recurrent, candidate.bias, recurrent_bias)
    gates = [UnrolledGate(gate, sequence) for gate in (update, reset, candidate)]
    return lambda number, states: [_gru_step(gates, number, states[0] if states else None, inner, outer)]


def _gru_step(gates: Sequence[UnrolledGate], number: int, hidden: Any, inner: Any, outer: Any) -> Any:
    layers = keras().layers
    update, reset, candidate = gates
    share = inner(update.sum(number, hidden))
    if hidden is None:
        offset = candidate.recurrent_bias
        total = candidate.input(number)
        if offset is not None and offset.any():
            total = layers.Add()([total, by_channel(inner(reset.input(number)), offset, 0.0)])
        new = outer(total)
        return layers.Subtract()([new, layers.Multiply()([share, new])])
    kept = inner(reset.sum(number, hidden))
    if candidate.recurrent_bias is not None:
        product = layers.Multiply()([kept, candidate.dense(hidden)])
    else:
        product = candidate.dense(layers.Multiply()([kept, hidden]))
    new = outer(layers.Add()([candidate.input(number), product]))
    return layers.Add()([new, layers.Multiply()([share, layers.Subtract()([hidden, new])])])


def _simple(layer: Layer, sequence: Any) -> Step:
    outer = _function(layer, "activation")
    kernel, recurrent, *bias = layer.weights
    gate = UnrolledGate(
        GateWeights(kernel, recurrent, bias[0] if bias else np.zeros(len(recurrent), np.float32)), sequence
    )
    return lambda number, states: [outer(gate.sum(number, states[0] if states else None))]


CELLS: Mapping[LayerSpec, tuple[Callable[[Layer, Any], Step], int]] = {
    specs.LSTM: (_lstm, 2),
    specs.CONV_LSTM_2D: (_lstm, 2),
    specs.GRU: (_gru, 1),
    specs.SIMPLE_RNN: (_simple, 1),
}
"""The formula of each kind, and its number of states."""


def _function(layer: Layer, setting: str) -> Callable[[Any], Any]:
    name = layer.config.get(setting) or "linear"
    if not isinstance(name, str):
        raise NotUnrolledError(f"its {setting} is not a function of Keras")
    return (lambda x: x) if name == "linear" else keras().layers.Activation(name)


def unrolled(layer: Layer, inputs: Sequence[Any]) -> Any:
    """Return the outputs of a recurrent layer as single steps.

    Raises:
        NotUnrolledError: the state lasts from one call to the next, or the input has too many time steps.
    """
    outputs = _outputs(layer, list(inputs))
    return outputs if len(outputs) > 1 else outputs[0]


def _outputs(layer: Layer, inputs: list[Any]) -> list[Any]:
    """Return the outputs of a layer that is not bidirectional."""
    sequence, *states = inputs
    config = layer.config
    cell, state_count = CELLS[specs.spec_of(layer)]
    _check_steps(sequence)
    if config.get("stateful"):
        raise NotUnrolledError("it keeps its state between calls (stateful)")
    if len(states) not in (0, state_count):
        raise NotUnrolledError(f"it has {len(states)} initial states instead of {state_count}")
    if config.get("data_format") == "channels_first":
        raise NotUnrolledError("its maps have the channels first")
    step = cell(layer, sequence)
    hidden = []
    order = range(sequence.shape[1])
    for number in reversed(order) if config.get("go_backwards") else order:
        states = step(number, states)
        hidden.append(states[0])
    output = _stacked(hidden) if config.get("return_sequences") else hidden[-1]
    return [output, *states] if config.get("return_state") else [output]


def _check_steps(sequence: Any) -> None:
    if sequence.shape[1] > MOST_STEPS:
        raise NotUnrolledError(f"it has {sequence.shape[1]} time steps, and at most {MOST_STEPS} are unrolled")


LAYER_OF_CELL = {spec.cell: spec for spec in (specs.LSTM, specs.GRU, specs.SIMPLE_RNN)}
"""The layer with the formula of each cell, by the class name of the cell."""


def with_cells(layer: Layer, inputs: Sequence[Any]) -> Any:
    """Return the outputs of an `RNN` with one cell or stacked cells as single steps.

    Raises:
        NotUnrolledError: a cell is of another kind, or cannot be unrolled.
    """
    cells = cells_of(layer.config)
    for entry in cells:
        if entry["class_name"] not in LAYER_OF_CELL:
            raise NotUnrolledError(f"its cell is a {entry['class_name']}")
    (output, *states), weights, last_states = inputs, list(layer.weights), []
    for index, entry in enumerate(cells):
        recurrent = _layer_of_cell(layer, entry, first=index == 0, last=entry is cells[-1])
        count = 2 + bool(entry["config"].get("use_bias", True))
        own_states = states[: CELLS[specs.spec_of(recurrent)][1]]
        output, *after = _outputs(replace(recurrent, weights=tuple(weights[:count])), [output, *own_states])
        del weights[:count], states[: len(own_states)]
        last_states += after
    return [output, *last_states] if layer.config.get("return_state") else output


def cells_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return Keras' entries of the cells of an `RNN` layer with these settings, the first one first."""
    cell: dict[str, Any] = config["cell"]
    return list(cell["config"]["cells"]) if cell["class_name"] == specs.STACKED_CELLS.kind else [cell]


def layer_of_kind(entry: Mapping[str, Any], weights: tuple[Any, ...] = ()) -> Layer:
    """Return the layer of a serialized form inside another layer."""
    return Layer(entry["config"]["name"], entry["class_name"], entry, (), weights)


def _layer_of_cell(layer: Layer, entry: Mapping[str, Any], *, first: bool, last: bool) -> Layer:
    """Return the recurrent layer that a cell is equal to, without weights."""
    config = {
        **entry["config"],
        "return_sequences": layer.config.get("return_sequences") or not last,
        "return_state": True,
        "go_backwards": layer.config.get("go_backwards") and first,
        "stateful": layer.config.get("stateful"),
    }
    kind = LAYER_OF_CELL[entry["class_name"]].kind
    return layer_of_kind({"class_name": kind, "config": config})


def time_distributed(layer: Layer, inputs: Sequence[Any]) -> Any:
    """Return a layer on each time step as calls of that layer.

    Raises:
        NotUnrolledError: the input has too many time steps.
    """
    (sequence,) = inputs
    inner = keras().layers.deserialize(dict(layer.config["layer"]))
    if layer.config["layer"]["class_name"] == specs.DENSE.kind:  # works on the last axis
        output = inner(sequence)
    else:
        _check_steps(sequence)
        output = _stacked([inner(time_step) for time_step in time_steps(sequence)])
    inner.set_weights(layer.weights)
    return output


def time_steps(sequence: Any) -> list[Any]:
    """Return the values of each time step. A sequence of maps is sliced by rows: the chip takes three dimensions."""
    steps, *shape = sequence.shape[1:]
    if len(shape) != 3:
        return [sequence[:, step] for step in range(steps)]
    height, width, channels = shape
    rows = keras().layers.Reshape((steps * height, width, channels))(sequence)
    return [rows[:, step * height : (step + 1) * height] for step in range(steps)]


def _stacked(steps: Sequence[Any]) -> Any:
    """Return [steps, ...] from the values of each time step."""
    layers, shape = keras().layers, steps[0].shape[1:]
    are_maps = len(shape) == 3
    rows = list(steps) if are_maps else [layers.Reshape((1, *shape))(step) for step in steps]
    joined = layers.Concatenate(axis=1)(rows) if len(rows) > 1 else rows[0]
    return layers.Reshape((len(steps), *shape))(joined) if are_maps else joined


def bidirectional(layer: Layer, inputs: Sequence[Any]) -> Any:
    """Return the outputs of a bidirectional layer as single steps.

    Raises:
        NotUnrolledError: a layer inside is of another kind, or cannot be unrolled.
    """
    config = layer.config
    count = 2 + bool(config["layer"]["config"].get("use_bias", True))
    parts = (config["layer"], config["backward_layer"]), (layer.weights[:count], layer.weights[count:])
    halves = [layer_of_kind(entry, weights) for entry, weights in zip(*parts, strict=True)]
    for half in halves:
        if specs.spec_of(half) not in CELLS:
            raise NotUnrolledError(f"it has a layer of the kind {half.kind} inside")
    states, half_states = inputs[1:], len(inputs) // 2
    forward, *forward_states = _outputs(halves[0], [inputs[0], *states[:half_states]])
    backward, *backward_states = _outputs(halves[1], [inputs[0], *states[half_states:]])
    if halves[0].config["return_sequences"]:
        backward = _stacked(time_steps(backward)[::-1])
    merged = MERGES[config["merge_mode"]]([forward, backward])
    outputs = [*merged, *forward_states, *backward_states]
    return outputs if len(outputs) > 1 else outputs[0]


MERGES: Mapping[str | None, Callable[[list[Any]], list[Any]]] = {
    None: lambda outputs: outputs,
    "concat": lambda outputs: [keras().layers.Concatenate()(outputs)],
    "sum": lambda outputs: [keras().layers.Add()(outputs)],
    "mul": lambda outputs: [keras().layers.Multiply()(outputs)],
    "ave": lambda outputs: [keras().layers.Add()(outputs) * 0.5],
}
"""The outputs of a bidirectional layer from those of both directions, by its merge mode."""
