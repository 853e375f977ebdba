"""The phases of a training, and what they cost relative to each other.

A unit of cost is one sample that goes through the model. A training step goes through it about three times: forward,
and backward for the activations and for the weights.
"""

from __future__ import annotations

from typing import Protocol

from compress.core.progress import Phase
from compress.data.types import Data
from compress.learning.training.subset import Subset

BACKWARD = 3.0
"""Cost of a sample in a training step."""
BUILD = 2_000.0
"""Cost of building, tracing or converting a model once, measured with MobileNetV2 0.35@96; small models cost more."""
VALIDATION = Phase("validation", unit="sample")


def training_cost(data: Data, epochs: int, share: float = 1.0) -> float:
    """Return the cost of a training.

    Args:
        data: the data.
        epochs: number of epochs.
        share: the part of the training split that is trained on.
    """
    train, validation = (len(data.labels(split)) for split in ("train", "validation"))
    return BUILD + epochs * (BACKWARD * share * train + validation)


def validation_cost(data: Data) -> float:
    """Return the cost of running a model on the validation split."""
    return float(len(data.labels("validation")))


class Epochs(Protocol):
    """Settings of a training (`compress.learning.training.loop.TrainingSettings`)."""

    @property
    def epochs(self) -> int:
        """Number of epochs."""

    @property
    def subset(self) -> Subset | None:
        """The part of the training split that is trained on."""


def training(data: Data, settings: Epochs | None, name: str = "training") -> Phase:
    """Return the phase of a training with these settings, validation included; without settings it costs nothing."""
    if settings is None:
        return Phase(name, 0.0)
    share = 1.0 if settings.subset is None else settings.subset.share
    return Phase(name, training_cost(data, settings.epochs, share) + 2 * validation_cost(data))
