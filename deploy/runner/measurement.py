"""Measurements as plain maps, and the statistics that they need.

The keys are those of the host side: `value`, `unit`, `how` (measured or missing), `low` and `high` (the
95% interval), `note` (the conditions; for a missing value the reason).
"""

from __future__ import annotations

from math import isfinite, sqrt
from typing import Any, Dict, Optional, Tuple

import numpy as np

from deploy.contract.preprocessing import Array

Z95 = 1.959963984540054
"""The 97.5th percentile of the standard normal distribution."""
RESAMPLES = 2000
"""The number of bootstrap samples; chosen."""
BEST_DB = 120.0
"""Ratios of signal to error above this count as equal values."""
Measured = Dict[str, Any]


def measured(value: float, unit: str, note: str = "", interval: Optional[Tuple[float, float]] = None) -> Measured:
    """Return a measured value."""
    low, high = interval or (None, None)
    return {"value": float(value), "unit": unit, "how": "measured", "low": low, "high": high, "note": note}


def missing(unit: str, reason: str) -> Measured:
    """Return a value that could not be measured, with the reason."""
    return {"value": None, "unit": unit, "how": "missing", "low": None, "high": None, "note": reason}


def finite(value: float) -> Optional[float]:
    """Return the value, or None for NaN and infinity, which JSON does not have."""
    return float(value) if isfinite(value) else None


def describe(measurement: Measured, digits: int = 4) -> str:
    """Return a measurement as text."""
    if measurement["how"] == "missing":
        return "not measured: %s" % measurement["note"]
    text = "%.*g %s" % (digits, measurement["value"], measurement["unit"])
    if measurement["low"] is not None:
        text += " (%.*g to %.*g)" % (digits, measurement["low"], digits, measurement["high"])
    return text


def proportion(successes: int, trials: int, note: str = "") -> Measured:
    """Return a proportion with its Wilson 95% score interval.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    share = successes / trials
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    interval = (max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))
    return measured(share, "fraction", ("%s, %d samples" % (note, trials)).lstrip(", "), interval)


def paired_drop(before: Array, after: Array) -> Measured:
    """Return the loss of accuracy between two models, from the samples for which each is right: bool [samples].

    The interval is that of a percentile bootstrap over samples, with a fixed seed.
    Source: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    change = before.astype(np.int64) - after.astype(np.int64)
    random = np.random.RandomState(0)  # numpy 1.16 has no default_rng
    means = [change[random.randint(0, len(change), len(change))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    note = "paired on %d samples: %d lost, %d gained" % (len(change), (change > 0).sum(), (change < 0).sum())
    return measured(change.mean(), "fraction", note, (float(low), float(high)))


def sqnr_db(expected: Array, actual: Array) -> float:
    """Return the ratio of values to their errors in dB, at most BEST_DB; -BEST_DB if a value is NaN or infinite."""
    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(np.subtract(actual, expected, dtype=np.float64)).sum())
    if not isfinite(signal) or not isfinite(noise):
        return -BEST_DB
    if noise == 0:
        return BEST_DB
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / noise), -BEST_DB, BEST_DB))
