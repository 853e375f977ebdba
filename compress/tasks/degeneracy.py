"""A check for models that give one answer to nearly every sample, whatever the sample shows.

A task counts its answers (`Spread`) in its own probe; the criterion on these counts is the same for every task.
"""

from __future__ import annotations

from math import hypot

from compress.core.measurement import wilson_interval
from compress.results.evaluation import Judgement, Spread

NEARLY_ALL = 0.95
"""Share of the samples with the most frequent output, above which a model is suspected."""
TOLD_APART = 0.1
"""Largest share of the samples with another label and another output in a degenerate model."""
COMMON = 0.9
"""Share of one label above which even a useful model may predict it for nearly everything."""
ENOUGH = 4
"""Number of samples with another label for a verdict: if 0 of 4 are recognized, the 95% interval ends at 0.49."""
ENOUGH_WITH_ORIGINAL = 2
"""Number of samples with another label for a verdict, if the original recognizes them."""


def judge(spread: Spread, original: Spread | None = None) -> Judgement:
    """Decide whether a model gives one answer to nearly everything while the labels differ.

    A model is suspected if NEARLY_ALL samples get one answer. A suspected model is degenerate if at most TOLD_APART of
    the samples with another label get another answer. If COMMON of the labels are the most frequent answer, a suspected
    model can be useful: it is degenerate only if its balanced accuracy, that answer against all others, is not above
    chance.
    """
    if spread.constant:
        return Judgement("degenerate", spread.text, spread)
    if spread.same < NEARLY_ALL * spread.samples:
        return Judgement("varied", spread.text, spread)
    compared = original is not None and above_chance(original)
    if spread.others < (ENOUGH_WITH_ORIGINAL if compared else ENOUGH):
        return Judgement("undecided", spread.text, spread)
    common = spread.samples - spread.others >= COMMON * spread.samples
    blind = spread.told_apart <= TOLD_APART * spread.others
    degenerate = blind and not (common and above_chance(spread))
    return Judgement("degenerate" if degenerate else "varied", spread.text, spread)


def above_chance(spread: Spread) -> bool:
    """Return True if other outputs are more frequent for samples with another label, with 95% confidence.

    The difference is twice what the balanced accuracy exceeds 0.5 by.
    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), 873-890, method 10.
    """
    fitting = spread.samples - spread.others
    if not fitting or not spread.others:
        return False
    false_alarms = spread.samples - spread.same - spread.told_apart
    right = spread.told_apart / spread.others
    wrong = false_alarms / fitting
    low, _ = wilson_interval(spread.told_apart, spread.others)
    _, high = wilson_interval(false_alarms, fitting)
    return right - wrong > hypot(right - low, high - wrong)
