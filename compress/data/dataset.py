"""Data sets: a source of samples, its splits, and the preprocessing."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.artifact import Facts
from compress.core.errors import DataError
from compress.core.files import digest_of, explain
from compress.core.progress import SILENT, Progress
from compress.core.settings import Settings
from compress.data import duplicates
from compress.data import summary as summaries
from compress.data.prefetching import corrupt, decode, decoded
from compress.data.rows import Rows
from compress.data.source import LEAVE_OUT, REPAIR, CorruptError, Samples, Source, several
from compress.data.sources.in_memory import Arrays, InMemory
from compress.data.types import SPLITS, DecodedCache, Objects, Split
from deploy.contract.durable_files import write_atomically
from deploy.contract.image_geometry import AffineMap, input_map, mask_in_input, moves_positions
from deploy.contract.preprocessing import Preprocessing, PreprocessingError

LARGE_BYTES = 256 << 20
"""A preprocessed split larger than this is written to a file of the store and memory-mapped."""
VERSION = 3
"""Increased when the same files give different values or different splits."""
TOOLS = ("numpy", "pillow", "scipy")


class Splitting(Settings):
    """How samples are divided into splits if the source does not define splits. Stratified by class."""

    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the samples for validation: early stopping and selection."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of the samples for the final measurement, used for nothing else."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the division. It differs from the run's seed, so that all runs have the same test split."""


class Dataset:
    """A data set as stages and probes see it (`compress.data.types.Data`). The samples are loaded on first use.

    Args:
        source: where the samples come from.
        preprocessing: what is done to each of them.
        splitting: how to divide them; None leaves it to the source where it has an opinion.
        task: what the samples are for; None for what their labels say.
    """

    def __init__(
        self, source: Source, preprocessing: Preprocessing, splitting: Splitting | None, task: str | None = None
    ) -> None:
        self.source = source
        self._task = task
        self._preprocessing = preprocessing
        self._splitting = splitting
        self._inputs: dict[Split, NDArray[np.float32]] = {}
        self._store: DecodedCache | None = None
        self._progress = SILENT
        self._masks: dict[Split, NDArray[np.uint8]] = {}
        self._dropped: list[str] = []
        self._raw_fingerprints: dict[int, bytes] = {}
        self._tolerant = False
        self._shapes: dict[Split, tuple[int, ...]] = {}
        self._fingerprints: dict[Split, dict[int, bytes]] = {}

    @classmethod
    def from_arrays(
        cls,
        train: Arrays,
        validation: Arrays | None = None,
        test: Arrays | None = None,
        *,
        class_names: Sequence[str] = (),
        preprocess: Sequence[Mapping[str, Any]] = (),
        task: str | None = None,
    ) -> Dataset:
        """Return a data set of arrays in memory.

        Args:
            train: samples [n, ...] and labels: [n] whole numbers from 0; values [n, targets] for regression; [n,
                classes] of 0 and 1, masks or points for other tasks; None for samples without labels.
            validation: the same for the validation split; None takes a tenth of the training samples.
            test: the same for the test split; None takes a fifth of the training samples.
            class_names: the names of the classes, a label is an index into them; or of the targets.
            preprocess: preprocessing steps as in pipeline.yaml.
            task: what the samples are for; None for classification, regression or no labels, as the labels say.

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
        return cls(source, preprocessing, None, task)

    def work_in(self, store: DecodedCache | None, progress: Progress) -> None:
        """Set the store for large splits, and the progress for decoding."""
        self._store, self._progress = store, progress

    def tolerant(self) -> Dataset:
        """Return the same data set without a manifest, and with unreadable samples left out."""
        known = type(self.source).model_fields.keys()
        changes = {name: value for name, value in (("corrupt", "skip"), ("manifest", None)) if name in known}
        data = Dataset(self.source.model_copy(update=changes), self._preprocessing, self._splitting, self._task)
        data._tolerant = True
        return data

    @cached_property
    def _origin(self) -> dict[str, Any]:
        """Everything that determines the samples before preprocessing, their labels, and the splits."""
        split = self._splitting.model_dump() if self._splitting else None
        return {"source": {self.source.name: self.source.fingerprint()}, "split": split, "version": VERSION}

    @property
    def samples_digest(self) -> str:
        """Digest of the samples before preprocessing, their labels, and the splits. No sample is loaded."""
        return digest_of(self._origin)

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines samples, labels and splits. No sample is loaded."""
        task = {"task": self._task} if self._task else {}
        return digest_of({**self._origin, "preprocessing": self._preprocessing.digest, **task})

    @cached_property
    def _kept(self) -> str:
        """Digest for decoded samples; it also depends on the versions of the decoders."""
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
        """Return the readable samples. The list of the other samples is stored, so that it is made only once."""
        errors: dict[str, str] | None = None
        path = self._store.kept(self._kept) / "corrupt.json" if self._store else None
        if path is not None and path.exists():
            errors = json.loads(path.read_bytes())
        digests: dict[int, bytes] = {}
        if errors is None:

            def read(index: int) -> NDArray[Any]:
                sample = self._read(samples, index)
                digests[index] = duplicates.fingerprint(sample)
                return sample

            problems = corrupt(read, len(samples.labels), progress=self._progress)
            errors = {str(index): str(error) for index, error in problems}
            if path is not None:
                write_atomically(path, json.dumps(errors).encode())
        self._dropped = list(errors.values())
        rest = np.setdiff1d(np.arange(len(samples.labels)), np.array([int(index) for index in errors], np.int64))
        self._raw_fingerprints = {new: digests[int(old)] for new, old in enumerate(rest) if int(old) in digests}
        return samples.part(rest)

    @cached_property
    def _indices(self) -> dict[Split, NDArray[np.int64]]:
        samples, splitting = self._samples, self._splitting
        indices = {} if splitting else dict(samples.splits)
        if indices and "train" not in indices:
            raise DataError(
                f"has no train split, only {' and '.join(indices)}",
                where=f"data.source.{self.source.name}",
                hint="add one, or have the samples divided by data.split",
            )
        if samples.groups is not None:
            _refuse_shared(samples.groups, indices, f"data.source.{self.source.name}")
        splitting = splitting or Splitting()
        everything = np.arange(len(samples.labels))
        if "test" not in indices:
            rest = indices.get("train", everything)
            indices["train"], indices["test"] = samples.divide(samples.labels, rest, splitting.test, splitting.seed)
        if "validation" not in indices:
            indices["train"], indices["validation"] = samples.divide(
                samples.labels, indices["train"], splitting.validation, splitting.seed + 1
            )
        for split in SPLITS:
            if len(indices[split]) == 0:
                raise DataError(
                    f"the {split} split is empty: {len(everything)} samples are too few",
                    where=f"data.source.{self.source.name}",
                    hint=samples.few,
                )
        return indices

    @property
    def task(self) -> str:
        """The name of the task of the samples. No sample is loaded."""
        return self._task or self.source.task_name()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into it."""
        return self._samples.class_names

    @property
    def preprocessing(self) -> list[dict[str, Any]]:
        """The preprocessing steps as in pipeline.yaml."""
        return self._preprocessing.specification

    @property
    def decoding(self) -> dict[str, Any]:
        """How the device decodes files (`deploy.contract.decoding`)."""
        return self.source.decoding

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed sample: height, width, channels."""
        return tuple(int(side) for side in self.inputs("validation").shape[1:])

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the label of every sample of a split: [n]."""
        return self._samples.labels[self._indices[split]]

    @property
    def corrupt(self) -> list[str]:
        """The unreadable samples that were left out because of `corrupt: skip`, with the reasons."""
        return [*self._samples.corrupt, *self._dropped]

    @property
    def notes(self) -> list[str]:
        """Further notes on the data for the user."""
        count, used = len(self._samples.labels), sum(map(len, self._indices.values()))
        unused = f"{count - used:,} of {count:,} samples are in no split, and are not used"
        return [*self._samples.notes, *[unused] * (used < count)]

    @property
    def warnings(self) -> list[str]:
        """The probable mistakes in the data; of the splits that were decoded so far."""
        train, validation, test = (self._fingerprints_of(split) for split in SPLITS)
        shared = duplicates.about_shared(test, (train, validation), self._samples, self._indices["test"])
        return [*self._samples.warnings, *shared, *self._about_contradictory_samples()]

    def _about_contradictory_samples(self) -> list[str]:
        """Warn of equal samples in two classes."""
        samples = self._samples
        if not samples.class_names or self.has_objects or self.has_targets:
            return []
        digests = {
            int(self._indices[split][position]): digest
            for split in SPLITS
            for position, digest in self._fingerprints_of(split).items()
        }
        return duplicates.about_contradictory(digests or self._raw_fingerprints, samples)

    def _fingerprints_of(self, split: Split) -> dict[int, bytes]:
        """Return the fingerprints of a split that was decoded; those of a stored one are computed unless it is huge."""
        inputs = self._inputs.get(split)
        if split not in self._fingerprints and inputs is not None and inputs.nbytes <= duplicates.MOST_BYTES:
            self._fingerprints[split] = dict(enumerate(map(duplicates.fingerprint, inputs)))
        return self._fingerprints.get(split, {})

    @property
    def observed(self) -> list[str]:
        """Notes on what is unusual about the samples that were decoded so far. After a run they depend on what was in
        the store; `compress.data.summary.examine` decodes all."""
        return list(self._samples.observed())

    def summary(self) -> Facts:
        """Return counts, shapes, ranges and the samples left out (`compress.data.summary`)."""
        return summaries.summary(self)

    @property
    def has_objects(self) -> bool:
        """Whether the samples have objects with boxes."""
        return self._samples.objects is not None

    @property
    def has_targets(self) -> bool:
        """Whether the samples have arrays as targets."""
        samples = self._samples
        return not (samples.targets is None and samples.points is None and samples.read_mask is None)

    def targets(self, split: Split) -> NDArray[Any]:
        """Return the array that belongs to each sample of a split: [n, ...]. Masks and points of images are those of
        the preprocessed image.

        Raises:
            DataError: the samples have none, or a mask cannot be read.
        """
        samples, indices = self._samples, self._indices[split]
        if samples.read_mask is not None:
            if split not in self._masks:
                read = partial(self._mask, indices)
                self._masks[split] = np.stack(decoded(read, len(indices), self._progress, self._hint))
            return self._masks[split]
        if samples.points is not None:
            return self._moved_points(samples.points[indices], indices)
        if samples.targets is None:
            raise DataError(
                f"the samples have no targets, which the task {self.task} needs",
                where=f"data.source.{self.source.name}",
                allowed="an array for each sample",
                hint="check data.task and data.source",
            )
        return samples.targets[indices]

    def _mask(self, indices: NDArray[np.int64], position: int) -> NDArray[np.uint8]:
        samples, index = self._samples, int(indices[position])
        assert samples.read_mask is not None  # the caller has checked it
        try:
            mask = samples.read_mask(index)
            moved: NDArray[np.uint8] = mask_in_input(self._preprocessing, mask)
        except DataError as error:
            raise CorruptError(error.what, where=error.where, allowed=error.allowed, hint=error.hint) from error
        except PreprocessingError as error:
            raise DataError(str(error), where=self._where(samples, index)) from error
        return moved

    def _moved_points(self, points: NDArray[np.float32], indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return points [n, points, 3] of some samples as fractions of the preprocessed images. Points outside of it
        count as not marked."""
        if not moves_positions(self._preprocessing):
            return points
        moved = points.copy()
        for row, index in zip(moved, indices, strict=True):
            positions = self._input_map(int(index)).to_input(row[:, 1::-1])
            outside = ((positions < 0) | (positions > 1)).any(axis=1)
            unmarked = row[:, 2] <= 0
            row[:, :2] = positions[:, ::-1]
            row[outside | unmarked] = 0
        return moved

    def _input_map(self, index: int) -> AffineMap:
        """Return the map from fractions of an image to fractions of the preprocessed image."""
        sizes = self._samples.sizes
        assert sizes is not None  # sources of objects and points have it
        try:
            return input_map(self._preprocessing, *(int(side) for side in sizes[index]))
        except PreprocessingError as error:
            raise DataError(str(error), where=self._where(self._samples, index)) from error

    def objects(self, split: Split) -> list[Objects]:
        """Return the objects of every sample of a split, for detection. Boxes are fractions of the preprocessed image:
        they are cut off at its border, and objects of which too little is visible are left out."""
        samples, indices = self._samples, self._indices[split]
        assert samples.objects is not None  # only the task detection asks for objects
        if not moves_positions(self._preprocessing):
            return [samples.objects[index] for index in indices]
        moved = []
        for index in indices:
            boxes, classes = samples.objects[index]
            moved_boxes, visible = self._input_map(int(index)).boxes_to_input(boxes)
            moved.append(Objects(moved_boxes[visible], classes[visible]))
        return moved

    def raw(self, split: Split, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return some samples of a split before preprocessing."""
        chosen = self._indices[split][indices]
        return decoded(lambda position: self._read(self._samples, int(chosen[position])), len(chosen), hint=self._hint)

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample for people, such as the path of its file."""
        return self._samples.describe(int(self._indices[split][index]))

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return all preprocessed samples of a split: [n, height, width, channels]; a memory map if the split is large.

        Raises:
            DataError: a sample cannot be read, has a wrong shape, NaN or infinity.
            StoreError: the disk is full, or the store cannot be written.
        """
        if split not in self._inputs:
            inputs = self._obtained(split)
            self._fit(split, inputs.shape[1:])
            self._inputs[split] = inputs
        return self._inputs[split]

    @property
    def _acceptance(self) -> Path | None:
        """The file in the store that says that all samples are readable."""
        return self._store.kept(self._kept) / "accepted" if self._store else None

    def is_accepted(self) -> bool:
        """Return whether an earlier run with the same store has decoded all samples."""
        return self._acceptance is not None and self._acceptance.exists()

    def accept(self) -> None:
        """Decode all splits, and refuse all unreadable samples at once.

        Raises:
            DataError: as `inputs`; of unreadable samples with those of all splits.
        """
        problems: list[DataError] = []
        for split in SPLITS:
            try:
                self.inputs(split)
                if self._samples.read_mask is not None:
                    self.targets(split)
            except CorruptError as error:
                problems += error.errors or [error]
        if problems:
            raise several(problems, self._hint)
        if self._acceptance is not None:
            write_atomically(self._acceptance, b"")

    def try_out(self, split: Split) -> None:
        """Decode and preprocess a split like `inputs`, without keeping the result.

        Raises:
            DataError: as `inputs`.
        """
        rows = Rows(len(self._indices[split]), 0, None, keep=False)
        self._decoded(split, rows)
        self._fit(split, rows.shape or ())
        if self._samples.read_mask is not None:
            self.targets(split)

    def _fit(self, split: Split, shape: tuple[int, ...]) -> None:
        """Refuse a split whose sample shape differs from that of other splits."""
        self._shapes[split] = shape
        other = next((name for name, known in self._shapes.items() if known != shape), None)
        if other is not None:
            raise DataError(
                f"the {split} split has shape {list(shape)} after preprocessing, {other} {list(self._shapes[other])}",
                where=f"data.source.{self.source.name}",
                hint="put a resize step into data.preprocess",
            )

    def _obtained(self, split: Split) -> NDArray[np.float32]:
        """Return a split from the store, or decode the split; a large split is added to the store."""
        count = len(self._indices[split])
        if self._store is None:
            array = self._decoded(split, Rows(count, LARGE_BYTES, None))
            assert array is not None  # without a path rows stay in memory
            return array
        name = f"{self._kept}-{split}"
        try:
            path = self._store.kept(self._kept) / f"{split}.npy"
            if (stored := _mapped(path, count)) is not None:
                return stored
            with self._store.lock(
                name, lambda: self._progress.note(f"the {split} split is being decoded by another run")
            ):
                if (stored := _mapped(path, count)) is not None:
                    return stored
                with self._store.scratch() as folder:
                    rows = Rows(count, LARGE_BYTES, folder / path.name)
                    array = self._decoded(split, rows)
                    if array is not None:
                        return array
                    os.replace(folder / path.name, path)
        except OSError as error:
            raise explain(error, "decoded samples cannot be kept", self._store.folder) from error
        stored = _mapped(path, count)
        assert stored is not None  # it was written a moment ago
        return stored

    def _decoded(self, split: Split, rows: Rows) -> NDArray[np.float32] | None:
        indices = self._indices[split]
        fingerprints = self._fingerprints[split] = {}

        def put(position: int, image: NDArray[np.float32]) -> None:
            if rows.shape is not None and image.shape != rows.shape:
                raise DataError(
                    f"has shape {list(image.shape)} after preprocessing, others have {list(rows.shape)}",
                    where=self._where(self._samples, int(indices[position])),
                    hint="put a resize step into data.preprocess",
                )
            rows.put(position, image)
            fingerprints[position] = duplicates.fingerprint(image)

        with rows:
            decode(
                lambda position: self._preprocessed(int(indices[position])),
                len(indices),
                put,
                self._progress,
                self._hint,
            )
            return rows.taken()

    @property
    def _hint(self) -> str:
        """Advice for unreadable samples; not every source can leave them out."""
        return LEAVE_OUT if "corrupt" in type(self.source).model_fields else REPAIR

    def _where(self, samples: Samples, index: int) -> str:
        return f"data.source.{self.source.name}: {samples.describe(index)}"

    def _read(self, samples: Samples, index: int) -> NDArray[Any]:
        """Return a sample before preprocessing; its values are finite."""
        where = self._where(samples, index)
        try:
            sample = samples.read(index)
        except DataError as error:
            location = where if error.where in where or not error.where else f"{where}: {error.where}"
            raise CorruptError(error.what, where=location, allowed=error.allowed, hint=error.hint) from error
        if sample.dtype.kind not in "uifb":
            raise CorruptError(f"is {sample.dtype}", where=where, allowed="integers, floats or bools")
        if sample.dtype.kind == "f" and not np.isfinite(sample).all():
            raise CorruptError("has values that are NaN or infinite", where=where, hint="remove or repair it")
        return sample

    def _preprocessed(self, index: int) -> NDArray[np.float32]:
        sample = self._read(self._samples, index)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused below
                image: NDArray[np.float32] = self._preprocessing(sample)
        except PreprocessingError as error:
            raise DataError(str(error), where=self._where(self._samples, index)) from error
        if not np.isfinite(image).all():
            reason = "has values that are NaN or infinite after preprocessing"
            raise CorruptError(reason, where=self._where(self._samples, index), hint="check data.preprocess")
        return image


def _mapped(path: Path, count: int) -> NDArray[np.float32] | None:
    """Return a stored split as a memory map, or None if it is missing or incomplete."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except ValueError:  # cut short by whatever happened to the disk: decoded again
        return None
    return array if array.dtype == np.float32 and len(array) == count else None


def _check(samples: Samples, name: str) -> None:
    labels, classes = samples.labels, samples.class_names
    where = f"data.source.{name}"
    if len(labels) == 0:
        raise DataError("contains no samples", where=where)
    if samples.objects is not None:
        if not classes or not any(len(objects.classes) for objects in samples.objects):
            raise DataError("the images contain no objects", where=where, hint="check the annotations")
        _refuse_twins(classes, where)
        return
    arrays = (samples.targets, samples.points, samples.read_mask)
    if any(array is not None for array in arrays) or not samples.has_labels:
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
    """Refuse a group that is in two splits."""
    known: dict[str, Split] = {}
    for split, indices in splits.items():
        for group in np.unique(groups[indices]).tolist():
            if group and known.setdefault(group, split) != split:
                raise DataError(
                    f"the group {group!r} is in {known[group]} and in {split}",
                    where=where,
                    hint="correct the table, or have its groups divided by data.split",
                )


def _refuse_twins(classes: tuple[str, ...], where: str) -> None:
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise DataError(f"two classes are called {twice!r}", where=where)
