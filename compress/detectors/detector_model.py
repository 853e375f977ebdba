"""A detector of another program as a model that can be trained, quantized and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.detectors.cutting import cut
from compress.detectors.families import family_of
from compress.detectors.recognition import recognize
from compress.errors import ModelError
from compress.ir import keras_graph
from compress.ir.passes.fold import unfolded


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
    kept: Sequence[int] | None = None,
    size: Sequence[int] | None = None,
) -> DetectorModel | None:
    """Return a model as a detector; None if its outputs are not those of a detector.

    Args:
        model: a Keras model with one input of a fixed size.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.
        kept: the classes to keep, by number; None for all.
        size: height and width of the input that the result has; None for those of the model.

    Raises:
        ModelError: there is no such class, the head has a form that cannot be cut, or the model cannot have this size.
    """
    family, changes = family_of(settings)
    network = unfolded(keras_graph.read(model))
    found = recognize(network, family)
    if found is None:
        return None
    if kept is not None and not all(0 <= number < found.classes for number in kept):
        raise ModelError(f"keep_classes names a class that the model does not have: it has {found.classes} classes")
    ending = keras_graph.build(cut(network, found, kept))
    classes = found.classes if kept is None else len(kept)
    specification, notes = {**found.specification, **changes}, found.notes
    before = ending.inputs[0].shape[1:3]
    if size is not None and tuple(size) != before:
        ending, specification = _resized(ending, specification, size)
        notes = (*notes, f"the input is changed from {before[0]} x {before[1]} to {size[0]} x {size[1]}")
    return DetectorModel(ending, specification, classes, found.box_error, notes)


def _resized(model: Any, specification: dict[str, Any], size: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return a model that ends at its last convolutions, and its specification, with another size of the input."""
    wanted = f"cannot have an input of {size[0]} x {size[1]}"
    if any("cells" not in entry for entry in specification["maps"]):
        raise ModelError(f"{wanted}: its anchors are listed one by one for the size that it has")
    before = model.inputs[0].shape[1:3]
    resized = keras_graph.with_input_shape(model, (*size, model.inputs[0].shape[-1]))
    shapes = {tuple(old.shape[1:3]): new.shape[1:3] for old, new in zip(model.outputs, resized.outputs, strict=True)}
    maps = []
    for entry in specification["maps"]:
        cells = shapes.get(tuple(entry["cells"]))
        if cells is None:
            raise ModelError(f"{wanted}: its outputs are not the maps of its detector")
        scaled = [
            [side * b / s for side, b, s in zip(box, before, size, strict=True)] for box in entry.get("boxes", ())
        ]
        maps.append({**entry, "cells": list(cells), **({"boxes": scaled} if scaled else {})})
    changed = {"maps": maps} | ({"input_size": list(size)} if specification.get("input_size") else {})
    return resized, {**specification, **changed}
