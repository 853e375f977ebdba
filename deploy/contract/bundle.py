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
     "evaluation": {"split": "test", "inputs": [file, ...], "labels": file,
                    "outputs": {ROLE: file}, "metrics": {...}},
     "tools": {name: version}, "detection": SPECIFICATION, "decoding": {...},
     "members": [{"name": ..., "size": bytes, "sha256": ...}],
     ...}

ROLE is `original` (float), `int8` or `compiled`; TENSOR is {"name", "shape", "dtype",
"scale", "zero_point"}. Golden inputs are decoded samples before preprocessing, one in a file;
evaluation inputs likewise, but each file is a stack [n, ...] of samples of one shape and
dtype. Labels are int64 [n] over all files; outputs are what the host found, [n, ...] in the
model's own dtype. `evaluation` may be missing or null; `tools` and `decoding` (`deploy.contract.decoding`) may be
missing.

A detector has `detection` (its format is in `deploy.contract.detection`), and each of its models has a second TENSOR,
`boxes`, in addition to `output`, its scores. Outputs are then both side by side, boxes first: [n, anchors * (4 +
classes)]. Labels are float32 [objects, 6]: number of the sample, class, ymin, xmin, ymax, xmax.

A signed bundle has a trailer of 144 bytes behind the zip: `TRAILER_MAGIC` (16 bytes), SHA-256
of the zip (32), public key (32), and the Ed25519 signature (64) of the first 48. It is checked
before anything is opened, and tells a bundle that was changed after it was signed
(`ChangedError`) from one that nobody signed in this form (`WronglySignedError`).
Runs on Python 3.7 with numpy alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from deploy.contract import decoding, signature
from deploy.contract.detection import DetectionError, Detector
from deploy.contract.preprocessing import Array, Preprocessing, PreprocessingError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 1 << 20
MAX_MEMBERS = 3000
TRAILER_MAGIC = b"\nCoralline-sig1\n"
TRAILER_BYTES = len(TRAILER_MAGIC) + 32 + signature.KEY_BYTES + signature.SIGNATURE_BYTES
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
ROLES = ("original", "int8", "compiled")
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
    """A file that is not a bundle, or not the one that was written. Exit code 8.

    Attributes:
        kind: for programs: "changed" (or never a bundle), "unsigned", "untrusted" or "wrongly signed".
    """

    exit_code = 8
    kind = "changed"


class UnsignedError(BundleError):
    """A bundle without a signature, where one is needed."""

    kind = "unsigned"


class UntrustedBundleError(BundleError):
    """A bundle that somebody signed, but nobody who is trusted here."""

    kind = "untrusted"


class WronglySignedError(BundleError):
    """A bundle with a signature that the key it names did not make."""

    kind = "wrongly signed"


class ChangedError(BundleError):
    """A bundle with a good signature, but another content than was signed."""


def archive_of(members: Mapping[str, bytes]) -> bytes:
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
    content = archive_of(everything)
    Bundle(content)
    return content


def array_bytes(array: Array) -> bytes:
    """An array as the content of a .npy member (format 1.0, the same on every numpy)."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def read_array(content: Union[bytes, bytearray], name: str = "it") -> Array:
    """The array in the content of a .npy file (format 1.0).

    Raises:
        BundleError: it is no array of numbers.
    """
    header = _ARRAY.match(content)  # numpy's own parser evaluates the header, and stumbles over many a bad one
    if header is None:
        raise BundleError("%s is not an array of numbers" % name)
    try:
        shape = tuple(int(side) for side in header.group(2).split(b",") if side.strip())
        return np.frombuffer(content[header.end() :], header.group(1).decode()).reshape(shape).copy()
    except (ValueError, TypeError, OverflowError) as error:
        raise BundleError("%s is not an array: %s" % (name, error))


def sign(content: bytes, public_key: bytes, signer: Callable[[bytes], bytes]) -> bytes:
    """A signed bundle; a signature that it has already is replaced.

    Args:
        content: the bytes of a bundle.
        public_key: 32 bytes.
        signer: gives the Ed25519 signature of a message, 64 bytes.

    Raises:
        BundleError: not a bundle, or the signature is not that of the key.
    """
    Bundle(content)
    archive, _ = _parted(content)
    message = TRAILER_MAGIC + hashlib.sha256(archive).digest()
    signed = archive + message + public_key + signer(message)
    Bundle(signed, [public_key])
    return signed


class Bundle:
    """A verified bundle: whoever holds one knows that every byte is what was packed.

    Args:
        content: the bytes of a .coralline file.
        keys: public keys (`signature.trusted`). With any, the bundle must be signed with one of them;
            without, it may be unsigned, but a signature that it has must be good.

    Attributes:
        manifest: the parsed manifest.
        members: content by name.
        preprocessing: what turns a decoded sample into a model's input.
        decoding: what turns image and WAV files into samples.
        detector: what turns the outputs of a model that finds objects into detections; None for classifiers.
        signer: the public key that it was signed with, or None.

    Raises:
        BundleError: not a bundle, changed, of an unknown schema, or not signed as it should be: see its subclasses.
    """

    def __init__(self, content: bytes, keys: Collection[bytes] = ()) -> None:
        archive, trailer = _parted(content)
        self.signer = _check_signature(archive, trailer, keys)
        self.members = _read_archive(archive)
        self.manifest = _read_manifest(self.members.pop(MANIFEST))
        _check_members(self.manifest, self.members)
        _check_references(self.manifest, self.members)
        try:
            self.preprocessing = Preprocessing(self.manifest["preprocessing"]["steps"])
        except PreprocessingError as error:
            what = "the bundle's preprocessing cannot be used: %s; Coralline %s packed it: is this runner older?"
            raise BundleError(what % (error, self.manifest["coralline"]))
        if self.preprocessing.digest != self.manifest["preprocessing"]["digest"]:
            what = "the bundle's preprocessing is not what this version of Coralline computes: use the runner of %s"
            raise BundleError(what % self.manifest["coralline"])
        try:
            self.decoding = decoding.parsed(self.manifest.get("decoding", {}), self.preprocessing.rate)
        except ValueError as error:
            raise BundleError("the manifest's decoding cannot be used: %s" % error)
        self.detector: Optional[Detector] = None
        if "detection" in self.manifest:
            try:
                self.detector = Detector(self.manifest["detection"])
            except DetectionError as error:
                raise BundleError("the bundle's boxes cannot be read: %s" % error)

    @property
    def labels(self) -> Any:
        """The class names, in the order of the output."""
        return self.manifest["labels"]

    def array(self, name: str) -> Array:
        """A .npy member as an array.

        Raises:
            BundleError: the member is no array.
        """
        return read_array(self.members.get(name, b""), name)

    def evaluation(self) -> Tuple[List[Array], Array]:
        """The evaluation sample: decoded samples, and their labels, int64 [n]; none where there is none.

        Raises:
            BundleError: it is not labelled samples.
        """
        entry = self.manifest.get("evaluation")
        if entry is None:
            return [], np.zeros(0, np.int64)
        samples, labels = self.samples(entry), self.array(entry["labels"])
        good = labels.shape == (len(samples),) and labels.dtype == np.int64
        if not good or ((labels < 0) | (labels >= len(self.labels))).any():
            raise BundleError("the evaluation sample is not %d samples with a label each" % len(samples))
        return samples, labels

    def samples(self, entry: Dict[str, Any]) -> List[Array]:
        """The decoded samples of the evaluation sample, `entry`."""
        stacks = [self.array(name) for name in entry["inputs"]]
        if not all(stack.ndim in (2, 3, 4) and len(stack) for stack in stacks):
            raise BundleError("the evaluation sample is not stacks of two to four axes, with a sample in each")
        return [sample for stack in stacks for sample in stack]


def read(path: str, keys: Collection[bytes] = ()) -> Bundle:
    """Opens and verifies a .coralline file; `keys` as for `Bundle`.

    On a device: `read(path, signature.trusted())`.

    Raises:
        BundleError: not a bundle, changed, of an unknown schema, or not signed as it should be.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        content = stream.read(MAX_BYTES + TRAILER_BYTES + 1)
    return Bundle(content, keys)


def _parted(content: bytes) -> Tuple[bytes, Optional[bytes]]:
    """The zip and, where there is one, the trailer."""
    place = len(content) - TRAILER_BYTES
    if place < 0 or not content.startswith(TRAILER_MAGIC, place):
        return content, None
    return content[:place], content[place:]


def _check_signature(archive: bytes, trailer: Optional[bytes], keys: Collection[bytes]) -> Optional[bytes]:
    """The public key that signed, or None; nothing of the archive is looked into."""
    wanted = " or ".join(sorted(map(signature.key_name, keys)))
    if trailer is None:
        if keys:
            raise UnsignedError("the bundle is not signed, and this device takes bundles signed with %s only" % wanted)
        return None
    start = len(TRAILER_MAGIC) + 32
    message, key = trailer[:start], trailer[start : start + signature.KEY_BYTES]
    name = signature.key_name(key)
    if not signature.verify(key, trailer[start + signature.KEY_BYTES :], message):
        raise WronglySignedError("the bundle is wrongly signed: the signature was not made with the key %s" % name)
    if message[len(TRAILER_MAGIC) :] != hashlib.sha256(archive).digest():
        raise ChangedError("the bundle was changed after it was signed with the key %s" % name)
    if keys and key not in keys:
        raise UntrustedBundleError(
            "the bundle is signed with the key %s, which is not trusted here; trusted: %s" % (name, wanted)
        )
    return key


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
    if archive_of(members) != content:
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
        known = all(role in ROLES for role in models) and all(role in models for role in golden["outputs"])
        texts = [manifest["name"], manifest["coralline"], manifest["preprocessing"]["digest"]]
        typed = isinstance(labels, list) and all(isinstance(text, str) for text in texts + labels)
        typed = typed and isinstance(golden["inputs"], list) and isinstance(manifest["preprocessing"]["steps"], list)
        evaluation = manifest.get("evaluation")
        if evaluation is not None:
            files += list(evaluation["inputs"]) + [evaluation["labels"]] + list(evaluation["outputs"].values())
            known = known and all(role in models for role in evaluation["outputs"])
            typed = typed and isinstance(evaluation["inputs"], list) and isinstance(evaluation["metrics"], dict)
        typed = typed and isinstance(manifest.get("tools", {}), dict)
        ends = ("input", "output") + (("boxes",) if "detection" in manifest else ())
        tensors = [model[end] for model in models.values() for end in ends]
        typed = typed and all(isinstance(tensor, dict) and set(tensor) >= _TENSOR for tensor in tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError("the manifest is incomplete: %r" % error)
    if not typed or not known or not models:
        raise BundleError("the manifest is not of schema 1")
    for name in files:
        if not isinstance(name, str) or name not in members:
            raise BundleError("the manifest names %r, which is not in the bundle" % (name,))
