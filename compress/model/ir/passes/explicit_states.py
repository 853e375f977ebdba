"""Recurrent layers that keep their state between calls: the state becomes inputs and outputs of the model.

A full-integer .tflite file has no variables. The caller feeds the state outputs of one call back as the state inputs of
the next one, and zeros at the start of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from compress.core.errors import ModelError
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, read
from compress.model.ir.layer_specs import BIDIRECTIONAL, CONV_LSTM_2D, IDENTITY, INPUT, RNN, LayerSpec, spec_of
from compress.model.ir.passes.unroll import CELLS, LAYER_OF_CELL, cells_of, layer_of_kind

INPUT_SUFFIX = "_in"
OUTPUT_SUFFIX = "_out"
"""Ends of the names of the input and the output of a state: `lstm_state_0_in`, `lstm_state_0_out`."""
Shape = tuple[int | None, ...]


def with_explicit_states(model: Any) -> Any:
    """Return a Keras model in which no layer keeps a state between calls; the model itself if none does.

    Raises:
        ModelError: the state of a layer cannot become an input.
    """
    network = read(model)
    stateful = [layer for layer in network.layers.values() if is_stateful(layer.config)]
    if not stateful:
        return model
    network = _with_open_batch(network)
    for layer in stateful:
        network = _explicit(network, layer)
    return build(network)


def is_stateful(config: Mapping[str, Any]) -> bool:
    """Return whether a layer keeps a state; `Bidirectional` has the setting in the layers inside it."""
    inner = config.get("layer")
    return bool(config.get("stateful")) or (isinstance(inner, dict) and is_stateful(inner.get("config", {})))


def _with_open_batch(network: Network) -> Network:
    """Return the network without the fixed batch that stateful layers need."""
    layers = {
        layer.name: layer.configured(batch_shape=[None, *layer.config["batch_shape"][1:]])
        for layer in network.layers.values()
        if spec_of(layer) == INPUT
    }
    return network.edited(layers, {})


def _explicit(network: Network, layer: Layer) -> Network:
    """Return the network with the states of a layer as further inputs and outputs."""
    if len(layer.calls) != 1:
        raise _refusal(layer, "and is called several times")
    if len(layer.inputs()) > 1:  # they replace the state of the last call
        return network.edited({layer.name: _stateless(layer, return_state=layer.config.get("return_state"))}, {})
    shapes_by_cell = _state_shapes(layer, network.shapes[LayerOutput(layer.name)])
    inputs: list[LayerOutput] = []
    outputs: list[LayerOutput] = []
    added: dict[str, Layer] = {}
    known: dict[LayerOutput, Shape] = {}
    for number, shape in enumerate(shape for shapes in shapes_by_cell for shape in shapes):
        name = f"{layer.name}_state_{number}"
        source, state = LayerOutput(name + INPUT_SUFFIX), LayerOutput(layer.name, 0, number + 1)
        target = LayerOutput(name + OUTPUT_SUFFIX)
        added[source.layer] = INPUT.layer(source.layer, (), batch_shape=[None, *shape], dtype="float32")
        added[target.layer] = IDENTITY.layer(target.layer, ({"args": [state], "kwargs": {}},))
        known |= dict.fromkeys((source, state, target), shape)
        inputs.append(source)
        outputs.append(target)
    call = layer.calls[0]
    initial = _by_cell(inputs, shapes_by_cell) if spec_of(layer) == RNN else inputs
    started = {**call, "kwargs": {**call["kwargs"], "initial_state": initial}}
    added[layer.name] = replace(_stateless(layer, return_state=True), calls=(started,))
    return replace(
        network,
        layers={**network.layers, **added},
        inputs=_with(network.inputs, inputs),
        outputs=_with(network.outputs, outputs),
        shapes={**network.shapes, **known},
    )


def _by_cell(states: list[LayerOutput], shapes_by_cell: list[list[Shape]]) -> list[Any]:
    """Return the states in the form of an `RNN`: the states of stacked cells as a list for each cell."""
    if len(shapes_by_cell) == 1:
        return states
    ends = np.cumsum([0, *map(len, shapes_by_cell)]).tolist()
    return [states[start:end] for start, end in pairwise(ends)]


def _state_shapes(layer: Layer, output: Shape) -> list[list[Shape]]:
    config: Mapping[str, Any] = layer.config
    spec: LayerSpec = spec_of(layer)
    if spec == BIDIRECTIONAL:
        halves = (config["layer"], config["backward_layer"])
        return [shapes for half in halves for shapes in _state_shapes(layer_of_kind(half), output)]
    cells: list[tuple[LayerSpec, Mapping[str, Any]]] = [(spec, config)]
    if spec == RNN:
        cells = [(LAYER_OF_CELL.get(cell["class_name"], spec), cell["config"]) for cell in cells_of(config)]
    if any(cell_spec not in CELLS for cell_spec, _ in cells):
        raise _refusal(layer, f"and the states of its kind, {layer.kind}, are not known")
    if spec == CONV_LSTM_2D:
        return [[output[-3:]] * CELLS[spec][1]]
    return [[(inner["units"],)] * CELLS[cell_spec][1] for cell_spec, inner in cells]


def _stateless(layer: Layer, return_state: Any) -> Layer:
    config = layer.config
    if spec_of(layer) != BIDIRECTIONAL:
        return layer.configured(stateful=False, return_state=return_state)
    changes = {"stateful": False, "return_state": return_state}
    halves = {
        name: {**config[name], "config": {**config[name]["config"], **changes}} for name in ("layer", "backward_layer")
    }
    return layer.configured(**halves)


def _with(structure: Any, tensors: list[LayerOutput]) -> Any:
    """Return the inputs or outputs of a network with further ones at the end."""
    if isinstance(structure, dict):
        return {**structure, **{tensor.layer: tensor for tensor in tensors}}
    return [*(structure if isinstance(structure, list) else [structure]), *tensors]


def _refusal(layer: Layer, reason: str) -> ModelError:
    return ModelError(
        f"the layer {layer.name!r} keeps its state between calls (stateful), {reason}",
        hint="build the model with `stateful=False` and the state as inputs (`initial_state=`), and copy the weights",
    )
