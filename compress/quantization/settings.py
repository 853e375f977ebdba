"""Settings of quantization: calibration, post-training quantization (PTQ), quantization-aware training (QAT)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.settings import Settings


class Calibration(Settings):
    """The calibration samples."""

    select: Literal["balanced", "random", "stratified", "hardness", "coverage"] = "balanced"
    """balanced: as many of each class as possible; random; stratified: the classes in their proportions; hardness:
    the samples with the largest errors of the float model; coverage: samples that are far from each other, in the
    features of the model's last layer."""


class PostTrainingSettings(Settings):
    """Settings of post-training quantization."""

    search: Literal["auto", "full"] = "auto"
    """auto: candidates are compared in a simulation, and those that change next to nothing are not tried. full: every
    candidate is converted and run as a file, which takes several times as long."""
    ranges: Literal["auto", "minmax", "sample_percentile", "percentile", "mse", "entropy"] = "auto"
    """The method that chooses activation ranges; auto: the one that agrees best with the float model."""
    equalize: Literal["auto", "off"] = "auto"
    """auto: cross-layer equalization (the same function with scaled channels) if it helps; never if weights are
    clustered."""
    correct_bias: Literal["auto", "off"] = "auto"
    """auto: biases that correct the shift of each layer's mean output by rounding, if they help."""
    rounding: Literal["nearest", "adaround"] = "nearest"
    """adaround: each weight is rounded up or down as is best for the layer's output; this takes minutes."""
    io: Literal["int8", "uint8"] = "int8"
    """Type of the file's input and output."""


class RoundedTraining(Settings):
    """How quantization-aware training treats ranges and batch norm."""

    ranges: Literal["averaged", "learned", "fixed"] = "averaged"
    """Activation ranges: averaged over the batches, learned by gradient, or fixed as calibration chose them."""
    batch_norm: Literal["folded", "trained"] = "folded"
    """folded: into the weights, before the training. trained: with each batch's mean and variance."""
    freeze: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Last part of the training, in which ranges and batch norm no longer change; only weights do."""
