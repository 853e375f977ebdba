"""A value with its origin, or with the reason why it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

How = Literal["measured", "predicted", "missing"]
Z95 = 1.959963984540054
"""The 97.5th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Metric:
    """A quantity that is measured of models.

    Attributes:
        name: its key in measurements.
        label: its name in the report.
        unit: "fraction", "bytes", "ms", ...; "" for the unit of the targets.
        change: the key of the comparison of result and original.
        limited: whether `change` is a key of `budget`.
    """

    name: str
    label: str
    unit: str
    change: str
    limited: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of a task's metric is better: then its change is a drop."""
        return self.change.endswith("_drop")


SIZES = (
    Metric("macs", "MACs", "MACs", "macs_ratio"),
    Metric("parameters", "Parameters", "parameters", "parameters_ratio"),
    Metric("size_bytes", "Size", "bytes", "size_ratio"),
    Metric("compressed_bytes", "Compressed size", "bytes", "compressed_bytes_ratio"),
)
LATENCIES = (
    Metric("latency_ms", "Latency, median", "ms", "latency_ratio"),
    Metric("latency_p90_ms", "Latency, p90", "ms", "latency_p90_ms_ratio"),
    Metric("latency_p99_ms", "Latency, p99", "ms", "latency_p99_ms_ratio"),
)
COSTS = (*SIZES, *LATENCIES)
"""The metrics of every model, whatever its task."""


@dataclass(frozen=True)
class Measurement:
    """A value with its unit and its origin.

    Attributes:
        value: the number, in `unit`; None when `how` is "missing".
        unit: "fraction", "bytes", "ms", "MACs", "parameters", "samples", ...
        how: measured here, predicted from a model of the hardware, or missing.
        low: lower end of the 95% interval, if one is known.
        high: its upper end.
        note: the conditions it holds under; for a missing value the reason, which is required.
    """

    value: float | None
    unit: str
    how: How
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.how == "missing"):
            raise ValueError(f"a value of {self.value!r} cannot be {self.how!r}")
        if self.how == "missing" and not self.note:
            raise ValueError("a missing measurement must say why")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for report.json."""
        return asdict(self)


Measurements = Mapping[str, Measurement]
"""Measurements by the name of their metric."""


def missing(unit: str, reason: str) -> Measurement:
    """Return a missing measurement with its reason."""
    return Measurement(None, unit, "missing", note=reason)


def origin(*measurements: Measurement) -> How:
    """Return the origin of a value that is calculated from others: measured if all of them are."""
    return "measured" if all(measurement.how == "measured" for measurement in measurements) else "predicted"


def ratio(before: Measurement | None, after: Measurement | None) -> Measurement:
    """Return `after` divided by `before`."""
    if before is None or after is None or before.value is None or after.value is None:
        return missing("fraction", "a value is missing")
    if before.value == 0:
        return missing("fraction", "the original is 0")
    note = "result divided by original"
    return Measurement(after.value / before.value, "fraction", origin(before, after), note=note)


def proportion(successes: int, trials: int, note: str = "") -> Measurement:
    """Return a fraction with its Wilson 95% score interval.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212.
    """
    low, high = wilson_interval(successes, trials)
    return Measurement(successes / trials, "fraction", "measured", low, high, f"{note}, {trials} samples".lstrip(", "))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% score interval of a share (source: `proportion`)."""
    share, z2 = successes / trials, Z95 * Z95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding may cross the share


def drop(original: NDArray[np.bool_], result: NDArray[np.bool_]) -> Measurement:
    """Return the loss of accuracy from `original` to `result`: for the same samples, whether the answer is right."""
    both, first = int((original & result).sum()), int((original & ~result).sum())
    second, neither = int((~original & result).sum()), int((~original & ~result).sum())
    return paired_drop(both, first, second, neither)


def paired_drop(both: int, first: int, second: int, neither: int) -> Measurement:
    """Return the loss of accuracy from one model to another on the same samples.

    The interval is Newcombe's for paired proportions: the two Wilson intervals, combined
    with the correlation between the pairs.
    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), 2635-2650, method 10.

    Args:
        both: the number of samples that both models answer correctly.
        first: those that only the first model answers correctly.
        second: those that only the second model answers correctly.
        neither: those that no model answers correctly.
    """
    n = both + first + second + neither
    p1, p2 = (both + first) / n, (both + second) / n
    (l1, u1), (l2, u2) = wilson_interval(both + first, n), wilson_interval(both + second, n)
    product = float(both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    # Newcombe's continuity correction applies to a positive correlation only.
    corrected = max(excess - n / 2, 0.0) if excess > 0 else float(excess)
    phi = corrected / sqrt(product) if product else 0.0
    down = sqrt(max((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2, 0))
    up = sqrt(max((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2, 0))
    difference = p1 - p2
    note = f"paired on {n} samples: {first} lost, {second} gained"
    return Measurement(difference, "fraction", "measured", difference - down, difference + up, note)


def mcnemar(first: int, second: int) -> float:
    """Return the probability that answers change so unevenly, or more so, if both models are equally good.

    `first` and `second` are the numbers of samples that only that model answers correctly. The test is exact and
    two-sided. Source: Q. McNemar, Psychometrika 12 (1947), 153-157.
    """
    from scipy.stats import binomtest

    return float(binomtest(first, first + second).pvalue) if first + second else 1.0
