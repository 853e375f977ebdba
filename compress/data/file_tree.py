"""The files of a folder, or of a tar archive that is read in place."""

from __future__ import annotations

import io
import os
import tarfile
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from compress.core.errors import DataError, reason_of
from compress.data import files

MAX_FILES = 5_000_000
"""Chosen, so that the names of the files fit into memory: 5 million names take about 1 GB."""
MAX_DEPTH = 32
"""Chosen: folders inside each other, so that a chain of links ends."""
_MAX_HEADER = 1 << 20
"""Bytes; chosen: headers of tar archives have names and attributes, and rarely exceed 10 kB."""
_TAR_ERRORS = (tarfile.TarError, OSError, ValueError, EOFError, OverflowError, MemoryError, RecursionError)
"""Exceptions of tarfile for damaged files."""


class Tree:
    """A set of named files.

    Attributes:
        where: its path.
        names: the files, relative, with `/`, sorted; hidden ones are left out.
        folders: the folders, likewise.
    """

    def __init__(self, where: str, names: set[str], folders: set[str]) -> None:
        self.where = where
        self.names = _sorted(names)
        self.folders = _sorted(folders)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            DataError: the file does not exist, or cannot be read.
        """
        raise NotImplementedError

    def files(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Return the files on disk that contain the named files, for digests."""
        raise NotImplementedError

    def describe(self, name: str) -> str:
        """Return the name of a file for messages."""
        return str(Path(self.where) / name)

    def read(self, name: str, most: int) -> bytes:
        """Read a file of at most `most` bytes."""
        with self.open(name) as stream:
            return files.content(stream, self.describe(name), most)


class _Folder(Tree):
    def __init__(self, path: Path) -> None:
        names: set[str] = set()
        folders: set[str] = set()
        try:
            _walk(path, "", (), names, folders)
        except (OSError, ValueError) as error:
            raise files.unreadable(error, path) from error
        super().__init__(str(path), names, folders)

    def open(self, name: str) -> BinaryIO:
        return files.opened(Path(self.where) / inside(name, self.where))

    def files(self, names: tuple[str, ...]) -> dict[str, Path]:
        return {name: Path(self.where) / name for name in names}


def _walk(path: Path, under: str, above: tuple[tuple[int, int], ...], names: set[str], folders: set[str]) -> None:
    """Add everything below a folder. Links to folders are followed, cycles are not."""
    status = path.stat()
    inode = (status.st_dev, status.st_ino)
    if inode in above:
        return
    if len(above) == MAX_DEPTH or len(names) > MAX_FILES:
        raise DataError("contains too much", where=str(path), allowed=f"{MAX_FILES:,} files, {MAX_DEPTH} folders deep")
    with os.scandir(path) as entries:
        for entry in entries:
            name = under + entry.name
            if entry.is_dir():
                folders.add(name)
                if not _hidden(entry.name):
                    _walk(path / entry.name, f"{name}/", (*above, inode), names, folders)
            elif entry.is_file():
                names.add(name)


class _SingleFile(Tree):
    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path.parent), {path.name}, set())
        self.names = (path.name,)  # hidden or not

    def open(self, name: str) -> BinaryIO:
        return files.opened(Path(self.where) / inside(name, self.where))

    def files(self, names: tuple[str, ...]) -> dict[str, Path]:
        return {"path" if name == self._path.name else name: Path(self.where) / name for name in names}


class _Archive(Tree):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = files.plain(files.opened(path), str(path))
        weakref.finalize(self, self._stream.close)
        self._extents, folders = _members(self._stream, str(path))
        names = set(self._extents)
        for name in names:
            folders.update(str(parent) for parent in PurePosixPath(name).parents if str(parent) != ".")
        if clash := names & folders:
            raise DataError(f"has {min(clash)!r} as a file and as a folder", where=str(path))
        super().__init__(str(path), names, folders)

    def open(self, name: str) -> BinaryIO:
        extent = self._extents.get(inside(name, self.where))
        if extent is None:
            raise DataError(f"contains no file {name!r}", where=self.where, hint="check data.source")
        return io.BufferedReader(_Part(self._stream, *extent))

    def files(self, names: tuple[str, ...]) -> dict[str, Path]:
        return {"path": self._path}


class _Part(io.RawIOBase):
    """A section of a file that is shared between threads: every read has its own offset."""

    def __init__(self, stream: BinaryIO, start: int, size: int) -> None:
        self._stream, self._start, self._size, self._position = stream, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence], 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = max(min(len(buffer), self._size - self._position), 0)
        content = os.pread(self._stream.fileno(), size, self._start + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class _Headers(io.RawIOBase):
    """An archive for tarfile, which refuses headers of unreasonable size before they are read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return self._stream.read(size)


def tree(path: Path, *, single: bool = False) -> Tree:
    """Return the files of a folder, of a tar archive or, with `single`, a single file."""
    try:
        folder = path.is_dir()
    except OSError as error:
        raise files.unreadable(error, path) from error
    if folder:
        return _Folder(path)
    if is_archive(path):
        return _Archive(path)
    if not single:
        allowed = "a folder, or a tar archive of one"
        raise DataError("is not a folder", where=str(path), allowed=allowed, hint="check data.source")
    files.opened(path).close()
    return _SingleFile(path)


def unpacked(path: Path) -> Tree:
    """Return the files of a folder that is not empty; an archive is refused."""
    if is_archive(path):
        raise DataError("is an archive", where=str(path), allowed="a folder", hint="unpack it")
    folder = tree(path)
    if not folder.names:
        raise DataError("contains no files", where=str(path), hint="check data.source")
    return folder


def is_archive(path: Path | str) -> bool:
    """Return if a path has the suffix of a tar archive."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    return suffixes[-1:] in ([".tar"], [".tgz"], [".tbz2"], [".txz"], [".tzst"]) or suffixes[:1] == [".tar"]


def inside(name: str, where: str) -> str:
    """Return a relative path, normalized; a path that leads out of the folder is refused."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise DataError(f"names the file {name!r}", where=where, allowed="files inside, by relative paths")
    return str(path)


def _members(stream: BinaryIO, where: str) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Return offset and size of every file in an archive, and its folders."""
    extents: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
    size = files.size_of(stream)
    try:
        with tarfile.open(fileobj=_Headers(stream), mode="r:", errorlevel=0) as archive:
            end = 0
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined] # it would keep them all
                if member.offset < end or member.size < 0 or len(extents) >= MAX_FILES:
                    raise DataError(
                        "is damaged, or contains too many files", where=where, allowed=f"{MAX_FILES:,} files"
                    )
                end = member.offset_data
                _add(member, size, extents, folders, where)
            stream.seek(archive.offset)
            if any(block := stream.read(512)) or not block:
                raise DataError(f"is damaged or cut short at byte {archive.offset}", where=where, hint="get it again")
    except _TAR_ERRORS as error:
        raise DataError(
            f"is not a readable tar archive: {reason_of(error)}", where=where, hint="get it again"
        ) from error
    return extents, folders


def _add(
    member: tarfile.TarInfo, size: int, extents: dict[str, tuple[int, int]], folders: set[str], where: str
) -> None:
    kinds: Mapping[str, bool] = {
        "a link": member.issym() or member.islnk(),
        "a device": member.isdev(),
        "a sparse file": member.issparse(),
        "of no known kind": not (member.isdir() or member.isreg()),
    }
    unsupported = next((kind for kind, applies in kinds.items() if applies), None)
    if unsupported:
        raise DataError(f"its member {member.name!r} is {unsupported}", where=where, allowed="files and folders")
    if member.isdir() and str(PurePosixPath(member.name)) == ".":
        return
    name = inside(member.name, where)
    if member.isdir():
        folders.add(name)
        return
    if member.offset_data + member.size > size:
        raise DataError(f"its member {member.name!r} of {member.size:,} bytes is cut short", where=where)
    if name in extents:
        raise DataError(f"has two members {name!r}", where=where)
    extents[name] = (member.offset_data, member.size)


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Sort names by their path components, and remove hidden ones."""
    parted = sorted(name.split("/") for name in names)
    return tuple("/".join(parts) for parts in parted if not any(map(_hidden, parts)))


def _hidden(part: str) -> bool:
    return part.startswith(".") or part == "__MACOSX"  # macOS adds it to archives
