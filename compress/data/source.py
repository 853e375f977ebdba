"""Data sources: settings that open samples, and files with digests and manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.core.files import digest_of
from compress.core.settings import Settings
from compress.data import class_names, files, manifest
from compress.data.splits import Divide, stratified
from compress.data.types import Objects, Split


@dataclass(frozen=True)
class Samples:
    """Samples, with or without labels; `read` decodes a sample when it is used.

    Attributes:
        labels: int64 [n], indices into `class_names`. For images with objects, the class by which splits are balanced;
            the number of classes for an image without objects.
        class_names: the classes; empty if the samples have no labels.
        read: returns the decoded sample at an index: [height, width] or [height, width, channels]; a series [time,
            channels], a signal [samples]. Several threads call it at once.
        splits: the indices of each split that the data defines.
        describe: returns the name of the sample at an index, for messages.
        divide: divides the samples into splits that the data does not define.
        skip: leave out unreadable samples and list them, instead of raising an error.
        corrupt: the reason for each sample that was unreadable and is left out already.
        notes: further notes on the data for the user.
        warnings: the probable mistakes in the data.
        objects: the objects of each sample, for detection; otherwise None.
        sizes: height and width of each image with objects or points, because preprocessing may move these.
        points: the keypoints of each sample: float32 [n, points, 3]: x and y as fractions of the image, and visibility
            (0: not marked).
        read_mask: returns the class of each pixel of a sample: uint8 [height, width]. Several threads call it at once.
        targets: an array for each sample, which preprocessing does not move: values to predict, labels of 0 and 1, a
            mask, or points: [n, ...]; otherwise None.
        groups: the group of each sample, if a table has groups; no two splits share a group. "": no group.
        few: the advice if a division leaves a split empty.
        has_labels: whether the samples have classes, objects or targets.
        observed: notes on what is unusual about the samples that were decoded so far.
    """

    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    read: Callable[[int], NDArray[Any]]
    splits: Mapping[Split, NDArray[np.int64]] = field(default_factory=dict)
    describe: Callable[[int], str] = "sample {}".format
    divide: Divide = stratified
    skip: bool = False
    corrupt: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    objects: tuple[Objects, ...] | None = None
    sizes: NDArray[np.int64] | None = None
    points: NDArray[np.float32] | None = None
    read_mask: Callable[[int], NDArray[np.uint8]] | None = None
    targets: NDArray[Any] | None = None
    groups: NDArray[np.str_] | None = None
    few: str = "add samples, or change data.split"
    has_labels: bool = True
    observed: Callable[[], tuple[str, ...]] = tuple

    def part(self, indices: NDArray[np.int64]) -> Samples:
        """Return some of the samples; the indices are in ascending order."""
        new_index = np.full(len(self.labels), -1, np.int64)
        new_index[indices] = np.arange(len(indices))
        kept = {split: new_index[of][new_index[of] >= 0] for split, of in self.splits.items()}
        everything = self.labels

        def divide(
            labels: NDArray[np.int64], chosen: NDArray[np.int64], share: float, seed: int
        ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            rest, taken = self.divide(everything, indices[chosen], share, seed)
            return new_index[rest], new_index[taken]

        def read_mask(index: int) -> NDArray[np.uint8]:
            assert self.read_mask is not None  # otherwise this function is not used
            return self.read_mask(int(indices[index]))

        return replace(
            self,
            labels=self.labels[indices],
            read=lambda index: self.read(int(indices[index])),
            splits=kept,
            describe=lambda index: self.describe(int(indices[index])),
            divide=divide,
            objects=None if self.objects is None else tuple(self.objects[int(index)] for index in indices),
            sizes=None if self.sizes is None else self.sizes[indices],
            points=None if self.points is None else self.points[indices],
            read_mask=read_mask if self.read_mask else None,
            targets=None if self.targets is None else self.targets[indices],
            groups=None if self.groups is None else self.groups[indices],
        )


class Source(Settings):
    """A source of samples; its fields are its settings in pipeline.yaml."""

    name: ClassVar[str]
    task: ClassVar[str] = "classification"
    """The purpose of the samples: one class for each, or objects with boxes."""

    def task_name(self) -> str:
        """Return the task with these settings."""
        return self.task

    def with_labels_beside(self, model: Path) -> Self:
        """Return the same source with the class names of a labels file in the folder of a model, if it uses one."""
        return self

    @property
    def decoding(self) -> dict[str, Any]:
        """Settings of `deploy.contract.decoding` for the device; empty if samples are not decoded from files."""
        return {}

    def with_paths_from(self, folder: Path) -> Self:
        """Return the same source with paths relative to `folder`."""
        return self

    def files(self) -> dict[str, Path]:
        """Return the files that samples come from, by names that stay the same when the files are moved together.

        Raises:
            DataError: the data does not exist.
        """
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """Return values that change with any sample, without decoding one.

        Raises:
            DataError: the data does not exist, or differs from its manifest.
        """
        raise NotImplementedError

    def load(self) -> Samples:
        """Open the data."""
        raise NotImplementedError


class Stored(Source):
    """A source whose samples are in files."""

    paths: ClassVar[tuple[str, ...]] = ("manifest",)
    """The settings that are paths, or tuples of paths."""

    manifest: str | None = None
    """A file with the SHA-256 of every file, which is verified. `data --write-manifest` creates it."""

    def with_paths_from(self, folder: Path) -> Self:
        """Return the same source with paths relative to `folder`."""
        locations: dict[str, str | tuple[str, ...]] = {}
        for name in self._path_settings():
            value = getattr(self, name)
            if isinstance(value, tuple):
                locations[name] = tuple(str(folder / path) for path in value)
            elif value is not None:
                locations[name] = str(folder / value)
        return self.model_copy(update=locations)

    def with_labels_beside(self, model: Path) -> Self:
        """Return the same source with the class names of the labels file in the folder of a model, if there is one and
        the settings give no names."""
        labels_file = class_names.beside(model)
        if labels_file is None or "classes" not in self.paths or getattr(self, "classes", None) is not None:
            return self
        if self.task_name() not in ("classification", "detection"):
            return self
        return self.model_copy(update={"classes": str(labels_file)})

    def _path_settings(self) -> set[str]:
        """Return the settings that are paths. `classes` is one only if it is a text; otherwise it has the names."""
        return {name for name in self.paths if name != "classes" or isinstance(getattr(self, name), str)}

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings and the digests of all files, verified with the manifest if there is one."""
        paths = self.files()
        digests = files.digests(paths)
        if self.manifest is not None:
            manifest.verify(Path(self.manifest), {paths[name]: digest for name, digest in digests.items()})
        return {**self.model_dump(mode="json", exclude=self._path_settings()), "sha256": digest_of(digests)}


class CorruptError(DataError):
    """A sample is unreadable; other samples may be readable.

    Attributes:
        errors: the error of each unreadable sample, if there are several.
    """

    errors: Sequence[DataError] = ()


REPAIR = "remove or repair them"
MAX_NAMED = 100
"""Number of unreadable samples that an error or a summary names; more would fill the screen and the report."""
SKIP = "`corrupt: skip`"
LEAVE_OUT = f"{REPAIR}, or leave them out with {SKIP}"


def several(problems: Sequence[DataError], hint: str = LEAVE_OUT) -> DataError:
    """Combine errors into one that names up to `MAX_NAMED` of them, and what to do."""
    if len(problems) == 1:
        if hint == LEAVE_OUT and SKIP not in problems[0].hint:
            problems[0].hint = f"{problems[0].hint or 'remove or repair it'}, or leave it out with {SKIP}"
        return problems[0]
    messages = []
    for error in problems[:MAX_NAMED]:
        allowed = f", allowed: {error.allowed}" if error.allowed else ""
        messages.append(f"{error.where}: {error.what}{allowed}")
    if len(problems) > MAX_NAMED:
        messages.append(f"and {len(problems) - MAX_NAMED} more")
    combined = CorruptError(f"{len(problems)} samples cannot be used: {'; '.join(messages)}", hint=hint)
    combined.errors = problems
    return combined
