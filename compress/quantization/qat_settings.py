"""What training with rounding can be told, beside what every training can."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.settings import Settings


class Calibration(Settings):
    """Which samples activation ranges are calibrated on."""

    select: Literal["balanced", "random", "stratified", "hardness", "coverage"] = "balanced"
    """balanced: the same number of each class where possible. random: at random. stratified: with the class proportions
    kept. hardness: the samples with the largest error of the float model. coverage: samples that are far from each
    other in the input of its last layer."""


class RoundedTraining(Settings):
    """How a network is trained with fake quantization."""

    ranges: Literal["averaged", "learnt", "held"] = "averaged"
    """Activation ranges in the training. averaged: moving average over the batches. learnt: trained by gradient. held:
    as calibrated."""
    batch_norm: Literal["folded", "trained"] = "folded"
    """folded: folded into the weights before the training. trained: updated from the mean and variance of each
    batch."""
    settle: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the training, at its end, in which ranges and batch norm are frozen and only weights are trained."""
