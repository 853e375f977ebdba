"""The bundle: one archive that host and device share.

A `.coralline` file is a zip that can be written in one way only: members stored without
compression, in the order of the manifest (which comes first), with one fixed time and
mode, no comments and no extra fields. So equal content is equal bytes, and a change
anywhere, also in the archive's own tables, is noticed. The first member is
`manifest.json` (schema 1)::

    {"schema_version": 1, "name": ..., "coralline": version, "labels": [...],
     "preprocessing": {"version": 1, "digest": ..., "steps": [...]},
     "models": {ROLE: {"file": ..., "input": TENSOR, "output": TENSOR}},
     "golden": {"inputs": [file, ...], "outputs": {ROLE: file}},
     "members": [{"name": ..., "size": bytes, "sha256": ...}],
     ...}

ROLE is `original` (float), `int8` or `compiled`; TENSOR is {"name", "shape", "dtype",
"scale", "zero_point"}. Golden inputs are decoded samples before preprocessing.
Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from typing import Any, Dict, Mapping

import numpy as np

from deploy.preprocessing import Array, Preprocessing, PreprocessingError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 1 << 20
MAX_MEMBERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_ROLES = ("original", "int8", "compiled")
_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ValueError, LookupError, OSError, EOFError, RuntimeError)
"""What zipfile raises for bad archives; the older it is, the more kinds."""
_TENSOR = {"name", "shape", "dtype", "scale", "zero_point"}
_ARRAY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biuf](?:[1248]|16))', "
    rb"'fortran_order': False, 'shape': \(([0-9, ]{0,100})\), \} *\n",
    re.DOTALL,
)
"""The start of a .npy member as `array_bytes` writes it: dtype and shape."""


class BundleError(ValueError):
    """A file that is not a bundle, or not the one that was written. Exit code 8."""

    exit_code = 8


def _archive(members: Mapping[str, bytes]) -> bytes:
    """The one archive that holds these members in this order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content)
    return stream.getvalue()


def _manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest. NaN and infinity are no JSON."""
    return json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def pack(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> bytes:
    """The bytes of a bundle.

    Args:
        manifest: everything but `schema_version` and `members`.
        members: content by name; plain file names, no folders.

    Raises:
        BundleError: the manifest and the members do not fit together.
    """
    ordered = {name: members[name] for name in sorted(members)}
    table = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in ordered.items()
    ]
    everything = {MANIFEST: _manifest_bytes(dict(manifest, schema_version=SCHEMA_VERSION, members=table))}
    everything.update(ordered)
    content = _archive(everything)
    Bundle(content)
    return content


def array_bytes(array: Array) -> bytes:
    """An array as the content of a .npy member (format 1.0, the same on every numpy)."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


class Bundle:
    """A verified bundle: whoever holds one knows that every byte is what was packed.

    Args:
        content: the bytes of a .coralline file.

    Attributes:
        manifest: the parsed manifest.
        members: content by name.
        preprocessing: what turns a decoded sample into a model's input.

    Raises:
        BundleError: not a bundle, changed, or of an unknown schema.
    """

    def __init__(self, content: bytes) -> None:
        self.members = _read_archive(content)
        self.manifest = _read_manifest(self.members.pop(MANIFEST))
        _check_members(self.manifest, self.members)
        _check_references(self.manifest, self.members)
        try:
            self.preprocessing = Preprocessing(self.manifest["preprocessing"]["steps"])
        except PreprocessingError as error:
            raise BundleError("the bundle's preprocessing cannot be used: %s" % error)
        if self.preprocessing.digest != self.manifest["preprocessing"]["digest"]:
            raise BundleError("the bundle's preprocessing is not what this version of Coralline computes")

    @property
    def labels(self) -> Any:
        """The class names, in the order of the output."""
        return self.manifest["labels"]

    def array(self, name: str) -> Array:
        """A .npy member as an array.

        Raises:
            BundleError: the member is no array.
        """
        content = self.members.get(name, b"")
        header = _ARRAY.match(content)  # numpy's own parser evaluates the header, and stumbles over many a bad one
        if header is None:
            raise BundleError("%s is not an array of numbers" % name)
        try:
            shape = tuple(int(side) for side in header.group(2).split(b",") if side.strip())
            return np.frombuffer(content[header.end() :], header.group(1).decode()).reshape(shape).copy()
        except (ValueError, TypeError, OverflowError) as error:
            raise BundleError("%s is not an array: %s" % (name, error))


def read(path: str) -> Bundle:
    """Opens and verifies a .coralline file.

    Raises:
        BundleError: not a bundle, changed, or of an unknown schema.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    return Bundle(content)


def _read_archive(content: bytes) -> Dict[str, bytes]:
    if len(content) > MAX_BYTES:
        raise BundleError("too large for a bundle (at most %d bytes)" % MAX_BYTES)
    members: Dict[str, bytes] = {}
    room = len(content)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
            if not infos or infos[0].filename != MANIFEST or len(infos) > MAX_MEMBERS:
                raise BundleError("not a bundle: its first member must be %s" % MANIFEST)
            for info in infos:
                if not _NAME.match(info.filename) or info.filename in members:
                    raise BundleError("not a bundle: the member name %r is not allowed" % info.filename)
                stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
                room -= info.file_size  # members that share bytes would unpack to far more than the file has
                if not stored or room < 0:
                    raise BundleError("not a bundle: %s is compressed, or shares bytes with another" % info.filename)
                members[info.filename] = archive.read(info)
    except BundleError:
        raise
    except _ZIP_ERRORS as error:
        raise BundleError("not a bundle, or a damaged one: %s" % error)
    if _archive(members) != content:
        raise BundleError("the archive's own tables were changed, or another program packed it")
    return members


def _read_manifest(text: bytes) -> Dict[str, Any]:
    if len(text) > MAX_MANIFEST_BYTES:
        raise BundleError("the manifest is too large (at most %d bytes)" % MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(text.decode())
        written = _manifest_bytes(manifest)
    except (ValueError, RecursionError) as error:
        raise BundleError("the manifest is not JSON: %s" % error)
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise BundleError("the manifest has no schema_version")
    found = manifest["schema_version"]
    if type(found) is not int or found != SCHEMA_VERSION:
        shown = repr(found) if isinstance(found, (int, float, str)) else type(found).__name__
        raise BundleError("the bundle has schema %s; this version of Coralline reads %d" % (shown, SCHEMA_VERSION))
    if written != text:
        raise BundleError("the manifest is not written as a bundle's manifest is")
    return manifest


def _check_members(manifest: Dict[str, Any], members: Dict[str, bytes]) -> None:
    """Exactly the listed members, each with its size and SHA-256."""
    table = manifest.get("members")
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise BundleError("the manifest has no list of members")
    if [row.get("name") for row in table] != list(members):
        raise BundleError("the members are not those that the manifest lists")
    for row in table:
        content = members[row["name"]]
        if row.get("size") != len(content) or row.get("sha256") != hashlib.sha256(content).hexdigest():
            raise BundleError("%s is not what was packed: its SHA-256 differs" % row["name"])


def _check_references(manifest: Dict[str, Any], members: Dict[str, bytes]) -> None:
    """Every file that the manifest names is there, and every part has its type."""
    try:
        models, golden, labels = manifest["models"], manifest["golden"], manifest["labels"]
        files = list(golden["inputs"]) + list(golden["outputs"].values())
        files += [model["file"] for model in models.values()]
        known = all(role in _ROLES for role in models) and all(role in models for role in golden["outputs"])
        texts = [manifest["name"], manifest["coralline"], manifest["preprocessing"]["digest"]]
        typed = isinstance(labels, list) and all(isinstance(text, str) for text in texts + labels)
        typed = typed and isinstance(golden["inputs"], list) and isinstance(manifest["preprocessing"]["steps"], list)
        tensors = [model[end] for model in models.values() for end in ("input", "output")]
        typed = typed and all(isinstance(tensor, dict) and set(tensor) >= _TENSOR for tensor in tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError("the manifest is incomplete: %r" % error)
    if not typed or not known or not models:
        raise BundleError("the manifest is not of schema 1")
    for name in files:
        if not isinstance(name, str) or name not in members:
            raise BundleError("the manifest names %r, which is not in the bundle" % (name,))
