"""What training with rounding can be told, beside what every training can."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.settings import Settings


class Calibration(Settings):
    """Which samples ranges are taken from."""

    select: Literal["balanced", "random", "stratified", "hardness", "coverage"] = "balanced"
    """balanced: as many of each class as there are; random; stratified: the classes in their proportions; hardness:
    what the float model is most wrong about; coverage: what is far from each other, in what its last layer is given."""


class RoundedTraining(Settings):
    """How a network is trained that rounds as its 8-bit file will."""

    ranges: Literal["averaged", "learnt", "held"] = "averaged"
    """Activation ranges: averaged over the batches, learnt by gradient, or held as calibration found them."""
    batch_norm: Literal["folded", "trained"] = "folded"
    """folded: into the weights, before the training. trained: on, from each batch's mean and variance."""
    settle: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Last part of the training in which ranges and batch norm stand still, and only weights move."""
