"""The bundle: the archive with which the host passes models to a device.

A `.coralline` file is a zip whose bytes follow from its content: members are stored without compression, in the order
of the manifest (which comes first), with a fixed time and mode, without comments and extra fields. Every change is
therefore detected, also in the tables of the archive. The first member is `manifest.json` (schema 1)::

    {"schema_version": 1, "name": ..., "coralline": version, "task": TASK, "labels": [...],
     "preprocessing": {"version": 1, "digest": ..., "steps": [...]},
     "models": {ROLE: {"file": ..., "inputs": [TENSOR, ...], "outputs": [TENSOR, ...], "lookup": file}},
     "golden": {"inputs": [file, ...], "outputs": {ROLE: file}},
     "evaluation": {"split": "test", "inputs": [file, ...], "labels": file,
                    "labels_from": "original", "outputs": {ROLE: file}, "metrics": {...}},
     "tools": {name: version}, "detection": SPECIFICATION, "binary": "probability" or "logit", "decoding": {...},
     "embedding": {...}, "confidence": {...},
     "members": [{"name": ..., "size": bytes, "sha256": ...}],
     ...}

TASK is one of TASKS. ROLE is `original` (float), `int8` or `compiled`; there is at least one. TENSOR is {"name",
"tensor", "shape", "dtype", "scale", "zero_point"} (`deploy.contract.tensors`); its name is the same for all roles.
`labels` is empty for models without classes. `lookup` is the table of an embedding outside of the model
(`deploy.contract.tensors`), and missing for other models.

Golden inputs are decoded samples before preprocessing, one per file. Evaluation inputs are too, but each file is a
stack [n, ...] of samples with one shape and dtype. A sample of a model with several inputs is a row: its input tensors,
flattened, one after the other. Outputs are those of the host: [n, ...] in the dtype of the model; several outputs are
rows [n, values] in a dtype that holds all of them. There may be no golden inputs. `evaluation` may be missing or null;
`tools`, `decoding` (`deploy.contract.decoding`), `embedding` (`deploy.contract.embedding`) and `confidence`
(`deploy.contract.confidence`) may be missing.

For `classification`, `labels` of the evaluation is int64 [n] over all files. A classifier with one value for two labels
has `binary`: the value is the probability or the logit of the second label. For `multi_label`, `binary` applies to each
value; without it they are probabilities. A detector has `detection` (see `deploy.contract.detection`), its outputs are
boxes and scores in this order, and the labels of its evaluation are float32 [objects, 6]: index of the sample, class,
ymin, xmin, ymax, xmax; `labels_from` is `original` if they are what the original model finds. The other tasks need no
labels.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from deploy.contract import confidence, decoding, embedding
from deploy.contract.detection import Detector
from deploy.contract.detector_specification import DetectionError
from deploy.contract.preprocessing import Array, Preprocessing, PreprocessingError
from deploy.contract.tensors import Lookup, TensorDescription, TensorLayout

if TYPE_CHECKING:
    from deploy.contract.trust import TrustFolder

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 30
"""Chosen: far above every model for an Edge TPU, and a device holds the whole file in memory."""
MAX_MANIFEST_BYTES = 1 << 20
"""Chosen: the rows of MAX_MEMBERS members take less than two thirds of it."""
MAX_MEMBERS = 3000
"""Chosen: a check takes time for each member, and an attacker could add empty ones."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
ROLES = ("original", "int8", "compiled")
TASKS = (
    "classification",
    "multi_label",
    "regression",
    "segmentation",
    "keypoints",
    "reconstruction",
    "embeddings",
    "detection",
    "outputs",
)
ANSWERS = {"classification": "class", "multi_label": "labels", "detection": "objects"}
"""The answer of a model by its task; "arrays" for the other tasks."""
WITH_EMBEDDINGS = ("embeddings",)
"""The tasks whose first output is an embedding."""
WITH_POSITIONS = ("detection", "keypoints")
"""The tasks whose answers are positions in the image."""
ARRAYS_IN_IMAGE = {"segmentation": "mask", "keypoints": "points"}
"""The meaning of the first array of a task for the image: the class of each pixel, or positions."""
BINARY = ("probability", "logit")
MAX_TENSORS = 64
"""The largest number of inputs, and of outputs, of a model."""
ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ValueError, LookupError, OSError, EOFError, RuntimeError)
"""The exceptions of zipfile for invalid archives. Older Python versions raise more types."""
_ARRAY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biuf](?:[1248]|16))', "
    rb"'fortran_order': False, 'shape': \(([0-9, ]{0,100})\), \} *\n",
    re.DOTALL,
)
"""The start of a .npy member as `array_bytes` writes it: dtype and shape."""


class BundledModel(NamedTuple):
    """The description of a model in the manifest.

    Attributes:
        outputs: its outputs; for a detector boxes and scores, for other models in the order of the model.
        lookup: the lookup for its only input; None: samples have the values of the input.
    """

    file: str
    inputs: Tuple[TensorDescription, ...]
    outputs: Tuple[TensorDescription, ...]
    lookup: Optional[Lookup] = None

    def output(self, name: Any) -> Optional[TensorDescription]:
        """Return the output of this name; None: there is none."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)

    @property
    def input_layout(self) -> TensorLayout:
        """The inputs as a row; with a lookup, a preprocessed sample."""
        if self.lookup is not None:
            return TensorLayout([self.inputs[0].name], [self.lookup.shape])
        return TensorLayout.of(self.inputs)

    @property
    def output_layout(self) -> TensorLayout:
        """The outputs as a row."""
        return TensorLayout.of(self.outputs)


class BundleError(ValueError):
    """A file that is not a bundle, or was changed. Exit code 8; `kind` is an identifier for programs."""

    exit_code = 8
    kind = "changed"


def archive_of(members: Mapping[str, bytes]) -> bytes:
    """Return the archive of these members, in this order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content)
    return stream.getvalue()


def _manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest. NaN and infinity are not valid JSON."""
    return json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def pack(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a bundle.

    Args:
        manifest: the manifest without `schema_version` and `members`.
        members: the content by file name; names have no folders.

    Raises:
        BundleError: the manifest is invalid, or names a file that is not a member.
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
    """Return an array as the content of a .npy file (format 1.0, equal for every numpy version)."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def read_array(content: Union[bytes, bytearray], name: str = "it") -> Array:
    """Return the array in the content of a .npy file (format 1.0).

    Raises:
        BundleError: the content is not an array of numbers.
    """
    header = _ARRAY.match(content)  # numpy's own parser evaluates the header, and crashes on some invalid ones
    if header is None:
        raise BundleError("%s is not an array of numbers" % name)
    try:
        shape = tuple(int(length) for length in header.group(2).split(b",") if length.strip())
        return np.frombuffer(content[header.end() :], header.group(1).decode()).reshape(shape).copy()
    except (ValueError, TypeError, OverflowError) as error:
        raise BundleError("%s is not an array: %s" % (name, error))


class Bundle:
    """A verified bundle: the constructor checks every byte.

    Args:
        content: the bytes of a .coralline file.

    Attributes:
        manifest: the parsed manifest.
        members: the content by file name.
        models: the descriptions of the models, by role.
        preprocessing: the function from a decoded sample to the input of a model.
        decoding: the decoding of image and WAV files.
        detector: the function from the outputs of a detector to detections; None for other tasks.
        embedding: the embedding and its references; None: the bundle has no entry for it.
        confidence: the calibration of a classifier; None: it is not calibrated.

    Raises:
        BundleError: the content is not a bundle, was changed, or has an unknown schema.
    """

    def __init__(self, content: bytes) -> None:
        self.members = read_archive(content)
        self.manifest = _read_manifest(self.members.pop(MANIFEST))
        _check_members(self.manifest, self.members)
        _check_references(self.manifest, self.members)
        self.models = {role: self._model(role, entry) for role, entry in self.manifest["models"].items()}
        _check_task(self.manifest, self.models)
        try:
            self.preprocessing = Preprocessing(self.manifest["preprocessing"]["steps"])
        except PreprocessingError as error:
            what = "the bundle's preprocessing cannot be used: %s; it was packed by Coralline %s: use a newer runner"
            raise BundleError(what % (error, self.manifest["coralline"]))
        if self.preprocessing.digest != self.manifest["preprocessing"]["digest"]:
            what = "this runner computes the bundle's preprocessing in another way: use the runner of Coralline %s"
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
                raise BundleError("the manifest's detection cannot be used: %s" % error)
            _check_detector(self.detector, self.models)
        self.embedding = self._embedding()
        self.confidence = self._confidence()

    def _model(self, role: str, entry: Dict[str, Any]) -> BundledModel:
        model = _model(role, entry)
        if entry.get("lookup") is None:
            return model
        if len(model.inputs) != 1:
            raise BundleError("the %s model has a lookup, and must have one input" % role)
        try:
            return model._replace(lookup=Lookup(self.array(entry["lookup"]), model.inputs[0]))
        except ValueError as error:
            raise BundleError("the lookup of the %s model cannot be used: %s" % (role, error))

    def _embedding(self) -> Optional[embedding.BundledEmbedding]:
        entry = self.manifest.get("embedding")
        if entry is None:
            return None
        tensors = [model.output(entry.get("output")) for role, model in self.models.items() if role != ROLES[0]]
        known = [tensor for tensor in tensors if tensor is not None]
        complete = len(known) == len(tensors) > 0 and len({tensor.values for tensor in known}) == 1
        try:
            return embedding.parsed(entry, self.array, known[0] if complete else None, len(self.labels))
        except ValueError as error:
            raise BundleError("the manifest's embedding cannot be used: %s" % error)

    def _confidence(self) -> Optional[confidence.Confidence]:
        entry = self.manifest.get("confidence")
        if entry is None:
            return None
        try:
            return confidence.parsed(entry)
        except ValueError as error:
            raise BundleError("the manifest's confidence cannot be used: %s" % error)

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest, which has the SHA-256 of every member."""
        return hashlib.sha256(_manifest_bytes(self.manifest)).hexdigest()

    @property
    def roles(self) -> List[str]:
        """The roles of the models, in the order of ROLES."""
        return [role for role in ROLES if role in self.manifest["models"]]

    @property
    def task(self) -> str:
        """The task of the models, one of TASKS."""
        return str(self.manifest["task"])

    @property
    def answers(self) -> str:
        """The answer of the models for a sample: "class", "labels", "objects" or "arrays"."""
        return ANSWERS.get(self.task, "arrays")

    @property
    def gives_embedding(self) -> bool:
        """Whether the first output of the models is an embedding."""
        return self.task in WITH_EMBEDDINGS

    @property
    def has_positions(self) -> bool:
        """Whether the answers are positions in the image."""
        return self.task in WITH_POSITIONS

    @property
    def labels(self) -> Any:
        """The class names, in the order of the model's output; empty for models without classes."""
        return self.manifest["labels"]

    def content(self, role: str) -> bytes:
        """Return the .tflite file of a model."""
        return self.members[self.models[role].file]

    def array(self, name: str) -> Array:
        """Return a .npy member as an array.

        Raises:
            BundleError: the member is not an array.
        """
        return read_array(self.members.get(name, b""), name)

    def evaluation(self) -> Tuple[List[Array], Array]:
        """Return the evaluation sample of a classifier: decoded samples, and their labels int64 [n]; it may be empty.

        Raises:
            BundleError: the evaluation sample is invalid, or has no labels.
        """
        entry = self.manifest.get("evaluation")
        if entry is None:
            return [], np.zeros(0, np.int64)
        if entry.get("labels") is None:
            raise BundleError("the evaluation sample has no labels")
        samples = self.samples(entry)
        labels = self.array(entry["labels"])
        valid = labels.shape == (len(samples),) and labels.dtype == np.int64
        if not valid or ((labels < 0) | (labels >= len(self.labels))).any():
            raise BundleError("the evaluation sample is not %d samples with a label each" % len(samples))
        return samples, labels

    def samples(self, entry: Dict[str, Any]) -> List[Array]:
        """Return the decoded samples of the manifest's `evaluation`, `entry`."""
        stacks = [self.array(name) for name in entry["inputs"]]
        if not all(stack.ndim in (2, 3, 4) and stack.size for stack in stacks):
            raise BundleError("the evaluation sample has an empty stack, or one without two to four axes")
        return [sample for stack in stacks for sample in stack]


def read(path: str, trusted: Optional[TrustFolder] = None) -> Bundle:
    """Open and verify a .coralline file.

    Args:
        path: the file.
        trusted: what the device trusts: `trust.find()` on a device. The bundle must then be in the signed metadata,
            which is checked before any part of the bundle is parsed.

    Raises:
        BundleError: see `Bundle`.
        TrustError: the device does not accept the bundle.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if trusted is not None:
        trusted.require_bundle(content, path)
    return Bundle(content)


def read_archive(content: bytes) -> Dict[str, bytes]:
    """Return the members of an archive that `archive_of` wrote, whose first member is MANIFEST.

    Raises:
        BundleError: the content is anything else.
    """
    if len(content) > MAX_BYTES:
        raise BundleError("the file is too large for a bundle (at most %d bytes)" % MAX_BYTES)
    members: Dict[str, bytes] = {}
    remaining = len(content)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
            if not infos or infos[0].filename != MANIFEST or len(infos) > MAX_MEMBERS:
                raise BundleError("not a bundle: its first member must be %s" % MANIFEST)
            for info in infos:
                if not _NAME.match(info.filename) or info.filename in members:
                    raise BundleError("not a bundle: the member name %r is not allowed" % info.filename)
                stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
                remaining -= info.file_size  # overlapping members would unpack to much more than the size of the file
                if not stored or remaining < 0:
                    raise BundleError("not a bundle: %s is compressed, or overlaps another member" % info.filename)
                members[info.filename] = archive.read(info)
    except BundleError:
        raise
    except ZIP_ERRORS as error:
        raise BundleError("not a bundle, or damaged: %s" % error)
    if archive_of(members) != content:
        raise BundleError("the tables of the archive were changed, or another program wrote them")
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
    schema = manifest["schema_version"]
    if type(schema) is not int or schema != SCHEMA_VERSION:
        shown = repr(schema) if isinstance(schema, (int, float, str)) else type(schema).__name__
        raise BundleError("the bundle has schema %s; this version of Coralline reads %d" % (shown, SCHEMA_VERSION))
    if written != text:
        raise BundleError("the manifest is not formatted as Coralline writes it")
    return manifest


def _check_members(manifest: Dict[str, Any], members: Dict[str, bytes]) -> None:
    """Check that the members are those of the manifest, with their size and SHA-256."""
    table = manifest.get("members")
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise BundleError("the manifest has no list of members")
    if [row.get("name") for row in table] != list(members):
        raise BundleError("the members differ from those that the manifest lists")
    for row in table:
        content = members[row["name"]]
        if row.get("size") != len(content) or row.get("sha256") != hashlib.sha256(content).hexdigest():
            raise BundleError("%s was changed: its SHA-256 differs from the manifest" % row["name"])


def _check_references(manifest: Dict[str, Any], members: Dict[str, bytes]) -> None:
    """Check the types of the manifest's values, and that every file that it names is a member."""
    try:
        valid = _check_types(manifest)
        files = _files(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError("the manifest is incomplete: %r" % error)
    if not valid:
        raise BundleError("the manifest does not match schema 1")
    for name in files:
        if not isinstance(name, str) or name not in members:
            raise BundleError("the manifest names %r, which is not in the bundle" % (name,))


def _check_types(manifest: Dict[str, Any]) -> bool:
    """Return whether the values of the manifest have the right types, and all roles are known."""
    models = manifest["models"]
    golden = manifest["golden"]
    preprocessing = manifest["preprocessing"]
    texts = [manifest["name"], manifest["coralline"], preprocessing["digest"]]
    lists = [manifest["labels"], golden["inputs"], preprocessing["steps"]]
    maps = [manifest.get("tools", {})]
    with_outputs = list(golden["outputs"])
    evaluation = manifest.get("evaluation")
    if evaluation is not None:
        lists.append(evaluation["inputs"])
        maps.append(evaluation["metrics"])
        with_outputs += list(evaluation["outputs"])
    if not all(isinstance(value, list) for value in lists) or not all(isinstance(value, dict) for value in maps):
        return False
    if not models or not set(with_outputs) <= set(models) <= set(ROLES):
        return False
    return all(isinstance(text, str) for text in texts + manifest["labels"])


def _files(manifest: Dict[str, Any]) -> List[Any]:
    """Return the names of all files that the manifest refers to."""
    golden = manifest["golden"]
    files = list(golden["inputs"]) + list(golden["outputs"].values())
    for model in manifest["models"].values():
        files.append(model["file"])
        if model.get("lookup") is not None:
            files.append(model["lookup"])
    evaluation = manifest.get("evaluation")
    if evaluation is not None:
        files += list(evaluation["inputs"]) + list(evaluation["outputs"].values())
        if evaluation.get("labels") is not None:
            files.append(evaluation["labels"])
    if manifest.get("embedding") is not None:
        files += embedding.files(manifest["embedding"])
    return files


def _model(role: str, entry: Dict[str, Any]) -> BundledModel:
    """Return the description of a model.

    Raises:
        BundleError: the inputs or outputs are not valid.
    """
    ends = {}
    for end in ("inputs", "outputs"):
        tensors = entry.get(end)
        if not isinstance(tensors, list) or not 0 < len(tensors) <= MAX_TENSORS:
            what = "the manifest must have a list of 1 to %d %s for the %s model"
            raise BundleError(what % (MAX_TENSORS, end, role))
        try:
            ends[end] = tuple(TensorDescription.parsed(tensor) for tensor in tensors)
        except ValueError as error:
            raise BundleError("the manifest's %s of the %s model cannot be used: %s" % (end, role, error))
        if len({tensor.name for tensor in ends[end]}) < len(tensors):
            raise BundleError("two %s of the %s model have the same name" % (end, role))
    return BundledModel(entry["file"], ends["inputs"], ends["outputs"])


def _check_detector(detector: Detector, models: Dict[str, BundledModel]) -> None:
    """Check that the outputs of all models are those of the detector."""
    for role, model in models.items():
        problem = detector.misfit([tensor.shape for tensor in model.outputs])
        if problem is not None:
            raise BundleError("the outputs of the %s model are not those of its detector: %s" % (role, problem))


def _check_task(manifest: Dict[str, Any], models: Dict[str, BundledModel]) -> None:
    """Check the task, and that the entries which it needs fit the models."""
    task = manifest.get("task")
    if task not in TASKS:
        shown = repr(task) if isinstance(task, str) else type(task).__name__
        what = "the bundle has the task %s, and this runner knows %s: use a newer runner"
        raise BundleError(what % (shown, ", ".join(TASKS)))
    if manifest.get("binary", BINARY[0]) not in BINARY:
        raise BundleError("the manifest's binary is not one of: %s" % ", ".join(BINARY))
    if ("detection" in manifest) != (task == "detection"):
        raise BundleError("a detector needs the entry detection, and other models must not have it")
    for role, model in models.items():
        if task == "detection" and len(model.inputs) != 1:
            raise BundleError("the %s model is a detector, and must have one input" % role)
        values = model.output_layout.sizes[0]
        if task == "classification" and values == 1 and len(manifest["labels"]) > 1 and "binary" not in manifest:
            raise BundleError(
                "the %s model has one value for %d labels, and no entry binary" % (role, len(manifest["labels"]))
            )
