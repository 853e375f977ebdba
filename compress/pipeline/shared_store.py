"""A store that machines share: a folder that they mount, or storage that fsspec knows, such as s3:// and gs://.

::

    ADDRESS/artifacts/<digest>/<file>    like the folder of the store; artifact.json is written after the other files
    ADDRESS/keys/<key>                   one line: the digest of the artifact; written last

What has a key is complete, artifacts are never changed, and two machines that upload the same artifact write the same
bytes. Stages work in the folder of the store. Nothing of a shared store is used before all of it was verified and
published there. A shared store that fails ends no run: then stages are made here, and wait for their upload.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from compress.core.artifact import Artifact, Kind
from compress.core.errors import PipelineError, StoreError
from compress.core.files import explain, file_digest
from compress.core.progress import Phase, Progress
from compress.pipeline.store import DIGEST_LINE, MANIFEST, STORE, Store, artifact_digest

UNSHARED = "unshared"
"""The folder of the keys that wait for their upload; each is an empty file."""
AWAY_S = 60.0
"""Seconds for which a shared store is not used after a request failed: a request may take minutes to fail again."""
MANIFEST_BYTES = 16 * 1024**2
"""The largest artifact.json; those of the shipped recipes have less than 1 MiB."""
FILES = 900
"""The largest number of files of an artifact: an artifact here has at most about ten."""
RESERVE_BYTES = 256 * 1024**2
"""Bytes of the disk that a download leaves free for the run itself."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MIB = 1024**2
ALLOWED = "a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"
PACKAGES = {
    "file": "pip install 'fsspec>=2025.3'",
    "s3": "pip install 's3fs>=2025.3'",
    "gs": "pip install 'gcsfs>=2025.3'",
}
"""What to install, by the beginning of an address."""
HINT = "credentials and endpoint are those of s3fs and gcsfs, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
ERRORS = {
    "botocore.exceptions": "BotoCoreError",
    "aiohttp": "ClientError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
}
"""The errors of s3fs and gcsfs that are no OSError, by module."""


class DamagedError(Exception):
    """An artifact in a shared store that cannot be used; the message is the reason."""


class SharedStore(Store):
    """A folder of artifacts with a shared store behind it.

    Args:
        folder: the folder.
        location: the shared store.

    Raises:
        PipelineError: the location is invalid, or the package for it is not installed.
        StoreError: the shared store cannot be used.
    """

    def __init__(self, folder: Path, location: str) -> None:
        super().__init__(folder)
        self._files, self._root = _file_system(location)
        self._location = location
        self._shared: set[str] = set()
        self._away_until = 0.0
        self._is_noted = False
        try:  # only the bucket: a prefix exists as soon as it has an object
            self._files.ls(self._root.partition("/")[0] or self._root)
        except _errors() as error:
            what = f"the shared store cannot be used: {_cause(error)}"
            raise StoreError(what, where=location, hint=f"create it, or correct --store; {HINT}") from error

    def look(self, key: str) -> Artifact | None:
        """Return the artifact for a key, without its files if only the shared store has the artifact."""
        artifact = self.find(key)
        if artifact is not None:
            return artifact
        try:
            return self._manifest(key)
        except DamagedError:
            return None
        except _errors():
            return None

    def fetch(self, key: str, progress: Progress) -> Artifact | None:
        """Download the artifact for a key, verify and publish it; return None if that is not possible.

        Args:
            key: the key. The caller must hold its lock.
            progress: the receiver of progress, and of the reason why it is not possible.

        Raises:
            StoreError: the folder cannot be written.
        """
        if self._is_away:
            return None
        try:
            manifest = self._manifest(key)
            if manifest is None:
                return None
            with self.scratch() as work:
                self._download(manifest, work, progress)
                artifact = self.publish(key, manifest.kind, work, manifest.facts, manifest.seconds)
        except DamagedError as error:
            progress.note(f"{self._location}: a stored result cannot be used: {error}; it is made again")
            return None
        except _errors() as error:
            self._failed("a stored result cannot be downloaded", error, "it is made here", progress)
            return None
        self._worked(key)
        return artifact

    def is_shared(self, key: str) -> bool:
        """Whether the shared store has a key, or nobody can know at the moment."""
        return key in self._shared or self._is_away

    def share(self, key: str, artifact: Artifact, progress: Progress, *, replace: bool = False) -> None:
        """Upload an artifact, and those that could not be uploaded before.

        Args:
            key: the key of the artifact.
            artifact: the artifact.
            progress: the receiver of progress.
            replace: whether to upload the artifact even if the shared store has an artifact with this key.

        Raises:
            StoreError: the folder cannot be written.
        """
        if not replace and self.is_shared(key):
            return
        waiting = self.folder / UNSHARED
        try:
            waiting.mkdir(exist_ok=True)
            (waiting / key).touch()
            if self._is_away:
                return
            others = [path.name for path in sorted(waiting.iterdir()) if path.name != key]
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error
        try:
            if replace or not self._files.exists(f"{self._root}/keys/{key}"):
                self._upload(key, artifact, progress)
            self._worked(key)
            for other in others:
                unshared = self.find(other)
                if unshared is not None:
                    self._upload(other, unshared, progress)
                self._worked(other)
        except _errors() as error:
            consequence = f"it stays in {self.folder}, and is uploaded by the next run"
            self._failed("a result cannot be uploaded", error, consequence, progress)

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until

    def _failed(self, what: str, error: BaseException, consequence: str, progress: Progress) -> None:
        """Leave the shared store alone for a while; note the reason once until it works again."""
        self._away_until = time.monotonic() + AWAY_S
        if not self._is_noted:
            progress.note(f"{self._location}: {what}: {_cause(error)}; {consequence}")
            self._is_noted = True

    def _worked(self, key: str) -> None:
        self._is_noted = False
        self._shared.add(key)
        (self.folder / UNSHARED / key).unlink(missing_ok=True)

    def _upload(self, key: str, artifact: Artifact, progress: Progress) -> None:
        """Upload the files, then the manifest, then the key."""
        remote = f"{self._root}/artifacts/{artifact.digest}"
        sizes = {name: artifact.file(name).stat().st_size for name in artifact.files}
        with progress.phase(Phase("uploading", unit="MiB")):
            done = 0
            for name, size in sizes.items():
                self._files.put_file(str(artifact.file(name)), f"{remote}/{name}")
                done += size
                progress.update(done // MIB, -(-sum(sizes.values()) // MIB))
        self._files.pipe_file(f"{remote}/{MANIFEST}", (artifact.folder / MANIFEST).read_bytes())
        self._files.pipe_file(f"{self._root}/keys/{key}", artifact.digest.encode() + b"\n")

    def _read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file, of a larger one the first bytes; None if there is none."""
        try:
            with self._files.open(f"{self._root}/{name}", "rb") as stream:
                return bytes(stream.read(limit))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def _manifest(self, key: str) -> Artifact | None:
        """Return a key's artifact without its files; None if the shared store has no such key.

        Raises:
            DamagedError: the manifest is missing, too large or invalid.
            OSError: a request failed, or another of `_errors`.
        """
        line = self._read(f"keys/{key}", 66)
        if line is None:
            return None
        if not DIGEST_LINE.fullmatch(line):
            raise DamagedError("the key is damaged")
        digest = line[:64].decode()
        content = self._read(f"artifacts/{digest}/{MANIFEST}", MANIFEST_BYTES + 1)
        if content is None:
            raise DamagedError(f"{MANIFEST} is missing")
        if len(content) > MANIFEST_BYTES:
            raise DamagedError(f"{MANIFEST} is larger than {MANIFEST_BYTES:,} bytes")
        return _verified(content, digest)

    def _download(self, manifest: Artifact, work: Path, progress: Progress) -> None:
        """Download the files of an artifact, and verify them.

        Raises:
            DamagedError: a file is missing, or different from the manifest, or the disk is too small for all files.
            OSError: a request failed, or another of `_errors`.
        """
        remote = f"{self._root}/artifacts/{manifest.digest}"
        sizes: dict[str, int] = {}
        for name in manifest.files:
            try:
                sizes[name] = int(self._files.info(f"{remote}/{name}")["size"] or 0)
            except FileNotFoundError as error:
                raise DamagedError(f"{name} is missing") from error
        total, free = sum(sizes.values()), shutil.disk_usage(work).free - RESERVE_BYTES
        if total > free:
            raise DamagedError(f"its files have {total:,} bytes, but the disk has space for {max(free, 0):,}")
        with progress.phase(Phase("downloading", unit="MiB")):
            done = 0
            for name, expected in manifest.files.items():
                self._files.get_file(f"{remote}/{name}", str(work / name))
                if file_digest(work / name) != expected:
                    raise DamagedError(f"{name} is damaged")
                done += sizes[name]
                progress.update(done // MIB, -(-total // MIB))


def _verified(content: bytes, digest: str) -> Artifact:
    """Return the artifact of an artifact.json, without its files.

    Raises:
        DamagedError: the manifest is invalid, or the manifest of another artifact.
    """
    try:
        value = json.loads(content)
        files, facts, seconds = value["files"], value["facts"], float(value["seconds"])
        if not isinstance(files, dict) or not isinstance(facts, dict) or len(files) > FILES:
            raise TypeError
        if not all(NAME.fullmatch(name) and name != MANIFEST for name in files):
            raise DamagedError(f"{MANIFEST} has names or values that are not allowed")
        if artifact_digest(value) != digest:
            raise DamagedError(f"{MANIFEST} is damaged")
        if not math.isfinite(seconds):
            raise ValueError
        return Artifact(digest, Kind(str(value.get("kind"))), Path(), files, facts, seconds)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is invalid") from error


def _file_system(location: str) -> tuple[Any, str]:
    """Return fsspec's file system of a location, and the path there.

    Raises:
        PipelineError: the location is invalid, or the package for it is not installed.
    """
    scheme = location.partition("://")[0] if "://" in location else "file"
    if "::" in location or (scheme != "file" and ("@" in location or ".." in location.split("/"))):
        # The message does not repeat the location, in case somebody put credentials into it.
        raise PipelineError("the location of the store is invalid", where="--store", allowed=ALLOWED, hint=HINT)
    try:
        from fsspec.core import url_to_fs

        # Listings change on other machines. Only the local file system has to make folders.
        options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
        files, root = url_to_fs(location, **options)
    except ImportError as error:
        raise PipelineError(
            f"--store needs a package: {error}", where="--store", allowed=ALLOWED, hint=PACKAGES.get(scheme, "")
        ) from error
    except _errors() as error:
        what = f"the shared store cannot be used: {_cause(error)}"
        raise StoreError(what, where=location, hint=HINT) from error
    except ValueError as error:
        raise PipelineError(
            f"the location of the store is invalid: {error}", where="--store", allowed=ALLOWED
        ) from error
    return files, root.rstrip("/")


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors of a storage: OSError, and those of the libraries that are imported."""
    modules = [(sys.modules[module], name) for module, name in ERRORS.items() if module in sys.modules]
    return (OSError, *(getattr(module, name) for module, name in modules))


def _cause(error: BaseException) -> str:
    """Return what an error means. Other errors than OSError may contain the endpoint, with a password in it."""
    if not isinstance(error, OSError):
        return type(error).__name__
    return (error.strerror or str(error) or type(error).__name__).splitlines()[0][:200]


def store_in(out: Path, location: str | None) -> Store:
    """Return the store in a folder for results, with a shared store behind it if there is a location."""
    return Store(out / STORE) if location is None else SharedStore(out / STORE, location)
