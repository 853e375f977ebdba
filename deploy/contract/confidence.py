"""Calibrated confidence of a classifier, and its answer "unknown".

A confidence is calibrated if answers of confidence 0.8 are right in 80% of the cases. Temperature scaling divides the
logits by one number before the softmax, and does not change the order of the classes. Source: Guo, Pleiss, Sun and
Weinberger, On Calibration of Modern Neural Networks, ICML 2017. An answer whose confidence is below the threshold is
"unknown".

The manifest of a bundle has the entry `confidence`::

    {"logits": FORM, "step": ..., "temperature": ..., "threshold": ..., "false_reject_rate": ..., "measured": {...}}

FORM says what the logits are computed from: "head" (the embedding, by the head in the bundle), "probabilities" or
"scores" (the output of the model). `step` is the quantization step of probabilities. `threshold` may be null.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from deploy.contract.preprocessing import Array

FORMS = ("head", "probabilities", "scores")
BINS = 15
"""Number of bins of the calibration error, as in the paper."""
TEMPERATURES = (0.01, 100.0)
"""The limits of the temperature."""
SMALLEST = 1e-7
"""The smallest probability of float outputs."""


class Confidence(NamedTuple):
    """The calibration of a classifier.

    Attributes:
        form: one of FORMS.
        temperature: the divisor of the logits.
        threshold: answers with a lower confidence are unknown; None: no answer is.
        step: the quantization step of probabilities; 0: they are not quantized.
    """

    form: str
    temperature: float
    threshold: Optional[float]
    step: float = 0.0

    def to_json(self) -> Any:
        """Return the entry of a manifest, without the measurements."""
        return {"logits": self.form, "step": self.step, "temperature": self.temperature, "threshold": self.threshold}


def parsed(entry: Any) -> Confidence:
    """Return the calibration in a manifest. Unknown keys, of later versions, are ignored.

    Raises:
        ValueError: the entry is invalid.
    """
    if not isinstance(entry, dict):
        raise ValueError("it is not a map")
    if entry.get("logits") not in FORMS:
        raise ValueError("logits is not one of: %s" % ", ".join(FORMS))
    limits = {"temperature": TEMPERATURES, "threshold": (0.0, 1.0), "step": (0.0, 1.0)}
    for name, (low, high) in limits.items():
        value = entry.get(name, 0.0)
        if name == "threshold" and value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError("%s cannot be %r" % (name, value))
    threshold = entry.get("threshold")
    number = None if threshold is None else float(threshold)
    return Confidence(entry["logits"], float(entry["temperature"]), number, float(entry.get("step", 0.0)))


def log_softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Return the logarithms of the probabilities [n, classes] of logits [n, classes]: float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def logits_of(scores: Array, form: str, step: float) -> Array:
    """Return logits from the dequantized class scores [n, classes] of a model.

    A quantized probability of 0 counts as half a step: its logarithm would be infinite.
    """
    if form != "probabilities":
        return scores
    return np.log(np.maximum(scores, step / 2 or SMALLEST))


def fitted_temperature(logits: Array, labels: Array) -> float:
    """Return the temperature with the smallest mean cross entropy of logits [n, classes] and correct classes, int [n].

    The correct class has the probability (n + 1) / (n + 2), not 1. Otherwise a few samples without an error would
    give a temperature of 0, and all answers a confidence of 1. Source: Platt, Probabilistic Outputs for Support
    Vector Machines, 1999.
    """
    low, high = np.log(TEMPERATURES)
    count, classes = logits.shape
    targets = np.full((count, classes), 1 / (count + 2) / max(classes - 1, 1))
    targets[np.arange(count), labels] = (count + 1) / (count + 2)
    for _ in range(4):  # the cross entropy has one minimum: it is convex in 1 / temperature
        candidates = np.linspace(low, high, 41)
        costs = [
            -(targets * log_softmax(logits, float(np.exp(candidate)))).sum(axis=1).mean() for candidate in candidates
        ]
        best = int(np.argmin(costs))
        low = candidates[max(best - 1, 0)]
        high = candidates[min(best + 1, len(candidates) - 1)]
    return float(np.clip(np.exp(candidates[best]), *TEMPERATURES))


def calibration_error(confidences: Array, right: Array) -> float:
    """Return the expected calibration error (ECE) of answers with confidences [n], of which some are `right`: bool [n].

    The BINS bins have equal widths.
    """
    bins = np.minimum((np.asarray(confidences) * BINS).astype(np.int64), BINS - 1)
    error = 0.0
    for number in range(BINS):
        members = bins == number
        if members.any():
            error += float(members.mean()) * abs(float(right[members].mean()) - float(confidences[members].mean()))
    return error


def rejection_threshold(confidences: Array, rate: float) -> float:
    """Return the largest threshold below which at most a share `rate` of the confidences [n] is."""
    ordered = np.sort(np.asarray(confidences, np.float64))
    return float(ordered[min(int(rate * len(ordered)), len(ordered) - 1)])
