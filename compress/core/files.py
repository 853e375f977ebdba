"""Files: digests, folders that appear complete, errors of the operating system as messages, and numpy files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.errors import StoreError
from deploy.contract.durable_files import sync

if TYPE_CHECKING:
    import numpy as np

SAVED_MODEL = "saved_model.pb"
"""The file by which the folder of a SavedModel is recognized."""
MOST_FILES = 1000
"""A SavedModel has about ten files; a folder of millions would be listed for minutes."""
NUMPY_ERRORS = (
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
"""Exceptions of zipfile and numpy for damaged files, besides OSError; numpy evaluates the header of an array."""


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a plain JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in the folder of a SavedModel.

    Raises:
        OSError: a file cannot be read, or the folder is another one, or has links or too many files.
    """
    if not path.is_dir():
        return file_digest(path)
    if not (path / SAVED_MODEL).is_file():
        raise OSError(errno.EISDIR, f"a folder without {SAVED_MODEL}", str(path))
    digests = {}
    for number, file in enumerate(path.rglob("*")):
        if number == MOST_FILES:
            raise OSError(errno.EFBIG, f"more than {MOST_FILES:,} files and folders", str(path))
        if file.is_symlink():
            raise OSError(errno.ELOOP, f"{file.name} is a link", str(path))
        if file.is_file():
            digests[file.relative_to(path).as_posix()] = file_digest(file)
    return digest_of(digests)


def explain(error: OSError, what: str, folder: Path | None = None) -> StoreError:
    """Return an error of the operating system as a message with advice; `folder` is used if the error has no path."""
    where = str(error.filename2 or error.filename or folder or "")  # of a copy: what could not be written
    reasons = {
        errno.ENOSPC: ("the disk is full", "free some space and run again: finished stages are kept"),
        errno.EDQUOT: ("the disk quota is used up", "free some space and run again: finished stages are kept"),
        errno.EACCES: ("no permission", "change the folder's rights, or choose another with --out"),
        errno.EPERM: ("not permitted", "change the folder's rights, or choose another with --out"),
        errno.EROFS: ("the file system is read-only", "choose another folder with --out"),
        errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another folder with --out"),
        errno.EEXIST: ("a file is in the way", "remove it, or choose another folder with --out"),
        errno.EISDIR: ("a folder is in the way", "remove it, or choose another folder with --out"),
        errno.EIO: ("the disk failed (input/output error)", "check the disk, or use another one, and run again"),
        errno.ESTALE: ("the folder of the network file system has changed", "mount it again, and run again"),
        errno.ENOLCK: ("the file system has no file locks", "use a folder on a local disk"),
    }
    reason, hint = reasons.get(error.errno or 0, (error.strerror or str(error), ""))
    return StoreError(f"{what}: {reason}", where=where, hint=hint)


def publish_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Create a folder with files. It does not exist before it is complete.

    Args:
        folder: the folder, which must not exist, or be empty.
        contents: the content of each file by its name.

    Raises:
        OSError: it exists and has files, or cannot be written.
    """
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        complete = temporary / "complete"
        complete.mkdir()
        for name, content in contents.items():
            with (complete / name).open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        sync(complete)
        os.replace(complete, folder)
        sync(folder.parent)
    except OSError as error:
        error.filename, error.filename2 = str(folder), None  # and not the temporary folder
        raise
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def array_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and data type of each array in an .npz file.

    Raises:
        OSError: the file cannot be opened or read.
        NUMPY_ERRORS: it is damaged.
    """
    import numpy as np

    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read = np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
                arrays[name.removesuffix(".npy")] = shape, dtype
    return arrays
