"""Findings about the outputs of a result that its user must know: the basis of the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.measurement import Measurement, Metric, wilson_interval

ENOUGH = 30
"""Number of test samples from which a comparison with a constant answer counts."""
KEPT = 0.5
"""Share of the original's lead over a constant answer that a usable result keeps."""
ANSWERED = 5
"""Samples that the original recognizes of a class that the result never answers: five changes in one direction are
chance with a probability of 1 in 32."""
SAMPLES_PER_CLASS = 5
"""Test samples for each class from which the order of the classes is judged: an assignment that fits by chance gains
less then."""
GAIN = 0.2
"""Gain of accuracy by other names of the classes, above which their order is doubted."""
STALE = 0.3
"""Typical distance of the statistics of batch norms from those on the samples, above which they are doubted."""
FAR = 1.0
"""Distance of the statistics of the first batch norm from which samples of another scale are a possible cause."""
LESS_LOSS = 0.5
"""Share of the loss that goes with other statistics, above which they are doubted."""
UNLIKE = 0.5
"""Share of equal decisions below which a result cannot be used."""
DOUBTFUL = 0.8
"""Share of equal decisions below which there is a warning."""
LITTLE_LEFT_DB = 10.0
"""Ratio of values to errors in dB below which little of the values is left: errors have a third of their amplitude."""
COARSE_DB = 20.0
"""Ratio of values to errors in dB below which there is a warning about values that share a quantization step with
larger values: errors have a tenth of their amplitude."""
MOST_FLAT = 0.5
"""Share of the channels with one value, although they vary in the original, from which an output cannot be used."""
MOST_NAMED = 4
"""More names would make a finding longer than two lines of the report."""
OUTSIDE = 0.05
"""Share of the values of samples that a quantized input cannot hold, above which there is a warning."""
MOST_OUTSIDE = 0.5
"""Share of the values of samples that a quantized input cannot hold, from which the result cannot be used."""
USED = 0.02
"""Share of the range of a quantized input that samples fill, below which fewer than 6 of 256 values occur."""
_ENDS = (("sample_low", "sample_high"), ("low", "high"))
TIED = 0.02
"""Share of the samples with two equal highest outputs, above which there is a warning."""


Level = Literal["not usable", "warning"]


@dataclass(frozen=True)
class VerdictReason:
    """A reason for the verdict on a result.

    Attributes:
        level: whether the result cannot be used, or can be used with care.
        text: one sentence without a full stop.
        cause: the probable cause: the model before compression, or the compression; "named" if the text names the
            cause and what to do.
        gain: how much better the metric of the original is without the cause, if that was measured.
        on_noise: whether the reason holds if the samples are random numbers, becomes a warning, or is left out: outputs
            for noise hardly differ from sample to sample.
    """

    level: Level
    text: str
    cause: Literal["model", "named", "compression"] = "compression"
    gain: float | None = None
    on_noise: Literal["holds", "warning", "left out"] = "left out"


def against_constant(
    metric: Metric, values: tuple[Measurement, Measurement, Measurement], samples: int
) -> list[VerdictReason]:
    """Compare the quality of both models with that of the best answer that does not depend on the input.

    `values` are those of the constant answer, of the original and of the result.
    """
    constant, original, result = values
    if constant.value is None or original.value is None or result.value is None:
        return []
    sign = 1 if metric.higher_is_better else -1
    lead = sign * (original.value - constant.value)
    kept = sign * (result.value - constant.value)
    label = _label(metric)
    compared = f"{label} {_shown(result.value)}, a constant answer {_shown(constant.value)}"
    worst = result.low if metric.higher_is_better else result.high
    if kept <= 0 or (worst is not None and sign * (worst - constant.value) <= 0):
        text = f"the result is no better than a constant answer ({compared})"
        if kept > 0:
            interval = f"{label} {_shown(result.value)}, interval {_shown(result.low)} to {_shown(result.high)}"
            text = f"on {samples:,} samples the result cannot be told from a constant answer, "
            text += f"{_shown(constant.value)} ({interval})"
        if lead <= 0:
            text += f"; nor is the original ({_shown(original.value)})"
        cause: Literal["model", "compression"] = "model" if lead <= 0 or kept >= KEPT * lead else "compression"
        return [VerdictReason("not usable" if samples >= ENOUGH else "warning", text, cause)]
    if lead > 0 and kept < KEPT * lead:
        change = f"{label} {_shown(original.value)} before, {_shown(result.value)} after"
        text = f"the result answers unlike the original: it keeps {kept / lead:.0%} of the lead over a constant answer"
        return [VerdictReason("not usable" if samples >= ENOUGH else "warning", f"{text} ({change})")]
    return []


def unlike_original(agreement: float, outputs: Sequence[Mapping[str, Any]]) -> list[VerdictReason]:
    """Judge a model without labels by its agreement with the original: the share of equal decisions or close values.

    In the comparison of each output, `agreement` is None for values without decisions.
    """
    shown = f"the result answers unlike the original: {agreement:.0%} of its decisions or values agree"
    reasons = []
    if agreement < DOUBTFUL:
        reasons.append(VerdictReason("not usable" if agreement < UNLIKE else "warning", shown))
    return reasons + little_left([output for output in outputs if (output["agreement"] or 0.0) < DOUBTFUL])


def little_left(outputs: Sequence[Mapping[str, Any]], level: Level = "not usable") -> list[VerdictReason]:
    """Name the outputs whose errors are so large that little of their values is left."""
    poor = [output for output in outputs if output["sqnr_db"] < LITTLE_LEFT_DB]
    if not poor:
        return []
    noisy = [f"{output['name']} ({output['sqnr_db']:.1f} dB)" for output in poor]
    listed = ", ".join(noisy[:MOST_NAMED]) + ", …" * (len(noisy) > MOST_NAMED)
    text = (
        f"little is left of {len(noisy)} outputs, whose errors have a third of the amplitude of their values or more: "
        f"{listed}; calibrate with samples of the kind that the device will see, in the preprocessing of the training"
    )
    return [VerdictReason(level, text, on_noise="warning")]


def channels(outputs: Sequence[Mapping[str, Any]]) -> list[VerdictReason]:
    """Name channels that vary in the original, and of which the result keeps nothing or little.

    `outputs` is the result of `compress.pipeline.probes.output_fidelity`.
    """
    reasons = []
    for output in outputs:
        smaller = output["scales"][1:]
        lost = [channel for scale in smaller for channel in scale["constant"]]
        coarse = [scale for scale in smaller if scale["sqnr_db"] < COARSE_DB]
        if lost or coarse:
            reasons.append(_mixed(output, lost, coarse))
        elif flat := output["flat_channels"]:
            total = output["shape"][-1]
            text = (
                f"{flat} of {total} channels of the output {output['name']} have one value for all samples, and vary "
                "in the original"
            )
            level: Level = "not usable" if flat >= MOST_FLAT * total else "warning"
            reasons.append(VerdictReason(level, text, on_noise="warning" if level == "not usable" else "left out"))
    return reasons


def _mixed(output: Mapping[str, Any], lost: Sequence[int], coarse: Sequence[Mapping[str, Any]]) -> VerdictReason:
    """Return the effect of one scale for an output of quantities of different scale, and what to do."""
    useless = bool(lost) or any(scale["sqnr_db"] < LITTLE_LEFT_DB for scale in coarse)
    concerned = coarse or [scale for scale in output["scales"][1:] if scale["constant"]]
    low, high = min(scale["low"] for scale in concerned), max(scale["high"] for scale in concerned)
    affected = sorted(lost or [channel for scale in coarse for channel in scale["channels"]])
    axis, largest = output["channel_axis"], output["scales"][0]
    where = f"{len(affected)} of {output['shape'][axis]} channels of the output {output['name']}"
    named = f"{', '.join(map(str, affected[:MOST_NAMED]))}{', …' * (len(affected) > MOST_NAMED)} on axis {axis + 1}"
    step = "" if output["step"] is None else f", whose quantization step is {output['step']:.3g}"
    ratio = min(scale["sqnr_db"] for scale in concerned)
    what = "are constant in the result" if lost else f"keep a ratio of {ratio:.1f} dB to their error"
    text = (
        f"{where} ({named}) {what}: their values are from {low:.3g} to {high:.3g}, and share one tensor with values "
        f"from {largest['low']:.3g} to {largest['high']:.3g}{step}; end the model in front of the operator that joins "
        "them, so that each quantity is an output, or scale the values to one range in the model"
    )
    return VerdictReason("not usable" if useless else "warning", text, "named", on_noise="holds")


def class_order(labels: NDArray[np.int64], predictions: NDArray[np.int64], names: Sequence[str]) -> list[VerdictReason]:
    """Doubt the order of the class names, if another order fits the original's predictions much better."""
    count = len(labels)
    if count < SAMPLES_PER_CLASS * len(names):
        return []
    table = np.zeros((len(names), len(names)), np.int64)
    np.add.at(table, (predictions, labels), 1)
    right = int(np.diagonal(table).sum())
    if not _clearly_more(int(table.max(axis=1).sum()), right, count):  # what no assignment exceeds
        return []
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(table, maximize=True)
    best = int(table[rows, columns].sum())
    if not _clearly_more(best, right, count):
        return []
    moved = [(row, column) for row, column in zip(rows, columns, strict=True) if row != column and table[row, column]]
    moved.sort(key=lambda pair: -table[pair])
    shown = ", ".join(f"output {row} is {names[column]!r} and not {names[row]!r}" for row, column in moved[:3])
    text = (
        f"the order of the classes does not fit the model: with other names its accuracy is {best / count:.3f} instead "
        f"of {right / count:.3f} ({shown}{', …' * (len(moved) > 3)}); set `classes` to the order of its training"
    )
    return [VerdictReason("not usable", text, "named", (best - right) / count)]


def never_answered(
    labels: NDArray[np.int64], before: NDArray[np.int64], after: NDArray[np.int64], names: Sequence[str]
) -> list[VerdictReason]:
    """Name the classes that the result never answers, although the original does, or although there are enough samples.

    `before` and `after` are the answers of the original and of the result: [n].
    """
    samples, answers = (np.bincount(values, minlength=len(names)) for values in (labels, after))
    recognized = np.bincount(labels[before == labels], minlength=len(names))
    missing = (answers == 0) & ((recognized >= ANSWERED) | (samples >= ENOUGH))
    if not missing.any():
        return []
    of_original = int(recognized[missing].sum())
    listed = ", ".join(
        f"{names[index]!r} ({samples[index]:,} samples)" for index in np.flatnonzero(missing)[:MOST_NAMED]
    )
    text = f"the result never answers {int(missing.sum())} of {len(names)} classes: {listed}"
    text += ", …" * (int(missing.sum()) > MOST_NAMED)
    if not of_original:
        return [VerdictReason("not usable", f"{text}, and neither does the original", "model")]
    return [VerdictReason("not usable", f"{text}; the original recognizes {of_original:,} of these samples")]


def _clearly_more(best: int, right: int, count: int) -> bool:
    gain = best - right >= GAIN * count
    return gain and wilson_interval(best, count)[0] > wilson_interval(right, count)[1]


def input_range(facts: Mapping[str, Any] | None, *, labelled: bool = False) -> list[VerdictReason]:
    """Doubt the scale of samples that the quantized input of the original cannot hold, or hardly uses.

    Args:
        facts: the result of `compress.pipeline.probes.input_values.input_range`; None for a float input.
        labelled: whether labels show how good the answers are.
    """
    if facts is None or (facts["outside"] <= OUTSIDE and facts["used"] >= USED):
        return []
    samples, limits = (f"{facts[low]:.3g} to {facts[high]:.3g}" for low, high in _ENDS)
    text = f"the scale of the samples does not fit the model: they are {samples}, and its quantized input is {limits}"
    other = facts["alternative"]
    if other is None:
        advice = "use the preprocessing with which it was quantized"
    else:
        advice = f"add {other['advice']} to the end of data.preprocess, or change its steps"
    lost = facts["outside"] >= MOST_OUTSIDE or facts["used"] < USED
    level: Level = "not usable" if lost and other is not None and not labelled else "warning"
    return [VerdictReason(level, f"{text}; {advice}", "named")]


def about_original(
    metric: Metric,
    inputs: Mapping[str, Any],
    batch_norms: Mapping[str, Any],
    original: Measurement,
    result: Measurement,
) -> list[VerdictReason]:
    """Name the cause of a bad original: its preprocessing (`other_inputs`), or the statistics of its batch norms
    (`wrong_statistics`).

    A result that is much better than the original was trained with this preprocessing: it can be used.
    """
    others = batch_norms.get("others")
    # With wrong statistics in all batch norms, samples of another scale may be better by chance.
    if others is not None and others >= STALE:
        reasons = wrong_statistics(batch_norms) or other_inputs(metric, inputs)
    else:
        reasons = other_inputs(metric, inputs) or wrong_statistics(batch_norms)
    if _gain(metric, original, result) >= GAIN:
        return [replace(reason, level="warning") for reason in reasons]
    return reasons


def wrong_statistics(facts: Mapping[str, Any]) -> list[VerdictReason]:
    """Name batch norms whose statistics do not fit the weights of a loaded model, or do not fit the samples.

    `facts` is the result of `bn_recalibration.compared_statistics`; empty without batch norms.
    """
    before, after = facts.get("validation_before"), facts.get("validation_after")
    if before is None or after is None:
        return []
    if facts["metric"] == "accuracy":
        count, gain = facts["samples"], after - before
        is_better = _clearly_more(round(after * count), round(before * count), count)
    else:
        gain = 1 - after / max(before, 1e-9)
        is_better = gain >= LESS_LOSS
    if not is_better:
        return []
    result = f"its validation {facts['metric']} is {_shown(after)} instead of {_shown(before)}"
    momentum = "set `momentum` of these layers to 0.9, and train the model for one more epoch"
    if facts["first"] >= FAR and (facts["others"] is None or facts["others"] < STALE):
        text = (
            f"the statistics of the batch norms do not fit these samples: measured again on them, {result}; check that "
            f"data.preprocess is the preprocessing of the training; if it is, {momentum}"
        )
    else:
        text = (
            "the statistics of the batch norms do not fit the weights of the model, as after few training steps with a "
            f"large momentum: measured again on training samples, {result}; {momentum}"
        )
    return [VerdictReason("not usable", text, "named", gain)]


def other_inputs(metric: Metric, facts: Mapping[str, Any]) -> list[VerdictReason]:
    """Doubt the preprocessing, if the original is much better on samples of another range or order of channels.

    `facts` has `samples`, `original`, and `alternatives` with `description`, `advice` and `value`; it may be empty.
    """
    if not facts.get("alternatives"):
        return []
    original = Measurement(**facts["original"])
    gains = [_gain(metric, original, Measurement(**row["value"])) for row in facts["alternatives"]]
    best = facts["alternatives"][int(np.argmax(gains))]
    if max(gains) < GAIN:
        return []
    text = (
        f"the preprocessing does not fit the model: with {best['description']}, the original's {_label(metric)} is "
        f"{_shown(best['value']['value'])} instead of {_shown(original.value)} ({facts['samples']} samples); add "
        f"{best['advice']} to the end of data.preprocess, or change its steps"
    )
    return [VerdictReason("not usable", text, "named", max(gains))]


def _gain(metric: Metric, before: Measurement, after: Measurement) -> float:
    """Return how much better a metric is, or the share by which an error is smaller; 0 if that can be chance."""
    if before.value is None or after.value is None:
        return 0.0
    if metric.higher_is_better:
        return after.value - max(before.value, 0.0) if _above(after.low, before.high) else 0.0
    return 1 - after.value / before.value if before.value > 0 and _above(before.low, after.high) else 0.0


def _above(low: float | None, high: float | None) -> bool:
    return low is None or high is None or low > high


def ties(tied: int, samples: int, *, probabilities: bool) -> list[VerdictReason]:
    """Warn of samples (`tied`) whose two highest outputs are equal: there the first class wins.

    `probabilities` says whether the outputs are those of a softmax.
    """
    if tied <= max(1, TIED * samples):
        return []
    if probabilities:
        reason = "a softmax in 8 bits has steps of 1/256; end the model with logits, without the softmax"
    else:
        reason = "8 bits do not show their difference; check the scale of the samples and the training"
    count = f"{tied:,} of {samples:,} samples"
    text = f"the two highest outputs of the result are equal for {count}, where the first class wins: {reason}"
    return [VerdictReason("warning", text)]


def _label(metric: Metric) -> str:
    """Return the name of a metric inside a sentence."""
    return metric.label[:1].lower() + metric.label[1:] if metric.label[1:2].islower() else metric.label


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 0.001 or abs(value) >= 1000 else f"{value:.3f}"
