"""The trust of a device: a folder with the metadata that it accepted last, and the rules for accepting newer metadata.

A device that has such a folder uses only files that the trusted targets metadata lists. The rules are those of the TUF
specification 1.0, section 5; numbers in comments are its steps. The folder is

::

    root.json, timestamp.json, snapshot.json, targets.json   the last accepted metadata of each role
    installed.json    by folder of releases: SHA-256 of the bundles that were accepted there; they may go on running
    .lock             locked (flock) during an update

Each file is replaced by one rename, after its verification. The source of an update is a function, so that the same
rules apply to a folder, a memory card and the connection of `compress deploy`. This module uses only the standard
library: `deploy` sends it to the device.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import types
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from deploy.contract import update_metadata
from deploy.contract.durable_files import PREFIX, write_atomically
from deploy.contract.update_metadata import MAX_BYTES, FileInfo, Metadata, Root, TrustError

FOLDERS = ("/etc/coralline/trust", "~/.config/coralline/trust")
"""Where a device has what it trusts: the first that exists, below CORALLINE_ROOT (see `deploy.runner.host`)."""
MAX_ROOTS = 256
"""The largest number of root versions in one update; the next update continues."""
INSTALLED = "installed.json"
BUNDLE_ENDING, RUNNER_ENDING = ".coralline", ".pyz"
FIRST = "compare the fingerprint with `python -m compress trust status` on the host, and pass it as --first-root"
Fetch = Callable[[str, int], Optional[bytes]]
"""Returns the content of a metadata file, at most one byte more than a limit; None: the source does not have it."""


def find(folder: str = "") -> Optional[TrustFolder]:
    """Return the folder of what this device trusts; None: it trusts no root, and accepts any bundle.

    Args:
        folder: this folder instead of `FOLDERS`.

    Raises:
        TrustError: the folder is damaged.
    """
    for path in [folder] if folder else _existing(FOLDERS):
        return TrustFolder(path)
    return None


def _existing(folders: Sequence[str]) -> Iterator[str]:
    return filter(os.path.isdir, map(_path, folders))


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
        TrustError: the source has no root with this fingerprint, or it is invalid.
        OSError: the folder exists, or cannot be written.
    """
    path = folder or default_folder()
    for number in range(1, MAX_ROOTS + 1):
        content = _fetched(fetch, "%d.root.json" % number, MAX_BYTES["root"])
        if content is None:
            break
        if fingerprint(content) == digest.strip().lower():
            update_metadata.read_root(content)
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
    """Return at most `limit` + 1 bytes of a file from outside; None: there is none. Devices and pipes are refused.

    Raises:
        TrustError: it is not an ordinary file.
        OSError: it cannot be read.
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
        path: its path.
        root: the trusted root.

    Raises:
        TrustError: its root is missing or damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        content = self._content("root")
        if content is None:
            raise TrustError("%s has no root.json" % path, "restore it, or see docs/trust.md", "damaged")
        self.root: Root = update_metadata.read_root(content)

    # --- what is trusted ------------------------------------------------------------------

    def _content(self, role: str) -> Optional[bytes]:
        return read_file(os.path.join(self.path, role + ".json"), MAX_BYTES[role])

    def trusted(self, role: str) -> Optional[Metadata]:
        """Return the stored metadata of a role; None: there is none that the keys of the trusted root have signed."""
        content = self._content(role)
        if content is None:
            return None
        try:
            metadata = update_metadata.parse(content, role)
            update_metadata.check_signatures(metadata, self.root)
        except TrustError:  # keys were rotated after it was stored
            return None
        return metadata

    def now(self) -> float:
        """Return the time, but never one before the last accepted timestamp was signed: this clock may be wrong."""
        timestamp = self.trusted("timestamp")
        return max(time.time(), update_metadata.issued(timestamp) if timestamp else 0)

    def listed(self) -> Dict[str, FileInfo]:
        """Return the files in the trusted targets metadata, by name."""
        metadata = self.trusted("targets")
        return update_metadata.targets(metadata) if metadata else {}

    def describe(self) -> Dict[str, object]:
        """Return the versions and expiries of the trusted metadata, and the listed files, as a plain map."""
        roles = {role: self.root.metadata if role == "root" else self.trusted(role) for role in update_metadata.ROLES}
        rows = {
            role: {"version": metadata.version, "expires": update_metadata.time_text(metadata.expires)}
            for role, metadata in roles.items()
            if metadata is not None
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
            TrustError: it is not listed.
        """
        for target, info in self.listed().items():
            if target.endswith(ending) and info.length == len(content):
                with contextlib.suppress(TrustError):
                    info.check(content, name)
                    return
        metadata = self.trusted("targets")
        version = "version %d" % metadata.version if metadata else "none yet"
        what = "%s is not in the signed targets metadata of this device (%s)" % (name, version)
        raise TrustError(what, "on the host: python -m compress trust add, then deploy with --repository", "unlisted")

    def require_bundle(self, content: bytes, path: str) -> None:
        """Check that a bundle may run: it is listed, or it was when it was installed at this path.

        Metadata that expires, or that lists a newer bundle instead, therefore does not stop a device.

        Raises:
            TrustError: it may not.
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
            TrustError: it is not: it expired, or an update was interrupted.
        """
        now = self.now()
        self.root.metadata.check_expiry(now)
        info: Optional[FileInfo] = None
        for role, following in (("timestamp", "snapshot.json"), ("snapshot", "targets.json"), ("targets", "")):
            metadata = self.trusted(role)
            if metadata is None or (info is not None and info.version != metadata.version):
                hint = "deploy with --repository, or: runner.pyz update SOURCE"
                raise TrustError("this device does not have the newest %s metadata" % role, hint, "missing")
            metadata.check_expiry(now)
            info = update_metadata.meta(metadata)[following] if following else None

    def installed(self, folder: str) -> List[str]:
        """Return the SHA-256 of the bundles that were accepted in a folder of releases."""
        return self._installed().get(os.path.realpath(folder), [])

    def _installed(self) -> Dict[str, List[str]]:
        content = read_file(os.path.join(self.path, INSTALLED), MAX_BYTES["targets"])
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

    # --- updates (5) ----------------------------------------------------------------------

    def update(self, fetch: Fetch) -> None:
        """Accept newer metadata from a source, in the order of the specification.

        Raises:
            TrustError: something was refused. Metadata that was accepted before it stays.
            OSError: a file cannot be read or written.
        """
        with self._locked():
            self.root = update_metadata.read_root(self._content("root") or b"")
            self._update_root(fetch)
            now = self.now()  # 5.1
            self.root.metadata.check_expiry(now)  # 5.3.10
            timestamp = self._update_timestamp(fetch, now)
            now = max(now, update_metadata.issued(timestamp))
            snapshot = self._update_snapshot(fetch, now, update_metadata.meta(timestamp)["snapshot.json"])
            self._update_targets(fetch, now, update_metadata.meta(snapshot)["targets.json"])

    def _update_root(self, fetch: Fetch) -> None:
        """Follow the chain of roots (5.3): each is signed by the keys of the one before, and by its own."""
        for _ in range(MAX_ROOTS):
            version = self.root.metadata.version + 1
            content = _fetched(fetch, "%d.root.json" % version, MAX_BYTES["root"])  # 5.3.3
            if content is None:
                return
            new = update_metadata.read_root(content)
            update_metadata.check_signatures(new.metadata, self.root)  # 5.3.4
            if new.metadata.version != version:  # 5.3.5
                what = "%d.root.json has version %d" % (version, new.metadata.version)
                raise TrustError(what, "copy the repository again", "rollback")
            online = ("timestamp", "snapshot")
            if any(new.roles[role] != self.root.roles[role] for role in online):  # 5.3.11
                # Who had a stolen key may have signed any version. It is done at once, because an interrupted update
                # continues with the new root, in which the change is not visible any more.
                for role in online:
                    self._remove(role)
            self._store("root", content)  # 5.3.8
            self.root = new

    def _update_timestamp(self, fetch: Fetch, now: float) -> Metadata:
        """Accept a newer timestamp (5.4)."""
        old = self.trusted("timestamp")
        new = self._verified(_required(fetch, "timestamp.json", MAX_BYTES["timestamp"]), "timestamp")
        listed = update_metadata.meta(new)["snapshot.json"]
        if old is not None:  # 5.4.3
            _no_rollback(new.version, old.version, "timestamp")
            _no_rollback(listed.version, update_metadata.meta(old)["snapshot.json"].version, "snapshot")
            if new.version == old.version:
                new = old
        update_metadata.issued(new)
        new.check_expiry(now)  # 5.4.4
        if new is not old:
            self._store("timestamp", new.content)  # 5.4.5
        return new

    def _update_snapshot(self, fetch: Fetch, now: float, info: FileInfo) -> Metadata:
        """Accept the snapshot that the timestamp lists (5.5)."""
        name, limit = self._named("snapshot", info)
        content = _required(fetch, name, limit)
        info.check(content, name)  # 5.5.2
        new = self._verified(content, "snapshot")
        _same_version(new, info)  # 5.5.4
        listed = update_metadata.meta(new)
        old = self.trusted("snapshot")
        for file, before in update_metadata.meta(old).items() if old else ():  # 5.5.5
            if file not in listed:
                raise TrustError("the new snapshot metadata lacks %s" % file, "", "rollback")
            _no_rollback(listed[file].version, before.version, file)
        new.check_expiry(now)  # 5.5.6
        self._store("snapshot", content)  # 5.5.7
        return new

    def _update_targets(self, fetch: Fetch, now: float, info: FileInfo) -> None:
        """Accept the targets metadata that the snapshot lists (5.6)."""
        name, limit = self._named("targets", info)
        content = _required(fetch, name, limit)
        info.check(content, name)  # 5.6.2
        new = self._verified(content, "targets")
        _same_version(new, info)  # 5.6.4
        update_metadata.targets(new)
        new.check_expiry(now)  # 5.6.5
        self._store("targets", content)  # 5.6.6

    def _verified(self, content: bytes, role: str) -> Metadata:
        metadata = update_metadata.parse(content, role)
        update_metadata.check_signatures(metadata, self.root)  # 5.4.2, 5.5.3, 5.6.3
        return metadata

    def _named(self, role: str, info: FileInfo) -> Tuple[str, int]:
        """Return the name of a metadata file in the source, and the largest size to read."""
        name = "%d.%s.json" % (info.version, role) if self.root.consistent_snapshot else role + ".json"
        return name, min(MAX_BYTES[role] if info.length is None else info.length, MAX_BYTES[role])

    def _store(self, role: str, content: bytes) -> None:
        path = os.path.join(self.path, role + ".json")
        if self._content(role) != content:
            write_atomically(path, content)

    def _remove(self, role: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, role + ".json"))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(os.path.join(self.path, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _fetched(fetch: Fetch, name: str, limit: int) -> Optional[bytes]:
    content = fetch(name, limit)
    if content is not None and len(content) > limit:
        raise TrustError("%s has more than %d bytes" % (name, limit), "", "length")
    return content


def _required(fetch: Fetch, name: str, limit: int) -> bytes:
    content = _fetched(fetch, name, limit)
    if content is None:
        raise TrustError("the source does not have %s" % name, "copy the repository again", "missing")
    return content


def _no_rollback(new: int, old: int, name: str) -> None:
    if new < old:
        what = "the source offers version %d of %s, and this device has accepted version %d" % (new, name, old)
        raise TrustError(what, "use the newest repository", "rollback")


def _same_version(metadata: Metadata, info: FileInfo) -> None:
    if metadata.version != info.version:
        what = "the %s metadata has version %d, and version %d is listed"
        raise TrustError(what % (metadata.role, metadata.version, info.version), "copy the repository again", "mixed")


def download(source: str, name: str, listed: Mapping[str, FileInfo], consistent: bool) -> bytes:
    """Return a target from a folder with the layout of a TUF repository (5.7).

    Raises:
        TrustError: it is not listed, missing, or not what is listed.
    """
    info = listed.get(name)
    if info is None:
        known = ", ".join(sorted(listed)) or "(nothing)"
        raise TrustError("%.80r is not in the signed targets metadata" % name, "use one of: %s" % known, "unlisted")
    folder, _, file = name.rpartition("/")
    for digest in sorted(info.hashes.values()) if consistent else [""]:
        path = os.path.join(source, "targets", folder, "%s.%s" % (digest, file) if digest else file)
        content = read_file(path, info.length or 0)
        if content is not None:
            info.check(content, name)
            return content
    raise TrustError("the source does not have the listed file %s" % name, "copy the repository again", "missing")


def _json(installed: Mapping[str, Sequence[str]]) -> bytes:
    return json.dumps(dict(installed), indent=1, sort_keys=True).encode()
