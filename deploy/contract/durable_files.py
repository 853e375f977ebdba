"""Files that are old or new at every moment, also after a power cut. This module uses only the standard library."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import Optional, Union

AnyPath = Union[str, "os.PathLike[str]"]
PREFIX = ".new-"
"""The beginning of the name of a file that is not complete yet."""


def write_atomically(
    path: AnyPath, content: bytes, durable: bool = True, scratch: Optional[AnyPath] = None, mode: int = 0o644
) -> None:
    """Write a file. Until it is complete, the file that was there before remains.

    Args:
        path: the file.
        content: its content.
        durable: whether it must also survive a power failure from now on. This takes time on the flash of a board.
        scratch: a folder of the same file system for the new file until it is complete; by default the file's own.
        mode: its permissions.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    folder = os.path.dirname(os.path.abspath(path))
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=scratch or folder, prefix=PREFIX)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        with contextlib.suppress(PermissionError):  # a FAT card that is mounted for another user
            os.chmod(name, mode)
        os.replace(name, path)
        if durable:
            sync(folder)
    except BaseException as error:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # and not the temporary file
        raise


def sync(path: AnyPath) -> None:
    """Flush a file or the names in a folder to the disk. Some network file systems cannot flush names, and need not."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def create_folder(path: str) -> None:
    """Create a folder and those above it if they are missing; they survive a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    create_folder(parent)
    os.makedirs(path, exist_ok=True)
    sync(parent)
