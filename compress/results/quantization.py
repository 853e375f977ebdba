"""The results of quantization: candidates, errors of tensors, and rewrites for the compiler of the target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A candidate that was compared with the float model.

    Attributes:
        step: the kind of change.
        choice: the change.
        samples: held-out samples that it was run on.
        snr_db: mean over the samples that all candidates were run on of the logits' signal-to-noise ratio against the
            float model.
        agreement: share of these samples with the same largest output; of a detector, of the objects that both find.
        kept: whether it is in the plan.
        difference_db: of a detector, the mean over these samples of the energy by which its probabilities and boxes
            differ from the float model's, in dB: lower is better.
    """

    step: str
    choice: str
    samples: int
    snr_db: float
    agreement: float
    kept: bool
    difference_db: float | None = None


@dataclass(frozen=True)
class Skipped:
    """A candidate that was not tried: the kind of change, the change, and the reason for people."""

    step: str
    choice: str
    reason: str


@dataclass(frozen=True)
class LayerError:
    """One rounded tensor, or the weights or the bias shifts of one layer.

    Attributes:
        point: its name in the plan; the layer's name and a suffix for the rounding of weights, and for bias shifts.
        kind: the kind of layer that makes it.
        snr_db: its signal-to-noise ratio with everything before it rounded too; None for weights and shifts.
        share: the part of the error of the logits that rounding it alone causes, or that bias shifts add to the error
            of rounding everything, 0 if they correct it; all shares add up to 1.
        cause: the likely cause, or "".
        setting: the setting that would change it, or "".
    """

    point: str
    kind: str
    snr_db: float | None
    share: float
    cause: str
    setting: str


@dataclass(frozen=True)
class SeparatedGate:
    """An activation whose gate is computed by a copy of the layer in front of it, and the MACs of the copy."""

    activation: str
    copied: str
    macs: int


@dataclass(frozen=True)
class RewriteOutcome:
    """A rewrite for the compiler that was tried.

    Attributes:
        rewrite: the rewrite's name.
        op: the operator that it was tried on; "" for a rewrite of the whole graph.
        output: the name of that operator's output tensor.
        kept: whether the rewrite is in the result.
        steps: the largest difference of an output, in quantization steps; None if the operators could not be compared.
        tolerance: the allowed difference.
        reason: the reason why it was rejected, or the reference of the comparison; otherwise "".
    """

    rewrite: str
    op: str
    output: str
    kept: bool
    steps: float | None
    tolerance: int
    reason: str = ""


@dataclass(frozen=True)
class QuantizationRecord:
    """What `quantize` reports.

    Attributes:
        kept: the method of the result: ptq or qat.
        ranges: how the activation ranges were chosen, for people.
        agreement: the share of held-out samples on which the file agrees with the float model.
        warnings: what is unusual about the samples, the model or the result.
        layers: the rounded tensors, the one that costs most first.
    """

    calibration_samples: int
    kept: str = ""
    ranges: str = ""
    agreement: float | None = None
    warnings: tuple[str, ...] = ()
    tried: tuple[Trial, ...] = ()
    not_tried: tuple[Skipped, ...] = ()
    layers: tuple[LayerError, ...] = ()
    rewritten: tuple[RewriteOutcome, ...] = ()
    separated_gates: tuple[SeparatedGate, ...] = ()
