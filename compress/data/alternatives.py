"""Other preprocessings of the same samples: those with which models are often trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.contract.preprocessing import Preprocessing

Range = tuple[float, float]
RANGES: tuple[Range, ...] = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""Ranges of values that trained models expect, the most frequent one first."""
DARK = 2.0
"""Largest value of samples that may be of either range, 0 to 1 or 0 to 255."""
TORCH = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Mean and standard deviation of ImageNet. Source: torchvision, models and pre-trained weights; keras.applications,
preprocess_input, mode "torch"."""
CAFFE = {"mean": [103.939, 116.779, 123.68], "std": [1, 1, 1]}
"""Mean of ImageNet in the order BGR. Source: keras.applications, preprocess_input, mode "caffe"."""


@dataclass(frozen=True)
class Alternative:
    """Further preprocessing of samples.

    Attributes:
        description: the samples after it.
        steps: the preprocessing steps.
    """

    description: str
    steps: tuple[dict[str, Any], ...]

    @property
    def advice(self) -> str:
        """The steps as in a pipeline file."""
        texts = [json.dumps(step)[1:-1].replace('"', "") for step in self.steps]
        return " and ".join(f"`{text}`" for text in texts)

    def __call__(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the samples [n, ...] after the steps."""
        apply = Preprocessing(self.steps)
        return np.stack([apply(sample).reshape(sample.shape) for sample in samples])


def alternatives(samples: NDArray[np.float32]) -> list[Alternative]:
    """Return what samples [n, ...] could be instead: of another range, or with another order of the channels."""
    if samples.ndim > 4:  # preprocessing is for images and series
        return []
    return [*_other_ranges(samples), *_of_images(samples)]


def _other_ranges(samples: NDArray[np.float32]) -> Iterator[Alternative]:
    actual = _range_of(samples)
    for expected in RANGES:
        if actual is not None and expected != actual:
            yield Alternative(f"values {_shown(expected)} instead of {_shown(actual)}", (_scale(actual, expected),))


def _of_images(samples: NDArray[np.float32]) -> Iterator[Alternative]:
    if samples.ndim != 4 or samples.shape[-1] != 3:
        return
    to_bgr = {"colour": {"to": "bgr"}}
    yield Alternative("the channels in the order BGR instead of RGB (or the reverse)", (to_bgr,))
    actual = _range_of(samples)
    if actual is None:
        return
    scaled = {limits: () if limits == actual else (_scale(actual, limits),) for limits in (RANGES[0], RANGES[2])}
    yield Alternative("the mean and the standard deviation of ImageNet", (*scaled[RANGES[0]], {"normalize": TORCH}))
    bgr = (*scaled[RANGES[2]], to_bgr, {"normalize": CAFFE})
    yield Alternative("the order BGR without the mean of ImageNet", bgr)


def _range_of(samples: NDArray[np.float32]) -> Range | None:
    """Return the range that the values of samples fill; None if that is not clear."""
    low, high = float(samples.min()), float(samples.max())
    if low >= 0 and high <= 1:
        return RANGES[0]
    if low >= -1 and high <= 1:
        return RANGES[1]
    return RANGES[2] if low >= 0 and DARK < high <= RANGES[2][1] else None


def _scale(actual: Range, expected: Range) -> dict[str, Any]:
    return {"scale": {"from": [_plain(value) for value in actual], "to": [_plain(value) for value in expected]}}


def _shown(limits: Range) -> str:
    return f"from {limits[0]:g} to {limits[1]:g}"


def _plain(value: float) -> float:
    return int(value)
