"""The store: artifacts by content, found by the digest of what determines them.

::

    artifacts/<digest>/   files and artifact.json; complete from the moment it exists
    keys/<key>            one line: the digest of the artifact that answers this key
    locks/<key>           held (flock) by the process that is making it
    unfinished/<key>/     what a process that was interrupted left for the next one that makes it
    kept/<key>/           decoded samples, whole files, used again by any run; removed when they are not for long
    scratch/<random>/     work in progress; what killed processes left is cleared by the
                          next process that finds itself alone
    lock                  held, shared, by every process that works here

An artifact is published by one rename, after everything in it is on the disk. So a
process can be killed at any moment, and any number can work on the same store.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.core.artifact import Artifact, Facts, Kind
from compress.core.files import digest_of, explain, file_digest
from compress.core.progress import Progress
from deploy.contract.durable_files import sync, write_atomically

STORE = ".store"
"""The folder of the store, in that of the results."""
MANIFEST = "artifact.json"
DIGEST_LINE = re.compile(rb"[0-9a-f]{64}\n")
"""The content of a key."""
FORGOTTEN_DAYS = 14
"""Unfinished and decoded files that were not used for this number of days are removed."""


class Store:
    """A folder of artifacts, created on the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Artifact | None:
        """Return the artifact for a key, or None. A damaged artifact counts as missing."""
        try:
            line = (self.folder / "keys" / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(error, "the store cannot be read", self.folder) from error
        return self._open(line[:64].decode()) if DIGEST_LINE.fullmatch(line) else None

    def look(self, key: str) -> Artifact | None:
        """Return the artifact for a key without changing anything; one that is elsewhere has no folder."""
        return self.find(key)

    def fetch(self, key: str, progress: Progress) -> Artifact | None:
        """Return the artifact for a key from elsewhere. This store has nothing elsewhere."""
        del key, progress
        return None

    def is_shared(self, key: str) -> bool:
        """Whether there is nothing to do for `share`."""
        del key
        return True

    def share(self, key: str, artifact: Artifact, progress: Progress, *, replace: bool = False) -> None:
        """Bring an artifact to where other machines find it; here they find it in the folder."""

    def _open(self, digest: str) -> Artifact | None:
        """Return an artifact after verifying every byte, or None."""
        folder = self.folder / "artifacts" / digest
        try:
            artifact = parsed((folder / MANIFEST).read_bytes(), digest, folder)
            is_sound = all(file_digest(folder / name) == expected for name, expected in artifact.files.items())
            return artifact if is_sound else None
        except (FileNotFoundError, ValueError, NotADirectoryError):
            return None
        except OSError as error:
            raise explain(error, "the store cannot be read", self.folder) from error

    def prepare(self) -> None:
        """Create the folders, and clear scratch if no other process uses the store.

        Raises:
            StoreError: the folder cannot be written.
        """
        try:
            for name in ("artifacts", "keys", "locks", "scratch", "unfinished", "kept"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            presence = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            weakref.finalize(self, os.close, presence)
            if _try_lock(presence):
                for left in (self.folder / "scratch").iterdir():
                    shutil.rmtree(left)
                for left in (*(self.folder / "unfinished").iterdir(), *(self.folder / "kept").iterdir()):
                    if left.is_dir() and time.time() - left.stat().st_mtime > FORGOTTEN_DAYS * 86_400:
                        shutil.rmtree(left)
            fcntl.flock(presence, fcntl.LOCK_SH)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error

    @contextmanager
    def lock(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of a key; call `waiting` if another process holds it.

        Raises:
            StoreError: the disk is full, or the folder cannot be written.
        """
        try:
            stream = (self.folder / "locks" / key).open("w")
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error
        with stream:
            if not _try_lock(stream.fileno()):
                waiting()
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Create an empty folder for work in progress, which is removed afterwards."""
        folder = Path(tempfile.mkdtemp(dir=self.folder / "scratch"))
        try:
            (folder / "work").mkdir()
            yield folder / "work"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def unfinished(self, key: str) -> Path:
        """Return a folder for the state of interrupted work. The caller must hold the key's lock.

        Raises:
            StoreError: the folder cannot be written.
        """
        folder = self.folder / "unfinished" / key
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error
        return folder

    def kept(self, key: str) -> Path:
        """Return a folder for decoded samples, and mark it as used. Files appear in it by renaming, and so are always
        complete.

        Raises:
            StoreError: the folder cannot be written.
        """
        folder = self.folder / "kept" / key
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error
        return folder

    def forget(self, key: str) -> None:
        """Remove the state of interrupted work."""
        shutil.rmtree(self.folder / "unfinished" / key, ignore_errors=True)

    def renew(self, key: str) -> None:
        """Remove the state of interrupted work, unless it belongs to a forced run that is being continued.

        Raises:
            StoreError: the folder cannot be written.
        """
        mark = self.folder / "unfinished" / key / "forced"
        if not mark.exists():
            self.forget(key)
            self.unfinished(key)
            mark.touch()

    def publish(self, key: str, kind: Kind, folder: Path, facts: Facts, seconds: float) -> Artifact:
        """Publish a scratch folder as the artifact of a key.

        Raises:
            StoreError: the disk is full, or the folder cannot be written.
        """
        try:
            return self._publish(key, kind, folder, facts, seconds)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error

    def _publish(self, key: str, kind: Kind, folder: Path, facts: Facts, seconds: float) -> Artifact:
        files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
        content = {"kind": kind.value, "files": files, "facts": facts, "seconds": round(seconds, 3)}
        digest = artifact_digest(content)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1, allow_nan=False))
        for path in (*folder.iterdir(), folder):
            sync(path)
        destination = self.folder / "artifacts" / digest
        while (artifact := self._open(digest)) is None:
            try:
                os.rename(folder, destination)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if self._open(digest) is None:  # damaged: out of the way, then again
                    os.rename(destination, folder.parent / "damaged")
        sync(destination.parent)
        write_atomically(self.folder / "keys" / key, digest.encode() + b"\n", scratch=folder.parent)
        self.forget(key)
        return artifact


def artifact_digest(content: dict[str, Any]) -> str:
    """Return the digest of an artifact, which does not include the time."""
    return digest_of({name: content[name] for name in ("kind", "files", "facts")})


def parsed(manifest: bytes, digest: str, folder: Path) -> Artifact:
    """Return the artifact of an artifact.json; its files are not read.

    Raises:
        ValueError: the content is invalid, or that of another artifact.
    """
    try:
        content = json.loads(manifest)
        files, facts, seconds = content["files"], content["facts"], float(content["seconds"])
        if not isinstance(files, dict) or not isinstance(facts, dict) or not math.isfinite(seconds):
            raise ValueError("a value has the wrong type")
        if artifact_digest(content) != digest:
            raise ValueError("the digest is that of another artifact")
        return Artifact(digest, Kind(content["kind"]), folder, files, facts, seconds)
    except (TypeError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError("the content is invalid") from error


def _try_lock(handle: int) -> bool:
    """Take the lock if it is free. It is released when the file is closed, or with the process."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
