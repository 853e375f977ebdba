"""Quantizer placement: the tensors that get a range, and which of them share one.

The model is in canonical form (`ir.passes.fold`). TFLite fuses a ReLU into the layer
before it, so only its output is rounded; pooling, reshaping and the like keep the range
of their input; all parts of a concatenation share one range. Integers and booleans
are not rounded.
"""

from __future__ import annotations

from collections.abc import Collection

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, subnetwork, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.layer_specs.functions import FUSED, PRESCRIBED_RANGES, SATURATION


def find(network: Network) -> dict[LayerOutput, str]:
    """Return the name of the point of every tensor that is rounded; tensors that share a range share a name."""
    consumers = network.consumers()
    outputs = network.outputs_by_call()
    model_outputs = set(tensors_in(network.outputs))
    source: dict[LayerOutput, LayerOutput] = {}  # the tensor whose range this one has
    order = list(network.in_order())

    def range_source(layer: Layer, call: int, tensor: LayerOutput) -> LayerOutput:
        spec = spec_of(layer)
        readers = consumers.get(tensor, [])
        if spec.output_range == "input":
            return source.get(layer.inputs(call)[0], tensor)
        if spec.fuses_relu and len(readers) == 1 and tensor not in model_outputs:
            name, number = readers[0]
            if _activation(network.layers[name]) in FUSED:
                return LayerOutput(name, number)
        return tensor

    for layer, call in order:
        for tensor in outputs[layer.name, call]:
            is_unused = tensor.output and not consumers.get(tensor) and tensor not in model_outputs
            if tensor.output not in layer.integers and not is_unused:
                source[tensor] = range_source(layer, call, tensor)
    shared = _shared(order, source)
    names = {}
    for tensor in source:
        if source[tensor] == tensor:
            point = shared.get(tensor, tensor)
            names[tensor] = point.layer
            if point.call or point.output:
                names[tensor] += f":{point.call}"
            if point.output:
                names[tensor] += f":{point.output}"
    return names


def _shared(order: list[tuple[Layer, int]], source: dict[LayerOutput, LayerOutput]) -> dict[LayerOutput, LayerOutput]:
    """Return by point of a concatenation the point that represents all of them."""
    leader: dict[LayerOutput, LayerOutput] = {}

    def lead(tensor: LayerOutput) -> LayerOutput:
        while leader.get(tensor, tensor) != tensor:
            tensor = leader[tensor]
        return tensor

    for layer, call in order:
        if spec_of(layer).output_range == "joined":
            joined = [tensor for tensor in (*layer.inputs(call), LayerOutput(layer.name, call)) if tensor in source]
            for tensor in joined:
                leader[lead(source[tensor])] = lead(source[joined[-1]])
    return {tensor: lead(tensor) for tensor in leader}


def fixed(network: Network, points: dict[LayerOutput, str]) -> dict[str, tuple[float, float]]:
    """Return the ranges that TFLite prescribes, by point; of a shared point only if all its parts have the same one."""
    prescribed: dict[str, set[tuple[float, float] | None]] = {}
    for tensor, name in points.items():
        layer = network.layers[tensor.layer]
        if spec_of(layer).output_range != "joined":
            prescribed.setdefault(name, set()).add(PRESCRIBED_RANGES.get(_activation(layer) or ""))
    return {name: one for name, (one, *others) in prescribed.items() if one is not None and not others}


def saturating(network: Network, points: Collection[LayerOutput]) -> dict[LayerOutput, tuple[float, float]]:
    """Return the limits beyond which the value of a tensor makes no difference, by tensor.

    Only activation functions read it that saturate there. A range need not hold values beyond the limits, so its steps
    can be finer: in front of a SiLU, -100 gives the same as -8.5.
    """
    consumers, model_outputs = network.consumers(), set(tensors_in(network.outputs))
    limits: dict[LayerOutput, tuple[float, float]] = {}
    for tensor in points:
        reader_limits = [
            SATURATION.get(_activation(network.layers[name]) or "") for name, _ in consumers.get(tensor, [])
        ]
        known = [interval for interval in reader_limits if interval is not None]
        if known and len(known) == len(reader_limits) and tensor not in model_outputs:
            limits[tensor] = min(low for low, _ in known), max(high for _, high in known)
    return limits


def _activation(layer: Layer) -> str | None:
    return spec_of(layer).activation(layer)


def repeated_softmax(network: Network) -> tuple[str, str] | None:
    """Return the names of two layers at the end of a network of which each applies a softmax; None without them."""
    for tensor in tensors_in(network.outputs):
        last = network.layers[tensor.layer]
        if not _applies_softmax(last):
            continue
        source = last.inputs(tensor.call)[0]
        while spec_of(network.layers[source.layer]).output_range == "input":  # a reshape, for example
            source = network.sources(source)[0]
        before = network.layers[source.layer]
        if _applies_softmax(before):
            return before.name, last.name
    return None


def _applies_softmax(layer: Layer) -> bool:
    return "softmax" in (_activation(layer), layer.config.get("activation"))


def without_softmax(network: Network) -> Network:
    """Return the network up to its logits: a softmax or sigmoid at the end hides differences when it saturates."""
    outputs = list(tensors_in(network.outputs))
    ends = [network.layers[tensor.layer] for tensor in outputs]
    inputs = [end.inputs(tensor.call)[0] if end.calls else tensor for end, tensor in zip(ends, outputs, strict=True)]
    cut = [
        before if _activation(end) in ("softmax", "sigmoid") else tensor
        for end, before, tensor in zip(ends, inputs, outputs, strict=True)
    ]
    return network if cut == outputs else subnetwork(network, cut)
