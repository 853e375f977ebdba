"""Data sets: a source of samples, its splits, and preprocessing on the way out."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.data.source import Samples, Source
from compress.data.sources import Digits, Folder, Npz
from compress.errors import DataError
from compress.stage import SPLITS, Settings, Split
from compress.store import digest_of
from deploy.preprocessing import Preprocessing, PreprocessingError

SOURCES: dict[str, type[Source]] = {source.name: source for source in (Digits, Npz, Folder)}


class Splitting(Settings):
    """How samples are divided where the source does not say: stratified by class."""

    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the samples for validation: early stopping and selection."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the samples for the final measurement, used for nothing else."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the division; not the run's seed, so that all runs share one test split."""


class Dataset:
    """A data set as stages and probes see it (`compress.stage.Data`). Loads when first asked.

    Args:
        source: where the samples come from.
        preprocessing: what is done to each of them.
        splitting: how to divide them; None leaves it to the source where it has an opinion.
    """

    def __init__(self, source: Source, preprocessing: Preprocessing, splitting: Splitting | None) -> None:
        self._source = source
        self._preprocessing = preprocessing
        self._splitting = splitting
        self._inputs: dict[Split, NDArray[np.float32]] = {}

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes a sample, a label or a split; loads nothing."""
        return digest_of(
            {
                "source": {self._source.name: self._source.fingerprint()},
                "preprocessing": self._preprocessing.digest,
                "split": self._splitting.model_dump() if self._splitting else None,
            }
        )

    @cached_property
    def _samples(self) -> Samples:
        samples = self._source.load()
        _check(samples, self._source.name)
        return samples

    @cached_property
    def _indices(self) -> dict[Split, NDArray[np.int64]]:
        samples, splitting = self._samples, self._splitting
        given = {} if splitting else dict(samples.splits)
        if given and "train" not in given:
            raise DataError(
                f"there is no train split, but {' and '.join(given)}",
                where=f"data.source.{self._source.name}",
                todo="add one, or have the samples divided anew with data.split",
            )
        splitting = splitting or Splitting()
        everything = np.arange(len(samples.labels))
        if "test" not in given:
            rest = given.get("train", everything)
            given["train"], given["test"] = stratified(samples.labels, rest, splitting.test, splitting.seed)
        if "validation" not in given:
            given["train"], given["validation"] = stratified(
                samples.labels, given["train"], splitting.validation, splitting.seed + 1
            )
        for split in SPLITS:
            if len(given[split]) == 0:
                raise DataError(
                    f"the {split} split is empty: {len(everything)} samples are too few",
                    where=f"data.source.{self._source.name}",
                    todo="add samples, or change data.split",
                )
        return given

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""
        return self._samples.class_names

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps, as they stand in pipeline.yaml."""
        return self._preprocessing.specification

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample: height, width, channels."""
        return tuple(int(side) for side in self.inputs("validation").shape[1:])

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The label of every sample of a split: [n]."""
        return self._samples.labels[self._indices[split]]

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Some samples of a split as they came, before preprocessing."""
        return [self._samples.read(int(index)) for index in self._indices[split][indices]]

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """All samples of a split, preprocessed: [n, height, width, channels].

        Raises:
            DataError: a sample has a wrong shape, NaN or infinity.
        """
        if split not in self._inputs:
            self._inputs[split] = np.stack(self._preprocessed(split))
        return self._inputs[split]

    def _preprocessed(self, split: Split) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = []
        for index in self._indices[split]:
            where = f"data.source.{self._source.name}: {self._samples.describe(int(index))}"
            try:
                sample = self._samples.read(int(index))
                with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is told of below
                    image = self._preprocessing(sample)
            except PreprocessingError as error:
                raise DataError(str(error), where=where) from error
            if not np.isfinite(image).all():
                raise DataError("has values that are NaN or infinite", where=where, todo="remove or repair it")
            if result and image.shape != result[0].shape:
                raise DataError(
                    f"has shape {list(image.shape)} after preprocessing, others have {list(result[0].shape)}",
                    where=where,
                    todo="put a resize step into data.preprocess",
                )
            result.append(image)
        return result


def stratified(
    labels: NDArray[np.int64], indices: NDArray[np.int64], share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divides indices class by class: (the rest, `share` of each class, at least one where there are two)."""
    random = np.random.RandomState(seed)
    rest, taken = [], []
    for label in np.unique(labels[indices]):
        members = random.permutation(indices[labels[indices] == label])
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        taken.append(members[:count])
        rest.append(members[count:])
    return np.sort(np.concatenate(rest)), np.sort(np.concatenate(taken))


def spread(labels: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """All indices, in an order of which every beginning has the classes in their proportions."""
    random = np.random.RandomState(seed)
    rank = np.zeros(len(labels))
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        rank[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((labels, rank)).astype(np.int64)


def _check(samples: Samples, name: str) -> None:
    labels, classes = samples.labels, samples.class_names
    where = f"data.source.{name}"
    if len(labels) == 0:
        raise DataError("there are no samples", where=where)
    outside = (labels < 0) | (labels >= len(classes))
    if outside.any():
        index = int(np.argmax(outside))
        allowed = f"0 to {len(classes) - 1} ({len(classes)} classes)" if classes else "class indices from 0"
        raise DataError(f"the label {labels[index]} of sample {index} is out of range", where=where, allowed=allowed)
    if len(classes) < 2:
        raise DataError(f"there are {len(classes)} classes; a classifier needs two or more", where=where)
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise DataError(f"two classes are called {twice!r}", where=where)
