"""Settings of quantization: post-training quantization (PTQ), quantization-aware training (QAT)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.core.settings import Settings


class PostTrainingSettings(Settings):
    """Settings of post-training quantization."""

    ranges: Literal["auto", "minmax", "sample_percentile", "percentile", "mse", "entropy"] = "auto"
    """How activation ranges are chosen. auto: the method that agrees best with the float model; for a detector also the
    mean squared error in which each value counts by its effect on scores and boxes."""
    equalize: Literal["auto", "off"] = "auto"
    """auto: apply cross-layer equalization if it helps. It does not change the function of the model. It is not applied
    to clustered weights."""
    separate_gates: Literal["auto", "off"] = "auto"
    """auto: compute the gate of a SiLU or hard-swish (x * sigmoid(x)) with a copy of the layer in front of it, if that
    helps: its large and small channels then get steps of their own. The copy costs its MACs again; the function stays
    the same. It needs `equalize: auto`."""
    correct_bias: Literal["auto", "off"] = "auto"
    """auto: correct biases for the median error that quantization causes in each layer, if it helps."""
    rounding: Literal["nearest", "adaround"] = "nearest"
    """nearest: round each weight to the nearest step. adaround: round up or down as is best for the layer's output;
    takes minutes."""
    io: Literal["int8", "uint8"] = "int8"
    """Type of the file's input and output."""


class RoundedTraining(Settings):
    """Ranges and batch norm in quantization-aware training."""

    ranges: Literal["averaged", "learned", "fixed"] = "averaged"
    """Activation ranges in the training. averaged: moving average over the batches. learned: trained by gradient.
    fixed: as calibrated."""
    batch_norm: Literal["folded", "trained"] = "folded"
    """folded: folded into the weights before the training. trained: updated from the mean and variance of each
    batch."""
    freeze: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the training, at its end, in which ranges and batch norm are frozen and only weights are trained."""
