"""Confidence intervals, compared with published numbers and with a second way to compute them."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.core.measurement import Z95, drop, mcnemar, proportion

# --- one share --------------------------------------------------------------------------

WILSON = [
    (10, 20, 0.299298, 0.700702),
    (0, 10, 0.0, 0.277533),
    (10, 10, 0.722467, 1.0),
    (1, 1, 0.206543, 1.0),
    (0, 7, 0.0, 0.354330),  # here rounding would put the lower limit above the share
    (13, 13, 0.771905, 1.0),  # and here the upper limit below it
    # the examples of R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, method 3
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("successes", "trials", "low", "high"), WILSON)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    measurement = proportion(successes, trials)
    assert measurement.value == successes / trials
    assert (measurement.unit, measurement.how) == ("fraction", "measured")
    assert measurement.low == pytest.approx(low, abs=5e-5)
    assert measurement.high == pytest.approx(high, abs=5e-5)
    assert measurement.low <= measurement.value <= measurement.high


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the point where an increasing function is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return (low + high) / 2


def score_limits(successes: int, trials: int) -> tuple[float, float]:
    """Return the limits of the shares that a score test accepts, found by search, not by Wilson's closed form."""
    share = successes / trials

    def excess(p: float) -> float:
        return abs(share - p) - Z95 * sqrt(p * (1 - p) / trials)

    low = 0.0 if successes == 0 else root(lambda p: -excess(p), 0.0, share)
    high = 1.0 if successes == trials else root(excess, share, 1.0)
    return low, high


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_by_search(case: tuple[int, int]) -> None:
    measurement = proportion(*case)
    assert (measurement.low, measurement.high) == pytest.approx(score_limits(*case), abs=1e-9)
    assert 0 <= measurement.low <= measurement.value <= measurement.high <= 1


# --- two shares on the same samples -----------------------------------------------------


def pairs(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two columns with these counts of right-right, right-wrong, wrong-right and wrong-wrong samples."""
    before = [True] * both + [True] * first + [False] * second + [False] * neither
    after = [True] * both + [False] * first + [True] * second + [False] * neither
    return np.array(before), np.array(after)


#: Newcombe's method 10 ("square and add") on tables from the literature: Altman et al., Statistics with
#: Confidence (2000), table 6.2; Bentur et al. 2009, in Fagerland, Lydersen and Laake, Statistical Analysis of
#: Contingency Tables (2017), chapter 8; and two of Newcombe's own. All were computed a second time, below.
PAIRED = [
    ((14, 5, 0, 22), 5 / 41, 0.011, 0.226),
    ((1, 1, 7, 12), -6 / 21, -0.507, -0.026),
    ((36, 12, 2, 0), 0.2, 0.0569, 0.3404),
    ((20, 12, 2, 16), 0.2, 0.0562, 0.3292),
]


@pytest.mark.parametrize(("counts", "value", "low", "high"), PAIRED)
def test_paired(counts: tuple[int, ...], value: float, low: float, high: float) -> None:
    measurement = drop(*pairs(*counts))
    digits = 5e-4 if len(f"{low}".lstrip("-")) == 5 else 5e-5
    assert measurement.value == pytest.approx(value)
    assert measurement.low == pytest.approx(low, abs=digits)
    assert measurement.high == pytest.approx(high, abs=digits)


def by_search(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Compute method 10 from the searched limits and numpy's correlation; correct a positive correlation by hand."""
    n = both + first + second + neither
    before, after = pairs(both, first, second, neither)
    (l1, u1), (l2, u2) = score_limits(both + first, n), score_limits(both + second, n)
    p1, p2 = before.mean(), after.mean()
    phi = 0.0
    if 0 < p1 < 1 and 0 < p2 < 1:
        phi = float(np.corrcoef(before, after)[0, 1])
        if phi > 0:  # reduced by n/2 before division by the root of the product of the four totals
            phi = max(phi - 1 / (2 * n * before.std() * after.std()), 0.0)
    down = sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    up = sqrt((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2)
    return p1 - p2 - down, p1 - p2 + up


@given(st.tuples(*[st.integers(0, 60)] * 4).filter(any))
def test_paired_by_search(counts: tuple[int, int, int, int]) -> None:
    measurement = drop(*pairs(*counts))
    assert (measurement.low, measurement.high) == pytest.approx(by_search(*counts), abs=1e-7)
    assert -1 <= measurement.low <= measurement.value <= measurement.high <= 1
    mirrored = drop(*reversed(pairs(*counts)))
    assert (mirrored.value, mirrored.low, mirrored.high) == pytest.approx(
        (-measurement.value, -measurement.high, -measurement.low)
    )


def test_a_loss_is_positive() -> None:
    assert drop(*pairs(90, 8, 2, 0)).value == pytest.approx(0.06)
    assert drop(*pairs(90, 2, 8, 0)).value == pytest.approx(-0.06)
    assert drop(*pairs(90, 8, 2, 0)).note == "paired on 100 samples: 8 lost, 2 gained"


def test_no_difference() -> None:
    for counts in ((100, 0, 0, 0), (0, 0, 0, 50), (30, 0, 0, 20)):
        measurement = drop(*pairs(*counts))
        assert measurement.value == 0
        assert measurement.low == pytest.approx(-measurement.high)
        assert 0 < measurement.high < 0.1


def test_pairing_narrows_the_interval() -> None:
    together, independent = drop(*pairs(80, 5, 0, 15)), drop(*pairs(68, 17, 12, 3))
    assert together.value == independent.value == pytest.approx(0.05)
    assert together.high - together.low < 0.6 * (independent.high - independent.low)


def test_mcnemar_is_exact_and_two_sided() -> None:
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1
    assert mcnemar(1, 7) == mcnemar(7, 1) == pytest.approx(2 * (1 + 8) / 2**8)
    assert mcnemar(0, 200_000) == 0
