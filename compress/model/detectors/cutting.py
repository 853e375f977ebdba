"""The model of a detector that ends at its last convolutions: one output for each part of each map.

Parts that one convolution computes become several convolutions, so that each part has its own scale in 8 bits. The
transpositions, joins and functions after them are gone: numpy on the device does their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.detectors.probing import HeadMap
from compress.model.detectors.recognition import RecognizedDetector
from compress.model.detectors.roles import UNCHANGED, AnchorRoles, MapRoles
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, subnetwork
from compress.model.ir.layer_specs import CONCATENATE, spec_of


def cut(network: Network, detector: RecognizedDetector, kept: Sequence[int] | None = None) -> Network:
    """Return the network that ends at the last convolutions, with the outputs of the detector's specification.

    `kept` are the numbers of the classes to keep, in this order; None for all.
    """
    outputs = []
    for entry in detector.specification["tensors"]:
        roles = detector.maps[entry["map"]]
        name = f"{entry['part']}_{entry['map']}"
        channels = channels_of(roles, entry["part"], kept)
        network, tensor = _selected(network, roles, channels, name)
        outputs.append(tensor)
    result = subnetwork(network, outputs)
    return replace(result, name=network.name)


def channels_of(roles: MapRoles, part: str, kept: Sequence[int] | None = None) -> list[int]:
    """Return the channels of a part of the specification, anchor by anchor; for `kept` see `cut`."""
    channels: list[int] = []
    for anchor in roles.anchors:
        objectness = () if anchor.objectness is None else (anchor.objectness,)
        scores = _kept_scores(anchor, roles.background, kept)
        parts = {"boxes": anchor.boxes, "scores": scores, "objectness": objectness, "keypoints": anchor.keypoints}
        channels += parts[part]
    return channels


def _kept_scores(anchor: AnchorRoles, background: str | None, kept: Sequence[int] | None) -> list[int]:
    if kept is None:
        return list(anchor.scores)
    first = 1 if background == "first" else 0
    classes = [anchor.scores[first + number] for number in kept]
    if background is None:
        return classes
    return [anchor.scores[0], *classes] if background == "first" else [*classes, anchor.scores[-1]]


def _selected(network: Network, roles: MapRoles, channels: Sequence[int], name: str) -> tuple[Network, LayerOutput]:
    """Return the network with a tensor that has some channels of a map, in their order."""
    head = roles.probe.head
    starts = np.cumsum([0, *head.widths])
    runs = by_tensor(head, channels)
    parts = []
    for index, (tensor, tensor_channels) in enumerate(runs):
        free = name if len(runs) == 1 else f"{name}_{index}"
        network, part = _of_convolution(network, head.tensors[tensor], tensor_channels, free)
        lines = [roles.lines.get(channel + int(starts[tensor]), UNCHANGED) for channel in tensor_channels]
        network = _with_lines(network, part, np.asarray(lines, np.float32))
        parts.append(part)
    if len(parts) == 1:
        return network, parts[0]
    joined = CONCATENATE.layer(network.free_name(name), ({"args": [parts], "kwargs": {}},), axis=-1)
    shape = (*head.cells, len(channels))
    return _with(network, joined, shape)


def by_tensor(head: HeadMap, channels: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return channels of a map as the numbers of their tensors, each with its channels that follow each other."""
    starts = np.cumsum([0, *head.widths])
    runs: list[tuple[int, list[int]]] = []
    for channel in channels:
        tensor = int(np.searchsorted(starts, channel, side="right")) - 1
        if not runs or runs[-1][0] != tensor:
            runs.append((tensor, []))
        runs[-1][1].append(channel - int(starts[tensor]))
    return runs


def _of_convolution(
    network: Network, tensor: LayerOutput, channels: Sequence[int], name: str
) -> tuple[Network, LayerOutput]:
    """Return the network with a convolution that computes some channels of another one."""
    layer = network.layers[tensor.layer]
    spec = spec_of(layer)
    index = list(channels)
    free = network.free_name(name)
    shape = (*(network.shapes[tensor][:2]), len(index))
    renamed = {"name": free}
    if index == list(range(int(network.shapes[tensor][2] or 0))):
        single = replace(layer, name=free, calls=(layer.calls[tensor.call],)).configured(**renamed)
        return _with(network, single, shape)
    if not spec.width_setting or layer.config.get("groups", 1) != 1:
        raise ModelError(
            f"the layer {layer.name!r} computes several parts of the detector, each from some of its channels only",
            hint="export the model with a head that ends in ordinary convolutions",
        )
    kernels = list(layer.weights[: len(spec.kernels)])
    last = spec.kernels[-1]
    kernels[-1] = np.take(kernels[-1], index, axis=last.out)
    biases = [weights[index] for weights in layer.weights[len(spec.kernels) :]]
    single = replace(layer, name=free, calls=(layer.calls[tensor.call],), weights=(*kernels, *biases))
    return _with(network, single.configured(**renamed, **{spec.width_setting: len(index)}), shape)


def _with_lines(network: Network, tensor: LayerOutput, lines: NDArray[np.float32]) -> Network:
    """Return the network with a convolution that applies a line, [slope, start], to each of its channels."""
    if (lines == UNCHANGED).all():
        return network
    layer = network.layers[tensor.layer]
    spec = spec_of(layer)
    slopes, starts = lines.T
    *others, kernel = layer.weights[: len(spec.kernels)]
    scaled = spec.kernels[-1].times_outputs(kernel, slopes).astype(np.float32)
    biases = layer.weights[len(spec.kernels) :]
    bias = starts + (biases[0] * slopes if biases else 0)
    changed = replace(layer, weights=(*others, scaled, bias)).configured(use_bias=True)
    return network.edited({layer.name: changed}, {})


def _with(network: Network, layer: Layer, shape: tuple[int | None, ...]) -> tuple[Network, LayerOutput]:
    """Return the network with one more layer, and its output."""
    tensor = LayerOutput(layer.name)
    edited = network.edited({layer.name: layer}, {})
    return replace(edited, shapes={**edited.shapes, tensor: shape}), tensor
