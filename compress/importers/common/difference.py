"""How far the answers of an imported model are from those of the runtime it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1e-6
"""Outputs are never taken relative to less."""


@dataclass(frozen=True)
class Parity:
    """The largest differences of all outputs over all samples.

    Attributes:
        max_abs: as they are; infinite for another shape, or where only one of both is a finite number.
        max_rel: of each output relative to the largest number in it.
        against: the runtime that gave the answers to compare with, and its version.
        samples: how many samples both were run on.
        own: where the differences are larger than they should be: how far the original's own answers move, relative
            as in `max_rel`, when its inputs change in their last bits.
    """

    max_abs: float
    max_rel: float
    against: str
    samples: int
    own: float | None = None


def compared(pairs: Iterable[tuple[Any, Any]], against: str, samples: int) -> Parity:
    """The parity of outputs (wanted, made), one pair for each output of each run."""
    largest, relative = 0.0, 0.0
    for first, second in pairs:
        wanted, made = np.asarray(first), np.asarray(second)
        apart = difference(wanted, made)
        largest, relative = max(largest, apart), max(relative, apart / max(scale(wanted), SMALLEST))
    return Parity(largest, relative, against, samples)


def difference(wanted: NDArray[Any], made: NDArray[Any]) -> float:
    """The largest difference of two arrays of one shape; equal infinities and NaNs do not differ."""
    if wanted.shape != made.shape:
        return float("inf")
    same = (wanted == made) | (np.isnan(wanted) & np.isnan(made))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(np.subtract(wanted, made, dtype=np.float64)))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def scale(wanted: NDArray[Any]) -> float:
    """The largest finite number."""
    return float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
