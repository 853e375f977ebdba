"""A detector of another program as a model that can be trained, quantized and packed: in Keras, or in integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from compress.core.errors import ModelError
from compress.model.detectors.cutting import by_tensor, channels_of, cut
from compress.model.detectors.families import COCO_CLASSES, family_of
from compress.model.detectors.recognition import DescribedDetector, RecognizedDetector, recognize
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes.fold import unfolded
from compress.model.tflite import edit as edits
from compress.model.tflite.dequantization import is_quantized, quantized_input
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Tensor

Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class DetectorModel(DescribedDetector, Generic[Model]):
    """A detector that ends at its last convolutions.

    Attributes:
        model: a Keras model, or the graph of a quantized file; None if the file changes the results of its last
            convolutions before the code of boxes, which its integers do not allow to cut off.
    """

    model: Model


def detector_model(
    model: Any,
    settings: str | Mapping[str, Any] = "auto",
    kept: Sequence[int | str] | None = None,
    size: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    rounded: bool = False,
) -> DetectorModel[Any] | None:
    """Return a model as a detector; None if its outputs are not those of a detector.

    Args:
        model: a Keras model with one input of a fixed size.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.
        kept: the classes to keep, by number or name; None for all.
        size: height and width of the input that the result has; None for those of the model.
        names: the names of the model's classes; None for those of COCO if it has as many.
        rounded: whether the model was made from a quantized file.

    Raises:
        ValueError: the family is unknown, or a key of `settings` is invalid.
        ModelError: a class does not exist, the head has a form that cannot be cut, or the model cannot have this size.
    """
    family, changes = family_of(settings)
    network = unfolded(keras_graph.read(model))
    detector = recognize(network, family, rounded=rounded)
    if detector is None:
        return None
    numbers = None if kept is None else _numbers(kept, detector.classes, names)
    ending = keras_graph.build(cut(network, detector, numbers))
    classes = detector.classes if numbers is None else len(numbers)
    specification, notes = {**detector.specification, **changes}, detector.notes
    if classes < detector.classes and specification["scores"] == "softmax":
        notes = (*notes, "the scores are a softmax: without the classes that are cut, the others have larger scores")
    before = ending.inputs[0].shape[1:3]
    if size is not None and tuple(size) != before:
        ending, specification = _resized(ending, specification, size)
        notes = (*notes, f"the input is changed from {before[0]} x {before[1]} to {size[0]} x {size[1]}")
    return DetectorModel(
        model=ending, specification=specification, classes=classes, box_error=detector.box_error, notes=notes
    )


def _numbers(kept: Sequence[int | str], classes: int, names: Sequence[str] | None) -> list[int]:
    if names is not None and len(names) != classes:
        raise ModelError(f"model.classes has {len(names)} names, and the model has {classes} classes")
    if names is None and classes == len(COCO_CLASSES):
        names = COCO_CLASSES
    numbers: list[int] = []
    for label in kept:
        if isinstance(label, str) and names is None:
            what = f"keep_classes: {label!r} is a name, and the names of the model's {classes} classes are not known"
            raise ModelError(what, hint="set model.classes, or use numbers")
        if isinstance(label, str) and label not in (names or ()):
            what = f"keep_classes: {label!r} is not a class of the model"
            raise ModelError(what, allowed=", ".join(names or ()), hint="set model.classes")
        number = label if isinstance(label, int) else list(names or ()).index(label)
        if not 0 <= number < classes:
            what = f"keep_classes: the model has no class {number}: it has {classes} classes"
            raise ModelError(what, allowed=f"0 to {classes - 1}")
        if number in numbers:
            raise ModelError(f"keep_classes: the class {label!r} is there twice", hint="remove one of the two")
        numbers.append(number)
    return numbers


def _resized(model: Any, specification: dict[str, Any], size: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return a model that ends at its last convolutions, and its specification, with another size of the input."""
    problem = f"cannot have an input of {size[0]} x {size[1]}"
    if any("cells" not in entry for entry in specification["maps"]):
        raise ModelError(f"{problem}: its anchors are listed one by one for the size that it has")
    before = model.inputs[0].shape[1:3]
    resized = keras_graph.with_input_shape(model, (*size, model.inputs[0].shape[-1]))
    shapes = {tuple(old.shape[1:3]): new.shape[1:3] for old, new in zip(model.outputs, resized.outputs, strict=True)}
    maps = []
    for entry in specification["maps"]:
        cells = shapes.get(tuple(entry["cells"]))
        if cells is None:
            raise ModelError(f"{problem}: its outputs are not the maps of its detector")
        scaled = [
            [side * b / s for side, b, s in zip(box, before, size, strict=True)] for box in entry.get("boxes", ())
        ]
        maps.append({**entry, "cells": list(cells), **({"boxes": scaled} if scaled else {})})
    changed = {"maps": maps} | ({"input_size": list(size)} if specification.get("input_size") else {})
    return resized, {**specification, **changed}


def quantized_detector(
    graph: Graph, network: Network, tensors: Mapping[LayerOutput, int], settings: str | Mapping[str, Any] = "auto"
) -> DetectorModel[Graph | None] | None:
    """Return a quantized graph as a detector; None if its outputs are not those of a detector.

    The file is recognized in float and cut in integers: the graph keeps its integers up to its last convolutions, so
    nothing is calibrated again. These convolutions become the outputs: boxes and scores have their own scales there,
    which they lose where an exporter joins them in one tensor.

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
    return DetectorModel(
        model=_cut_in_integers(graph, tensors, detector),
        specification={**detector.specification, **changes},
        classes=detector.classes,
        box_error=detector.box_error,
        notes=detector.notes,
    )


def may_be_detector(graph: Graph) -> bool:
    """Return whether the input is one image, and an output has several values for each of several locations."""
    image = len(graph.inputs) == 1 and len(graph.tensors[graph.inputs[0]].shape) == 4
    return image and any(len(graph.tensors[index].shape) > 2 for index in graph.outputs)


def _cut_in_integers(graph: Graph, indices: Mapping[LayerOutput, int], detector: RecognizedDetector) -> Graph | None:
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
