"""A detector in a quantized .tflite file: recognized in float, and cut in integers.

The file keeps its integers up to its last convolutions, so nothing is calibrated again. These convolutions become the
outputs: boxes and scores have their own scales there, which they lose where an exporter joins them in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.model.detectors.cutting import by_tensor, channels_of
from compress.model.detectors.families import family_of
from compress.model.detectors.recognition import RecognizedDetector, recognize
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes.fold import unfolded
from compress.model.tflite import edit as edits
from compress.model.tflite.dequantization import is_quantized, quantized_input
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Tensor


@dataclass(frozen=True)
class QuantizedDetector:
    """A quantized detector.

    Attributes:
        graph: the model that ends at its last convolutions; None if the file changes their results before the code of
            boxes, which its integers do not allow to cut off.
        specification: how its outputs are decoded (`deploy.contract.detection`).
        classes: the number of classes.
        box_error: see `RecognizedDetector`.
        notes: what was assumed or left out.
    """

    graph: Graph | None
    specification: Mapping[str, Any]
    classes: int
    box_error: float | None
    notes: tuple[str, ...]


def quantized_detector(
    graph: Graph, network: Network, tensors: Mapping[LayerOutput, int], settings: str | Mapping[str, Any] = "auto"
) -> QuantizedDetector | None:
    """Return a quantized graph as a detector; None if its outputs are not those of a detector.

    Args:
        graph: the quantized graph.
        network: the network that was made from the graph in float.
        tensors: the index of the tensor of the graph that each tensor of the network stands for.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.

    Raises:
        ValueError: the family is unknown, or a key of `settings` is invalid.
    """
    family, changes = family_of(settings)
    detector = recognize(unfolded(network), family, rounded=True)
    if detector is None:
        return None
    specification = {**detector.specification, **changes}
    cut = _cut(graph, tensors, detector)
    return QuantizedDetector(cut, specification, detector.classes, detector.box_error, detector.notes)


def may_be_detector(graph: Graph) -> bool:
    """Return whether the input is one image, and an output has several values for each of several locations."""
    image = len(graph.inputs) == 1 and len(graph.tensors[graph.inputs[0]].shape) == 4
    return image and any(len(graph.tensors[index].shape) > 2 for index in graph.outputs)


def _cut(graph: Graph, indices: Mapping[LayerOutput, int], detector: RecognizedDetector) -> Graph | None:
    """Return the quantized graph with the outputs of the detector's specification.

    None if a part is not made of unchanged channels with one scale.
    """
    edit = Edit(graph)
    outputs = []
    for entry in detector.specification["tensors"]:
        roles = detector.maps[entry["map"]]
        channels = channels_of(roles, entry["part"])
        tensors = [graph.tensors[indices[tensor]] for tensor in roles.probe.head.tensors if tensor in indices]
        is_cut = len(tensors) == len(roles.probe.head.tensors) and all(map(is_quantized, tensors))
        if not is_cut or not roles.lines.keys().isdisjoint(channels):
            return None
        parts = [_slices(edit, tensors[number], numbers) for number, numbers in by_tensor(roles.probe.head, channels)]
        joined = _joined(edit, [part for slices in parts for part in slices])
        if joined is None:
            return None
        outputs.append(joined)
    edit.outputs = outputs
    cut = edit.graph()
    source = quantized_input(cut)
    return edits.extract(cut, _operators_between(cut, source), [source], cut.outputs)


def _slices(edit: Edit, tensor: Tensor, channels: Sequence[int]) -> list[Tensor]:
    """Return tensors that together have some channels of a tensor, in their order."""
    if list(channels) == list(range(tensor.shape[-1])):
        return [tensor]
    breaks = np.flatnonzero(np.diff(channels) != 1) + 1
    slices = []
    for run in np.split(np.asarray(channels), breaks):
        shape = (*tensor.shape[:-1], len(run))
        begin = edit.integers("begin", *[0] * len(shape[:-1]), int(run[0]))
        index = edit.like(tensor, f"channel_{run[0]}", shape=shape)
        edit.add("SLICE", [tensor.index, begin, edit.integers("size", *shape)], [index], edit.options("SliceOptions"))
        slices.append(replace(tensor, index=index, shape=shape))
    return slices


def _joined(edit: Edit, parts: Sequence[Tensor]) -> int | None:
    """Return the tensor that has the channels of all parts; None if their scales differ."""
    first = parts[0]
    if len(parts) == 1:
        return first.index
    if any(part.quantization != first.quantization for part in parts):
        return None
    shape = (*first.shape[:-1], sum(part.shape[-1] for part in parts))
    index = edit.like(first, "joined", shape=shape)
    options = edit.options("ConcatenationOptions", axis=len(shape) - 1)
    edit.add("CONCATENATION", [part.index for part in parts], [index], options)
    return index


def _operators_between(graph: Graph, source: int) -> set[int]:
    """Return the operators that the outputs need, without those before `source`."""
    needed: set[int] = set()
    waiting = list(graph.outputs)
    while waiting:
        index = waiting.pop()
        operator = graph.producer.get(index)
        if index != source and operator is not None and operator.index not in needed:
            needed.add(operator.index)
            waiting += operator.inputs
    return needed
