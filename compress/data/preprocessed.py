"""The values of preprocessed samples: as images for people, and after other preprocessings that models often have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.contract.preprocessing import Colour, Normalize, Preprocessing, Scale, Squeeze

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
ROUNDING = 0.02
"""The share of a range by which values may be outside of it: bicubic filters overshoot."""


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
    return {"scale": {"from": [int(value) for value in actual], "to": [int(value) for value in expected]}}


def _shown(limits: Range) -> str:
    return f"from {limits[0]:g} to {limits[1]:g}"


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
