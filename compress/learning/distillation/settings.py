"""Settings of knowledge distillation, for all stages that use it; without TensorFlow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.core.settings import Settings
from compress.learning.training.loop import TrainingSettings


class DistillationSettings(Settings):
    """The distillation loss, and its weight relative to the loss on the labels."""

    temperature: Annotated[float, Field(ge=1, le=100)] = 4.0
    """Temperature of the softmax. 1 leaves the scores unchanged; a higher value makes them softer."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Weight of the distillation loss; the loss on the labels has the rest. With 1, the labels are not used."""

    def check_training(self, settings: TrainingSettings) -> None:
        """Check that the training does not need labels if the distillation does not use them.

        Raises:
            ValueError: the training needs labels; pydantic adds the location of the setting.
        """
        if self.weight == 1 and settings.class_weights != "none":
            raise ValueError("class_weights: balanced needs the labels, but `weight: 1` uses none")


class Pair(Settings):
    """Two layers whose outputs are compared."""

    student: str
    """Name of the student's layer. A layer in a nested model is called outer_inner."""
    teacher: str
    """Name of the teacher's layer."""


class Features(Settings):
    """Feature distillation: the student also learns from inner layers of the first teacher."""

    pairs: tuple[Pair, ...] = ()
    """The layers to compare, [{student: layer, teacher: layer}, …]. By default the last feature maps before the heads,
    of the same size if possible."""
    match: Literal["projected", "attention"] = "projected"
    """projected: compare values, after a trained 1x1 projection where the channels differ. attention: compare where the
    feature maps are large."""
    weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight in the loss. With `projected`, a loss of 1 is the error of a student that predicts the mean of each
    channel."""
