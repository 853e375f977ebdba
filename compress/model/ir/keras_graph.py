"""`Network`: a Keras model as immutable values that can be edited.

Keras 3 describes a functional model as a list of layers with their settings and the calls that connect them. `read`
returns that description with the weights, nested models inlined; `build` returns a Keras model. All passes between them
(folding, pruning, fake quantization) edit values, never a Keras model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from compress.core.errors import ModelError, cause_of
from compress.model.ir.tensorflow import keras, set_weights

Weights = tuple[NDArray[Any], ...]


@dataclass(frozen=True, order=True)
class LayerOutput:
    """A tensor, identified by the layer call that computes it.

    Attributes:
        call: the number of the call; a shared layer has several.
        output: the number of the output, for layers with several.
    """

    layer: str
    call: int = 0
    output: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer with all its calls.

    Attributes:
        name: the name, unique in the network.
        kind: the class name.
        entry: Keras' serialized form, without calls and build shapes.
        calls: for each call its args and kwargs, with a `LayerOutput` for each tensor.
        weights: the weights, in Keras' order.
        integers: the numbers of the outputs that hold integers or booleans; the others hold floats.
    """

    name: str
    kind: str
    entry: Mapping[str, Any]
    calls: tuple[Any, ...]
    weights: Weights
    integers: frozenset[int] = frozenset()

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the layer."""
        config: Mapping[str, Any] = self.entry["config"]
        return config

    def inputs(self, call: int = 0) -> list[LayerOutput]:
        """Return the tensors that a call reads, in the order of its arguments; an input of the model reads none."""
        return list(tensors_in(self.calls[call])) if self.calls else []

    def normalizes_last_axis(self, rank: int) -> bool:
        """Whether `axis` in the settings of a normalization is the last one; `rank` counts no batch axis."""
        axis = self.config.get("axis", -1)
        return (axis[0] if isinstance(axis, list) else axis) in (-1, rank)

    def configured(self, **changes: Any) -> Layer:
        """Return the layer with some settings changed."""
        return replace(self, entry={**self.entry, "config": {**self.config, **changes}})


@dataclass(frozen=True)
class Network:
    """A functional model without nested models.

    Attributes:
        layers: the layers by name, in any order; `in_order` returns the order of computation.
        inputs: the model's inputs: a `LayerOutput`, or a list or map of them.
        outputs: the model's outputs, in the same form.
        shapes: the shape of every tensor without the batch axis; None for a dimension that is not fixed.
    """

    name: str
    layers: Mapping[str, Layer]
    inputs: Any
    outputs: Any
    shapes: Mapping[LayerOutput, tuple[int | None, ...]]

    def consumers(self) -> dict[LayerOutput, list[tuple[str, int]]]:
        """Return for each tensor the calls (layer, number) that read it."""
        readers: dict[LayerOutput, list[tuple[str, int]]] = {}
        for layer in self.layers.values():
            for call in range(len(layer.calls)):
                for tensor in layer.inputs(call):
                    readers.setdefault(tensor, []).append((layer.name, call))
        return readers

    def sources(self, tensor: LayerOutput) -> list[LayerOutput]:
        """Return the tensors from which a layer computes a tensor."""
        return self.layers[tensor.layer].inputs(tensor.call)

    def outputs_by_call(self) -> dict[tuple[str, int], list[LayerOutput]]:
        """Return for each call (layer, number) its outputs, in order."""
        outputs: dict[tuple[str, int], list[LayerOutput]] = {}
        for tensor in sorted(self.shapes):
            outputs.setdefault((tensor.layer, tensor.call), []).append(tensor)
        return outputs

    def in_order(self) -> Iterator[tuple[Layer, int]]:
        """Yield all calls (layer, number) in an order of computation, earlier calls of a layer first. Inputs count."""
        waiting = [
            (layer, call, {(tensor.layer, tensor.call) for tensor in layer.inputs(call)})
            for layer in self.layers.values()
            for call in range(max(len(layer.calls), 1))
        ]
        for layer, call, used_calls in waiting:
            used_calls.update({(layer.name, call - 1)} if call else ())
        ready: set[tuple[str, int]] = set()
        while waiting:
            later = []
            for layer, call, used_calls in waiting:
                if used_calls <= ready:
                    ready.add((layer.name, call))
                    yield layer, call
                else:
                    later.append((layer, call, used_calls))
            if len(later) == len(waiting):
                raise ModelError(f"the layers {', '.join(layer.name for layer, *_ in later[:5])} form a loop")
            waiting = later

    def free_name(self, name: str) -> str:
        """Return a name that no layer has: the name itself, with underscores appended as needed."""
        while name in self.layers:
            name += "_"
        return name

    def edited(self, layers: Mapping[str, Layer | None], moved: Mapping[LayerOutput, LayerOutput]) -> Network:
        """Return an edited network.

        Args:
            layers: layers to replace or add, by name; None removes a layer.
            moved: tensors whose readers read another tensor instead.
        """
        merged = {name: layer for name, layer in {**self.layers, **layers}.items() if layer is not None}
        follow = {}
        for tensor, target in moved.items():
            while target in moved:
                target = moved[target]
            follow[tensor] = target
        return replace(
            self,
            layers={name: replace(layer, calls=map_tensors(layer.calls, follow.get)) for name, layer in merged.items()},
            outputs=map_tensors(self.outputs, follow.get),
            shapes={tensor: shape for tensor, shape in self.shapes.items() if tensor.layer in merged},
        )


def subnetwork(network: Network, tensors: list[LayerOutput]) -> Network:
    """Return the part of a network that computes some tensors, which become its outputs."""
    return without_unused_calls(replace(network, name=f"{network.name}_observed", outputs=tensors))


def without_unused_calls(network: Network) -> Network:
    """Return the network without the calls and layers that no output depends on; the inputs stay."""
    kept = used_calls(network)
    numbers = {name: sorted(call for layer, call in kept if layer == name) for name, _ in kept}

    def moved(tensor: LayerOutput) -> LayerOutput:
        return replace(tensor, call=numbers[tensor.layer].index(tensor.call))

    layers = {
        name: replace(layer, calls=tuple(map_tensors(layer.calls[call], moved) for call in numbers[name]))
        if layer.calls
        else layer
        for name, layer in network.layers.items()
        if name in numbers
    }
    shapes = {moved(tensor): shape for tensor, shape in network.shapes.items() if (tensor.layer, tensor.call) in kept}
    return replace(network, layers=layers, shapes=shapes, outputs=map_tensors(network.outputs, moved))


def used_calls(network: Network) -> set[tuple[str, int]]:
    """Return the calls (layer, number) that an output depends on, and the inputs."""
    used = {(tensor.layer, tensor.call) for tensor in tensors_in(network.inputs)}
    waiting = list(tensors_in(network.outputs))
    while waiting:
        tensor = waiting.pop()
        if (tensor.layer, tensor.call) not in used:
            used.add((tensor.layer, tensor.call))
            waiting += network.sources(tensor)
    return used


def tensors_in(structure: Any) -> Iterator[LayerOutput]:
    """Yield every `LayerOutput` in nested lists, tuples and maps."""
    if isinstance(structure, LayerOutput):
        yield structure
    elif isinstance(structure, list | tuple):
        for item in structure:
            yield from tensors_in(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item)


def map_tensors(structure: Any, change: Callable[[LayerOutput], LayerOutput | None]) -> Any:
    """Return a structure with each `LayerOutput` replaced by the result of `change`; None keeps it."""
    if isinstance(structure, LayerOutput):
        return change(structure) or structure
    if isinstance(structure, list | tuple):
        return type(structure)(map_tensors(item, change) for item in structure)
    if isinstance(structure, dict):
        return {name: map_tensors(item, change) for name, item in structure.items()}
    return structure


def _functional(model: Any) -> Any:
    """Return a Sequential or Functional model as a Functional one."""
    library = keras()
    if isinstance(model, library.Sequential):
        if not model.built:
            raise ModelError(f"the model {model.name!r} has no input shape yet", hint="give it an Input")
        return library.Model(model.inputs[0], model.outputs[0], name=model.name)
    if "input_layers" not in model.get_config():
        raise ModelError(
            f"the model {model.name!r} is written as a class, so its layers are hidden in code",
            hint="write it as a functional or sequential model",
        )
    return model


def read(model: Any) -> Network:
    """Return a Keras 3 model as a network.

    Raises:
        ModelError: the model is a subclassed model, whose layers are hidden in code, or has no input shape.
    """
    library = keras()
    functional = _functional(model)
    config = functional.get_config()
    used = {node for depth in functional._nodes_by_depth.values() for node in depth}
    operations = {operation.name: operation for operation in functional.operations}
    layers, shapes = {}, {}
    for entry in config["layers"]:
        live = operations[entry["name"]]
        nodes = [node.output_tensors for node in live._inbound_nodes if node in used]
        layers[entry["name"]] = _layer(entry, live, nodes)
        for call, node in enumerate(nodes):
            for output, tensor in enumerate(node):
                shapes[LayerOutput(entry["name"], call, output)] = tuple(tensor.shape[1:])
    nested = {name for name, live in operations.items() if isinstance(live, library.Model)}
    nested -= {name for name in nested if isinstance(operations[name], library.Sequential)}
    outputs = map_tensors(
        _refs(config["output_layers"]),
        # Keras counts the call that created a nested functional model here, and nowhere else.
        lambda tensor: replace(tensor, call=tensor.call - 1) if tensor.layer in nested else tensor,
    )
    network = Network(model.name, layers, _refs(config["input_layers"]), outputs, shapes)
    for entry in config["layers"]:
        live = operations[entry["name"]]
        if isinstance(live, library.Model) and entry["name"] in network.layers:
            network = inlined(network, entry["name"], read(live))
    return network


def _layer(entry: dict[str, Any], live: Any, nodes: list[list[Any]]) -> Layer:
    names = ("module", "class_name", "config", "registered_name")
    kept: dict[str, Any] = {name: entry[name] for name in names if name in entry}
    calls = tuple(_with_tensors(call) for call in entry["inbound_nodes"])
    weights = tuple(live.get_weights()) if hasattr(live, "get_weights") else ()
    integers = frozenset(number for node in nodes for number, tensor in enumerate(node) if "float" not in tensor.dtype)
    return Layer(entry["name"], entry["class_name"], copy.deepcopy(kept), calls, weights, integers)


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        return LayerOutput(*value["config"]["keras_history"])
    if isinstance(value, dict):
        return {name: _with_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_tensors(item) for item in value]
    return value


def _refs(value: Any) -> Any:
    """Return a structure with Keras' `["name", call, output]` replaced by `LayerOutput`, maps in the order of Keras."""
    if isinstance(value, list | tuple) and len(value) == 3 and isinstance(value[0], str):
        return LayerOutput(*value)
    if isinstance(value, list | tuple):
        return [_refs(item) for item in value]
    return {name: _refs(value[name]) for name in sorted(value)}


def _sorted(structure: Any) -> Any:
    """Return a structure with its maps in the order in which Keras takes their items: by name."""
    if isinstance(structure, list | tuple):
        return [_sorted(item) for item in structure]
    if isinstance(structure, dict):
        return {name: _sorted(structure[name]) for name in sorted(structure)}
    return structure


def inlined(outer: Network, name: str, inner: Network) -> Network:
    """Return `outer` with the layer `name`, a nested model, replaced by the layers of `inner` at each call."""
    nested = outer.layers[name]
    names = {inside: outer.free_name(f"{name}_{inside}") for inside in inner.layers}
    entrances = list(tensors_in(inner.inputs))
    counts = {inside: max(len(layer.calls), 1) for inside, layer in inner.layers.items()}
    added: dict[str, Layer] = {}
    moved: dict[LayerOutput, LayerOutput] = {}
    shapes = dict(outer.shapes)
    for call in range(len(nested.calls)):
        outer_tensors = {
            tensor: LayerOutput(names[tensor.layer], call * counts[tensor.layer] + tensor.call, tensor.output)
            for tensor in inner.shapes
        }
        outer_tensors.update(zip(entrances, tensors_in(_sorted(nested.calls[call])), strict=True))
        for inside, layer in inner.layers.items():
            if not layer.calls:
                continue
            before = added[names[inside]].calls if call else ()
            calls = (*before, *map_tensors(layer.calls, outer_tensors.get))
            renamed = layer.configured(name=names[inside])
            added[names[inside]] = replace(renamed, name=names[inside], calls=calls)
        shapes.update(
            {outer_tensors[tensor]: shape for tensor, shape in inner.shapes.items() if tensor not in entrances}
        )
        for output, tensor in enumerate(tensors_in(inner.outputs)):
            moved[LayerOutput(name, call, output)] = outer_tensors[tensor]
    return replace(outer, shapes=shapes).edited({**added, name: None}, moved)


def build(network: Network) -> Any:
    """Return the network as a Keras model with its weights.

    Raises:
        ModelError: Keras cannot build the model, or a layer does not take its weights.
    """
    try:
        model = _connected(network)
        operations = {operation.name: operation for operation in model.operations}
        for layer in network.layers.values():
            if layer.weights:
                set_weights(operations[layer.name], list(layer.weights))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the network {network.name!r} cannot be built: {cause_of(error)}") from error
    return model


def with_input_shape(model: Any, shape: Sequence[int]) -> Any:
    """Return a copy of a Keras 3 model with one input, whose input has a fixed shape, without the batch.

    Raises:
        ModelError: the layers cannot be built for this shape.
    """
    return build(with_input_size(read(model), shape))


def with_input_size(network: Network, shape: Sequence[int]) -> Network:
    """Return a network with one input for samples of another shape, without the batch; `build` makes its tensors.

    The shapes of the network are not changed.

    Raises:
        ModelError: the network has several inputs.
    """
    inputs = list(tensors_in(network.inputs))
    if len(inputs) != 1:
        raise ModelError(f"the model has {len(inputs)} inputs", allowed="one input")
    entrance = network.layers[inputs[0].layer]
    fixed = entrance.configured(batch_shape=[None, *shape])
    return replace(network, layers={**network.layers, entrance.name: fixed})


def _connected(network: Network) -> Any:
    """Return the Keras model with the weights that Keras creates.

    `Model.from_config` would repeat its pass over all layers once for each call of a shared layer that has to wait.
    """
    library = keras()
    operations: dict[str, Any] = {}
    tensors: dict[LayerOutput, Any] = {}
    for layer, call in network.in_order():
        if layer.name not in operations:
            # A copy: Keras removes some settings from its argument.
            entry = {**copy.deepcopy(dict(layer.entry)), "name": layer.name}
            operations[layer.name] = library.saving.deserialize_keras_object(entry)
        operation = operations[layer.name]
        if layer.calls:
            arguments = _with_values(layer.calls[call], tensors)
            outputs = library.tree.flatten(operation(*arguments["args"], **arguments["kwargs"]))
        else:
            outputs = [operation.output]
        tensors.update({LayerOutput(layer.name, call, number): output for number, output in enumerate(outputs)})
    inputs, outputs = _with_values(network.inputs, tensors), _with_values(network.outputs, tensors)
    return library.Model(inputs, outputs, name=network.name)


def _with_values(structure: Any, tensors: Mapping[LayerOutput, Any]) -> Any:
    """Return the arguments of a call with their tensors, and with Keras' serialized objects loaded."""
    if isinstance(structure, LayerOutput):
        return tensors[structure]
    if isinstance(structure, dict) and "class_name" not in structure:
        return {name: _with_values(item, tensors) for name, item in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(_with_values(item, tensors) for item in structure)
    return keras().saving.deserialize_keras_object(structure)
