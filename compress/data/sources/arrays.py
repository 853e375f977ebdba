"""numpy files: .npz, and pairs of .npy files that are memory-mapped."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compress.core.errors import DataError
from compress.core.files import NUMPY_ERRORS
from compress.data import class_names, files, labels
from compress.data.class_names import ClassList
from compress.data.source import Samples, Stored
from compress.data.splits import at_random, quantile_strata
from compress.data.types import Split
from deploy.contract.image_geometry import NO_CLASS

SHAPES = "numbers [n, samples], [n, height, width] or [n, height, width, channels]"
MAX_LABELS_BYTES = 4 << 30
"""Labels are read into memory; chosen: masks of 16,000 photos of 512 x 512 pixels fit."""


class ArraySource(Stored):
    """A source of numpy arrays."""

    y: str | None = None
    classes: ClassList | None = None
    """The class names in the order of the model's outputs: a list, or the path of a labels file, relative to the
    pipeline file. By default the labels are the names."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """For regression: the names of the targets, one for each column of y, which is then [n] or [n, targets]."""

    def task_name(self) -> str:
        """Return "regression" if y holds targets, "outputs" without labels."""
        if self.y is None:
            return "outputs"
        return "regression" if self.targets else "classification"

    def _class_names(self) -> tuple[str, ...] | None:
        return class_names.listed(self.classes, f"data.source.{self.name}")

    @model_validator(mode="after")
    def _either(self) -> Self:
        if self.targets is not None and self.classes is not None:
            raise ValueError("'classes' and 'targets' cannot be used together: 'y' has either labels or targets")
        if self.y is None and (self.targets is not None or self.classes is not None):
            raise ValueError("'classes' and 'targets' name the labels in 'y', which is not set")
        return self


class Npz(ArraySource):
    """A .npz file with samples [n, height, width] or [n, height, width, channels], and labels [n].

    Sounds are [n, samples], time series are [n, time, channels]. A third array can give the split of each sample: [n]
    of "train", "validation", "test".
    """

    name: ClassVar[str] = "npz"
    paths: ClassVar[tuple[str, ...]] = ("file", "classes", "manifest")

    file: str
    """Path of the file, relative to the pipeline file."""
    x: str | Annotated[tuple[str, ...], Field(min_length=1)] = "x"
    """Name of the array of samples; for a model with several inputs, the names of several arrays in their order."""
    y: str | None = "y"
    """Name of the array of labels: integers from 0, or class names; [n, classes] of 0 and 1, masks or points for the
    tasks that need them (data.task). null: the samples have no labels."""
    split: str | None = None
    """Name of the array with the split of each sample."""

    def files(self) -> dict[str, Path]:
        """Return the file, and the labels file."""
        return {"file": Path(self.file), **class_names.files_of(self.classes)}

    def load(self) -> Samples:
        """Read the arrays and check them against each other."""
        if self.y in self._inputs:
            what = f"the array {self.y!r} cannot be both samples and labels"
            raise DataError(what, where=self.file, hint="set y: null and data.task: reconstruction")
        arrays = self._arrays()
        split = (self.split, arrays[self.split]) if self.split else None
        labels = (self.y, arrays[self.y]) if self.y else None
        inputs = [(name, arrays[name]) for name in self._inputs]
        samples = _samples(self.file, inputs, labels, split, self._class_names(), self.targets)
        return replace(samples, describe=lambda index: f"{self.file}, sample {index}")

    @property
    def _inputs(self) -> tuple[str, ...]:
        return (self.x,) if isinstance(self.x, str) else self.x

    def _arrays(self) -> dict[str, NDArray[Any]]:
        names = [*self._inputs, *filter(None, (self.y, self.split))]
        try:
            with files.opened(Path(self.file)) as stream:
                self._refuse_large(stream)
                with np.load(stream, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in names if name in file.files}
                    stored = file.files
        except OSError as error:
            raise files.unreadable(error, self.file) from error
        except NUMPY_ERRORS as error:
            raise DataError(f"is not a usable .npz file: {error}", where=self.file) from error
        for name in names:
            if name not in arrays:
                allowed = ", ".join(stored) or "none: it is empty"
                hint = "name the arrays with data.source.npz.x and y; y: null if the samples have no labels"
                raise DataError(f"has no array {name!r}", where=self.file, allowed=allowed, hint=hint)
            if not isinstance(arrays[name], np.ndarray):  # numpy returns the bytes of a member that is not a .npy file
                raise DataError(f"{name!r} is not an array", where=self.file, hint="write the file with numpy.savez")
        return arrays

    def _refuse_large(self, stream: BinaryIO) -> None:
        limit = files.most(files.size_of(stream))
        with zipfile.ZipFile(stream) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > limit:
            raise DataError(f"unpacks to {size:,} bytes", where=self.file, allowed=f"{limit:,} bytes")
        stream.seek(0)


class Npy(ArraySource):
    """Two .npy files: samples as in `npz`, and labels [n]. Samples are read when they are needed, not all at once."""

    name: ClassVar[str] = "npy"
    paths: ClassVar[tuple[str, ...]] = ("x", "y", "split", "classes", "manifest")

    x: str
    """Path of the samples, relative to the pipeline file."""
    y: str | None = None
    """Path of the labels: integers from 0, or class names; [n, classes] of 0 and 1, masks or points for the tasks that
    need them (data.task). Without it the samples have no labels."""
    split: str | None = None
    """Path of an array with the split of each sample: [n] of "train", "validation", "test"."""

    def files(self) -> dict[str, Path]:
        """Return the one to three files, and the labels file."""
        arrays = {"x": self.x, "y": self.y, "split": self.split}
        paths = {name: Path(path) for name, path in arrays.items() if path}
        return paths | class_names.files_of(self.classes)

    def load(self) -> Samples:
        """Open the arrays and check them against each other; the samples are memory-mapped."""
        split = ("split", _in_memory(self.split)) if self.split else None
        labels = ("y", _in_memory(self.y)) if self.y else None
        samples = _samples(self.x, [("x", _mapped(Path(self.x)))], labels, split, self._class_names(), self.targets)
        return replace(samples, describe=lambda index: f"{self.x}, sample {index}")


def _mapped(path: Path) -> NDArray[Any]:
    """Return the array of a .npy file as a memory map."""
    with files.opened(path) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version}")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if dtype.hasobject:
                raise ValueError("it contains Python objects (a pickle), which could run code")
            expected = math.prod(shape) * dtype.itemsize
            available = files.size_of(stream) - stream.tell()
            if any(side < 0 for side in shape) or expected != available or not dtype.itemsize:
                raise ValueError(f"{dtype} {list(shape)} needs {expected:,} bytes of data, there are {available:,}")
            if not expected:
                return np.zeros(shape, dtype)
            order = "F" if fortran else "C"
            return np.memmap(stream, dtype, "r", stream.tell(), shape, order)  # type: ignore[call-overload, no-any-return]
        except OSError as error:
            raise files.unreadable(error, path) from error
        except (*NUMPY_ERRORS, OverflowError, RecursionError) as error:
            raise DataError(f"is not a usable .npy file: {error}", where=str(path), hint="write it again") from error


def _in_memory(path: str) -> NDArray[Any]:
    array = _mapped(Path(path))
    if array.nbytes > MAX_LABELS_BYTES:
        raise DataError(f"has {array.nbytes:,} bytes", where=path, allowed=f"{MAX_LABELS_BYTES:,} bytes of labels")
    return np.array(array)


def _samples(
    where: str,
    inputs: Sequence[tuple[str, NDArray[Any]]],
    labelling: tuple[str, NDArray[Any]] | None,
    split: tuple[str, NDArray[Any]] | None,
    classes: tuple[str, ...] | None,
    target_names: tuple[str, ...] | None,
) -> Samples:
    """Return samples from arrays that are checked against each other: the inputs [n, ...], the labels [n, ...] and the
    split of each sample, with their names."""
    if labelling is not None and len(inputs) == 1:
        _refuse_swapped(where, inputs[0], labelling)
    for name, x in inputs:
        if x.ndim not in ((2, 3, 4) if len(inputs) == 1 else range(1, 6)) or x.dtype.kind not in "uifb":
            raise DataError(f"array {name!r} is {x.dtype} {list(x.shape)}", where=where, allowed=SHAPES)
    count = len(inputs[0][1])
    for name, x in inputs:
        if len(x) != count:
            raise DataError(f"array {name!r} has {len(x):,} samples", where=where, allowed=f"{count:,}, as the first")
    arrays = [x for _, x in inputs]

    def read(index: int) -> NDArray[Any]:
        if len(arrays) == 1:
            return np.asarray(arrays[0][index])
        return np.concatenate([np.asarray(array[index], np.float32).ravel() for array in arrays])

    splits = _splits(where, *split, count) if split else {}
    if labelling is None:
        return Samples(np.zeros(count, np.int64), (), read, splits, divide=at_random, has_labels=False)
    y_name, y = labelling
    if target_names is not None:
        numbers = _targets(where, y_name, y, count, target_names)
        return Samples(quantile_strata(numbers[:, 0]), target_names, read, splits, targets=numbers)
    if y.ndim > 1 and len(y) == count and y.dtype.kind in "uifb":
        return _with_arrays(where, y_name, y, classes, read, splits)
    if y.shape != (count,) or y.dtype.kind not in "uiU":
        allowed = f"one integer or name for each of the {count} samples"
        if y.dtype.kind == "f":
            allowed += "; for regression, name the targets with `targets`"
        raise DataError(f"array {y_name!r} is {y.dtype} {list(y.shape)}", where=where, allowed=allowed)
    return Samples(*labels.of_array(y, classes, lambda index: f"{where}: {y_name}[{index}]"), read, splits)


def _refuse_swapped(where: str, samples: tuple[str, NDArray[Any]], labelling: tuple[str, NDArray[Any]]) -> None:
    """Refuse samples that are one number each, with labels that are arrays."""
    x_name, x = samples
    y_name, y = labelling
    if x.ndim == 1 < y.ndim:
        shapes = f"{x_name!r} is {list(x.shape)}, {y_name!r} is {list(y.shape)}"
        raise DataError(
            f"the arrays of samples and labels are swapped: {shapes}",
            where=where,
            allowed=SHAPES,
            hint=f"set x: {y_name} and y: {x_name} in data.source",
        )


def _with_arrays(
    where: str,
    name: str,
    y: NDArray[Any],
    classes: tuple[str, ...] | None,
    read: Callable[[int], NDArray[Any]],
    splits: Mapping[Split, NDArray[np.int64]],
) -> Samples:
    """Return samples with an array each: labels of 0 and 1, a mask or points."""
    if not np.isfinite(y).all():
        raise DataError(f"array {name!r} has values that are NaN or infinite", where=where, hint="repair it")
    if classes is None:
        highest = int(y[y != NO_CLASS].max(initial=0)) + 1 if y.dtype.kind in "uib" else y.shape[1]
        classes = tuple(map(str, range(y.shape[1] if y.ndim == 2 and highest <= 2 else highest)))
    return Samples(np.zeros(len(y), np.int64), classes, read, splits, divide=at_random, targets=y)


def _targets(where: str, name: str, y: NDArray[Any], count: int, names: tuple[str, ...]) -> NDArray[np.float32]:
    """Return the targets of all samples: float32 [n, targets]."""
    columns = y[:, np.newaxis] if y.ndim == 1 else y
    if columns.shape != (count, len(names)) or y.dtype.kind not in "uif":
        allowed = f"numbers [{count}, {len(names)}]: {', '.join(names)}"
        raise DataError(f"array {name!r} is {y.dtype} {list(y.shape)}", where=where, allowed=allowed)
    if len(set(names)) < len(names):
        raise DataError("two targets have the same name", where=where, allowed=", ".join(sorted(set(names))))
    with np.errstate(over="ignore"):
        numbers = columns.astype(np.float32)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, column = bad[0]
        what = f"target {names[column]!r} of sample {row} is {columns[row, column]}"
        raise DataError(what, where=where, allowed="finite numbers", hint="remove or repair the sample")
    return numbers


def _splits(where: str, name: str, words: NDArray[Any], count: int) -> Any:
    if words.shape != (count,) or words.dtype.kind != "U":
        allowed = f"the name of a split for each of the {count} samples"
        raise DataError(f"array {name!r} is {words.dtype} {list(words.shape)}", where=where, allowed=allowed)
    meant = {word: labels.split_named(word, where) for word in sorted(set(words.tolist()))}
    return labels.splits(meant[word] for word in words.tolist())
