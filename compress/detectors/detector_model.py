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
    model: Any, settings: str | Mapping[str, Any] = "auto", kept: Sequence[int] | None = None
) -> DetectorModel | None:
    """Return a model as a detector; None if its outputs are not those of a detector.

    Args:
        model: a Keras model with one input of a fixed size.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.
        kept: the classes to keep, by number; None for all.

    Raises:
        ModelError: there is no such class, or the head has a form that cannot be cut.
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
    return DetectorModel(ending, {**found.specification, **changes}, classes, found.box_error, found.notes)
