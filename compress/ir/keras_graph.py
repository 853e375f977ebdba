"""A Keras model as plain values that can be edited, and built again.

Keras 3 describes a functional model as a list of layers with their configuration and
the calls that connect them. `read` takes that description and the weights, with nested
models inlined; `build` makes a model of it. What lies between (folding, pruning, fake
quantization) edits values and never a live model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from compress.errors import ModelError
from compress.ir.tensorflow import keras, set_weights

Weights = tuple[NDArray[Any], ...]


@dataclass(frozen=True, order=True)
class LayerOutput:
    """A tensor, named by what makes it: the `output`-th result of the `call`-th call of a layer."""

    layer: str
    call: int = 0
    output: int = 0


@dataclass(frozen=True)
class Layer:
    """A layer with all its calls.

    Attributes:
        name: its name, unique in the network.
        kind: its class name.
        entry: Keras' serialized form, without calls and without the shapes it was built for.
        calls: args and kwargs of every call; tensors stand in them as `LayerOutput`.
        weights: its weights, in Keras' order.
        integers: which of its outputs hold integers or truth values; the others hold floats.
    """

    name: str
    kind: str
    entry: Mapping[str, Any]
    calls: tuple[Any, ...]
    weights: Weights
    integers: frozenset[int] = frozenset()

    @property
    def config(self) -> Mapping[str, Any]:
        """The layer's own settings."""
        config: Mapping[str, Any] = self.entry["config"]
        return config

    def given(self, call: int = 0) -> list[LayerOutput]:
        """The tensors that a call is given, in order."""
        return list(tensors_in(self.calls[call]))

    def configured(self, **changes: Any) -> Layer:
        """The layer with other settings."""
        return replace(self, entry={**self.entry, "config": {**self.config, **changes}})


@dataclass(frozen=True)
class Network:
    """A functional model without nested models.

    Attributes:
        name: the model's name.
        layers: by name; an order in which they can be computed is not implied.
        inputs: the model's inputs, as a structure of `LayerOutput`.
        outputs: its outputs, likewise.
        shapes: shape of every tensor without the batch; None for a side that is not fixed.
    """

    name: str
    layers: Mapping[str, Layer]
    inputs: Any
    outputs: Any
    shapes: Mapping[LayerOutput, tuple[int | None, ...]]

    def consumers(self) -> dict[LayerOutput, list[tuple[str, int]]]:
        """The calls (layer, number) that take each tensor."""
        found: dict[LayerOutput, list[tuple[str, int]]] = {}
        for layer in self.layers.values():
            for call in range(len(layer.calls)):
                for tensor in layer.given(call):
                    found.setdefault(tensor, []).append((layer.name, call))
        return found

    def made(self) -> dict[tuple[str, int], list[LayerOutput]]:
        """The tensors that each call (layer, number) makes, in order."""
        found: dict[tuple[str, int], list[LayerOutput]] = {}
        for tensor in sorted(self.shapes):
            found.setdefault((tensor.layer, tensor.call), []).append(tensor)
        return found

    def in_order(self) -> Iterator[tuple[Layer, int]]:
        """All calls, each after those that it depends on and after the layer's earlier ones. An input counts as one."""
        waiting = [
            (layer, call, {(tensor.layer, tensor.call) for tensor in layer.given(call)} if layer.calls else set())
            for layer in self.layers.values()
            for call in range(max(len(layer.calls), 1))
        ]
        for layer, call, needed in waiting:
            needed.update({(layer.name, call - 1)} if call else ())
        ready: set[tuple[str, int]] = set()
        while waiting:
            later = []
            for layer, call, needed in waiting:
                if needed <= ready:
                    ready.add((layer.name, call))
                    yield layer, call
                else:
                    later.append((layer, call, needed))
            if len(later) == len(waiting):
                raise ModelError(f"the layers {', '.join(layer.name for layer, *_ in later[:5])} form a loop")
            waiting = later

    def free_name(self, name: str) -> str:
        """Return a name that no layer has: the name itself, with underscores appended as needed."""
        while name in self.layers:
            name += "_"
        return name

    def edited(self, layers: Mapping[str, Layer | None], moved: Mapping[LayerOutput, LayerOutput]) -> Network:
        """Layers replaced, added, or removed (None); everyone who took a key of `moved` takes its value."""
        merged = {name: layer for name, layer in {**self.layers, **layers}.items() if layer is not None}
        follow = {tensor: _follow(tensor, moved) for tensor in moved}
        return replace(
            self,
            layers={name: replace(layer, calls=map_tensors(layer.calls, follow.get)) for name, layer in merged.items()},
            outputs=map_tensors(self.outputs, follow.get),
            shapes={tensor: shape for tensor, shape in self.shapes.items() if tensor.layer in merged},
        )


def observed(network: Network, tensors: list[LayerOutput]) -> Network:
    """The network up to some of its tensors, which are its outputs; what they do not depend on is gone."""
    return living(replace(network, name=f"{network.name}_observed", outputs=tensors))


def living(network: Network) -> Network:
    """The network without the calls, and so the layers, that no output depends on; its inputs stay."""
    kept = needed(network)
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
    shapes = {moved(each): shape for each, shape in network.shapes.items() if (each.layer, each.call) in kept}
    return replace(network, layers=layers, shapes=shapes, outputs=map_tensors(network.outputs, moved))


def needed(network: Network) -> set[tuple[str, int]]:
    """The calls (layer, number) that an output depends on, and the inputs."""
    found = {(tensor.layer, tensor.call) for tensor in tensors_in(network.inputs)}
    waiting = list(tensors_in(network.outputs))
    while waiting:
        tensor = waiting.pop()
        if (tensor.layer, tensor.call) not in found:
            found.add((tensor.layer, tensor.call))
            waiting += network.layers[tensor.layer].given(tensor.call)
    return found


def _follow(tensor: LayerOutput, moved: Mapping[LayerOutput, LayerOutput]) -> LayerOutput:
    while tensor in moved:
        tensor = moved[tensor]
    return tensor


def tensors_in(structure: Any) -> Iterator[LayerOutput]:
    """Every `LayerOutput` in a structure of lists, tuples and maps."""
    if isinstance(structure, LayerOutput):
        yield structure
    elif isinstance(structure, list | tuple):
        for item in structure:
            yield from tensors_in(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item)


def map_tensors(structure: Any, change: Callable[[LayerOutput], LayerOutput | None]) -> Any:
    """The structure with each `LayerOutput` replaced by what `change` gives; None leaves it."""
    if isinstance(structure, LayerOutput):
        return change(structure) or structure
    if isinstance(structure, list | tuple):
        return type(structure)(map_tensors(item, change) for item in structure)
    if isinstance(structure, dict):
        return {name: map_tensors(item, change) for name, item in structure.items()}
    return structure


def read(model: Any) -> Network:
    """A Keras 3 model as a network.

    Raises:
        ModelError: it is a subclassed model, whose layers are hidden in code.
    """
    library = keras()
    functional = model
    if isinstance(model, library.Sequential):
        if not model.built:
            raise ModelError(f"the model {model.name!r} has no input shape yet", todo="give it an Input")
        functional = library.Model(model.inputs[0], model.outputs[0], name=model.name)
    config = functional.get_config()
    if "input_layers" not in config:
        raise ModelError(
            f"the model {model.name!r} is written as a class, so its layers are hidden in code",
            todo="write it as a functional or sequential model",
        )
    operations = {operation.name: operation for operation in functional.operations}
    layers, shapes = {}, {}
    for entry in config["layers"]:
        live = operations[entry["name"]]
        nodes = _nodes(live, functional)
        layers[entry["name"]] = _layer(entry, live, nodes)
        for call, node in enumerate(nodes):
            for output, tensor in enumerate(node):
                shapes[LayerOutput(entry["name"], call, output)] = tuple(tensor.shape[1:])
    nested = {name for name, live in operations.items() if isinstance(live, library.Model)}
    nested -= {name for name in nested if isinstance(operations[name], library.Sequential)}
    outputs = map_tensors(
        _refs(config["output_layers"]),
        # A functional model was called once when it was made, and Keras counts that here, and nowhere else.
        lambda tensor: replace(tensor, call=tensor.call - 1) if tensor.layer in nested else tensor,
    )
    network = Network(model.name, layers, _refs(config["input_layers"]), outputs, shapes)
    for entry in config["layers"]:
        live = operations[entry["name"]]
        if isinstance(live, library.Model) and entry["name"] in network.layers:
            network = inlined(network, entry["name"], read(live))
    return network


def _nodes(live: Any, functional: Any) -> list[list[Any]]:
    """Output tensors of each call of a layer that belongs to this model."""
    used = {node for depth in functional._nodes_by_depth.values() for node in depth}
    return [node.output_tensors for node in live._inbound_nodes if node in used]


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
    """Keras' `["name", call, output]` as `LayerOutput`, wherever it stands in a structure."""
    if isinstance(value, list | tuple) and len(value) == 3 and isinstance(value[0], str):
        return LayerOutput(*value)
    if isinstance(value, list | tuple):
        return [_refs(item) for item in value]
    return {name: _refs(item) for name, item in value.items()}


def inlined(outer: Network, name: str, inner: Network) -> Network:
    """`outer` with the nested model `name` replaced by its layers, once for each call of it."""
    nested = outer.layers[name]
    names = {inside: _unique(f"{name}_{inside}", outer.layers) for inside in inner.layers}
    entrances = list(tensors_in(inner.inputs))
    counts = {inside: max(len(layer.calls), 1) for inside, layer in inner.layers.items()}
    added: dict[str, Layer] = {}
    moved: dict[LayerOutput, LayerOutput] = {}
    shapes = dict(outer.shapes)
    for call in range(len(nested.calls)):
        place = {
            tensor: LayerOutput(names[tensor.layer], call * counts[tensor.layer] + tensor.call, tensor.output)
            for tensor in inner.shapes
        }
        place.update(zip(entrances, nested.given(call), strict=True))
        for inside, layer in inner.layers.items():
            if not layer.calls:
                continue
            before = added[names[inside]].calls if call else ()
            calls = (*before, *map_tensors(layer.calls, place.get))
            renamed = layer.configured(name=names[inside])
            added[names[inside]] = replace(renamed, name=names[inside], calls=calls)
        shapes.update({place[tensor]: shape for tensor, shape in inner.shapes.items() if tensor not in entrances})
        for output, tensor in enumerate(tensors_in(inner.outputs)):
            moved[LayerOutput(name, call, output)] = place[tensor]
    return replace(outer, shapes=shapes).edited({**added, name: None}, moved)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name


def build(network: Network) -> Any:
    """The network as a Keras model, with its weights.

    Raises:
        ModelError: Keras cannot make a model of it, or a layer does not take its weights.
    """
    library = keras()
    config = {
        "name": network.name,
        "trainable": True,
        # Keras goes over its list until no call waits for another one: in order, once.
        "layers": [_entry(layer) for layer in _in_order(network)],
        "input_layers": map_to_refs(network.inputs),
        "output_layers": map_to_refs(network.outputs),
    }
    try:
        model = library.Model.from_config(config)
        operations = {operation.name: operation for operation in model.operations}
        for layer in network.layers.values():
            if layer.weights:
                set_weights(operations[layer.name], list(layer.weights))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"the network {network.name!r} cannot be built: {str(error).splitlines()[0]}") from error
    return model


def _in_order(network: Network) -> list[Layer]:
    """The layers in the order of their first calls."""
    return list({layer.name: layer for layer, _ in network.in_order()}.values())


def _entry(layer: Layer) -> dict[str, Any]:
    calls = [_without_tensors(call) for call in layer.calls]
    # A copy: Keras takes some settings out of what it is given.
    return {**copy.deepcopy(dict(layer.entry)), "name": layer.name, "inbound_nodes": calls}


def _without_tensors(value: Any) -> Any:
    if isinstance(value, LayerOutput):
        history = [value.layer, value.call, value.output]
        # Keras looks the tensor up by its history; shape and dtype only have to be valid.
        config = {"shape": [None], "dtype": "float32", "keras_history": history}
        return {"class_name": "__keras_tensor__", "config": config}
    if isinstance(value, dict):
        return {name: _without_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    return value


def map_to_refs(structure: Any) -> Any:
    """A structure of `LayerOutput` in Keras' form."""
    if isinstance(structure, LayerOutput):
        return [structure.layer, structure.call, structure.output]
    if isinstance(structure, dict):
        return {name: map_to_refs(item) for name, item in structure.items()}
    return [map_to_refs(item) for item in structure]
