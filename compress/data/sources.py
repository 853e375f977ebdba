"""The sources: scikit-learn's digits, .npz files, folders of images."""

from __future__ import annotations

import importlib.util
import tokenize
import tomllib
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from compress.data.source import Samples, Source
from compress.errors import DataError
from compress.shipped import shipped
from compress.stage import SPLITS, Split
from compress.store import digest_of, file_digest

MAX_ARRAY_BYTES = 16 << 30
MAX_PIXELS = 64_000_000
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_NPZ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
)
"""What zipfile and numpy raise for damaged files; numpy evaluates the header of an array."""
SPLIT_FOLDERS: dict[str, Split] = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


class Digits(Source):
    """scikit-learn's 1,797 handwritten digits, 8x8 values from 0 to 16; part of the library, no download.

    The split is fixed and stratified: 629 test, 169 validation, 999 training samples.
    """

    name: ClassVar[str] = "digits"

    def fingerprint(self) -> dict[str, Any]:
        """The digest of the library's file, checked against calibration_data/digits."""
        found = importlib.util.find_spec("sklearn")
        if found is None or found.origin is None:
            raise DataError("scikit-learn is not installed", where="data.source.digits", todo="pip install coralline")
        digest = file_digest(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz")
        expected = self._manifest()["sha256"]
        if digest != expected:
            raise DataError(
                f"scikit-learn's digits.csv.gz has SHA-256 {digest}",
                where="data.source.digits",
                allowed=expected,
                todo="reinstall scikit-learn",
            )
        return {"sha256": digest, "split": self._manifest()["split"]}

    @staticmethod
    def _manifest() -> dict[str, Any]:
        return tomllib.loads((shipped("calibration_data") / "digits" / "manifest.toml").read_text())

    def load(self) -> Samples:
        """The digits with their fixed split."""
        from sklearn.datasets import load_digits

        from compress.data import stratified

        self.fingerprint()
        bunch = load_digits()
        labels = np.asarray(bunch.target, np.int64)
        split = self._manifest()["split"]
        rest, test = stratified(labels, np.arange(len(labels)), split["test"], split["seed"])
        train, validation = stratified(labels, rest, split["validation"], split["seed"])
        images: NDArray[np.float32] = bunch.images.astype(np.float32)
        return Samples(
            labels,
            tuple(str(name) for name in bunch.target_names),
            lambda index: images[index],
            {"train": train, "validation": validation, "test": test},
        )


class Npz(Source):
    """A .npz file with samples [n, height, width] or [n, height, width, channels], and labels [n].

    A division that comes with the data is a third array: [n] of "train", "validation", "test".
    """

    name: ClassVar[str] = "npz"
    file: str
    """Path of the file, from the pipeline file's folder."""
    x: str = "x"
    """Name of the array of samples."""
    y: str = "y"
    """Name of the array of labels: whole numbers from 0, or names."""
    split: str | None = None
    """Name of the array that says which split a sample belongs to."""
    classes: tuple[str, ...] | None = None
    """Names of the classes; by default the labels themselves."""

    def beside(self, folder: Path) -> Self:
        """The same source with its path taken from `folder`."""
        return self.model_copy(update={"file": str(folder / self.file)})

    def fingerprint(self) -> dict[str, Any]:
        """The digest of the file, and which arrays are read."""
        try:
            digest = file_digest(Path(self.file))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot be read: {reason}", where=self.file, todo="check data.source") from error
        return {**self.model_dump(mode="json", exclude={"file"}), "sha256": digest}

    def load(self) -> Samples:
        """The arrays of the file, checked against each other."""
        arrays = self._arrays()
        x, y = arrays[self.x], arrays[self.y]
        if x.ndim not in (3, 4) or x.dtype.kind not in "uifb":
            raise DataError(
                f"array {self.x!r} is {x.dtype} {list(x.shape)}",
                where=self.file,
                allowed="numbers [n, height, width] or [n, height, width, channels]",
            )
        if y.shape != (len(x),) or y.dtype.kind not in "uiU":
            raise DataError(
                f"array {self.y!r} is {y.dtype} {list(y.shape)}",
                where=self.file,
                allowed=f"one whole number or name for each of the {len(x)} samples",
            )
        labels, names = self._labels(y)
        splits = self._splits(arrays[self.split], len(x)) if self.split else {}
        return Samples(labels, names, lambda index: np.asarray(x[index]), splits)

    def _splits(self, names: NDArray[Any], count: int) -> dict[Split, NDArray[np.int64]]:
        if names.shape != (count,) or names.dtype.kind != "U":
            raise DataError(
                f"array {self.split!r} is {names.dtype} {list(names.shape)}",
                where=self.file,
                allowed=f"the name of a split for each of the {count} samples",
            )
        unknown = sorted({str(name) for name in names} - SPLIT_FOLDERS.keys())
        if unknown:
            raise DataError(f"unknown split {unknown[0]!r}", where=self.file, allowed=", ".join(SPLIT_FOLDERS))
        splits = np.array([SPLIT_FOLDERS[str(name)] for name in names], np.str_)
        return {split: np.flatnonzero(splits == split) for split in SPLITS if split in splits}

    def _labels(self, y: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        if y.dtype.kind == "U":
            names = self.classes or tuple(str(name) for name in np.unique(y))
            place = {name: index for index, name in enumerate(names)}
            unknown = sorted({str(name) for name in y} - place.keys())
            if unknown:
                raise DataError(f"unknown class {unknown[0]!r}", where=self.file, allowed=", ".join(names))
            return np.array([place[str(name)] for name in y], np.int64), names
        count = int(y.max()) + 1 if len(y) else 0
        if self.classes is None and count > max(10_000, len(y)):
            raise DataError(f"label {count - 1} is out of range", where=self.file, allowed="class indices from 0")
        return y.astype(np.int64), self.classes or tuple(str(index) for index in range(count))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        wanted = [name for name in (self.x, self.y, self.split) if name]
        try:
            with zipfile.ZipFile(self.file) as archive:
                size = sum(info.file_size for info in archive.infolist())
            if size > MAX_ARRAY_BYTES:
                raise DataError(f"unpacks to {size} bytes", where=self.file, allowed=f"{MAX_ARRAY_BYTES} bytes")
            with np.load(self.file, allow_pickle=False) as file:
                absent = [name for name in wanted if name not in file.files]
                if absent:
                    raise DataError(
                        f"has no array {absent[0]!r}",
                        where=self.file,
                        allowed=", ".join(file.files) or "none: it is empty",
                        todo="name the arrays with data.source.npz.x and y",
                    )
                arrays = {name: file[name] for name in wanted}
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=self.file) from error
        except _NPZ_ERRORS as error:
            raise DataError(f"is not a usable .npz file: {error}", where=self.file) from error
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):  # numpy gives the bytes of a member that is no .npy
                raise DataError(f"{name!r} is no array", where=self.file, todo="write the file with numpy.savez")
        return arrays


class Folder(Source):
    """A folder of images: one folder for each class, inside train/, val/ and test/ or without these."""

    name: ClassVar[str] = "folder"
    path: str
    """Path of the folder, from the pipeline file's folder."""
    channels: Literal[1, 3] = 3
    """3: decoded as RGB; 1: as grey levels."""

    def beside(self, folder: Path) -> Self:
        """The same source with its path taken from `folder`."""
        return self.model_copy(update={"path": str(folder / self.path)})

    def fingerprint(self) -> dict[str, Any]:
        """Names and digests of all images."""
        images = self._images()
        try:
            files = [(str(path.relative_to(self.path)), file_digest(path)) for path, _, _ in images]
        except OSError as error:
            raise self._unreadable(error) from error
        return {"channels": self.channels, "sha256": digest_of(files)}

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot be read: {error.strerror or error}", where=str(error.filename or self.path))

    def _groups(self) -> list[tuple[Split | None, Path]]:
        """The folders that hold the folders of classes, with their splits."""
        root = Path(self.path)
        if not root.is_dir():
            raise DataError("is not a folder", where=self.path, todo="check data.source")
        top = _folders(root)
        splits = [folder for folder in top if folder.name.lower() in SPLIT_FOLDERS]
        if len(splits) > 1 and len(splits) < len(top):  # one alone may be a class: a train, a test
            other = next(folder for folder in top if folder not in splits)
            raise DataError(
                f"holds the folder {other.name!r} beside {splits[0].name!r} and {splits[1].name!r}",
                where=self.path,
                allowed="either splits or classes",
            )
        if splits and len(splits) == len(top):
            return [(SPLIT_FOLDERS[folder.name.lower()], folder) for folder in top]
        return [(None, root)]

    def _images(self) -> list[tuple[Path, str, Split | None]]:
        """Every image with its class and its split, in a fixed order."""
        try:
            images = [
                (path, kind.name, split)
                for split, folder in self._groups()
                for kind in _folders(folder)
                for path in sorted(kind.rglob("*"))
                if path.suffix.lower() in IMAGE_SUFFIXES and not _hidden(path.relative_to(kind)) and path.is_file()
            ]
        except OSError as error:
            raise self._unreadable(error) from error
        if not images:
            raise DataError(
                "holds no images",
                where=self.path,
                allowed=f"CLASS/*{{{','.join(IMAGE_SUFFIXES)}}}, or the same inside train/, val/ and test/",
            )
        return images

    def load(self) -> Samples:
        """Labels from the folder names; images are decoded when they are read."""
        images = self._images()
        names = tuple(sorted({kind for _, kind, _ in images}))
        labels = np.array([names.index(kind) for _, kind, _ in images], np.int64)
        divided = {split for _, _, split in images if split}
        splits = {
            split: np.array([i for i, (_, _, of) in enumerate(images) if of == split], np.int64) for split in divided
        }
        return Samples(
            labels, names, lambda index: self._decode(images[index][0]), splits, lambda index: str(images[index][0])
        )

    def _decode(self, path: Path) -> NDArray[np.uint8]:
        from PIL import Image

        try:
            with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"has {image.width}x{image.height} pixels", where=str(path), allowed=str(MAX_PIXELS)
                    )
                pixels = np.asarray(image.convert("RGB" if self.channels == 3 else "L"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"is not a readable image: {error}", where=str(path), todo="remove or repair it") from error
        return pixels if self.channels == 3 else pixels[..., np.newaxis]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not _hidden(Path(path.name)))
