"""Metadata of The Update Framework (TUF, specification 1.0): parsed, and checked against the keys of a root.

A metadata file is JSON: `{"signed": {"_type": ROLE, "version": ..., "expires": ..., ...}, "signatures": [...]}`. The
signatures are made for the canonical JSON of `signed`. There are four roles: `root` names the keys of all roles,
`targets` lists files with length and hashes, `snapshot` the version of the targets metadata, `timestamp` that of the
snapshot. `deploy.contract.trust` applies the order and the rules in which a device accepts them.

Everything here is untrusted until `check_signatures` returns. Only Ed25519 keys count. Delegations are not followed.
This module uses only the standard library.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import re
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from deploy.contract import signature
from deploy.contract.errors import DeviceError

ROLES = ("root", "timestamp", "snapshot", "targets")
MAX_BYTES = {"root": 512_000, "timestamp": 16_384, "snapshot": 2_000_000, "targets": 5_000_000}
"""The largest file of each role; more is not read. They are the limits of python-tuf."""
MAX_DEPTH = 32
MAX_DIGITS = 15
"""Integers are below 10^15, which every JSON parser reads exactly."""
MAX_KEYS = 64
"""The largest number of keys, and of signatures, in a file: each verification takes time."""
HASHES = {"sha256": 64, "sha512": 128}
"""The supported hashes, and their number of hexadecimal digits."""
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.?)*(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
"""A string, which may be cut off, or a bracket. No text makes it match in more than linear time."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z", re.ASCII)
_HEX = re.compile(r"[0-9a-f]+\Z")


class TrustError(DeviceError):
    """An update, or a file, that this device does not accept. Exit code 8.

    `kind` is one of

    - `metadata`: not valid metadata
    - `length`: longer than allowed, or than listed
    - `missing`: the source does not have the file
    - `signature`: not signed by enough keys of its role
    - `rollback`: older than what this device has accepted before
    - `mixed`: the files do not belong together
    - `expired`: valid until a time that has passed
    - `unlisted`: the file is not in the trusted targets metadata
    - `first_contact`: this device trusts no root yet, or another one
    - `damaged`: the trusted metadata on this device cannot be used
    """

    exit_code = 8
    kind = "metadata"


class FileInfo(NamedTuple):
    """The description of a file in a metadata file.

    Attributes:
        version: its version; 0 for targets.
        length: its length in bytes; None: not listed.
        hashes: its hashes by algorithm; may be empty for metadata.
    """

    version: int
    length: Optional[int]
    hashes: Mapping[str, str]

    def check(self, content: bytes, name: str) -> None:
        """Check length and hashes of the content.

        Raises:
            TrustError: they differ.
        """
        if self.length is not None and len(content) != self.length:
            raise TrustError(
                "%s has %d bytes, and its metadata lists %d" % (name, len(content), self.length), "", "mixed"
            )
        for algorithm, digest in self.hashes.items():
            if hashlib.new(algorithm, content).hexdigest() != digest:
                raise TrustError("the %s of %s differs from its metadata" % (algorithm, name), "", "mixed")


class RoleKeys(NamedTuple):
    """The keys of a role.

    Attributes:
        keys: the public keys by key id; None: a key of another type than Ed25519, which never counts.
        threshold: the number of keys that must sign.
    """

    keys: Mapping[str, Optional[bytes]]
    threshold: int


class Metadata(NamedTuple):
    """A parsed metadata file.

    Attributes:
        role: its role, one of ROLES.
        version: its version, 1 or more.
        expires: the end of its validity, in seconds since 1970.
        signed: the signed part.
        signatures: the signatures: key id and 64 bytes.
        content: the bytes of the file.
    """

    role: str
    version: int
    expires: int
    signed: Mapping[str, Any]
    signatures: Tuple[Tuple[str, bytes], ...]
    content: bytes

    @property
    def message(self) -> bytes:
        """The bytes that are signed."""
        return canonical(self.signed)

    def check_expiry(self, now: float) -> None:
        """Check that the metadata is still valid.

        Raises:
            TrustError: it is not.
        """
        if now >= self.expires:
            facts = (self.role, time_text(self.expires), time_text(now))
            what = "the %s metadata was valid until %s, and the time here is %s"
            raise TrustError(what % facts, "on the host: python -m compress trust refresh; or set the clock", "expired")


class Root(NamedTuple):
    """The root metadata: `roles` has the keys of each role."""

    metadata: Metadata
    roles: Mapping[str, RoleKeys]
    consistent_snapshot: bool


# --- JSON -----------------------------------------------------------------------------


def canonical(value: Any) -> bytes:
    """Return a JSON value in canonical form (OLPC): sorted keys, no spaces, only `"` and the backslash escaped.

    Raises:
        TrustError: the value has a type that this form does not have, or text that is not Unicode.
    """
    parts: List[str] = []
    _write(value, parts)
    try:
        return "".join(parts).encode("utf-8")
    except UnicodeEncodeError:
        raise TrustError("the metadata has text that is not Unicode")


def _write(value: Any, parts: List[str]) -> None:
    if isinstance(value, str):
        parts.append('"%s"' % value.replace("\\", "\\\\").replace('"', '\\"'))
    elif value is None or isinstance(value, bool):
        parts.append({True: "true", False: "false", None: "null"}[value])
    elif isinstance(value, int):
        parts.append(str(value))
    elif isinstance(value, dict):
        for position, key in enumerate(sorted(value)):
            parts.append("," if position else "{")
            _write(key, parts)
            parts.append(":")
            _write(value[key], parts)
        parts.append("}" if value else "{}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            parts.append("," if position else "[")
            _write(item, parts)
        parts.append("]" if value else "[]")
    else:
        raise TrustError("the metadata has a value of the type %s" % type(value).__name__)


def read_json(content: bytes) -> Any:
    """Return the value in a JSON text, as strictly as canonical JSON: no floats, no duplicate keys, bounded depth.

    Raises:
        TrustError: the text is anything else.
    """
    depth = 0
    for token in _TOKEN.finditer(content):
        first = token.group()[:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_DEPTH:
            raise TrustError("the metadata is nested deeper than %d levels" % MAX_DEPTH)
    try:
        text = content.decode("utf-8")
        return json.loads(
            text, object_pairs_hook=_map, parse_float=_no_float, parse_int=_integer, parse_constant=_no_float
        )
    except (ValueError, RecursionError) as error:
        raise TrustError("the metadata is not JSON: %s" % error)


def _map(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise TrustError("the metadata has a key twice in one map")
    return value


def _no_float(text: str) -> Any:
    raise TrustError("the metadata has the number %s, and only integers are allowed" % text[:20])


def _integer(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > MAX_DIGITS:
        raise TrustError("the metadata has an integer of %d digits" % digits)
    return int(text)


# --- metadata -------------------------------------------------------------------------


def parse(content: bytes, role: str) -> Metadata:
    """Return a metadata file as a value. Nothing in it is trusted yet.

    Raises:
        TrustError: it is not valid metadata of this role.
    """
    if len(content) > MAX_BYTES[role]:
        raise TrustError("the %s metadata has more than %d bytes" % (role, MAX_BYTES[role]), "", "length")
    envelope = read_json(content)
    signed = _member(envelope, "signed", dict)
    if signed.get("_type") != role:
        raise TrustError("the file is not %s metadata" % role)
    specification = _member(signed, "spec_version", str)
    if specification.split(".")[0] != "1":
        raise TrustError("the %s metadata follows version %.20s of the specification, not 1" % (role, specification))
    signatures = _member(envelope, "signatures", list)
    if len(signatures) > MAX_KEYS:
        raise TrustError("the %s metadata has more than %d signatures" % (role, MAX_KEYS))
    rows = tuple(_signature(row) for row in signatures)
    version = _integer_of(signed, "version", 1)
    return Metadata(role, version, seconds(_member(signed, "expires", str)), signed, rows, content)


def _signature(row: Any) -> Tuple[str, bytes]:
    text = _member(row, "sig", str)
    signature_bytes = bytes.fromhex(text) if len(text) % 2 == 0 and _HEX.match(text) else b""
    return str(_member(row, "keyid", str)), signature_bytes  # of another kind of key, it may have another length


def read_root(content: bytes) -> Root:
    """Return root metadata that is signed by its own keys.

    Raises:
        TrustError: it is not valid root metadata, or not signed by enough of its own keys.
    """
    metadata = parse(content, "root")
    signed = metadata.signed
    known = _member(signed, "keys", dict)
    if len(known) > MAX_KEYS:
        raise TrustError("the root metadata has more than %d keys" % MAX_KEYS)
    keys = {name: _key(entry) for name, entry in known.items()}
    entries = _member(signed, "roles", dict)
    roles = {role: _role(role, _member(entries, role, dict), keys) for role in ROLES}
    root = Root(metadata, roles, bool(_member(signed, "consistent_snapshot", bool)))
    check_signatures(metadata, root)
    return root


def _key(entry: Any) -> Optional[bytes]:
    """Return a public key; None: it has another type than Ed25519."""
    kind, scheme = _member(entry, "keytype", str), _member(entry, "scheme", str)
    text = _member(_member(entry, "keyval", dict), "public", str)
    if (kind, scheme) != ("ed25519", "ed25519"):
        return None
    if len(text) != 2 * signature.KEY_BYTES or not _HEX.match(text) or not signature.usable(bytes.fromhex(text)):
        raise TrustError("the root metadata has a key that is not an Ed25519 public key")
    return bytes.fromhex(text)


def _role(role: str, entry: Dict[str, Any], keys: Mapping[str, Optional[bytes]]) -> RoleKeys:
    names = _member(entry, "keyids", list)
    if not all(isinstance(name, str) and name in keys for name in names) or len(set(names)) < len(names):
        raise TrustError("the root metadata names a key of the role %s twice, or one that it does not have" % role)
    return RoleKeys({name: keys[name] for name in names}, _integer_of(entry, "threshold", 1))


def check_signatures(metadata: Metadata, root: Root) -> None:
    """Check that enough different keys of a role have signed. A key counts once, under whatever ids it is listed.

    Raises:
        TrustError: fewer keys than the threshold have signed.
    """
    role = root.roles[metadata.role]
    message = metadata.message
    signers: Set[bytes] = set()
    for name, signature_bytes in metadata.signatures:
        if len(signers) >= role.threshold:
            break  # each verification takes time on a board
        key = role.keys.get(name)
        if key is not None and key not in signers and signature.verify(key, signature_bytes, message):
            signers.add(key)
    if len(signers) < role.threshold:
        facts = (metadata.role, metadata.version, len(signers), root.metadata.version, role.threshold)
        what = "the %s metadata, version %d, is signed by %d keys that root %d names for it, and %d are required"
        raise TrustError(what % facts, "", "signature")


def meta(metadata: Metadata) -> Dict[str, FileInfo]:
    """Return the metadata files that timestamp or snapshot metadata lists.

    Raises:
        TrustError: the list is invalid, or lacks the file of the next role.
    """
    listed = {name: _info(entry, 1) for name, entry in _member(metadata.signed, "meta", dict).items()}
    required = "snapshot.json" if metadata.role == "timestamp" else "targets.json"
    if required not in listed or (metadata.role == "timestamp" and len(listed) > 1):
        raise TrustError("the %s metadata does not list %s" % (metadata.role, required))
    return listed


def issued(metadata: Metadata) -> int:
    """Return the time at which timestamp metadata was signed, which Coralline's hosts write; 0: not written.

    Raises:
        TrustError: the time is not before the end of the validity.
    """
    if "issued" not in metadata.signed:
        return 0
    moment = seconds(_member(metadata.signed, "issued", str))
    if moment >= metadata.expires:
        raise TrustError("the timestamp metadata was signed after the end of its validity")
    return moment


def targets(metadata: Metadata) -> Dict[str, FileInfo]:
    """Return the files that targets metadata lists, each with its length and at least one hash.

    Raises:
        TrustError: the list is invalid.
    """
    listed = {name: _info(entry, 0) for name, entry in _member(metadata.signed, "targets", dict).items()}
    for name, info in listed.items():
        if info.length is None or not info.hashes:
            raise TrustError("the targets metadata lists %.80r without length or a known hash" % name)
    return listed


def _info(entry: Any, least_version: int) -> FileInfo:
    version = _integer_of(entry, "version", least_version) if least_version else 0
    length = _integer_of(entry, "length", 0) if "length" in _checked(entry, dict) else None
    hashes = _member(entry, "hashes", dict) if "hashes" in entry else {}
    known = {name: digest for name, digest in hashes.items() if name in HASHES}
    for name, digest in known.items():
        if not isinstance(digest, str) or len(digest) != HASHES[name] or not _HEX.match(digest):
            raise TrustError("the metadata has an invalid %s" % name)
    if hashes and not known:
        raise TrustError("the metadata has none of the hashes %s" % ", ".join(HASHES))
    return FileInfo(version, length, known)


def seconds(text: str) -> int:
    """Return a time such as 2030-01-31T00:00:00Z in seconds since 1970.

    Raises:
        TrustError: it is not such a time.
    """
    try:
        if _TIME.match(text):
            return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except (ValueError, OverflowError):
        pass
    raise TrustError("%.40r is not a time such as 2030-01-31T00:00:00Z" % text)


def time_text(moment: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TrustError("the metadata has a %s where a %s must be" % (type(value).__name__, kind.__name__))
    return value


def _member(value: Any, name: str, kind: type) -> Any:
    if name not in _checked(value, dict):
        raise TrustError("the metadata has no %s" % name)
    return _checked(value[name], kind)


def _integer_of(value: Any, name: str, least: int) -> int:
    number = int(_member(value, name, int))
    if number < least:
        raise TrustError("%s in the metadata is %d, and must be at least %d" % (name, number, least))
    return number
