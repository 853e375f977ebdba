"""A detector of another program as a model that can be trained, quantized and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.core.errors import ModelError
from compress.model.detectors.class_names import COCO_CLASSES
from compress.model.detectors.cutting import cut
from compress.model.detectors.families import family_of
from compress.model.detectors.recognition import recognize
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import unfolded


@dataclass(frozen=True)
class DetectorModel:
    """A detector that ends at its last convolutions.

    Attributes:
        model: the Keras model.
        specification: how its outputs are decoded (`deploy.contract.detection`).
        classes: the number of classes.
        box_error: the largest difference between the boxes of the file and those of the decoding, as a fraction of the
            image or the box; None if the file does not decode its boxes.
        notes: what was assumed or left out.
    """

    model: Any
    specification: Mapping[str, Any]
    classes: int
    box_error: float | None
    notes: tuple[str, ...]


def detector_model(
    model: Any,
    settings: str | Mapping[str, Any] = "auto",
    kept: Sequence[int | str] | None = None,
    size: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    rounded: bool = False,
) -> DetectorModel | None:
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
    return DetectorModel(ending, specification, classes, detector.box_error, notes)


def _numbers(kept: Sequence[int | str], classes: int, names: Sequence[str] | None) -> list[int]:
    """Return the numbers of the classes to keep.

    Raises:
        ModelError: one does not exist or is there twice, or the names of the classes are not known.
    """
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
