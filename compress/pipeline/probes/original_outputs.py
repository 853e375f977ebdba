"""A data set whose targets are the outputs of the original model, for tasks that learn from the original."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.core.progress import Phase, Progress
from compress.data.types import Data, Objects, Split
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks import task_of

LARGE_BYTES = 1 << 28
"""Outputs of a split that are larger than this are kept in a temporary file."""
Indices = NDArray[np.int64]


class TaughtByOriginal:
    """A data set (`compress.data.types.Data`) with the outputs of the original model as targets.

    Args:
        full: the data set; its labels are not used.
        original: the original model, with its float .tflite file.
        progress: receives the progress of running it.
    """

    has_targets = True

    def __init__(self, full: Data, original: Artifact, progress: Progress) -> None:
        self.full = full
        self.task = full.task
        self.class_names = full.class_names
        self.preprocessing = full.preprocessing
        self.decoding = full.decoding
        self._original = original
        self._progress = progress
        self._targets: dict[Split, NDArray[np.float32]] = {}

    def report_to(self, progress: Progress) -> None:
        """Set the receiver of the progress of running the original."""
        self._progress = progress

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample."""
        return self.full.input_shape

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the preprocessed samples of a split."""
        return self.full.inputs(split)

    def raw(self, split: Split, indices: Indices) -> list[NDArray[Any]]:
        """Return some samples of a split before preprocessing."""
        return self.full.raw(split, indices)

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample for people."""
        return self.full.describe(split, index)

    def labels(self, split: Split) -> Indices:
        """Return the groups that splits keep balanced."""
        return self.full.labels(split)

    def objects(self, split: Split) -> list[Objects]:
        """Return the objects of every sample of a split."""
        return self.full.objects(split)

    def summary(self) -> Facts:
        """Return the summary of the full data set."""
        return self.full.summary()

    def targets(self, split: Split) -> NDArray[np.float32]:
        """Return the outputs of the original for every sample of a split as rows [n, values]."""
        if split not in self._targets:
            order = partial(task_of(self.full).output_order, specification=self._original.facts.get("specification"))
            model = LoadedModel(self._original.file(MODEL_TFLITE), reproducible=True, order=order)
            samples = self.full.inputs(split)
            with self._progress.phase(Phase("outputs of the original", unit="sample")):
                self._targets[split] = output_rows(model, samples, self._progress)
        return self._targets[split]


def output_rows(
    model: LoadedModel, samples: NDArray[np.float32], progress: Progress | None = None
) -> NDArray[np.float32]:
    """Return the outputs of a model for all samples as rows [n, values]; large ones are a memory map."""
    shape = (len(samples), model.output_layout.size)
    rows: NDArray[np.float32]
    if 4 * shape[0] * shape[1] > LARGE_BYTES:
        with tempfile.TemporaryFile(prefix="coralline-") as stream:  # the mapping outlives the name of the file
            rows = np.memmap(stream, np.float32, "w+", shape=shape)
    else:
        rows = np.empty(shape, np.float32)
    for index in range(len(samples)):
        rows[index] = model.scores(np.asarray(samples[index : index + 1]))[0]
        if progress is not None:
            progress.update(index + 1, len(samples))
    return rows
