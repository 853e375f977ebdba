"""What learning from teachers can be told; without TensorFlow, for the stages that have these settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.settings import Settings
from compress.training.loop import TrainingSettings


class Decoupled(Settings):
    """Decoupled distillation (Zhao et al., 2022)."""

    right: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of how sure the teacher is of the right class."""
    wrong: Annotated[float, Field(ge=0, le=1000)] = 8.0
    """Weight of what it says of the wrong classes among themselves; the paper's is 8 for small images."""


class Teaching(Settings):
    """How much is learnt from teachers, and how, beside the labels."""

    temperature: Annotated[float, Field(ge=1, le=100)] = 4.0
    """How much the scores are softened: 1 leaves them as they are."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of what teachers say in the loss; the rest is the labels'. With 1, nothing is learnt from labels."""
    decoupled: Decoupled | None = None
    """Weighs what the teacher says of the right class and of the wrong ones apart; by default it is one."""

    @model_validator(mode="after")
    def _labels_are_there(self) -> Self:
        if self.weight == 1 and self.decoupled:
            raise ValueError("decoupled needs the labels, to know the right class, but `weight: 1` uses none")
        return self

    def goes_with(self, settings: TrainingSettings) -> None:
        """Refuses settings of the training that need labels where none are used.

        Raises:
            ValueError: for pydantic, which adds where it stands.
        """
        if self.weight == 1 and settings.class_weights != "none":
            raise ValueError("class_weights: balanced needs the labels, but `weight: 1` uses none")


class Pair(Settings):
    """Two layers whose outputs are compared."""

    student: str
    """Name of the student's layer; a layer of a nested model is called outer_inner."""
    teacher: str
    """Name of the teacher's layer."""


class Features(Settings):
    """What is learnt from the first teacher's inner layers."""

    pairs: tuple[Pair, ...] = ()
    """[{student: layer, teacher: layer}, …]; by default the last feature maps before the heads, of one size if any."""
    match: Literal["projected", "attention"] = "projected"
    """projected: values, after a learnt 1x1 projection where channels differ. attention: where the maps are large."""
    weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight in the loss. Of values, 1 is the error of a student that knows no more than the mean of each channel."""
