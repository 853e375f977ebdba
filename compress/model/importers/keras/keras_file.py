"""Keras files (.keras, .h5): safety checks, and loading as a Keras 3 model.

A Keras file can contain Python code, or name code to import. The protection of Keras depends on the format and the
version: tf_keras ignores `safe_mode` for .h5. Therefore the stored configuration is read first, without Keras, and
every object that is not on the list of known objects is refused.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compress.core import sandbox
from compress.core.errors import CorallineError, ModelError, UntrustedError
from compress.model.importers.common import guarded_calls
from compress.model.importers.common.guarded_calls import READ_ERRORS
from compress.model.importers.common.unsupported import MOST_LISTED, Refused, carrying, listed
from compress.model.importers.common.verification import Parity
from compress.model.importers.keras import hdf5_weights, keras2, keras_config
from compress.model.importers.keras.hdf5_weights import MAX_WEIGHTS_BYTES, MOST_PACKED
from compress.model.importers.keras.keras_config import MAX_DEPTH, loadable, shown
from compress.model.ir import mixed_precision, tensorflow
from compress.model.ir.passes.explicit_states import with_explicit_states

if TYPE_CHECKING:
    import keras

MAX_CONFIG_BYTES = 64 * 2**20
"""A configuration is text of a few hundred bytes for each layer; MOST_CALLS limits the layers."""
TRUST = "if you know where the file comes from, set `trust: true` under `model:`, or give --trust to `import`"
REPLACE = "replace these layers by layers of Keras, or export the model to ONNX or as a SavedModel, with its graph"
ALLOWED = "a .keras, .h5 or .hdf5 file with architecture and weights"
RESAVE = "save it again with Keras: model.save('model.keras')"
READ_MEMORY_BYTES = 512 * 2**20
"""Limit of the process that reads a file first, without its weights: a damaged length of a text can be any number."""
CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"


@dataclass(frozen=True)
class Scan:
    """The content of a Keras file that can be read without running code.

    Attributes:
        format: the container, independent of the file name.
        keras_version: the version that wrote the file; "" if it is not stored.
        config: the stored model configuration, for "keras" without compile_config (never loaded).
        untrusted: code that loading would run or import, and files outside that it would read.
        unsupported: layers of Keras 2 without a counterpart in Keras 3.
        backend: the backend of Keras, if an HDF5 file has it: tensorflow, theano, cntk.
    """

    format: Literal["keras", "h5"]
    keras_version: str
    config: dict[str, Any]
    untrusted: tuple[Refused, ...]
    unsupported: tuple[Refused, ...]
    backend: str = ""

    @property
    def from_keras2(self) -> bool:
        """Whether Keras 1 or 2 wrote the file, or an unknown version."""
        return not self.keras_version or self.keras_version.startswith(("1.", "2."))

    @property
    def stateful(self) -> tuple[str, ...]:
        """The names of the layers that keep their state between calls."""
        return keras_config.stateful_layers(self.config)


def scan(path: Path) -> Scan:
    """Read the stored configuration, without Keras and without running any code.

    Raises:
        ModelError: the file is not a Keras file, is damaged, or is malicious.
    """
    import h5py

    try:
        is_zip = path.is_file() and zipfile.is_zipfile(path)
        is_hdf5 = path.is_file() and h5py.is_hdf5(path)
        if is_zip and is_hdf5 and not (path.suffix == ".keras" and _start(path).startswith(b"PK\x03\x04")):
            # An archive has model.weights.h5 uncompressed, and HDF5 looks for its signature at 0, 512, 1024, … bytes:
            # HDF5 may find it in an ordinary archive.
            raise _refusal(path, "is a zip archive and an HDF5 file at once: it is not clear which one to load")
        if is_zip:
            version, config = _read_keras(path)
            return _scanned(path, "keras", version, config)
        if is_hdf5:
            version, backend, config = _read_h5(path)
            return replace(_scanned(path, "h5", version, config), backend=backend)
        raise _refusal(path, _description(path))
    except RecursionError as error:
        raise _refusal(path, f"its configuration is nested deeper than {MAX_DEPTH} levels") from error
    except READ_ERRORS as error:
        raise _refusal(
            path, f"cannot be read: {guarded_calls.first_line(error)}", "check that it was copied completely"
        ) from error


def check_readable(path: Path) -> None:
    """Read a file of unknown origin once in a child process, with all of its weights."""
    unpacked = MOST_PACKED * path.stat().st_size if path.is_file() else 0
    memory_bytes = READ_MEMORY_BYTES + min(unpacked, 2 * MAX_WEIGHTS_BYTES)
    guarded_calls.check_readable(path, "HDF5", read_in_child, [str(path)], memory_bytes=memory_bytes)


def read_in_child(path: str) -> None:
    """Read a file. A refusal is not an error here: the parent reads the file again and reports it.

    Raises:
        SystemExit: memory could not be allocated.
    """
    import h5py

    try:
        container = scan(Path(path)).format
        if container == "h5":
            with h5py.File(path, "r") as file:
                hdf5_weights.read_all(file)
            return
        with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read(WEIGHTS)), "r") as file:
            hdf5_weights.read_all(file)
    except (CorallineError, MemoryError, *READ_ERRORS) as error:
        message = f"{type(error).__name__}: {error}"
        if sandbox.is_out_of_memory(message):
            raise SystemExit(message) from error


def load(path: Path, *, trust: bool = False) -> keras.Model:
    """Load a Keras file as a Keras 3 Functional or Sequential model, not compiled.

    Files of Keras 2 are rebuilt layer by layer, and the outputs compared (`compress.model.importers.keras.keras2`).

    Raises:
        UntrustedError: loading would run code, and `trust` is not set.
        ModelError: the file is damaged, or Keras 3 cannot express the model.
    """
    return load_scanned(path, scan(path), trust=trust)[0]


def load_scanned(path: Path, scan: Scan, *, trust: bool, samples: Any = None) -> tuple[keras.Model, Parity | None]:
    """Load a scanned file as in `load`, with the parity of a model that was rebuilt.

    Real `samples` [n, ...] are compared in addition to random ones.
    """
    check_loadable(path, scan.config, scan.untrusted, scan.unsupported, trust=trust)
    version = f"Keras {scan.keras_version}" if scan.keras_version else "an unknown version of Keras"
    what = f"cannot be loaded (written by {version})"
    hint = f"custom classes are not in the file: register them first, or {RESAVE}" if scan.untrusted else RESAVE
    with guarded_calls.quiet(), guarded_calls.explained(path, what, hint), tempfile.TemporaryDirectory() as folder:
        if (backend := tensorflow.keras().config.backend()) != "tensorflow":
            raise ModelError(f"Keras runs on {backend}", where="KERAS_BACKEND", allowed="tensorflow", hint="unset it")
        loadable_path = _prepared(path, scan, Path(folder))
        if scan.from_keras2:
            model, parity = keras2.rebuild(_from_keras2(loadable_path, scan, trust), str(path), samples)
            return usable(model, scan.stateful), parity
        with guarded_calls.bounded():
            model = tensorflow.keras().saving.load_model(loadable_path, compile=False, safe_mode=not trust)
            model = mixed_precision.single(model)
        guarded_calls.check_tensors(model)
    if not getattr(model, "inputs", None):
        raise ModelError("the model has no defined inputs", where=str(path), hint=keras2.INPUT)
    return usable(model, scan.stateful), None


def check_loadable(
    path: Path, config: dict[str, Any], untrusted: Sequence[Refused], unsupported: Sequence[Refused], *, trust: bool
) -> None:
    """Check that a configuration may be loaded, that Keras 3 can express it, and that TensorFlow runs it on a CPU.

    Raises:
        UntrustedError: loading would run code, and `trust` is not set.
        ModelError: a layer has no counterpart in Keras 3, or has its channels first.
    """
    if untrusted and not trust:
        what = f"loading would run or import code that the file names: {listed(untrusted)}"
        lacks_code = any(refusal.lacks_code for refusal in untrusted)
        error = UntrustedError(what, where=str(path), hint=REPLACE if lacks_code else TRUST)
        raise carrying(error, untrusted)
    if unsupported:
        raise keras2.missing(unsupported, str(path))
    if names := keras_config.channels_first(config):
        first = ", ".join(map(keras_config.shown, names[:MOST_LISTED]))
        raise ModelError(
            "TensorFlow does not run convolutions with data_format='channels_first' on a CPU, and it has "
            f"{len(names)}: {first}",
            where=str(path),
            allowed="channels_last",
            hint="build the same model with channels_last, with Permute((3, 1, 2)) in front of a Flatten, and copy the "
            "weights with set_weights",
        )


def usable(model: keras.Model, stateful: Sequence[str]) -> keras.Model:
    """Return a loaded model as every later step calls it: with a list of inputs, and without state between calls.

    Keras calls a model that was built with a map of inputs only with a map. `inputs` has the items in Keras' order.
    """
    library = tensorflow.keras()
    if not isinstance(model, library.Sequential) and isinstance(model.input, dict):
        model = library.Model(list(model.inputs), model.output, name=model.name)
    return with_explicit_states(model) if stateful else model


def _from_keras2(path: str, scan: Scan, trust: bool) -> Any:
    """Load a model with tf-keras; from its configuration if that has a form that tf-keras no longer reads."""
    import tf_keras

    config = keras_config.normalized(scan.config)
    with guarded_calls.bounded():
        if scan.format == "keras" or config == scan.config:
            model = tf_keras.saving.load_model(path, compile=False, safe_mode=not trust)
        else:
            model = tf_keras.models.model_from_json(json.dumps(config))
            model.load_weights(path)
    if scan.backend == "theano":
        keras2.rotate_kernels(model)
    return model


def _refusal(path: Path, what: str, hint: str = RESAVE) -> ModelError:
    return ModelError(what, where=str(path), allowed=ALLOWED, hint=hint)


def _start(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(8)


def _description(path: Path) -> str:
    if path.is_dir():
        return "is a folder (a SavedModel?)"
    if not path.exists():
        return "does not exist"
    start = _start(path)
    if not start:
        return "is empty"
    if start.startswith((b"PK\x03\x04", b"\x89HDF")):
        return "is cut off: its end is missing"
    if start[0] == 0x80 and start[1:2] <= b"\x05":
        return "is a Python pickle, which can run code when it is opened"
    return "is neither a zip archive nor an HDF5 file"


def _read_keras(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the version and the configuration of a .keras archive, after a check of its members."""
    import h5py

    with zipfile.ZipFile(path) as archive:
        _check_members(path, archive)
        names = set(archive.namelist())
        if CONFIG not in names:
            torch = any(name.endswith("data.pkl") for name in names)
            raise _refusal(path, f"has no {CONFIG}" + (": it is a PyTorch file" if torch else ""))
        if WEIGHTS not in names:
            raise _refusal(path, f"has no {WEIGHTS}")
        config = _parsed(path, CONFIG, archive.read(CONFIG))
        metadata = _parsed(path, METADATA, archive.read(METADATA)) if METADATA in names else {}
        with h5py.File(io.BytesIO(archive.read(WEIGHTS)), "r") as file:
            problem = hdf5_weights.problem(file)
    if problem:
        raise _refusal(path, problem)
    version = metadata.get("keras_version")
    return version if isinstance(version, str) else "", loadable(config)


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse archives that would fill the disk, write outside the folder, or have ambiguous members."""
    seen: set[str] = set()
    total = 0
    for info in archive.infolist():
        name = info.filename
        total += info.file_size
        parts = re.split(r"[/\\]", name)
        if not parts[0] or ".." in parts or ":" in parts[0] or stat.S_ISLNK(info.external_attr >> 16):
            raise _refusal(path, f"has a member that leads out of the archive: {shown(name)}")
        if name in seen:
            raise _refusal(path, f"has two members called {shown(name)}")
        if info.flag_bits & 1:
            raise _refusal(path, f"is encrypted ({shown(name)})")
        if name.lower().endswith((".pkl", ".pickle", ".joblib")) and CONFIG in archive.namelist():
            raise _refusal(path, f"has a Python pickle in it ({shown(name)}), which can run code when it is opened")
        if _is_bomb(info) or total > MAX_WEIGHTS_BYTES:
            packed = max(info.compress_size, 1)
            raise _refusal(path, f"its {shown(name)} would unpack from {packed:,} to {info.file_size:,} bytes")
        seen.add(name)


def _is_bomb(info: zipfile.ZipInfo) -> bool:
    """Return True if a member is much larger than its compressed data, or than a real one of its kind."""
    size, packed = info.file_size, max(info.compress_size, 1)
    if info.filename in (CONFIG, METADATA):
        return size > MAX_CONFIG_BYTES or size > max(2**20, 200 * packed)
    return size > max(2**28, 100 * packed)


def _read_h5(path: Path) -> tuple[str, str, dict[str, Any]]:
    import h5py

    with h5py.File(path, "r") as file:
        if "model_config" not in file.attrs:
            weights = "layer_names" in file.attrs or "layers" in file or "_layer_checkpoint_dependencies" in file
            raise _refusal(
                path,
                "has weights only, no architecture" if weights else "has no model_config: it is not a Keras model",
                "build the model in code, load these weights into it, then model.save('model.keras')",
            )
        if problem := hdf5_weights.problem(file):
            raise _refusal(path, problem)
        text = file.attrs["model_config"]
        stored = [file.attrs.get(name, "") for name in ("keras_version", "backend")]
    decoded = [value.decode() if isinstance(value, bytes) else value for value in stored]
    version, backend = (value if isinstance(value, str) else "" for value in decoded)
    if not isinstance(text, str | bytes):
        raise _refusal(path, "its model_config is not text")
    return version, backend, _parsed(path, "model_config", text)


def _parsed(path: Path, name: str, text: str | bytes) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise _refusal(path, f"its {name} is larger than {MAX_CONFIG_BYTES:,} bytes")
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise _refusal(path, f"its {name} is not JSON: {guarded_calls.first_line(error)}") from error
    if not isinstance(value, dict):
        raise _refusal(path, f"its {name} is not a JSON object")
    return value


def _scanned(path: Path, container: Literal["keras", "h5"], version: str, config: dict[str, Any]) -> Scan:
    judgement = keras_config.judged(config)
    if judgement.problem:
        raise _refusal(path, judgement.problem)
    return Scan(container, version, config, judgement.untrusted, judgement.unsupported)


def _prepared(path: Path, scan: Scan, folder: Path) -> str:
    """Return the path of a copy or link that the libraries can load: valid suffix, checked configuration."""
    if scan.format == "h5":
        if path.suffix in (".h5", ".hdf5"):
            return str(path.absolute())
        os.symlink(path.absolute(), folder / "model.h5")
        return str(folder / "model.h5")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / "model.keras", "w") as target:
        target.writestr(CONFIG, json.dumps(scan.config))
        target.writestr(METADATA, json.dumps({"keras_version": scan.keras_version}))
        for name in source.namelist():
            if name == WEIGHTS or (name.startswith("assets/") and not name.endswith("/")):
                with source.open(name) as stored, target.open(name, "w", force_zip64=True) as copy:
                    shutil.copyfileobj(stored, copy)
    return str(folder / "model.keras")
