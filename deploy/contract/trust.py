"""The trust of a device: a folder with the metadata that it accepted last, and the update of this metadata.

A device that has such a folder uses only files that the trusted targets metadata lists. The client of python-tuf
(`tuf.ngclient`) applies the rules of the TUF specification 1.0, section 5. The folder is

::

    root.json, timestamp.json, snapshot.json, targets.json   the last accepted metadata of each role
    installed.json    by folder of releases: SHA-256 of the bundles that were accepted there; they may go on running
    .lock             locked (flock) during an update

The client works in a copy of the folder. Each file that the client has accepted then replaces the file here by one
rename, flushed to the disk. The source of an update is a function, so that the same rules apply to a folder, a memory
card and the connection of `compress deploy`, which sends this module to the device.

python-tuf needs Python 3.10. Without the folder nothing here imports python-tuf. With the folder, a device without
python-tuf refuses every bundle, because nothing else tells a listed bundle from another one.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
import types
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from deploy.contract.durable_files import PREFIX, write_atomically
from deploy.contract.errors import DeviceError

FOLDERS = ("/etc/coralline/trust", "~/.config/coralline/trust")
"""Where a device has what it trusts: the first that exists, below CORALLINE_ROOT (see `deploy.runner.host`)."""
ROLES = ("root", "timestamp", "snapshot", "targets")
MAX_ROOTS = 256
"""The largest number of root versions that a first contact looks at, as in python-tuf's client."""
MAX_BYTES = 5_000_000
"""The largest metadata file that is read: python-tuf's limit for targets metadata, which is its highest one."""
INSTALLED = "installed.json"
BUNDLE_ENDING, RUNNER_ENDING = ".coralline", ".pyz"
FIRST = "compare the fingerprint with `python -m compress trust status` on the host, and pass it as --first-root"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_COPY = "copy the repository again"
_RENEW = "on the host: python -m compress trust refresh; or set the clock"
Fetch = Callable[[str, int], Optional[bytes]]
"""Returns the content of a metadata file, at most one byte more than a limit; None: the source does not have it."""


class TrustError(DeviceError):
    """An update, or a file, that this device does not accept. Exit code 8.

    `kind` is one of

    - `metadata`: not valid metadata
    - `length`: longer than allowed, or than listed
    - `missing`: the source does not have the file, or an update is incomplete
    - `signature`: not signed by enough keys of its role
    - `version`: older than what this device has accepted before, or not the version that is listed
    - `mixed`: the files do not belong together
    - `expired`: valid until a time that has passed
    - `unlisted`: the file is not in the trusted targets metadata
    - `first_contact`: this device trusts no root yet, or another one
    - `damaged`: the trusted metadata on this device cannot be used
    - `unsupported`: python-tuf is missing, so that nothing can be verified
    """

    exit_code = 8
    kind = "metadata"


def find(folder: str = "") -> Optional[TrustFolder]:
    """Return what this device trusts, in `folder` or one of FOLDERS; None: it trusts no root, and accepts any bundle.

    Raises:
        TrustError: the folder is damaged, or python-tuf is missing.
    """
    for path in [folder] if folder else filter(os.path.isdir, map(_path, FOLDERS)):
        return TrustFolder(path)
    return None


def _path(folder: str) -> str:
    path = os.path.expanduser(folder)
    if not os.path.isabs(path):  # the user has no home: `~` is not a folder in the working directory
        path = "/nonexistent"
    return os.path.join(os.environ.get("CORALLINE_ROOT", "/"), path.lstrip("/"))


def default_folder() -> str:
    """Return the folder in which this user's first contact stores the root: FOLDERS[0] for root, else FOLDERS[1]."""
    return _path(FOLDERS[0] if os.geteuid() == 0 else FOLDERS[1])


def fingerprint(root: bytes) -> str:
    """Return the fingerprint of a root metadata file: its SHA-256."""
    return hashlib.sha256(root).hexdigest()


def first_contact(
    fetch: Fetch, digest: str, folder: str = "", running: Mapping[str, Sequence[str]] = types.MappingProxyType({})
) -> TrustFolder:
    """Make this device trust a root for the first time.

    Args:
        fetch: the source.
        digest: the fingerprint of any version of the root. The person has compared it.
        folder: where to store it; by default `default_folder()`.
        running: by folder of releases, the SHA-256 of bundles that were installed before, and may go on running.

    Raises:
        TrustError: the source has no valid root with this fingerprint, or python-tuf is missing.
        OSError: the folder exists, or cannot be written.
    """
    path = folder or default_folder()
    for number in range(1, MAX_ROOTS + 1):
        content = fetch("%d.root.json" % number, MAX_BYTES)
        if content is None:
            break
        if fingerprint(content) == digest.strip().lower():
            _read_root(content, path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            new = tempfile.mkdtemp(prefix=PREFIX + "trust-", dir=os.path.dirname(path))
            os.chmod(new, 0o755)  # noqa: S103  (nothing in it is secret, and other users run bundles)
            write_atomically(os.path.join(new, "root.json"), content)
            write_atomically(os.path.join(new, INSTALLED), _json(running))
            os.rename(new, path)  # fails if the folder exists, and is not empty
            return TrustFolder(path)
    raise TrustError("the source has no root with the fingerprint %.80s" % digest, FIRST, "first_contact")


def folder_source(folder: str) -> Fetch:
    """Return the source of updates in a folder with the layout of a TUF repository: metadata/ and targets/."""
    return lambda name, limit: read_file(os.path.join(folder, "metadata", name), limit)


def read_file(path: str, limit: int) -> Optional[bytes]:
    """Return at most `limit` + 1 bytes of a file from outside; None: the file does not exist. Devices are refused.

    Raises:
        TrustError: the path is a folder, a device or a pipe.
        OSError: the file cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise TrustError("%s is not an ordinary file" % path)
    with os.fdopen(handle, "rb") as stream:
        return stream.read(min(limit, facts.st_size) + 1)


class TrustFolder:
    """The folder of what a device trusts.

    Attributes:
        root: the trusted root, a `tuf.api.metadata.Root`.

    Raises:
        TrustError: its root is missing or damaged, or python-tuf is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.root: Any = _read_root(self._content("root"), path)

    # --- what is trusted ------------------------------------------------------------------

    def _content(self, role: str) -> Optional[bytes]:
        return read_file(os.path.join(self.path, role + ".json"), MAX_BYTES)

    def trusted(self, role: str) -> Any:
        """Return the stored metadata of a role; None: there is none that the keys of the trusted root have signed."""
        from tuf.api.exceptions import RepositoryError
        from tuf.api.metadata import Metadata

        try:
            metadata: Any = Metadata.from_bytes(self._content(role) or b"")
            self.root.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        except RepositoryError:  # there is none, or keys were rotated after it was stored
            return None
        return metadata.signed if metadata.signed.type == role else None

    def now(self) -> datetime.datetime:
        """Return the time, but never one before the last accepted timestamp was signed: this clock may be wrong."""
        clock = datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc)
        return max(clock, _issued(self.trusted("timestamp")))

    def listed(self) -> Mapping[str, Any]:
        """Return the files in the trusted targets metadata, by name: `tuf.api.metadata.TargetFile`."""
        metadata = self.trusted("targets")
        return {} if metadata is None else dict(metadata.targets)

    def describe(self) -> Dict[str, object]:
        """Return the versions and expiries of the trusted metadata, and the listed files, as a plain map."""
        roles = {role: self.root if role == "root" else self.trusted(role) for role in ROLES}
        rows = {
            role: {"version": signed.version, "expires": signed.expires.strftime(TIME_FORMAT)}
            for role, signed in roles.items()
            if signed is not None
        }
        return {"folder": self.path, "roles": rows, "targets": sorted(self.listed())}

    # --- files ----------------------------------------------------------------------------

    def require(self, content: bytes, ending: str, name: str) -> None:
        """Check that a file is listed in the trusted targets metadata.

        Args:
            content: its bytes.
            ending: the ending of its listed name: a bundle must not be taken for a runner.
            name: its name in messages.

        Raises:
            TrustError: the file is not listed.
        """
        from tuf.api.exceptions import LengthOrHashMismatchError

        for target, info in self.listed().items():
            if target.endswith(ending):
                with contextlib.suppress(LengthOrHashMismatchError):
                    info.verify_length_and_hashes(content)
                    return
        metadata = self.trusted("targets")
        version = "none yet" if metadata is None else "version %d" % metadata.version
        what = "%s is not in the signed targets metadata of this device (%s)" % (name, version)
        raise TrustError(what, "on the host: python -m compress trust add, then deploy with --repository", "unlisted")

    def require_bundle(self, content: bytes, path: str) -> None:
        """Check that a bundle may run: the bundle is listed, or was listed when it was installed at this path.

        Metadata that expires, or that lists a newer bundle instead, therefore does not stop a device.

        Raises:
            TrustError: the bundle may not run.
        """
        try:
            self.require(content, BUNDLE_ENDING, path)
        except TrustError:
            release = os.path.dirname(os.path.realpath(path))
            folder = os.path.dirname(os.path.dirname(release))
            if hashlib.sha256(content).hexdigest() not in self.installed(folder):
                raise

    def require_fresh(self) -> None:
        """Check that the trusted metadata is complete and valid now: before something new is installed.

        Raises:
            TrustError: the metadata expired, or an update was interrupted.
        """
        timestamp, snapshot, targets = (self.trusted(role) for role in ROLES[1:])
        listed = None if snapshot is None else snapshot.meta.get("targets.json")
        versions = [part and part.version for part in (timestamp and timestamp.snapshot_meta, listed)]
        if None in versions or versions != [snapshot.version, targets and targets.version]:
            hint = "deploy with --repository, or: runner.pyz update SOURCE"
            raise TrustError("this device does not have the newest metadata: an update is incomplete", hint, "missing")
        now = self.now()
        for signed in (self.root, timestamp, snapshot, targets):
            _require_valid(signed, now)

    def installed(self, folder: str) -> List[str]:
        """Return the SHA-256 of the bundles that were accepted in a folder of releases."""
        return self._installed().get(os.path.realpath(folder), [])

    def _installed(self) -> Dict[str, List[str]]:
        content = read_file(os.path.join(self.path, INSTALLED), MAX_BYTES)
        try:
            return dict(json.loads(content.decode("utf-8"))) if content else {}
        except ValueError:  # it never has partial content; without it, listed bundles still run
            return {}

    def record(self, folder: str, digests: Sequence[str]) -> None:
        """Store the bundles that were accepted in a folder of releases; they replace the earlier ones."""
        with self._locked():
            everything = self._installed()
            everything[os.path.realpath(folder)] = sorted(set(digests))
            write_atomically(os.path.join(self.path, INSTALLED), _json(everything))

    # --- updates --------------------------------------------------------------------------

    def update(self, fetch: Fetch) -> None:
        """Accept newer metadata from a source.

        Raises:
            TrustError: something was refused. Metadata that was accepted before it stays.
            OSError: a file cannot be read or written.
        """
        from tuf.api.exceptions import DownloadError, RepositoryError
        from tuf.ngclient import Updater

        with self._locked(), tempfile.TemporaryDirectory() as work:
            for role in ROLES[1:]:
                with open(os.path.join(work, role + ".json"), "wb") as stream:
                    stream.write(self._content(role) or b"")
            try:
                Updater(work, "metadata", fetcher=_fetcher(fetch), bootstrap=self._content("root")).refresh()
            except (RepositoryError, DownloadError) as error:
                raise _refusal(error)
            finally:
                self._accept(work)
            self.require_fresh()

    def _accept(self, work: str) -> None:
        """Store what the client has accepted. The client knows only this device's clock, so expiry is checked again.

        The root comes first: a timestamp that was signed with a stolen key does not count after the key was replaced.
        """
        from tuf.api.metadata import Metadata

        for role in ROLES:
            content = read_file(os.path.join(work, role + ".json"), MAX_BYTES)
            if not content or content == self._content(role):
                continue
            signed: Any = Metadata.from_bytes(content).signed
            if role == "root":
                self.root = signed
            else:
                _require_valid(signed, max(self.now(), _issued(signed)))
            write_atomically(os.path.join(self.path, role + ".json"), content)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(os.path.join(self.path, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _read_root(content: Optional[bytes], path: str) -> Any:
    """Return a root that is signed by its own keys: a `tuf.api.metadata.Root`.

    Raises:
        TrustError: the root is missing or damaged, or python-tuf is missing.
    """
    try:
        if sys.version_info < (3, 10):
            raise ImportError("this Python is %d.%d" % sys.version_info[:2])
        from tuf import __version__
        from tuf.api.exceptions import RepositoryError
        from tuf.api.metadata import Metadata

        if int(__version__.split(".")[0]) < 7:  # its client has another interface
            raise ImportError("tuf is %s" % __version__)
    except ImportError as error:
        what = "%s says that this device accepts only signed bundles, which cannot be verified: %s" % (path, error)
        hint = "use Python 3.10 or newer, with: pip install 'tuf>=7' 'cryptography>=48'"
        raise TrustError(what, hint, "unsupported")
    if content is None:
        raise TrustError("%s has no root.json" % path, "restore it, or see docs/trust.md", "damaged")
    try:
        metadata: Any = Metadata.from_bytes(content)
        if metadata.signed.type != "root":
            raise RepositoryError("it is %s metadata" % metadata.signed.type)
        metadata.signed.verify_delegate("root", metadata.signed_bytes, metadata.signatures)
    except RepositoryError as error:
        raise TrustError("the root metadata cannot be used: %.200s" % error, "see docs/trust.md", "damaged")
    return metadata.signed


def _fetcher(fetch: Fetch) -> Any:
    """Return a source as python-tuf's client reads it; the client applies its own limits of length."""
    from tuf.api.exceptions import DownloadHTTPError
    from tuf.ngclient import FetcherInterface

    class MetadataSource(FetcherInterface):  # type: ignore[misc]
        def _fetch(self, url: str) -> Iterator[bytes]:
            name = url.rpartition("/")[2]
            content = fetch(name, MAX_BYTES)
            if content is None:
                raise DownloadHTTPError("the source does not have %s" % name, 404)
            yield content

    return MetadataSource()


def _refusal(error: Exception) -> TrustError:
    from tuf.api import exceptions

    kinds = (
        (exceptions.ExpiredMetadataError, "expired", _RENEW),
        (exceptions.UnsignedMetadataError, "signature", ""),
        (exceptions.BadVersionNumberError, "version", "use the newest repository"),
        (exceptions.LengthOrHashMismatchError, "mixed", _COPY),
        (exceptions.DownloadLengthMismatchError, "length", _COPY),
        (exceptions.DownloadHTTPError, "missing", _COPY),
    )
    kind, hint = next(((kind, hint) for cause, kind, hint in kinds if isinstance(error, cause)), ("metadata", ""))
    return TrustError("the update was refused: %.300s" % error, hint, kind)


def _issued(timestamp: Any) -> datetime.datetime:
    """Return when timestamp metadata was signed: the field `issued`, which Coralline's hosts write."""
    try:
        issued = datetime.datetime.strptime(timestamp.unrecognized_fields["issued"], TIME_FORMAT)
    except (AttributeError, KeyError, TypeError, ValueError):  # no timestamp, or signed by another program
        issued = datetime.datetime.min
    return issued.replace(tzinfo=datetime.timezone.utc)


def _require_valid(signed: Any, now: datetime.datetime) -> None:
    if signed.is_expired(now):
        facts = (signed.type, signed.expires.strftime(TIME_FORMAT), now.strftime(TIME_FORMAT))
        raise TrustError("the %s metadata was valid until %s, and the time here is %s" % facts, _RENEW, "expired")


def download(source: str, name: str, listed: Mapping[str, Any], consistent: bool) -> bytes:
    """Return a target from a folder with the layout of a TUF repository.

    Raises:
        TrustError: the target is not listed, is missing, or differs from what is listed.
    """
    from tuf.api.exceptions import LengthOrHashMismatchError

    info = listed.get(name)
    if info is None:
        known = ", ".join(sorted(listed)) or "(nothing)"
        raise TrustError("%.80r is not in the signed targets metadata" % name, "use one of: %s" % known, "unlisted")
    for path in info.get_prefixed_paths() if consistent else [name]:
        content = read_file(os.path.join(source, "targets", path), info.length)
        if content is not None:
            try:
                info.verify_length_and_hashes(content)
            except LengthOrHashMismatchError as error:
                raise TrustError("%s is not the listed file: %s" % (name, error), _COPY, "mixed")
            return content
    raise TrustError("the source does not have the listed file %s" % name, _COPY, "missing")


def _json(installed: Mapping[str, Sequence[str]]) -> bytes:
    return json.dumps(dict(installed), indent=1, sort_keys=True).encode()
