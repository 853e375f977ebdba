"""A store that machines share: a folder that they mount, or storage that fsspec knows, such as s3:// and gs://.

::

    ADDRESS/artifacts/<digest>/<file>    like the folder of the store; artifact.json is written after the other files
    ADDRESS/keys/<key>                   one line: the digest of the artifact; written last

What has a key is complete, artifacts are never changed, and two machines that upload the same artifact write the same
bytes. Stages work in the folder of the store. Nothing of a shared store is used before all of it was verified and
published there. A shared store that fails ends no run: the rest of the run does without it, and a later run uploads
what the store does not have.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from compress.core.artifact import Artifact
from compress.core.errors import PipelineError, StoreError
from compress.core.files import file_digest
from compress.core.progress import Phase, Progress
from compress.pipeline.store import DIGEST_LINE, MANIFEST, STORE, Store, parsed

MANIFEST_BYTES = 16 * 1024**2
"""Bytes of artifact.json that are read; those of the shipped recipes have less than 1 MiB."""
RESERVE_BYTES = 256 * 1024**2
"""Bytes of the disk that a download leaves free for the run itself; chosen."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""The names of files that are downloaded: no path leads out of the folder."""
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
        self._is_away = False
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
            self._leave("a stored result cannot be downloaded", error, "it is made here", progress)
            return None
        self._shared.add(key)
        return artifact

    def is_shared(self, key: str) -> bool:
        """Whether the shared store has a key, or is not used any more."""
        return key in self._shared or self._is_away

    def share(self, key: str, artifact: Artifact, progress: Progress, *, replace: bool = False) -> None:
        """Upload an artifact.

        Args:
            key: the key of the artifact.
            artifact: the artifact.
            progress: the receiver of progress.
            replace: whether to upload the artifact even if the shared store has an artifact with this key.
        """
        if self._is_away or (not replace and key in self._shared):
            return
        try:
            if replace or not self._files.exists(f"{self._root}/keys/{key}"):
                self._upload(key, artifact, progress)
            self._shared.add(key)
        except _errors() as error:
            consequence = f"it stays in {self.folder}; a later run uploads what the store does not have"
            self._leave("a result cannot be uploaded", error, consequence, progress)

    def _leave(self, what: str, error: BaseException, consequence: str, progress: Progress) -> None:
        """Use the shared store no more: each further request may take minutes to fail."""
        self._is_away = True
        progress.note(f"{self._location}: {what}: {_cause(error)}; {consequence}")

    def _upload(self, key: str, artifact: Artifact, progress: Progress) -> None:
        """Upload the files, then the manifest, then the key."""
        remote = f"{self._root}/artifacts/{artifact.digest}"
        with progress.phase(Phase("uploading", unit="file")):
            for number, name in enumerate(artifact.files, 1):
                self._files.put_file(str(artifact.file(name)), f"{remote}/{name}")
                progress.update(number, len(artifact.files))
        self._files.pipe_file(f"{remote}/{MANIFEST}", (artifact.folder / MANIFEST).read_bytes())
        self._files.pipe_file(f"{self._root}/keys/{key}", artifact.digest.encode() + b"\n")

    def _read(self, name: str) -> bytes | None:
        """Return the first MANIFEST_BYTES of a file; None if there is no such file."""
        try:
            # `cat_file` with an end fails for an empty object of S3.
            with self._files.open(f"{self._root}/{name}", "rb") as stream:
                return bytes(stream.read(MANIFEST_BYTES))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def _manifest(self, key: str) -> Artifact | None:
        """Return a key's artifact without its files; None if the shared store has no such key.

        Raises:
            DamagedError: the manifest is missing or invalid.
            OSError: a request failed, or another of `_errors`.
        """
        line = self._read(f"keys/{key}")
        if line is None:
            return None
        if not DIGEST_LINE.fullmatch(line):
            raise DamagedError("the key is damaged")
        digest = line[:64].decode()
        content = self._read(f"artifacts/{digest}/{MANIFEST}")
        if content is None:
            raise DamagedError(f"{MANIFEST} is missing")
        try:
            artifact = parsed(content, digest, Path())
        except ValueError as error:
            raise DamagedError(f"{MANIFEST} is invalid") from error
        if not all(NAME.fullmatch(name) and name != MANIFEST for name in artifact.files):
            raise DamagedError(f"{MANIFEST} has names or values that are not allowed")
        return artifact

    def _download(self, manifest: Artifact, work: Path, progress: Progress) -> None:
        """Download the files of an artifact, and verify them.

        Raises:
            DamagedError: a file is missing, or different from the manifest.
            OSError: a request failed, or another of `_errors`.
        """
        remote = f"{self._root}/artifacts/{manifest.digest}"
        total = 0
        for name in manifest.files:
            try:
                total += self._files.info(f"{remote}/{name}")["size"] or 0
            except FileNotFoundError as error:
                raise DamagedError(f"{name} is missing") from error
        free = max(0, shutil.disk_usage(work).free - RESERVE_BYTES)
        if total > free:
            raise DamagedError(f"its files have {total:,} bytes, but the disk has space for {free:,}")
        with progress.phase(Phase("downloading", unit="file")):
            for number, (name, expected) in enumerate(manifest.files.items(), 1):
                self._files.get_file(f"{remote}/{name}", str(work / name))
                if file_digest(work / name) != expected:
                    raise DamagedError(f"{name} is damaged")
                progress.update(number, len(manifest.files))


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
