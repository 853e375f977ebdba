"""Activations that the Edge TPU has to put together from several operators, swapped for a ReLU, which costs nothing.

A ReLU is part of the operator in front of it. SiLU is two operators more, hard SiLU three, GELU six,
ELU and mish 25 (`rewrites.curves`), and a leaky ReLU is a PRELU, whose slopes
are sent at every inference. All of them dip below 0: of an int8 range from -0.28 to 3, as SiLU has,
8% of the steps go to the tail.

What an activation is called or how it is written down does not matter: a group of operators that
together are a function of one tensor's numbers is recognised by the values of that function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compress.ir.activations import NAMED, POINTS, Activation, Values, recognised
from compress.ir.keras_graph import Layer, LayerOutput, Network, build, living, tensors_in
from compress.ir.layer_specs import ACTIVATION, INPUT, PRELU, RELU, RESCALING, LayerSpec, spec_named, spec_of
from compress.ir.layer_specs.functions import ELEMENTWISE, SINGLE_OPERATOR, canonical_name
from compress.ir.tensorflow import keras

MAX_STEPS = 12
"""Operators that one activation may be written with."""


@dataclass(frozen=True)
class Swaps:
    """What was swapped, and what was not.

    Attributes:
        done: by what it was the layers that were swapped, in the order in which they are computed.
        left: by layer why it was left as it is.
        notes: by layer what is to be said of its swap.
    """

    done: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Swaps) -> Swaps:
        return Swaps({**self.done, **other.done}, {**self.left, **other.left}, {**self.notes, **other.notes})


@dataclass(frozen=True)
class Region:
    """Operators that together are an activation: everything between two tensors."""

    kind: Activation
    given: LayerOutput
    made: LayerOutput
    calls: frozenset[tuple[str, int]]


def activations(network: Network, kinds: Collection[Activation], by: str) -> tuple[Network, Swaps]:
    """The network with ReLUs in the place of some activations.

    A PReLU with a slope for every position, which the Edge TPU does not have, keeps one for each channel, their mean.
    Activations whose result is an output of the model, and those inside recurrent layers, are left.

    Args:
        network: any network.
        kinds: what is swapped.
        by: "relu" or "relu6".
    """
    regions = spelt_out(network)
    claimed = {call for region in regions for call in region.calls}
    shown = set(tensors_in(network.outputs))
    done: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    edited = network
    order = [layer.name for layer, call in network.in_order() if not call]
    for region in regions:  # the last ones first: the tensor that one takes may be what an earlier one makes
        if region.kind in kinds and region.made in shown:
            left[region.made.layer] = _an_output(region.kind)
        elif region.kind in kinds:
            done.setdefault(region.kind, []).append(region.made.layer)
            edited = _in_place_of(edited, region, by)
    for name in order:
        layer = network.layers[name]
        if any((name, call) in claimed for call in range(len(layer.calls))):
            continue
        swapped, found = _swapped(layer, network, kinds, by)
        why = _unswappable(layer, found, shown)
        if found and not why:
            edited = edited.edited({name: replace(swapped, calls=_calls(edited.layers[name], swapped))}, {})
            done.setdefault(found[0], []).append(name)
        elif why:
            left[name] = why
    names = {kind: tuple(sorted(dict.fromkeys(found), key=order.index)) for kind, found in done.items()}
    return living(edited), Swaps(names, left)


def _in_place_of(network: Network, region: Region, by: str) -> Network:
    """The network with a ReLU in the place of several operators."""
    name = f"{region.made.layer}_{by}"
    while name in network.layers:
        name += "_"
    layer = replace(_relu(name, by), calls=({"args": [region.given], "kwargs": {}},))
    edited = network.edited({}, {region.made: LayerOutput(name)}).edited({name: layer}, {})
    return replace(edited, shapes={**edited.shapes, LayerOutput(name): network.shapes[region.made]})


def _an_output(kind: str) -> str:
    return f"{kind} makes an output of the model, which would mean something else"


def _unswappable(layer: Layer, found: list[Activation], shown: set[LayerOutput]) -> str:
    """Why a layer's activation is left; "" where nothing speaks against a swap."""
    inner = _activation_in(layer.config)
    if spec_of(layer).recurrent:
        names = (canonical_name(name) for name in (inner, layer.config.get("recurrent_activation")) if name)
        swappable = [name for name in names if name in NAMED]
        return f"{swappable[0]} is inside a recurrent layer" if swappable else ""
    if found and any(tensor.layer == layer.name for tensor in shown):
        return _an_output(found[0])
    other = inner or spec_of(layer).activation(layer)
    if other and not found and other not in NAMED and other.lower() not in SINGLE_OPERATOR:
        return f"{other} is not among what a ReLU is put in the place of"
    for inside in _applied(layer, "layer", "cell", "cells", "layers"):
        why = _unswappable(inside, [], set())
        nested = "layer" not in layer.config and _named(inside)
        if why or nested:
            return why or f"{nested} is inside a {layer.kind}, into which swap does not go"
    return ""


def _activation_in(config: Mapping[str, Any]) -> str | None:
    """The name of the activation in a layer's settings; the class where it is an object of one."""
    activation = config.get("activation")
    if isinstance(activation, dict):
        return _function_of_object(activation)
    return canonical_name(activation) if isinstance(activation, str) else None


def _function_of_object(entry: Mapping[str, Any]) -> str:
    """The function that a serialized object applies; its class name where it is not one of Keras'."""
    kind, config = str(entry.get("class_name")), entry.get("config")
    spec = spec_named(kind)
    if spec == RELU and isinstance(config, dict):
        return "leaky_relu" if config.get("negative_slope") else "relu"
    if kind == "function":
        return str(config)
    return getattr(spec, "applies", kind)


def _named(layer: Layer) -> Activation | None:
    """The activation that a layer is or has, where it has a name."""
    return NAMED.get(_applied_alone(layer) or _activation_in(layer.config) or "")


def _applied_alone(layer: Layer) -> str | None:
    """The function of a layer or operation that is one, and has no setting for it."""
    spec = spec_of(layer)
    return None if spec == ACTIVATION else spec.activation(layer)


# --- activations that are a layer, or in one ---------------------------------------------


def _swapped(layer: Layer, network: Network, kinds: Collection[Activation], by: str) -> tuple[Layer, list[Activation]]:
    """A layer with its activations swapped, and which those were."""
    if spec_of(layer) == PRELU and layer.calls:
        return _shared_slopes(layer, network.shapes[LayerOutput(layer.name)], kinds)
    return _with_relus(layer, kinds, by)


def _with_relus(layer: Layer, kinds: Collection[Activation], by: str) -> tuple[Layer, list[Activation]]:
    """A layer, and the one that it wraps, with ReLUs in the place of activations, and which those were."""
    spec = spec_of(layer)
    if spec == RELU:
        return _plain_relu(layer, kinds, by)
    if spec.recurrent:
        return layer, []
    kind = NAMED.get(_applied_alone(layer) or "")
    if kind is not None:
        return (_relu(layer.name, by), [kind]) if kind in kinds else (layer, [])
    found: list[Activation] = []
    named = NAMED.get(_activation_in(layer.config) or "")
    if named in kinds and named is not None:
        found.append(named)
        layer = layer.configured(activation=by)
    for wrapped in _applied(layer, "layer"):
        swapped, more = _with_relus(wrapped, kinds, by)
        layer = layer.configured(layer=swapped.entry) if more else layer
        found += more
    return layer, found


def _applied(layer: Layer, *keys: str) -> list[Layer]:
    """The layers that one such as TimeDistributed or RNN applies, without calls and weights."""
    values = [layer.config.get(key) for key in keys]
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    return [
        Layer(str(entry["config"].get("name")), str(entry.get("class_name")), entry, (), ())
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("config"), dict)
    ]


def _plain_relu(layer: Layer, kinds: Collection[Activation], by: str) -> tuple[Layer, list[Activation]]:
    slope, threshold = layer.config.get("negative_slope"), layer.config.get("threshold")
    kind: Activation = "leaky_relu" if slope else "threshold"
    if not (slope or threshold) or kind not in kinds:
        return layer, []
    limit = layer.config.get("max_value") or (6.0 if by == "relu6" else None)
    return layer.configured(negative_slope=0.0, threshold=0.0, max_value=limit), [kind]


def _shared_slopes(
    layer: Layer, shape: tuple[int | None, ...], kinds: Collection[Activation]
) -> tuple[Layer, list[Activation]]:
    """A PReLU whose slopes are the same at all positions."""
    positions = list(range(1, len(shape)))
    (slopes,) = layer.weights
    if "prelu" not in kinds or all(side == 1 for side in slopes.shape[:-1]):
        return layer, []
    mean = slopes.mean(axis=tuple(axis - 1 for axis in positions), keepdims=True)
    mean = np.broadcast_to(mean, (*mean.shape[:-1], shape[-1] or mean.shape[-1]))  # one for all channels, maybe
    return replace(layer.configured(shared_axes=positions), weights=(mean.astype(slopes.dtype),)), ["prelu"]


def _relu(name: str, by: str) -> Layer:
    """An activation as a layer, without calls."""
    return ACTIVATION.layer(name, (), activation=by)


def _calls(layer: Layer, swapped: Layer) -> tuple[Any, ...]:
    """The calls of a layer; those of an operation without what only the operation takes."""
    if layer.kind == swapped.kind:
        return layer.calls
    return tuple({"args": [layer.given(call)[0]], "kwargs": {}} for call in range(len(layer.calls)))


# --- activations that are written as several operators -----------------------------------


def spelt_out(network: Network) -> list[Region]:
    """Activations written as several operators, the last one first."""
    found: list[Region] = []
    claimed: set[tuple[str, int]] = set()
    for layer, call in reversed(list(network.in_order())):
        made = LayerOutput(layer.name, call)
        if (layer.name, call) in claimed or not _elementwise(network, made):
            continue
        region = next(_regions(network, made, claimed), None)
        if region is not None:
            found.append(region)
            claimed |= region.calls
    return found


def _regions(network: Network, made: LayerOutput, claimed: set[tuple[str, int]]) -> Iterator[Region]:
    """The activations that end with a tensor, that with the fewest operators first."""
    for given in _ancestors(network, made):
        calls = _between(network, given, made)
        if calls is not None and len(calls) > 1 and not calls & claimed:
            kind = recognised(_values(network, given, made, calls))
            several = kind == "tailed" and any(_named(network.layers[name]) for name, _ in calls)
            if kind is not None and not several:  # a SiLU of a SiLU is two of them
                yield Region(kind, given, made, calls)


def _ancestors(network: Network, made: LayerOutput) -> list[LayerOutput]:
    """The tensors that a tensor is computed from by elementwise operators, the nearest first."""
    found: dict[LayerOutput, None] = {}
    waiting = [made]
    for _ in range(MAX_STEPS):
        above = (each for tensor in waiting if _elementwise(network, tensor) for each in _given(network, tensor))
        waiting = list(dict.fromkeys(above))
        found.update(dict.fromkeys(waiting))
    return list(found)


def _given(network: Network, tensor: LayerOutput) -> list[LayerOutput]:
    return network.layers[tensor.layer].given(tensor.call)


def _between(network: Network, given: LayerOutput, made: LayerOutput) -> frozenset[tuple[str, int]] | None:
    """The calls that lead from one tensor to another; None where something else leads there too."""
    calls: set[tuple[str, int]] = set()
    waiting = [made]
    while waiting:
        tensor = waiting.pop()
        if tensor == given or (tensor.layer, tensor.call) in calls:
            continue
        if not _elementwise(network, tensor) or len(calls) >= MAX_STEPS:
            return None
        calls.add((tensor.layer, tensor.call))
        waiting += _given(network, tensor)
    return frozenset(calls)


def _elementwise(network: Network, tensor: LayerOutput) -> bool:
    """Whether the numbers of a tensor each depend on the numbers at their own place alone, the same everywhere."""
    layer = network.layers[tensor.layer]
    if not layer.calls:
        return False
    known = _is_elementwise(layer, spec_of(layer))
    given = layer.given(tensor.call)
    same = all(network.shapes[each] == network.shapes[tensor] for each in given)
    return known and bool(given) and same and all(_is_number(each) for each in _leaves(layer.calls[tensor.call]))


def _is_elementwise(layer: Layer, spec: LayerSpec) -> bool:
    if spec == ACTIVATION:
        return _activation_in(layer.config) in ELEMENTWISE
    if spec == RESCALING:
        return all(isinstance(layer.config[key], int | float) for key in ("scale", "offset"))
    return spec.elementwise


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict) and "class_name" not in value:
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | LayerOutput)


def _values(network: Network, given: LayerOutput, made: LayerOutput, calls: frozenset[tuple[str, int]]) -> Values:
    """What a region makes of POINTS."""
    entrance = INPUT.layer("points", (), batch_shape=(None, 1), dtype="float32")
    points = LayerOutput("points")
    layers = {name: network.layers[name] for name, _ in calls}
    alone = replace(network, name="region", layers=layers, inputs=points, outputs=[made])
    alone = alone.edited({"points": entrance}, {given: points})
    alone = replace(
        alone, outputs=[made], shapes={LayerOutput(name, call): (1,) for name, call in calls} | {points: (1,)}
    )
    values = build(living(alone))(POINTS.astype(np.float32).reshape(-1, 1))
    return np.asarray(keras().tree.flatten(values)[0], np.float64).ravel()
