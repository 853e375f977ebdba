"""A store that machines share through a bucket: what one has made, the others download.

::

    PREFIX/artifacts/<digest>/<file>    like the folder of the store; artifact.json is written after the other files
    PREFIX/keys/<key>                   one line: the digest of the artifact; written last

What has a key is complete, artifacts are never changed, and two machines that upload the same one write the same bytes.
Stages work in the folder of the store. Nothing of a bucket is used before all of it was verified and published there.
A bucket that fails ends no run: then stages are made here, and wait in the folder for their upload.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.core.artifact import Artifact, Facts, Kind
from compress.core.files import explain, file_digest
from compress.core.progress import Phase, Progress
from compress.pipeline.bucket import Bucket, BucketError
from compress.pipeline.store import DIGEST_LINE, MANIFEST, STORE, Store, artifact_digest

UNSHARED = "unshared"
"""The folder of the keys that wait for their upload; each is an empty file."""
AWAY_S = 60.0
"""Seconds for which a bucket is not used after a request failed."""
MANIFEST_BYTES = 16 * 1024**2
"""The largest artifact.json."""
FILES = 900
"""The largest number of files of an artifact: a request lists 1,000 objects."""
RESERVE_BYTES = 256 * 1024**2
"""Bytes of the disk that a download leaves free."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MIB = 1024**2


class DamagedError(Exception):
    """An artifact in a bucket that cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Manifest:
    """A verified artifact.json.

    Attributes:
        digest: that of the artifact.
        kind: what it is.
        files: SHA-256 of each file, by name.
        facts: what the maker says of it.
        seconds: how long making it took.
    """

    digest: str
    kind: Kind
    files: dict[str, str]
    facts: Facts
    seconds: float


class BucketConnection:
    """A bucket, and whether it works. One for a process: its runs share what is known.

    Args:
        bucket: the bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.shared: set[str] = set()
        """Keys that are known to be there."""
        self._away_until = 0.0
        self._is_noted = False

    @property
    def is_away(self) -> bool:
        """Whether a request failed a moment ago."""
        return time.monotonic() < self._away_until

    def failed(self, what: str, error: BucketError, consequence: str, progress: Progress) -> None:
        """Leave the bucket alone for a while; note the reason once until it works again."""
        self._away_until = time.monotonic() + AWAY_S
        if not self._is_noted:
            progress.note(f"{self.bucket.location}: {what}: {error.what}; {consequence}")
            self._is_noted = True

    def worked(self) -> None:
        """Note the next failure again."""
        self._is_noted = False


class SharedStore(Store):
    """A folder of artifacts with a bucket behind it.

    Args:
        folder: the folder.
        connection: the bucket.
    """

    def __init__(self, folder: Path, connection: BucketConnection) -> None:
        super().__init__(folder)
        self._connection, self._bucket = connection, connection.bucket

    def prepare(self) -> None:
        """Create the folders, and clear scratch if no other process uses the store.

        Raises:
            StoreError: the folder cannot be written.
        """
        super().prepare()
        try:
            (self.folder / UNSHARED).mkdir(exist_ok=True)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error

    def look(self, key: str) -> Artifact | None:
        """Return the artifact for a key, without its files if it is in the bucket only."""
        artifact = self.find(key)
        if artifact is not None:
            return artifact
        try:
            manifest = self._manifest(key)
        except (BucketError, DamagedError):
            return None
        if manifest is None:
            return None
        return Artifact(manifest.digest, manifest.kind, Path(), manifest.files, manifest.facts, manifest.seconds)

    def fetch(self, key: str, progress: Progress) -> Artifact | None:
        """Download the artifact for a key, verify and publish it; return None if that is not possible.

        Args:
            key: the key. The caller must hold its lock.
            progress: the receiver of progress, and of the reason why it is not possible.

        Raises:
            StoreError: the folder cannot be written.
        """
        if self._connection.is_away:
            return None
        try:
            manifest = self._manifest(key)
            if manifest is None:
                return None
            with self.scratch() as work:
                self._download(manifest, work, progress)
                artifact = self.publish(key, manifest.kind, work, manifest.facts, manifest.seconds)
        except (DamagedError, RecursionError) as error:
            progress.note(f"{self._bucket.location}: a stored result cannot be used: {error}; it is made again")
            return None
        except BucketError as error:
            self._connection.failed("a stored result cannot be downloaded", error, "it is made here", progress)
            return None
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error
        self._connection.shared.add(key)
        self._connection.worked()
        return artifact

    def is_shared(self, key: str) -> bool:
        """Whether the bucket has a key, or nobody can know at the moment."""
        return key in self._connection.shared or self._connection.is_away

    def share(self, key: str, artifact: Artifact, progress: Progress, *, replace: bool = False) -> None:
        """Upload an artifact, and those that could not be uploaded before.

        Args:
            key: the key of the artifact.
            artifact: the artifact.
            progress: the receiver of progress.
            replace: whether it is uploaded even if the bucket has one with this key.

        Raises:
            StoreError: the folder cannot be written.
        """
        if not replace and self.is_shared(key):
            return
        waiting = self.folder / UNSHARED
        try:
            if self._connection.is_away:
                (waiting / key).touch()
                return
            try:
                if replace or not self._bucket.exists(f"keys/{key}"):
                    self._upload(key, artifact, progress)
                self._connection.shared.add(key)
                self._share_waiting(waiting, progress)
                self._connection.worked()
            except BucketError as error:
                (waiting / key).touch()
                consequence = f"it stays in {self.folder}, and is uploaded by the next run"
                self._connection.failed("a result cannot be uploaded", error, consequence, progress)
        except OSError as error:
            raise explain(error, "the store cannot be written", self.folder) from error

    def _share_waiting(self, waiting: Path, progress: Progress) -> None:
        """Upload what could not be uploaded before."""
        for path in sorted(waiting.iterdir()):
            artifact = self.find(path.name)
            if artifact is not None:
                self._upload(path.name, artifact, progress)
                self._connection.shared.add(path.name)
            path.unlink(missing_ok=True)

    def _upload(self, key: str, artifact: Artifact, progress: Progress) -> None:
        """Upload the files, then the manifest, then the key."""
        folder = f"artifacts/{artifact.digest}/"
        sizes = {name: artifact.file(name).stat().st_size for name in artifact.files}
        with _transfer("uploading", sum(sizes.values()), progress) as transferred:
            for name in sizes:
                self._bucket.upload(artifact.file(name), folder + name, transferred)
        self._bucket.put(folder + MANIFEST, (artifact.folder / MANIFEST).read_bytes())
        self._bucket.put(f"keys/{key}", artifact.digest.encode() + b"\n")

    def _manifest(self, key: str) -> Manifest | None:
        """Return the verified manifest of a key's artifact; None if the bucket has no such key.

        Raises:
            DamagedError: it is missing, too large or invalid.
            BucketError: a request failed.
        """
        line = self._bucket.get(f"keys/{key}", len("\n") + 64)
        if line is None:
            return None
        if not DIGEST_LINE.fullmatch(line):
            raise DamagedError("the key is damaged")
        digest = line[:64].decode()
        content = self._bucket.get(f"artifacts/{digest}/{MANIFEST}", MANIFEST_BYTES)
        if content is None:
            raise DamagedError(f"{MANIFEST} is missing")
        if len(content) > MANIFEST_BYTES:
            raise DamagedError(f"{MANIFEST} is larger than {MANIFEST_BYTES:,} bytes")
        return _verified(content, digest)

    def _download(self, manifest: Manifest, work: Path, progress: Progress) -> None:
        """Download the files of an artifact, and verify them.

        Raises:
            DamagedError: a file is missing, or different from the manifest, or the disk is too small for them.
            BucketError: a request failed.
            OSError: a file cannot be written.
        """
        folder = f"artifacts/{manifest.digest}/"
        stored = self._bucket.sizes(folder) if manifest.files else {}
        if missing := sorted(manifest.files.keys() - stored.keys()):
            raise DamagedError(f"{missing[0]} is missing")
        total = sum(stored[name] for name in manifest.files)
        free = shutil.disk_usage(work).free - RESERVE_BYTES
        if total > free:
            raise DamagedError(f"its files have {total:,} bytes, but the disk has space for {max(free, 0):,}")
        with _transfer("downloading", total, progress) as transferred:
            for name, expected in manifest.files.items():
                self._bucket.download(folder + name, work / name, transferred)
                if file_digest(work / name) != expected:
                    raise DamagedError(f"{name} is damaged")


def _verified(content: bytes, digest: str) -> Manifest:
    """Return the manifest in an artifact.json.

    Raises:
        DamagedError: it is invalid, or another one's.
    """
    try:
        value = json.loads(content)
        if not isinstance(value, dict) or not isinstance(value.get("seconds"), int | float):
            raise DamagedError(f"{MANIFEST} is invalid")
        files, facts = value.get("files"), value.get("facts")
        if not isinstance(files, dict) or not isinstance(facts, dict) or len(files) > FILES:
            raise DamagedError(f"{MANIFEST} is invalid")
        if not all(NAME.fullmatch(name) and name != MANIFEST for name in files):
            raise DamagedError(f"{MANIFEST} has names or values that are not allowed")
        if artifact_digest(value) != digest:
            raise DamagedError(f"{MANIFEST} is damaged")
        seconds = float(value["seconds"])
        if not math.isfinite(seconds):
            raise ValueError("it took no finite time")
        return Manifest(digest, Kind(str(value.get("kind"))), files, facts, seconds)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is invalid") from error


class _Counter:
    """Counts transferred bytes of several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress.update(self._done // MIB, -(-self._total // MIB))


@contextmanager
def _transfer(name: str, total: int, progress: Progress) -> Iterator[_Counter]:
    """Open a phase of progress in MiB."""
    with progress.phase(Phase(name, unit="MiB")):
        yield _Counter(total, progress)


def store_in(out: Path, connection: BucketConnection | None) -> Store:
    """Return the store in a folder for results, with a bucket behind it if there is one."""
    return Store(out / STORE) if connection is None else SharedStore(out / STORE, connection)


def connected(location: str | None) -> BucketConnection | None:
    """Return the connection to a bucket that works; None without a location.

    Raises:
        PipelineError: the location is invalid, or boto3 is not installed.
        StoreError: the bucket cannot be used.
    """
    if location is None:
        return None
    bucket = Bucket(location)
    bucket.check()
    return BucketConnection(bucket)
