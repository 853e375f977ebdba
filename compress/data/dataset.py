"""Data sets: a source of samples, its splits, and preprocessing on the way out."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.artifact import Facts
from compress.data import summary as summaries
from compress.data.prefetching import Rows, corrupt, decode
from compress.data.source import LEAVE_OUT, REPAIR, CorruptError, Samples, Source
from compress.data.sources import SOURCES
from compress.data.sources.in_memory import Arrays, InMemory
from compress.data.splits import spread, stratified
from compress.data.types import SPLITS, DecodedCache, Objects, Split
from compress.errors import DataError
from compress.files import digest_of, explain, write_atomically
from compress.progress import Progress
from compress.settings import Settings
from deploy.contract.preprocessing import Preprocessing, PreprocessingError

__all__ = ["SOURCES", "Dataset", "Splitting", "spread", "stratified"]

LARGE_BYTES = 256 << 20
"""A split that is larger when preprocessed is kept in a file of the store and mapped, not held in memory."""
VERSION = 2
"""Raised when the same files would be decoded to other numbers, or divided otherwise, than before."""
TOOLS = ("numpy", "pillow", "scipy")


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
        self.source = source
        self._preprocessing = preprocessing
        self._splitting = splitting
        self._inputs: dict[Split, NDArray[np.float32]] = {}
        self._store: DecodedCache | None = None
        self._progress: Progress | None = None
        self._dropped: list[str] = []
        self._tolerant = False
        self._shapes: dict[Split, tuple[int, ...]] = {}

    @classmethod
    def from_arrays(
        cls,
        train: Arrays,
        validation: Arrays | None = None,
        test: Arrays | None = None,
        *,
        class_names: Sequence[str],
        preprocess: Sequence[Mapping[str, Any]] = (),
    ) -> Dataset:
        """Return a data set of arrays in memory.

        Args:
            train: samples [n, ...] and labels [n], whole numbers from 0.
            validation: the same for the validation split; None takes a tenth of the training samples.
            test: the same for the test split; None takes a fifth of the training samples.
            class_names: the names of the classes; a label is an index into them.
            preprocess: preprocessing steps as in pipeline.yaml.

        Raises:
            DataError: samples and labels do not fit together, or a step is wrong.
        """
        splits: dict[Split, Arrays | None] = {"train": train, "validation": validation, "test": test}
        source = InMemory.of(
            {split: arrays for split, arrays in splits.items() if arrays is not None}, tuple(class_names)
        )
        try:
            preprocessing = Preprocessing(list(preprocess))
        except PreprocessingError as error:
            raise DataError(str(error), where="preprocess") from error
        return cls(source, preprocessing, None)

    def work_in(self, store: DecodedCache | None, progress: Progress) -> None:
        """From now on large splits are kept in a store, and it is told how far decoding is."""
        self._store, self._progress = store, progress

    def tolerant(self) -> Dataset:
        """The same data without what cannot be read, and without a manifest."""
        known = type(self.source).model_fields.keys()
        changes = {name: value for name, value in (("corrupt", "skip"), ("manifest", None)) if name in known}
        data = Dataset(self.source.model_copy(update=changes), self._preprocessing, self._splitting)
        data._tolerant = True
        return data

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes a sample, a label or a split; loads nothing."""
        return digest_of(
            {
                "source": {self.source.name: self.source.fingerprint()},
                "preprocessing": self._preprocessing.digest,
                "split": self._splitting.model_dump() if self._splitting else None,
                "version": VERSION,
            }
        )

    @cached_property
    def _kept(self) -> str:
        """The name under which decoded samples are kept: it changes with the tools that decode, too."""
        tools = {tool: importlib.metadata.version(tool) for tool in TOOLS}
        return digest_of({"data": self.digest, "tools": tools})

    @cached_property
    def _samples(self) -> Samples:
        if getattr(self.source, "manifest", None) is not None:
            _ = self.digest  # verifies the files
        samples = self.source.load()
        if (samples.skip or self._tolerant) and len(samples.labels):
            samples = self._sound(samples)
        _check(samples, self.source.name)
        return samples

    def _sound(self, samples: Samples) -> Samples:
        """The samples that can be read; what is wrong with the others is kept, so that it is looked for once."""
        found: dict[str, str] | None = None
        path = self._store.kept(self._kept) / "corrupt.json" if self._store else None
        if path is not None and path.exists():
            found = json.loads(path.read_bytes())
        if found is None:
            problems = corrupt(lambda index: self._read(samples, index), len(samples.labels), progress=self._progress)
            found = {str(index): str(error) for index, error in problems}
            if path is not None:
                write_atomically(path, json.dumps(found).encode())
        self._dropped = list(found.values())
        rest = np.setdiff1d(np.arange(len(samples.labels)), np.array([int(index) for index in found], np.int64))
        return samples.part(rest)

    @cached_property
    def _indices(self) -> dict[Split, NDArray[np.int64]]:
        samples, splitting = self._samples, self._splitting
        given = {} if splitting else dict(samples.splits)
        if given and "train" not in given:
            raise DataError(
                f"there is no train split, but {' and '.join(given)}",
                where=f"data.source.{self.source.name}",
                todo="add one, or have the samples divided anew with data.split",
            )
        if samples.groups is not None:
            _refuse_shared(samples.groups, given, f"data.source.{self.source.name}")
        splitting = splitting or Splitting()
        everything = np.arange(len(samples.labels))
        if "test" not in given:
            rest = given.get("train", everything)
            given["train"], given["test"] = samples.divide(samples.labels, rest, splitting.test, splitting.seed)
        if "validation" not in given:
            given["train"], given["validation"] = samples.divide(
                samples.labels, given["train"], splitting.validation, splitting.seed + 1
            )
        for split in SPLITS:
            if len(given[split]) == 0:
                raise DataError(
                    f"the {split} split is empty: {len(everything)} samples are too few",
                    where=f"data.source.{self.source.name}",
                    todo=samples.few,
                )
        return given

    @property
    def task(self) -> str:
        """What the samples are for; loads nothing."""
        return self.source.task_name()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""
        return self._samples.class_names

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps, as they stand in pipeline.yaml."""
        return self._preprocessing.specification

    @property
    def decoding(self) -> dict[str, Any]:
        """How files become such samples on the device (`deploy.contract.decoding`)."""
        return self.source.decoding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample: height, width, channels."""
        return tuple(int(side) for side in self.inputs("validation").shape[1:])

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The label of every sample of a split: [n]."""
        return self._samples.labels[self._indices[split]]

    @property
    def corrupt(self) -> list[str]:
        """What was left out because it cannot be read, where that was asked for."""
        return [*self._samples.corrupt, *self._dropped]

    @property
    def notes(self) -> list[str]:
        """What else whoever looks at the data should know."""
        count, used = len(self._samples.labels), sum(map(len, self._indices.values()))
        unused = f"{count - used:,} of {count:,} samples are in no split, and are not used"
        return [*self._samples.notes, *[unused] * (used < count)]

    def summary(self) -> Facts:
        """What the data set is: counts, shapes, ranges, what was left out (`compress.data.summary`)."""
        return summaries.summary(self)

    def targets(self, split: Split) -> NDArray[np.float32]:
        """The numbers to predict for every sample of a split, for regression: [n, targets]."""
        assert self._samples.targets is not None  # the caller knows the task
        return self._samples.targets[self._indices[split]]

    def objects(self, split: Split) -> list[Objects]:
        """The objects of every sample of a split, for detection. No step of preprocessing moves them: boxes are
        fractions of the image's sides, and what cuts or pads images is refused beside them."""
        assert self._samples.objects is not None  # asked for by whoever knows the task
        return [self._samples.objects[index] for index in self._indices[split]]

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Some samples of a split as they came, before preprocessing."""
        found: list[NDArray[Any]] = []
        chosen = self._indices[split][indices]

        def put(place: int, sample: NDArray[Any]) -> None:
            found.append(sample)

        decode(lambda place: self._read(self._samples, int(chosen[place])), len(chosen), put, todo=self._todo)
        return found

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """All samples of a split, preprocessed: [n, height, width, channels]; a memory map of a file if it is large.

        Raises:
            DataError: a sample cannot be read, has a wrong shape, NaN or infinity.
            StoreError: the disk is full, or the store cannot be written.
        """
        if split not in self._inputs:
            found = self._obtained(split)
            self._fit(split, found.shape[1:])
            self._inputs[split] = found
        return self._inputs[split]

    def try_out(self, split: Split) -> None:
        """Decodes and preprocesses a split, as `inputs` does, and keeps nothing.

        Raises:
            DataError: as `inputs`.
        """
        rows = Rows(len(self._indices[split]), 0, None, keep=False)
        self._decoded(split, rows)
        self._fit(split, rows.shape or ())

    def _fit(self, split: Split, shape: tuple[int, ...]) -> None:
        """Refuses a split whose samples have another shape than those of the splits before."""
        self._shapes[split] = shape
        other = next((each for each, own in self._shapes.items() if own != shape), None)
        if other is not None:
            raise DataError(
                f"the {split} split has shape {list(shape)} after preprocessing, {other} {list(self._shapes[other])}",
                where=f"data.source.{self.source.name}",
                todo="put a resize step into data.preprocess",
            )

    def _obtained(self, split: Split) -> NDArray[np.float32]:
        """A split from the store, if it is there; decoded otherwise, and put there if it is large."""
        count = len(self._indices[split])
        if self._store is None:
            array = self._decoded(split, Rows(count, LARGE_BYTES, None))
            assert array is not None  # without a path rows stay in memory
            return array
        name = f"{self._kept}-{split}"
        try:
            path = self._store.kept(self._kept) / f"{split}.npy"
            if (found := _mapped(path, count)) is not None:
                return found
            with self._store.lock(name, lambda: self._note(f"the {split} split is being decoded by another run")):
                if (found := _mapped(path, count)) is not None:
                    return found
                with self._store.scratch() as folder:
                    rows = Rows(count, LARGE_BYTES, folder / path.name)
                    array = self._decoded(split, rows)
                    if array is not None:
                        return array
                    os.replace(folder / path.name, path)
        except OSError as error:
            raise explain(error, "decoded samples cannot be kept", self._store.folder) from error
        found = _mapped(path, count)
        assert found is not None  # it was written a moment ago
        return found

    def _note(self, text: str) -> None:
        if self._progress:
            self._progress.note(text)

    def _decoded(self, split: Split, rows: Rows) -> NDArray[np.float32] | None:
        """Decodes and preprocesses a split."""
        indices = self._indices[split]

        def put(place: int, image: NDArray[np.float32]) -> None:
            if rows.shape is not None and image.shape != rows.shape:
                raise DataError(
                    f"has shape {list(image.shape)} after preprocessing, others have {list(rows.shape)}",
                    where=self._where(self._samples, int(indices[place])),
                    todo="put a resize step into data.preprocess",
                )
            rows.put(place, image)

        with rows:
            decode(lambda place: self._preprocessed(int(indices[place])), len(indices), put, self._progress, self._todo)
            return rows.taken()

    @property
    def _todo(self) -> str:
        """What can be done about samples that cannot be read: not every source can leave them out."""
        return LEAVE_OUT if "corrupt" in type(self.source).model_fields else REPAIR

    def _where(self, samples: Samples, index: int) -> str:
        return f"data.source.{self.source.name}: {samples.describe(index)}"

    def _read(self, samples: Samples, index: int) -> NDArray[Any]:
        """A sample as it came, known to be finite."""
        where = self._where(samples, index)
        try:
            sample = samples.read(index)
        except DataError as error:
            told = where if error.where in where or not error.where else f"{where}: {error.where}"
            raise CorruptError(error.what, where=told, allowed=error.allowed, todo=error.todo) from error
        if sample.dtype.kind not in "uifb":
            raise CorruptError(f"is {sample.dtype}", where=where, allowed="whole numbers, floats or bools")
        if sample.dtype.kind == "f" and not np.isfinite(sample).all():
            raise CorruptError("has values that are NaN or infinite", where=where, todo="remove or repair it")
        return sample

    def _preprocessed(self, index: int) -> NDArray[np.float32]:
        sample = self._read(self._samples, index)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is told of below
                image: NDArray[np.float32] = self._preprocessing(sample)
        except PreprocessingError as error:
            raise DataError(str(error), where=self._where(self._samples, index)) from error
        if not np.isfinite(image).all():
            reason = "has values that are NaN or infinite after preprocessing"
            raise CorruptError(reason, where=self._where(self._samples, index), todo="check data.preprocess")
        return image


def _mapped(path: Path, count: int) -> NDArray[np.float32] | None:
    """A kept split, if it is there and whole."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except ValueError:  # cut short by whatever happened to the disk: decoded again
        return None
    return found if found.dtype == np.float32 and len(found) == count else None


def _check(samples: Samples, name: str) -> None:
    labels, classes = samples.labels, samples.class_names
    where = f"data.source.{name}"
    if len(labels) == 0:
        raise DataError("there are no samples", where=where)
    if samples.objects is not None:
        _check_objects(samples, where)
        return
    if samples.targets is not None:
        return
    outside = (labels < 0) | (labels >= len(classes))
    if outside.any():
        index = int(np.argmax(outside))
        allowed = f"0 to {len(classes) - 1} ({len(classes)} classes)" if classes else "class indices from 0"
        raise DataError(f"the label {labels[index]} of sample {index} is out of range", where=where, allowed=allowed)
    if len(classes) < 2:
        raise DataError(f"there are {len(classes)} classes; a classifier needs two or more", where=where)
    _refuse_twins(classes, where)


def _refuse_shared(groups: NDArray[np.str_], splits: Mapping[Split, NDArray[np.int64]], where: str) -> None:
    """Nothing, if no group is in two splits."""
    known: dict[str, Split] = {}
    for split, indices in splits.items():
        for group in np.unique(groups[indices]).tolist():
            if group and known.setdefault(group, split) != split:
                raise DataError(
                    f"the group {group!r} is in {known[group]} and in {split}",
                    where=where,
                    todo="correct the table, or have its groups divided anew with data.split",
                )


def _refuse_twins(classes: tuple[str, ...], where: str) -> None:
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise DataError(f"two classes are called {twice!r}", where=where)


def _check_objects(samples: Samples, where: str) -> None:
    if not samples.class_names or not any(len(each.classes) for each in samples.objects or ()):
        raise DataError("there are no objects in the images", where=where, todo="check the annotations")
    _refuse_twins(samples.class_names, where)
