"""A data set that any network learns in seconds, and the context that a stage needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.artifact import Artifact, Kind
from compress.core.progress import SilentProgress
from compress.data.types import Objects, Split
from compress.learning.context import Context
from compress.targets import load


@dataclass
class Blobs:
    """Images with a bright top half or a bright bottom half: two classes that any network learns."""

    class_names: tuple[str, ...] = ("top", "bottom")
    preprocessing: list[dict[str, Any]] = field(default_factory=list)
    has_targets = False
    decoding: dict[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] = (8, 8, 1)
    scale: float = 1.0
    task: str = "classification"

    def labels(self, split: Split) -> np.ndarray:
        return np.arange(96 if split == "train" else 32, dtype=np.int64) % 2

    def inputs(self, split: Split) -> np.ndarray:
        labels = self.labels(split)
        x = np.random.default_rng(len(labels)).random((len(labels), 8, 8, 1), np.float32) * 0.5
        x[labels == 0, :4] += 0.5
        x[labels == 1, 4:] += 0.5
        return x * np.float32(self.scale)

    def targets(self, split: Split) -> np.ndarray:
        raise AssertionError(split)

    def objects(self, split: Split) -> list[Objects]:
        raise AssertionError(split)

    def describe(self, split: Split, index: int) -> str:
        return f"blob {index}"

    def raw(self, split: Split, indices: np.ndarray) -> list[np.ndarray]:
        return list(self.inputs(split)[indices])


class Bright(Blobs):
    """Samples far from 0, so that outdated batch norm statistics are far from the right ones."""

    def inputs(self, split: Split) -> np.ndarray:
        return super().inputs(split) + np.float32(10)


@dataclass
class Silence(SilentProgress):
    seen: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)

    def update(self, done: int, total: int, **metrics: float) -> None:
        self.seen.append((done, total, metrics))

    def note(self, text: str) -> None:
        raise AssertionError(text)


@dataclass
class Noting(Silence):
    noted: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.noted.append(text)


def context(data: Blobs, folder: Path, seed: int = 0) -> Context:
    nothing = Artifact("", Kind.KERAS, folder, {}, {}, 0)
    return Context("test", folder, data, nothing, load("cpu"), seed, False, Silence())


def bars(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images with a bright rectangle in a corner, and its height and width in pixels."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 9, (samples, 2))
    images = random.random((samples, 8, 8, 1), np.float32) * 0.1
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:height, :width] += 0.9
    return images, sizes
