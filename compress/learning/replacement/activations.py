"""Replacement of activations by ReLU, which costs the Edge TPU nothing.

A ReLU is part of the operator before it. SiLU takes two operators more, hard SiLU three, GELU six, ELU and mish 25
(`rewrites.curves`), and a leaky ReLU is a PRELU, whose slopes are sent at every inference. All of them are negative
somewhere: of an int8 range from -0.28 to 3, as SiLU has, 8% of the steps are below 0.

Names do not matter: a region of operators that computes a function of one tensor, value by value, is recognised by the
values of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, tensors_in, without_unused_calls
from compress.model.ir.layer_specs import ACTIVATION, INPUT, PRELU, RELU, RESCALING, LayerSpec, spec_named, spec_of
from compress.model.ir.layer_specs.functions import (
    ELEMENTWISE,
    NAMED,
    POINTS,
    SINGLE_OPERATOR,
    Activation,
    Values,
    canonical_name,
    recognize,
)
from compress.model.ir.tensorflow import keras

MAX_OPERATORS = 12
"""Operators that one activation may be written with."""
Call = tuple[str, int]
"""Name of a layer and number of a call of it."""
Join = Callable[[str], Layer]
"""Name -> a layer without calls that takes [activation, replacement]."""


@dataclass(frozen=True)
class Replacements:
    """The result of a replacement.

    Attributes:
        replaced: by kind the layers that were replaced, in the order of the computation.
        skipped: by layer the reason why it was not replaced.
        notes: by layer a remark on its replacement.
    """

    replaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Replacements) -> Replacements:
        return Replacements(
            {**self.replaced, **other.replaced}, {**self.skipped, **other.skipped}, {**self.notes, **other.notes}
        )


@dataclass(frozen=True)
class Region:
    """Operators that together are an activation.

    Attributes:
        kind: the activation.
        input: the tensor that it is applied to.
        output: the result.
        calls: the calls from `input` to `output`.
    """

    kind: Activation
    input: LayerOutput
    output: LayerOutput
    calls: frozenset[Call]


def replace_by_relu(
    network: Network, kinds: Collection[Activation], by: str, join: Join | None = None
) -> tuple[Network, Replacements]:
    """Replace activations by ReLU ("relu" or "relu6").

    A PReLU with a slope for every position, which the Edge TPU does not have, gets one slope for each channel: their
    mean. Activations that make an output of the model, and those inside recurrent layers, are skipped.

    With `join`, activations that are a layer or several operators stay, and are joined with their replacements.
    """
    regions = find_regions(network)
    in_regions = {call for region in regions for call in region.calls}
    outputs = set(tensors_in(network.outputs))
    order = [layer.name for layer, call in network.in_order() if not call]
    replaced: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    edited = network
    for region in regions:  # from the last one: the input of a region may be the output of an earlier one
        if region.kind not in kinds:
            continue
        if region.output in outputs:
            skipped[region.output.layer] = _output_reason(region.kind)
        else:
            replaced.setdefault(region.kind, []).append(region.output.layer)
            edited = _replace_region(edited, region, by, join)
    for name in order:
        layer = network.layers[name]
        if any((name, call) in in_regions for call in range(len(layer.calls))):
            continue
        if spec_of(layer) == PRELU and layer.calls:
            shape = network.shapes[LayerOutput(name)]
            candidate, replaced_kinds = _with_channel_slopes(layer, shape, kinds)
        else:
            candidate, replaced_kinds = _with_relus(layer, kinds, by)
        reason = _skip_reason(layer, replaced_kinds, outputs)
        if reason is not None:
            skipped[name] = reason
        elif replaced_kinds:
            before = edited.layers[name]
            calls = before.calls if before.kind == candidate.kind else plain_calls(before)
            candidate = replace(candidate, calls=calls)
            if join is None or spec_of(layer).kernels:
                edited = edited.edited({name: candidate}, {})
            else:
                outputs_of = [LayerOutput(name, call) for call in range(len(layer.calls))]
                edited = _joined(edited, candidate, by, outputs_of, join)
            replaced.setdefault(replaced_kinds[0], []).append(name)
    ordered = {kind: tuple(sorted(set(names), key=order.index)) for kind, names in replaced.items()}
    return without_unused_calls(edited), Replacements(ordered, skipped)


def _replace_region(network: Network, region: Region, by: str, join: Join | None) -> Network:
    name = network.free_name(f"{region.output.layer}_{by}")
    layer = ACTIVATION.layer(name, ({"args": [region.input], "kwargs": {}},), activation=by)
    if join is not None:
        return _joined(network, layer, by, [region.output], join)
    edited = network.edited({}, {region.output: LayerOutput(name)}).edited({name: layer}, {})
    return replace(edited, shapes={**edited.shapes, LayerOutput(name): network.shapes[region.output]})


def _joined(network: Network, layer: Layer, by: str, outputs: Sequence[LayerOutput], join: Join) -> Network:
    """Add a replacement, one call for each of the outputs, and a layer that joins both; it is read instead of them."""
    name = network.free_name(layer.name if layer.name not in network.layers else f"{layer.name}_{by}")
    both = network.free_name(f"{name}_joined")
    calls = tuple({"args": [[output, LayerOutput(name, call)]], "kwargs": {}} for call, output in enumerate(outputs))
    moved = {output: LayerOutput(both, call) for call, output in enumerate(outputs)}
    shapes = {
        LayerOutput(new, call): network.shapes[output] for call, output in enumerate(outputs) for new in (name, both)
    }
    layer = replace(layer.configured(name=name), name=name)
    edited = network.edited({}, moved).edited({name: layer, both: replace(join(both), calls=calls)}, {})
    return replace(edited, shapes={**edited.shapes, **shapes})


def _output_reason(kind: str) -> str:
    return f"{kind} makes an output of the model, whose meaning would change"


def _skip_reason(layer: Layer, replaced_kinds: list[Activation], outputs: set[LayerOutput]) -> str | None:
    """Return why a layer's activation is not replaced; None where it is, or where there is nothing to replace."""
    inner = _activation_setting(layer.config)
    if spec_of(layer).recurrent:
        names = (canonical_name(name) for name in (inner, layer.config.get("recurrent_activation")) if name)
        replaceable = next((name for name in names if name in NAMED), None)
        return f"{replaceable} is inside a recurrent layer" if replaceable else None
    if replaced_kinds and any(tensor.layer == layer.name for tensor in outputs):
        return _output_reason(replaced_kinds[0])
    other = inner or spec_of(layer).activation(layer)
    if other and not replaced_kinds and other not in NAMED and other.lower() not in SINGLE_OPERATOR:
        return f"{other} is not an activation that a ReLU can replace"
    for wrapped in _wrapped_layers(layer, "layer", "cell", "cells", "layers"):
        reason = _skip_reason(wrapped, [], set())
        if reason is not None:
            return reason
        nested = None if "layer" in layer.config else _named(wrapped)
        if nested is not None:
            return f"{nested} is inside a {layer.kind}, which is not searched"
    return None


def _activation_setting(config: Mapping[str, Any]) -> str | None:
    """Return the name of the activation in a layer's settings; of an object its function or class."""
    activation = config.get("activation")
    if isinstance(activation, dict):
        return _function_of_object(activation)
    return canonical_name(activation) if isinstance(activation, str) else None


def _function_of_object(entry: Mapping[str, Any]) -> str:
    """Return the function that a serialized object applies; its class name where it is not a Keras class."""
    kind = str(entry.get("class_name"))
    config = entry.get("config")
    spec = spec_named(kind)
    if spec == RELU and isinstance(config, dict):
        return "leaky_relu" if config.get("negative_slope") else "relu"
    if kind == "function":
        return str(config)
    return getattr(spec, "applies", kind)


def _named(layer: Layer) -> Activation | None:
    """Return the activation that a layer is or has, if it is one that a ReLU can replace."""
    return NAMED.get(_function_of_layer(layer) or _activation_setting(layer.config) or "")


def _function_of_layer(layer: Layer) -> str | None:
    """Return the function of a layer or operation that applies one function and has no setting for it."""
    spec = spec_of(layer)
    return None if spec == ACTIVATION else spec.activation(layer)


# --- activations that are a layer, or a setting of one -----------------------------------


def _with_relus(layer: Layer, kinds: Collection[Activation], by: str) -> tuple[Layer, list[Activation]]:
    """Return a layer, and the layer that it wraps, with ReLUs instead of activations, and their kinds."""
    spec = spec_of(layer)
    if spec == RELU:
        return _plain_relu(layer, kinds, by)
    if spec.recurrent:
        return layer, []
    kind = NAMED.get(_function_of_layer(layer) or "")
    if kind is not None:
        return (ACTIVATION.layer(layer.name, (), activation=by), [kind]) if kind in kinds else (layer, [])
    replaced_kinds: list[Activation] = []
    setting = NAMED.get(_activation_setting(layer.config) or "")
    if setting is not None and setting in kinds:
        replaced_kinds.append(setting)
        layer = layer.configured(activation=by)
    for wrapped in _wrapped_layers(layer, "layer"):
        changed, more = _with_relus(wrapped, kinds, by)
        if more:
            layer = layer.configured(layer=changed.entry)
            replaced_kinds += more
    return layer, replaced_kinds


def _wrapped_layers(layer: Layer, *keys: str) -> list[Layer]:
    """Return the layers in the settings of one such as TimeDistributed or RNN, without calls and weights."""
    values = [layer.config.get(key) for key in keys]
    entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    return [
        Layer(str(entry["config"].get("name")), str(entry.get("class_name")), entry, (), ())
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("config"), dict)
    ]


def _plain_relu(layer: Layer, kinds: Collection[Activation], by: str) -> tuple[Layer, list[Activation]]:
    """Return a ReLU without slope and threshold, and the kind that it was."""
    slope = layer.config.get("negative_slope")
    threshold = layer.config.get("threshold")
    kind: Activation = "leaky_relu" if slope else "threshold"
    if not (slope or threshold) or kind not in kinds:
        return layer, []
    limit = layer.config.get("max_value") or (6.0 if by == "relu6" else None)
    return layer.configured(negative_slope=0.0, threshold=0.0, max_value=limit), [kind]


def _with_channel_slopes(
    layer: Layer, shape: tuple[int | None, ...], kinds: Collection[Activation]
) -> tuple[Layer, list[Activation]]:
    """Return a PReLU with one slope for each channel, the same at all positions."""
    (slopes,) = layer.weights
    if "prelu" not in kinds or all(size == 1 for size in slopes.shape[:-1]):
        return layer, []
    mean = slopes.mean(axis=tuple(range(slopes.ndim - 1)), keepdims=True)
    by_channel = np.broadcast_to(mean, (*mean.shape[:-1], shape[-1] or mean.shape[-1]))  # the channels may share one
    shared_axes = list(range(1, len(shape)))
    return replace(layer.configured(shared_axes=shared_axes), weights=(by_channel.astype(slopes.dtype),)), ["prelu"]


def plain_calls(layer: Layer) -> tuple[Any, ...]:
    """Return the calls of a layer without the arguments that only this kind of layer or operation takes."""
    return tuple({"args": [layer.inputs(call)[0]], "kwargs": {}} for call in range(len(layer.calls)))


# --- activations that are written as several operators -----------------------------------


def find_regions(network: Network) -> list[Region]:
    """Return the activations that are written as several operators, the last one first."""
    regions: list[Region] = []
    claimed: set[Call] = set()
    for layer, call in reversed(list(network.in_order())):
        output = LayerOutput(layer.name, call)
        if (layer.name, call) in claimed or not _elementwise(network, output):
            continue
        region = next(_regions_before(network, output, claimed), None)
        if region is not None:
            regions.append(region)
            claimed |= region.calls
    return regions


def _regions_before(network: Network, output: LayerOutput, claimed: set[Call]) -> Iterator[Region]:
    """Yield the activations that make a tensor, the one with the fewest operators first."""
    for tensor in _ancestors(network, output):
        calls = _calls_between(network, tensor, output)
        if calls is None or len(calls) < 2 or calls & claimed:
            continue
        kind = recognize(_function_values(network, tensor, output, calls))
        is_composition = kind == "tailed" and any(_named(network.layers[name]) for name, _ in calls)
        if kind is not None and not is_composition:  # a SiLU of a SiLU is two activations
            yield Region(kind, tensor, output, calls)


def _ancestors(network: Network, output: LayerOutput) -> list[LayerOutput]:
    """Return the tensors that a tensor is computed from by elementwise operators, the nearest first."""
    ancestors: dict[LayerOutput, None] = {}
    waiting = [output]
    for _ in range(MAX_OPERATORS):
        elementwise = (tensor for tensor in waiting if _elementwise(network, tensor))
        waiting = list(dict.fromkeys(source for tensor in elementwise for source in network.sources(tensor)))
        ancestors.update(dict.fromkeys(waiting))
    return list(ancestors)


def _calls_between(network: Network, source: LayerOutput, output: LayerOutput) -> frozenset[Call] | None:
    """Return the calls that compute `output` from `source`; None if `output` depends on another tensor as well."""
    calls: set[Call] = set()
    waiting = [output]
    while waiting:
        tensor = waiting.pop()
        if tensor == source or (tensor.layer, tensor.call) in calls:
            continue
        if not _elementwise(network, tensor) or len(calls) >= MAX_OPERATORS:
            return None
        calls.add((tensor.layer, tensor.call))
        waiting += network.sources(tensor)
    return frozenset(calls)


def _elementwise(network: Network, tensor: LayerOutput) -> bool:
    """Whether each value of a tensor depends on the input values at its index alone, in the same way everywhere."""
    layer = network.layers[tensor.layer]
    if not layer.calls or not _is_elementwise(layer, spec_of(layer)):
        return False
    inputs = layer.inputs(tensor.call)
    same_shape = all(network.shapes[source] == network.shapes[tensor] for source in inputs)
    plain = (type(None), bool, int, float, LayerOutput)
    return bool(inputs) and same_shape and all(isinstance(value, plain) for value in _leaves(layer.calls[tensor.call]))


def _is_elementwise(layer: Layer, spec: LayerSpec) -> bool:
    if spec == ACTIVATION:
        return _activation_setting(layer.config) in ELEMENTWISE
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


def _function_values(network: Network, source: LayerOutput, output: LayerOutput, calls: frozenset[Call]) -> Values:
    """Return the values of a region's function at POINTS."""
    entrance = INPUT.layer("points", (), batch_shape=(None, 1), dtype="float32")
    points = LayerOutput("points")
    layers = {name: network.layers[name] for name, _ in calls}
    shapes: dict[LayerOutput, tuple[int | None, ...]] = {LayerOutput(name, call): (1,) for name, call in calls}
    region = replace(network, name="region", layers=layers, inputs=points, outputs=[output])
    region = region.edited({"points": entrance}, {source: points})
    region = replace(region, outputs=[output], shapes={**shapes, points: (1,)})
    values = build(without_unused_calls(region))(POINTS.astype(np.float32).reshape(-1, 1))
    return np.asarray(keras().tree.flatten(values)[0], np.float64).ravel()
