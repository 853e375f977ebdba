"""A repository of The Update Framework (TUF) on the host: which bundles devices accept, signed.

::

    metadata/N.root.json        the keys of all roles, signed offline
    metadata/N.targets.json     the bundles and runners that devices accept, signed by whoever releases them
    metadata/N.snapshot.json    the version of the targets metadata, signed by the online key
    metadata/timestamp.json     the version of the snapshot, signed often by the online key
    targets/SHA256.NAME         the bundles and runners
    .lock                       locked (flock) during a change

It is the standard layout with consistent snapshots, so any TUF client can read it. python-tuf creates and signs the
metadata. The content of the folder is not trusted: there is a copy of a root next to the keys (`root.json`), and
everything is verified from this root before it is signed again. The device's rules are in `deploy.contract.trust`.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from compress.bundling import runner_pyz
from compress.core.errors import CorallineError, PipelineError, SigningError
from compress.core.files import explain
from compress.surface.fleet import key_files
from deploy.contract import bundle, trust
from deploy.contract.durable_files import write_atomically
from deploy.contract.trust import TrustError

try:
    from securesystemslib.signer import CryptoSigner
    from tuf.api.exceptions import RepositoryError
    from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
except ImportError as missing:
    package = (missing.name or "tuf").partition(".")[0]
    hint = "pip install 'cryptography>=48' 'tuf~=7.0'"
    raise SigningError(f"the package `{package}` is not installed", hint=hint) from missing

ROLES = ("root", "targets", "online")
"""The roles whose keys can be rotated; `online` is one key for the roles snapshot and timestamp."""
DAYS = {"root": 365, "targets": 365, "snapshot": 30, "timestamp": 30}
"""The validity of new metadata. The end of the timestamp bounds how long a device can be kept from updates."""
MAX_KEYS = 64
"""The largest number of root keys: a device verifies each signature."""
ANCHOR = "root.json"
RUNNER = "runner.pyz"
LOCK = ".lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.coralline\Z")


@dataclass(frozen=True)
class Contents:
    """The verified content of a repository.

    Attributes:
        root: the newest root.
        roots: the bytes of all versions of the root, from version 1 on.
        metadata: the newest targets, snapshot and timestamp metadata, by role; a role may be missing.
        files: their bytes, by role.
        rotated_targets: the newest targets metadata, if its keys were rotated and nothing is signed with the new ones:
            `rotate` was interrupted.
    """

    root: Root
    roots: tuple[bytes, ...]
    metadata: Mapping[str, Any]
    files: Mapping[str, bytes]
    rotated_targets: Targets | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the newest root."""
        return trust.fingerprint(self.roots[-1])

    @property
    def targets(self) -> dict[str, TargetFile]:
        """The listed files, by name."""
        return dict(self.metadata["targets"].targets) if "targets" in self.metadata else {}

    def to_json(self) -> dict[str, Any]:
        """Return the content as a plain map."""
        return {
            "schema_version": 1,
            "fingerprint": self.fingerprint,
            "roles": {
                role: {
                    "version": row.version,
                    "expires": row.expires.strftime(trust.TIME_FORMAT),
                    "keys": sorted(self.root.roles[role].keyids),
                    "threshold": self.root.roles[role].threshold,
                }
                for role, row in {"root": self.root, **self.metadata}.items()
            },
            "targets": {name: info.hashes["sha256"] for name, info in sorted(self.targets.items())},
        }

    def messages(self) -> dict[str, str]:
        """Return the metadata files that a device needs, by name, for the agent."""
        names = {f"{number}.root.json": content for number, content in enumerate(self.roots, 1)}
        names |= {_file_name(row): self.files[role] for role, row in self.metadata.items()}
        return {name: content.decode() for name, content in names.items()}


def _file_name(signed: Any) -> str:
    return "timestamp.json" if signed.type == "timestamp" else f"{signed.version}.{signed.type}.json"


# --- reading --------------------------------------------------------------------------


def read(folder: Path, anchor: Path | None = None) -> Contents:
    """Read and verify a repository. Expired metadata is read too: it must be possible to renew it.

    Args:
        folder: the repository.
        anchor: a file with a trusted root; None: the first root of the repository is believed.

    Raises:
        SigningError: it is not a repository, it is damaged, or it does not follow from the anchor.
        StoreError: a file cannot be read.
    """
    try:
        return _read(folder, anchor)
    except (TrustError, RepositoryError) as error:
        hint = "use a sound copy of the repository, and the root.json that belongs to your keys"
        raise SigningError(f"the repository cannot be used: {error}", where=str(folder), hint=hint) from error
    except OSError as error:
        raise explain(error, "the repository cannot be read", folder) from error


def _read(folder: Path, anchor: Path | None) -> Contents:
    roots: list[Root] = []
    contents: list[bytes] = []
    while (content := _metadata_file(folder, f"{len(roots) + 1}.root.json")) is not None:
        root = _verified(content, "root", roots[-1:])
        root = _verified(content, "root", [root])
        if root.version != len(roots) + 1:
            raise RepositoryError(f"{len(roots) + 1}.root.json has version {root.version}")
        roots.append(root)
        contents.append(content)
    if not roots:
        raise SigningError("is not a repository", where=str(folder), hint="python -m compress trust init REPOSITORY")
    if anchor is not None and anchor.read_bytes() not in contents:
        raise RepositoryError(f"{anchor} is none of its roots")
    metadata: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    rotated = None
    for role in ("targets", "snapshot", "timestamp"):
        file = _metadata_file(folder, _newest(folder, role))
        if file is None:
            continue
        try:
            metadata[role], files[role] = _verified(file, role, roots[-1:]), file
        except RepositoryError:
            signers = [root for root in roots if _is_signed(file, role, root)]
            if not signers:
                raise
            rotated = _verified(file, role, signers[:1]) if role == "targets" else rotated
    return Contents(roots[-1], tuple(contents), metadata, files, rotated)


def _verified(content: bytes, role: str, roots: Sequence[Root]) -> Any:
    """Return the signed part of a metadata file that each of some roots has keys for.

    Raises:
        RepositoryError: it is not valid metadata of this role, or not signed by enough keys.
    """
    metadata: Any = Metadata.from_bytes(content)
    if metadata.signed.type != role:
        raise RepositoryError(f"{metadata.signed.type} metadata is where {role} metadata must be")
    for root in roots:
        root.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    return metadata.signed


def _newest(folder: Path, role: str) -> str:
    """Return the name of the newest metadata file of a role."""
    if role == "timestamp":
        return "timestamp.json"
    names = [path.name.split(".")[0] for path in (folder / "metadata").glob(f"*.{role}.json")]
    numbers = [int(name) for name in names if re.fullmatch("[0-9]{1,15}", name)]
    return f"{max(numbers, default=0)}.{role}.json"


def _is_signed(content: bytes, role: str, root: Root) -> bool:
    try:
        _verified(content, role, [root])
    except RepositoryError:
        return False
    return True


def _metadata_file(folder: Path, name: str) -> bytes | None:
    return trust.read_file(str(folder / "metadata" / name), trust.MAX_BYTES)


def published(folder: Path) -> tuple[Contents, bytes]:
    """Return a repository that devices can use, and its runner.

    Raises:
        SigningError: metadata or the runner is missing, or differs from what is listed.
        StoreError: a file cannot be read.
    """
    contents = read(folder)
    for role in ("targets", "snapshot", "timestamp"):
        if role not in contents.metadata:
            raise SigningError(f"has no {role} metadata", where=str(folder), hint="python -m compress trust refresh")
    try:
        return contents, trust.download(str(folder), RUNNER, contents.targets, contents.root.consistent_snapshot)
    except TrustError as error:
        hint = "python -m compress trust add REPOSITORY BUNDLE"
        raise SigningError(error.what, where=str(folder), hint=hint) from error
    except OSError as error:
        raise explain(error, "the repository cannot be read", folder) from error


# --- signing --------------------------------------------------------------------------


class Editor:
    """A repository that is changed with private keys.

    Args:
        folder: the repository.
        keys: key files, and folders of them.
        days: the validity of new metadata, by role; others have `DAYS`.

    Raises:
        SigningError: the repository does not follow from the root next to the keys.
    """

    def __init__(self, folder: Path, keys: Sequence[Path], days: Mapping[str, int] | None = None) -> None:
        self.folder, self.keys, self._days = folder, list(keys), {**DAYS, **(days or {})}
        anchors = [path / ANCHOR for path in self.keys if (path / ANCHOR).is_file()]
        if not anchors:
            hint = "copy it there from the computer on which `trust init` ran"
            raise SigningError(f"no folder of --keys has {ANCHOR}, the trusted root", hint=hint)
        self._anchor = anchors[0]
        self._read()
        self._signers = _signers(self.keys)

    def _read(self) -> None:
        """Read the repository, and the newest version of each role."""
        self.contents = read(self.folder, self._anchor)
        self._versions: dict[str, int] = {role: row.version for role, row in self.contents.metadata.items()}
        if "snapshot" in self.contents.metadata:  # also if the keys of targets were rotated, and nothing is signed yet
            listed = self.contents.metadata["snapshot"].meta["targets.json"].version
            self._versions["targets"] = max(listed, self._versions.get("targets", 0))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of the repository, and read again what another process may have changed meanwhile."""
        try:
            lock = (self.folder / LOCK).open("a")
        except OSError as error:
            raise explain(error, "the repository cannot be written") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            yield

    # --- steps ------------------------------------------------------------------------

    def add(self, files: Mapping[str, bytes]) -> None:
        """List bundles, and this Coralline's runner, in new targets metadata, and publish it.

        Args:
            files: the content by file name; a file with the same name is not accepted by devices any more.

        Raises:
            SigningError: a file is not a bundle, or a key is missing.
        """
        for name, content in files.items():
            if not _NAME.match(name):
                allowed = "letters, digits, '.', '_' and '-', ending with .coralline"
                raise SigningError(f"{name!r} cannot be the name of a bundle", allowed=allowed)
            try:
                bundle.Bundle(content)
            except bundle.BundleError as error:
                raise SigningError(f"is not added: {error}", where=name, hint="run the pipeline again") from error
        with self._changing():
            new = {**files, RUNNER: runner_pyz.content()}
            before = self.contents.targets.get(RUNNER)
            remaining = set(self.contents.targets) - set(new)
            if before and remaining and before.hashes["sha256"] != runner_pyz.digest():
                # Bundles that stay listed may be installed with the earlier runner, and `rollback` needs both.
                name = f"runner-{before.hashes['sha256'][:12]}{trust.RUNNER_ENDING}"
                new[name] = trust.download(str(self.folder), RUNNER, self.contents.targets, consistent=True)
            self._release(new, ())

    def remove(self, names: Sequence[str]) -> None:
        """Publish targets metadata without some files: devices do not install them any more.

        Raises:
            PipelineError: a name is not listed.
            SigningError: a key is missing.
        """
        with self._changing():
            for name in names:
                if name not in self.contents.targets:
                    allowed = ", ".join(sorted(self.contents.targets)) or "nothing is listed"
                    raise PipelineError(f"{name} is not listed", where=str(self.folder), allowed=allowed)
            self._release({}, names)

    def refresh(self) -> None:
        """Publish new snapshot and timestamp metadata with the online key.

        Raises:
            SigningError: the online key, or targets metadata, is missing.
        """
        with self._changing():
            self._refresh()

    def _refresh(self) -> None:
        if "targets" not in self.contents.metadata:
            hint = "python -m compress trust add REPOSITORY BUNDLE"
            raise SigningError("has no targets metadata", where=str(self.folder), hint=hint)
        content = self.contents.files["targets"]
        listed = MetaFile.from_data(self.contents.metadata["targets"].version, content, ["sha256"])
        expires = self._expires("snapshot")
        content = self._publish(Snapshot(self._next("snapshot"), None, expires, {"targets.json": listed}))
        listed = MetaFile.from_data(self._versions["snapshot"], content, ["sha256"])
        issued = {"issued": datetime.now(UTC).strftime(trust.TIME_FORMAT)}
        expires = self._expires("timestamp")
        self._publish(Timestamp(self._next("timestamp"), None, expires, listed, unrecognized_fields=issued))

    def rotate(self, role: str, drop: Sequence[str] = (), threshold: int | None = None) -> list[Path]:
        """Replace keys of a role in a new root, and sign again what they have signed.

        Args:
            role: one of `ROLES`.
            drop: the ids of the keys to replace, or their beginnings; empty: all.
            threshold: the number of keys that must sign; None: as before.

        Returns:
            The files of the new keys, one for each replaced key.

        Raises:
            PipelineError: a key does not belong to the role, or the threshold is impossible.
            SigningError: the keys of the old or new root, or of the role, do not reach their thresholds.
        """
        with self._changing():
            return self._rotate(role, drop, threshold)

    def _rotate(self, role: str, drop: Sequence[str], threshold: int | None) -> list[Path]:
        roles = ("snapshot", "timestamp") if role == "online" else (role,)
        current = self.contents.root.roles[roles[0]]
        dropped = [_key_of(current.keyids, role, beginning) for beginning in drop] or list(current.keyids)
        required = current.threshold if threshold is None else threshold
        if not 1 <= required <= len(current.keyids):
            raise PipelineError(f"--threshold is {required}", allowed=f"1 to {len(current.keyids)}, the number of keys")
        new: Any = Metadata.from_bytes(self.contents.roots[-1]).signed
        new.version += 1
        new.expires = self._expires("root")
        self._require_signers("root")
        targets = self.contents.metadata.get("targets") or self.contents.rotated_targets
        created = [key_files.generate(self.keys[0], role) for _ in dropped]
        added = _signers(created)
        for name in roles:
            for key in dropped:
                new.revoke_key(key, name)
            for signer in added.values():
                new.add_key(signer.public_key, name)
            new.roles[name].threshold = required
        old_signers = dict(self._signers)
        self._signers |= added
        try:
            self._publish_root(new)
        except CorallineError:
            self._signers = old_signers
            for path in created:
                path.unlink()
            raise
        if role == "targets":
            self._release({}, (), targets)
        elif role == "online" and "targets" in self.contents.metadata:
            self._refresh()
        return created

    # --- parts ------------------------------------------------------------------------

    def _release(self, new: Mapping[str, bytes], removed: Sequence[str], before: Targets | None = None) -> None:
        """Publish new targets metadata, and the online metadata if its key is available.

        Args:
            new: the files to list, by name.
            removed: the names that are not listed any more.
            before: the targets metadata to start with, if its keys were rotated; None: that of the repository.
        """
        self._require_signers("targets")
        before = before or self.contents.metadata.get("targets")
        listed = {}
        if before is not None:
            listed = {name: entry for name, entry in before.targets.items() if name not in removed}
        for name, content in new.items():
            listed[name] = TargetFile.from_data(name, content, ["sha256"])
            digest = hashlib.sha256(content).hexdigest()
            self._write(self.folder / "targets" / f"{digest}.{name}", content)
        self._publish(Targets(self._next("targets"), None, self._expires("targets"), listed))
        if self.has_signers("timestamp") and self.has_signers("snapshot"):
            self._refresh()

    @property
    def is_published(self) -> bool:
        """Whether snapshot and timestamp list the newest targets metadata."""
        metadata = self.contents.metadata
        if not {"targets", "snapshot", "timestamp"} <= set(metadata):
            return False
        return bool(metadata["snapshot"].meta["targets.json"].version == metadata["targets"].version)

    def has_signers(self, role: str) -> bool:
        """Return whether enough keys of a role are available."""
        return len(self._keys_of(role)) >= int(self.contents.root.roles[role].threshold)

    def _keys_of(self, role: str) -> list[CryptoSigner]:
        return [self._signers[name] for name in self.contents.root.roles[role].keyids if name in self._signers]

    def _require_signers(self, role: str) -> None:
        if not self.has_signers(role):
            keys = self.contents.root.roles[role]
            what = (
                f"{len(self._keys_of(role))} keys of the role {role} are in --keys, and {keys.threshold} are required"
            )
            raise SigningError(what, allowed=", ".join(keys.keyids), hint="pass --keys once for each place")

    def _next(self, role: str) -> int:
        self._versions[role] = self._versions.get(role, 0) + 1
        return self._versions[role]

    def _expires(self, role: str) -> datetime:
        return datetime.now(UTC).replace(microsecond=0) + timedelta(days=self._days[role])

    def _publish(self, signed: Any) -> bytes:
        """Sign metadata with the available keys of its role, verify it, and write it; return its bytes."""
        self._require_signers(signed.type)
        content = _signed(signed, self._keys_of(signed.type))
        _verified(content, signed.type, [self.contents.root])
        self._write(self.folder / "metadata" / _file_name(signed), content)
        self.contents = read(self.folder)
        return content

    def _publish_root(self, signed: Root) -> None:
        """Sign a new root with the available keys of the old and of the new root, verify it, and write it."""
        names = {*self.contents.root.roles["root"].keyids, *signed.roles["root"].keyids}
        content = _signed(signed, [self._signers[name] for name in sorted(names & set(self._signers))])
        try:
            _verified(content, "root", [self.contents.root, signed])
        except RepositoryError as error:
            raise SigningError(str(error), hint="pass --keys once for each place with root keys") from error
        self._write(self.folder / "metadata" / _file_name(signed), content)
        self.contents = read(self.folder)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise explain(error, "the repository cannot be written") from error


def init(
    folder: Path, keys: Path, root_keys: int = 3, threshold: int = 2, days: Mapping[str, int] | None = None
) -> Contents:
    """Create a repository, and all keys and the trusted root in the folder `keys`.

    `threshold` of the root keys must sign a new root. `days`: see `Editor`.

    Raises:
        PipelineError: the numbers are impossible.
        SigningError: a repository or keys exist.
        StoreError: a folder cannot be written.
    """
    if not 1 <= threshold <= root_keys <= MAX_KEYS:
        raise PipelineError(f"{threshold} of {root_keys} root keys cannot sign", allowed="1 <= threshold <= root keys")
    for path in (folder / "metadata" / "1.root.json", keys / ANCHOR):
        if path.exists():
            raise SigningError("exists, and is not overwritten", where=str(path), hint="use another folder")
    lifetime = {**DAYS, **(days or {})}
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=lifetime["root"])
    root = Root(version=1, expires=expires, consistent_snapshot=True)
    signers = _signers([key_files.generate(keys, "root") for _ in range(root_keys)])
    for signer in signers.values():
        root.add_key(signer.public_key, "root")
    root.roles["root"].threshold = threshold
    for name, roles in (("targets", ("targets",)), ("online", ("snapshot", "timestamp"))):
        for signer in _signers([key_files.generate(keys, name)]).values():
            for role in roles:
                root.add_key(signer.public_key, role)
    content = _signed(root, list(signers.values()))
    _verified(content, "root", [root])
    try:
        for path in (keys / ANCHOR, folder / "metadata" / "1.root.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        raise explain(error, "the repository cannot be written") from error
    editor = Editor(folder, [keys], days)
    editor._release({}, ())
    return editor.contents


def _key_of(keys: Sequence[str], role: str, beginning: str) -> str:
    """Return the id of a key of a role that begins in this way."""
    matching = [name for name in keys if name.startswith(beginning)]
    if len(matching) != 1:
        what = f"{beginning} is the beginning of {len(matching)} keys of {role}"
        raise PipelineError(what, where="--drop", allowed=", ".join(keys))
    return matching[0]


def _signed(signed: Any, signers: Sequence[CryptoSigner]) -> bytes:
    document = Metadata(signed)
    for signer in signers:
        document.sign(signer, append=True)
    return bytes(document.to_bytes())


def _signers(paths: Sequence[Path]) -> dict[str, CryptoSigner]:
    """Return the private keys in files and folders, by key id."""
    signers = [CryptoSigner(key_files.read(path)) for path in key_files.find(paths)]
    return {signer.public_key.keyid: signer for signer in signers}
