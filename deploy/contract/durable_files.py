"""Files that are old or new at every moment, also after a power cut. This module uses only the standard library."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile

PREFIX = ".new-"
"""The beginning of the name of a file that is not complete yet."""


def write_atomically(path: str, content: bytes, durable: bool = True) -> None:
    """Write a file. Until it is complete, the file that was there before remains.

    Args:
        path: the file.
        content: its content.
        durable: whether it must also survive a power failure from now on. This takes time on the flash of a board.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    folder = os.path.dirname(os.path.abspath(path))
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=PREFIX)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        with contextlib.suppress(PermissionError):  # a FAT card that is mounted for another user
            os.chmod(name, 0o644)
        os.replace(name, path)
        if durable:
            sync_folder(folder)
    except BaseException as error:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            error.filename, error.filename2 = path, None  # and not the temporary file
        raise


def sync_folder(folder: str) -> None:
    """Flush the names in a folder to the disk. Some network file systems cannot do that, and need not."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
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
    sync_folder(parent)
