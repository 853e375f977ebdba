"""Opening, digesting and unpacking the files of a data set, with errors as messages."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import IO, BinaryIO

from compress.core.errors import DataError, reason_of

ROOM, TIMES = 256 << 20, 100
"""A compressed file may unpack to ROOM bytes, or to TIMES times its size. Archive bombs exceed both."""
MAX_UNPACKED = 64 << 30
"""Bytes on the disk for temporary files; chosen."""
_XZ_MEMORY = 256 << 20
"""Bytes; `xz -9` needs 65 MB to unpack. Source: xz(1), the table of presets."""
_BLOCK = 1 << 20
"""Bytes that are unpacked at a time; chosen."""
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def opened(path: Path) -> BufferedReader:
    """Open a file for reading. This never blocks, as opening a named pipe would."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(error, path) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for test, name in _KINDS.items() if test(mode)), "no plain file")
        raise DataError(f"cannot be read: it is {kind}", where=str(path), allowed="a file", hint="check data.source")
    return os.fdopen(handle, "rb")


def is_file(path: Path) -> bool:
    """Return whether a file exists; False also for a name that no file can have, for which `Path.is_file` raises."""
    return os.path.isfile(path)


def unreadable(error: Exception, path: Path | str) -> DataError:
    """Return an error of the operating system as a data error."""
    reason = getattr(error, "strerror", None) or error
    where = str(getattr(error, "filename", None) or path)
    return DataError(f"cannot be read: {reason}", where=where, hint="check data.source")


def size_of(stream: IO[bytes]) -> int:
    """Return the size of an open file in bytes."""
    position = stream.tell()
    size = stream.seek(0, os.SEEK_END)
    stream.seek(position)
    return size


def content(stream: IO[bytes], where: str, most: int) -> bytes:
    """Return the content of an open file of at most `most` bytes."""
    try:
        if size_of(stream) > most:
            raise DataError(f"has {size_of(stream):,} bytes", where=where, allowed=f"{most:,} bytes")
        return stream.read(most)
    except OSError as error:
        raise unreadable(error, where) from error


def read(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes."""
    with opened(path) as stream:
        return content(stream, str(path), most)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with opened(path) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(error, path) from error


def digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of many files by name."""
    with ThreadPoolExecutor() as pool:  # hashing and reading leave the interpreter to others
        return dict(zip(paths, pool.map(digest, paths.values()), strict=True))


def plain(stream: BinaryIO, where: str) -> BinaryIO:
    """Return a file as it is or, if it is compressed (gzip, bzip2, xz), unpacked into an anonymous temporary file.

    The argument is closed unless it is returned.
    """
    magic = stream.read(6)
    stream.seek(0)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        stream.close()
        raise DataError("is compressed with zstd", where=where, allowed="no compression, gzip, bzip2 or xz")
    if not magic.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")):
        return stream
    limit = most(size_of(stream))
    written, result = 0, tempfile.TemporaryFile(prefix="coralline-")  # noqa: SIM115 - it is returned open
    try:
        for part in _unpacked(stream, magic):
            written += len(part)
            if written > limit:
                raise DataError(f"unpacks to more than {limit:,} bytes", where=where, hint="give the unpacked file")
            result.write(part)
    except DataError:
        result.close()
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        result.close()
        raise DataError(f"cannot be unpacked: {reason_of(error)}", where=where, hint="get it again") from error
    finally:
        stream.close()
    result.seek(0)
    return result


def most(size: int) -> int:
    """Return the number of bytes that a compressed file of this size may unpack to."""
    return min(MAX_UNPACKED, max(ROOM, TIMES * size))


def _unpacked(stream: BinaryIO, magic: bytes) -> Iterator[bytes]:
    if magic.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=stream) as packed:
            while part := packed.read(_BLOCK):
                yield part
        return
    left = b""
    while block := left or stream.read(_BLOCK):  # several streams may follow each other
        worker = bz2.BZ2Decompressor() if magic.startswith(b"BZh") else lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        while True:
            yield worker.decompress(block, _BLOCK)
            if worker.eof:
                left = worker.unused_data
                break
            block = stream.read(_BLOCK) if worker.needs_input else b""
            if worker.needs_input and not block:
                raise EOFError("it is cut short")
