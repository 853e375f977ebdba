"""The releases in a folder of a device: installed next to the current one, verified, and switched to by one rename.

::

    current -> releases/<release>   the current release; a file with this text if the file system has no links (FAT)
    releases/<release>/             bundle.coralline, runner.pyz, release.json; created by one rename, thus complete
    incoming/                       received pieces of a release that is not complete yet
    history.jsonl                   one line for each switch: time, release, user
    coralline.service, README.txt   how to run it; nothing is installed automatically
    .lock                           locked (flock) during a deployment; the kernel releases it when the process ends

`deploy.contract.agent` calls these steps for the host. This module uses only the standard library.

On a device that trusts a root (`deploy.contract.trust`), both files of a release must be in the signed targets
metadata before any of them is used. The bundle that is switched to is recorded, so that it may go on running after
newer metadata was accepted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import Any, Callable, Dict, Iterator, List, Optional

from deploy.contract import trust
from deploy.contract.durable_files import PREFIX, create_folder, sync, write_atomically

BUNDLE, RUNNER, RELEASE = "bundle.coralline", "runner.pyz", "release.json"
MANIFEST = "manifest.json"  # in the bundle
TEXTS = ("coralline.service", "README.txt")
MAX_OUTPUT = 1 << 25
"""The largest part of the output of a runner, and of a manifest, that is read; chosen: 32 MB."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_CURRENT = re.compile(r"releases/([0-9a-f]{64})\s*\Z")
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
Message = Dict[str, Any]
Wait = Callable[[float], None]


class ReleaseError(Exception):
    """A step failed. `kind`: locked, disk, files, damaged, absent, timeout, trust, or request."""

    def __init__(self, kind: str, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.hint = kind, what, hint


def release_name(bundle_sha256: str, runner_sha256: str) -> str:
    """Return the name of the release of these two files."""
    return hashlib.sha256(("%s %s\n%s %s\n" % (BUNDLE, bundle_sha256, RUNNER, runner_sha256)).encode()).hexdigest()


class DeviceFolder:
    """The folder of the releases on a device, locked until the process ends.

    Args:
        by: the person who deploys, for the history.
        trust_folder: what this device trusts, instead of `trust.FOLDERS`.
        lock: False to look only, also during a deployment: then nothing may be changed.

    Raises:
        ReleaseError: another deployment has locked the folder, or the folder is missing and `create` is False.
        OSError: the folder cannot be created or read.
    """

    def __init__(self, path: str, by: str, create: bool, trust_folder: str = "", lock: bool = True) -> None:
        self.path, self.by, self._trust_folder = os.path.abspath(os.path.expanduser(path)), by, trust_folder
        if not create and not os.path.isdir(self._in("releases")):
            raise ReleaseError("absent", "nothing was deployed to %s" % self.path, "deploy a bundle there first")
        if not lock:
            return
        create_folder(self._in("releases"))
        create_folder(self._in("incoming"))
        self._lock = os.open(self._in(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 300).decode("utf-8", "replace").strip() or "another deployment"
            os.close(self._lock)
            raise ReleaseError("locked", "%s is using %s" % (holder, self.path), "wait until it is done")
        self.clear()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, ("%s (since %s)\n" % (by, _now())).encode()[:300], 0)
        running = self._at_open = self.current()
        if running and self._history()[-1:] != [running]:  # a cut came between the switch and its line
            self._remember(running)

    def _in(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def clear(self) -> None:
        """Remove the files of an interrupted step. Received pieces stay, because the next deployment needs them."""
        for name in os.listdir(self._in("releases")):
            if name.startswith("."):
                shutil.rmtree(self._in("releases", name))
        for name in os.listdir(self.path):
            if name.startswith(PREFIX):
                os.unlink(self._in(name))

    def describe(self) -> Message:
        """Return the releases, and the Python and machine of the device."""
        return {
            "path": self.path,
            "current": self.current(),
            "previous": self.previous(),
            "releases": self.releases(),
            "python": platform.python_version(),
            "program": sys.executable,
            "machine": platform.machine(),
            "node": platform.node(),
        }

    def status(self) -> Message:
        """Return what `describe` does, and about the current release: name, time and user of the switch, and whether
        its files are undamaged."""
        current = self.current()
        result: Message = dict(self.describe(), name=None, time=None, by=None, whole=False)
        if current is not None:
            result.update(name=self._title(current), whole=self.whole(current))
            entry = self._last_switch()
            if entry.get("release") == current:  # a cut may come between the switch and its line
                result.update(time=entry.get("time"), by=entry.get("by"))
        return result

    def _title(self, release: str) -> Optional[str]:
        """Return the name in the manifest of a release's bundle; None if it cannot be read."""
        try:
            with zipfile.ZipFile(self._in("releases", release, BUNDLE)) as archive, archive.open(MANIFEST) as stream:
                return str(json.loads(stream.read(MAX_OUTPUT).decode())["name"])[:100]
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None

    def _last_switch(self) -> Message:
        """Return the last line of the history; empty if it is incomplete."""
        try:
            with open(self._in("history.jsonl"), encoding="utf-8", errors="replace") as stream:
                entry = json.loads(stream.readlines()[-1])
        except (OSError, ValueError, IndexError):
            return {}
        return entry if isinstance(entry, dict) else {}

    def current(self) -> Optional[str]:
        """Return the current release, or None."""
        try:
            text = os.readlink(self._in("current"))
        except FileNotFoundError:
            return None
        except OSError:  # a text file, on file systems without links
            with open(self._in("current"), encoding="utf-8", errors="replace") as stream:
                text = stream.read(200)
        match = _CURRENT.match(text)
        return match.group(1) if match else None

    def previous(self) -> Optional[str]:
        """Return the release before the current one, if it still exists."""
        current = self.current()
        installed = self.releases()
        return next((name for name in reversed(self._history()) if name != current and name in installed), None)

    def releases(self) -> List[str]:
        """Return all releases, in the order of their last switch."""
        names = [name for name in os.listdir(self._in("releases")) if _DIGEST.match(name)]
        order = {name: position for position, name in enumerate(self._history())}
        return sorted(names, key=lambda name: (order.get(name, -1), name))

    def _history(self) -> List[str]:
        try:
            with open(self._in("history.jsonl"), encoding="utf-8", errors="replace") as stream:
                lines = stream.readlines()
        except FileNotFoundError:
            return []
        matches = [re.search(r'"release": "([0-9a-f]{64})"', line) for line in lines]  # the last line may be incomplete
        return [match.group(1) for match in matches if match]

    def _remember(self, release: str) -> None:
        line = json.dumps({"time": _now(), "release": release, "by": self.by}, sort_keys=True)
        with open(self._in("history.jsonl"), "a+b") as stream:
            is_new = not stream.tell()
            if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
                line = "\n" + line
            stream.write(line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if is_new:
            sync(self.path)

    # --- what arrives -------------------------------------------------------------------

    def missing(self, pieces: Dict[str, int], total: int) -> Dict[str, int]:
        """Return the missing pieces: SHA-256 to the number of bytes that have already arrived.

        Pieces of other releases are removed, and so are releases that were never current: their deployments were
        interrupted before the switch. The disk must have space for the missing data, and for the files that all pieces
        make up: `total` bytes.
        """
        for name in os.listdir(self._in("incoming")):
            if name.partition(".")[0] not in pieces:
                os.unlink(self._in("incoming", name))
        self._discard_unused(pieces)
        known = self._known(pieces)
        arrived = {}
        for digest, size in pieces.items():
            if digest not in known and not os.path.exists(self._in("incoming", digest)):
                arrived[digest] = self._arrived(digest, size)
        required = total + sum(pieces[digest] - count for digest, count in arrived.items())
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if free < required:
            what = "the disk needs %d free bytes, and has %d" % (required, free)
            raise ReleaseError("disk", what, "free some space")
        return arrived

    def _discard_unused(self, pieces: Dict[str, int]) -> None:
        """Remove the releases that were never current, except one that consists of these pieces."""
        history = self._history()
        for release in self.releases():
            if release in history:
                continue
            parts = {digest for entry in self._about(release).values() for digest, _ in entry["pieces"]}
            if not parts or parts - pieces.keys():
                self.discard(release)

    def _arrived(self, digest: str, size: int) -> int:
        """Return the number of bytes of an incomplete piece; a piece of the full size is damaged, and is removed."""
        part = self._in("incoming", digest + ".part")
        if not os.path.exists(part):
            return 0
        count = os.path.getsize(part)
        if count < size:
            return count
        os.unlink(part)
        return 0

    def _known(self, digests: Any) -> Dict[str, Any]:
        """Return the undamaged pieces of the installed releases: SHA-256 to file, offset and size."""
        known: Dict[str, Any] = {}
        for release in self.releases():
            for name, entry in self._about(release).items():
                path, offset = self._in("releases", release, name), 0
                for digest, size in entry["pieces"]:
                    new = digest in digests and digest not in known
                    if new and hashlib.sha256(_part(path, offset, size)).hexdigest() == digest:
                        known[digest] = (path, offset, size)
                    offset += size
        return known

    def _about(self, release: str) -> Message:
        """Return the file table in a release's release.json; empty if that file is damaged."""
        try:
            with open(self._in("releases", release, RELEASE), encoding="utf-8") as stream:
                files = json.load(stream)["files"]
                return {name: files[name] for name in (BUNDLE, RUNNER)}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def put(self, digest: str, offset: int, size: int, content: Iterator[bytes]) -> bool:
        """Store the rest of a piece; return whether it is complete. A damaged piece is removed."""
        part = self._in("incoming", _checked(digest) + ".part")
        with open(part, "ab" if offset else "wb") as stream:
            if stream.tell() != offset:
                raise ReleaseError("request", "%s has %d bytes, not %d" % (part, stream.tell(), offset))
            for block in content:
                stream.write(block)
                stream.flush()  # so that a cut loses nothing that arrived
            os.fsync(stream.fileno())
        if os.path.getsize(part) != size or _digest(part) != digest:
            os.unlink(part)
            return False
        os.replace(part, self._in("incoming", digest))
        return True

    def install(self, release: str, files: Message) -> None:
        """Assemble a release from its pieces, and flush it to the disk.

        Raises:
            ReleaseError: a piece is missing, or the checksum of a file is wrong.
            TrustError: this device trusts a root, and a file is not in the signed metadata.
        """
        if release_name(files[BUNDLE]["sha256"], files[RUNNER]["sha256"]) != release:
            raise ReleaseError("request", "%s is not the release of these files" % release)
        folder, destination = self._in("releases", ".new"), self._in("releases", release)
        os.mkdir(folder)
        known = self._known({digest for entry in files.values() for digest, _ in entry["pieces"]})
        for name in (BUNDLE, RUNNER):
            with open(os.path.join(folder, name), "wb") as stream:
                for digest, size in files[name]["pieces"]:
                    stream.write(_part(*known.get(digest, (self._in("incoming", _checked(digest)), 0, size))))
                stream.flush()
                os.fsync(stream.fileno())
            if _digest(os.path.join(folder, name)) != files[name]["sha256"]:
                self.drop_incoming()  # a damaged piece must be sent again
                raise ReleaseError("damaged", "%s is not what was sent" % name, "deploy again")
        self._require_listed(folder)
        about = {"installed": _now(), "by": self.by, "files": files}
        write_atomically(os.path.join(folder, RELEASE), json.dumps(about).encode())
        if os.path.isdir(destination):  # it was damaged, and may be the current release: replace it file by file
            for name in (BUNDLE, RUNNER, RELEASE):
                os.replace(os.path.join(folder, name), os.path.join(destination, name))
            os.rmdir(folder)
        else:
            sync(folder)
            os.rename(folder, destination)
        sync(self._in("releases"))
        self.drop_incoming()

    def drop_incoming(self) -> None:
        """Remove all received pieces."""
        for name in os.listdir(self._in("incoming")):
            os.unlink(self._in("incoming", name))

    # --- what runs ----------------------------------------------------------------------

    def whole(self, release: str) -> bool:
        """Return whether the checksums of a release are correct."""
        about = self._about(_checked(release))
        if not about or release_name(about[BUNDLE]["sha256"], about[RUNNER]["sha256"]) != release:
            return False
        try:
            return all(_digest(self._in("releases", release, name)) == about[name]["sha256"] for name in about)
        except OSError:
            return False

    def running(self) -> Dict[str, List[str]]:
        """Return the bundle of the current release, in the form of `trust.first_contact`."""
        about = self._about(self.current() or "")
        return {os.path.realpath(self.path): [about[BUNDLE]["sha256"]]} if about else {}

    def allow(self, release: str) -> None:
        """Check that this device accepts the files of a release now.

        The current release needs no check. Neither does the one that was current before this session: it is switched
        back to if the new one fails.

        Raises:
            TrustError: this device trusts a root, and a file is not in the signed metadata.
        """
        if release not in (self.current(), self._at_open):
            self._require_listed(self._in("releases", _checked(release)))

    def _require_listed(self, folder: str) -> None:
        trusted = trust.find(self._trust_folder)
        if trusted is None:
            return
        trusted.require_fresh()
        for name, ending in ((BUNDLE, trust.BUNDLE_ENDING), (RUNNER, trust.RUNNER_ENDING)):
            with open(os.path.join(folder, name), "rb") as stream:
                trusted.require(stream.read(), ending, name)

    def switch(self, release: str) -> None:
        """Make a release the current one, by one rename.

        Raises:
            ReleaseError: the release is damaged.
            TrustError: see `allow`.
        """
        if not self.whole(release):
            raise ReleaseError("damaged", "the release %s is damaged" % release, "deploy it again")
        self.allow(release)
        digests = [self._about(name)[BUNDLE]["sha256"] for name in (release, self.current() or "") if self._about(name)]
        trusted = trust.find(self._trust_folder)
        if trusted is not None:  # before the switch both: whichever is current after a power failure may run
            trusted.record(self.path, digests)
        target, temporary = "releases/%s" % release, self._in(PREFIX + "current")
        try:
            os.symlink(target, temporary)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            write_atomically(self._in("current"), (target + "\n").encode())
        else:
            os.replace(temporary, self._in("current"))
            sync(self.path)
        self._remember(release)
        if trusted is not None:
            trusted.record(self.path, digests[:1])

    def prune(self, keep: int) -> List[str]:
        """Remove all but the last `keep` releases; the current and the previous one always stay."""
        never = {self.current(), self.previous()}
        there = self.releases()
        rest = [name for name in there if name not in never]
        removed = rest[: max(len(there) - max(keep, 1), 0)]
        for release in removed:
            self.discard(release)
        return removed

    def discard(self, release: str) -> None:
        """Remove a release that is not current. It is renamed first, so that a partial release never has its name."""
        if release == self.current():
            raise ReleaseError("request", "%s is what runs" % release)
        trash = self._in("releases", ".old-" + _checked(release))
        os.rename(self._in("releases", release), trash)
        sync(self._in("releases"))
        shutil.rmtree(trash)

    def write(self, name: str, text: str) -> None:
        """Write one of the files TEXTS."""
        if name not in TEXTS:
            raise ReleaseError("request", "%r is not written here" % name)
        write_atomically(self._in(name), text.encode())

    def run(
        self, release: Optional[str], command: List[str], timeout_s: float, wait: Callable[[float], None]
    ) -> Message:
        """Run a command of a release's runner on its bundle.

        Args:
            release: the name of the release; None: the current one.
            command: the command and its arguments.
            timeout_s: the time limit.
            wait: a function that waits for some seconds; an exception from it ends the runner.
        """
        release = _checked(release or self.current() or "")
        self.allow(release)
        folder = self._in("releases", release)
        program = [sys.executable, os.path.join(folder, RUNNER), command[0], os.path.join(folder, BUNDLE), "--json"]
        program += ["--trust-folder", self._trust_folder] if self._trust_folder else []
        with tempfile.TemporaryFile(dir=self.path) as out, tempfile.TemporaryFile(dir=self.path) as errors:
            process = subprocess.Popen(
                program + command[1:], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
            try:
                end = time.monotonic() + timeout_s
                while process.poll() is None:
                    if time.monotonic() > end:
                        raise ReleaseError("timeout", "%s took longer than %g s" % (command[0], timeout_s))
                    wait(0.05)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said = [(stream.seek(0), stream.read(MAX_OUTPUT))[1].decode("utf-8", "replace") for stream in (out, errors)]
        return {"exit_code": process.returncode, "output": said[0], "errors": said[1][-20000:]}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _checked(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise ReleaseError("request", "%r is not a SHA-256" % digest)
    return digest


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _part(path: str, offset: int, size: int) -> bytes:
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except FileNotFoundError:
        return b""  # its digest differs, so the piece is sent again
