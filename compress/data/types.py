"""Types of a data set that other packages use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts

Split = Literal["train", "validation", "test"]


SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Objects(NamedTuple):
    """The objects in one image.

    Attributes:
        boxes: float32 [k, 4]: ymin, xmin, ymax, xmax, fractions of the image's height and width.
        classes: int64 [k], indices into the class names.
    """

    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]


class DecodedCache(Protocol):
    """A folder that outlives a run, where decoded samples are kept (`compress.pipeline.store.Store`)."""

    @property
    def folder(self) -> Path:
        """The root of the cache, for messages."""

    def kept(self, key: str) -> Path:
        """Return the folder for decoded samples of a data set; files appear in it by renaming, so all are complete."""

    def lock(self, key: str, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        """Hold a key while its files are written; call `waiting` first if another process holds it."""

    def scratch(self) -> AbstractContextManager[Path]:
        """Return an empty folder that is removed afterwards."""


class Data(Protocol):
    """The interface of a data set for stages and probes (`compress.data.dataset.Dataset`)."""

    @property
    def task(self) -> str:
        """The name of the task that the samples are for (`compress.tasks.TASKS`)."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, a label is an index into it; for regression the names of the targets; empty if the
        samples have no labels."""

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps in pipeline.yaml."""

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding of files on the device (`deploy.contract.decoding`)."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample, without the batch."""

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return all preprocessed samples of a split [n, *input_shape]; a large split is a memory map: read slices.

        Samples of several tensors are rows (`deploy.contract.tensors`).
        """

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return some samples of a split before preprocessing, in the type and shape of the files."""

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample for people, such as the path of its file."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels of a split [n]; for tasks without classes, the groups that splits keep balanced."""

    @property
    def has_targets(self) -> bool:
        """Whether the samples have arrays as targets."""

    def targets(self, split: Split) -> NDArray[Any]:
        """Return the array that belongs to each sample of a split [n, ...]: values, labels of 0 and 1, a mask, points.

        Raises:
            DataError: the samples have none.
        """

    def objects(self, split: Split) -> list[Objects]:
        """The objects of every sample of a split, for detection."""

    def summary(self) -> Facts:
        """Counts, shapes, ranges, and what was left out, as plain values."""
