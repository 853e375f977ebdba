"""Preprocessed samples as images for people: what preprocessing did to their values is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.alternatives import RANGES
from deploy.contract.preprocessing import Colour, Normalize, Preprocessing, Scale, Squeeze

ROUNDING = 0.02
"""The share of a range by which values may be outside of it: bicubic filters overshoot."""


def displayed(samples: NDArray[np.float32], steps: Sequence[Mapping[str, Any]]) -> NDArray[np.uint8] | None:
    """Return preprocessed images as RGB images; positions stay those of the model's input.

    Args:
        samples: [n, ...], as the model takes them.
        steps: the preprocessing, as in pipeline.yaml.

    Returns:
        uint8 [n, height, width, 3]; None if the samples are not images.
    """
    parsed = Preprocessing(steps).steps
    values = np.nan_to_num(np.asarray(samples, np.float32), posinf=0.0, neginf=0.0)
    for step in reversed(parsed):
        values = _before(step, values)
    if values.ndim != 4 or values.shape[-1] not in (1, 3) or min(values.shape) == 0:
        return None
    order = next((step.from_ for step in parsed if isinstance(step, Colour)), "rgb")
    if order == "bgr":
        values = values[..., ::-1]
    low, high = _range(values, parsed)
    pixels = np.clip((values - low) / (high - low) * 255, 0, 255)
    return np.ascontiguousarray(np.broadcast_to(np.rint(pixels).astype(np.uint8), (*values.shape[:-1], 3)))


def _before(step: Any, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values before a step. What cannot be undone stays: positions, grey, and values that were cut off."""
    if isinstance(step, Scale) and step.to[0] != step.to[1]:
        factor = (step.from_[1] - step.from_[0]) / (step.to[1] - step.to[0])
        return np.asarray((values - step.to[0]) * factor + step.from_[0], np.float32)
    if isinstance(step, Normalize) and {len(step.mean), len(step.std)} <= {1, values.shape[-1]}:
        return np.asarray(values * np.asarray(step.std, np.float32) + np.asarray(step.mean, np.float32))
    if isinstance(step, Colour) and {step.from_, step.to} == {"rgb", "bgr"}:
        return values[..., ::-1]
    if isinstance(step, Squeeze):
        return np.expand_dims(values, step.axis if step.axis < 0 else step.axis + 1)
    return values


def _range(values: NDArray[np.float32], steps: Sequence[Any]) -> tuple[float, float]:
    """Return the values of black and white: those that the first `scale` names, or the usual range that fits."""
    first = next((step for step in steps if isinstance(step, Scale | Normalize)), None)
    if isinstance(first, Scale):
        return min(first.from_), max(first.from_)
    low, high = float(values.min()), float(values.max())
    for usual in RANGES:
        room = ROUNDING * (usual[1] - usual[0])
        if usual[0] - room <= low and high <= usual[1] + room:
            return usual
    return low, max(high, low + 1e-6)
