"""Keras files (.keras, .h5): what loading one would run, and loading it as a Keras 3 model.

A Keras file can carry Python code, or name code to import, and what refuses it depends on
format and version: tf_keras ignores `safe_mode` for .h5. So the stored configuration is read
first, without Keras, and everything in it that is not on a list of known objects is refused.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compress.errors import ModelError, UntrustedError
from compress.importers import keras2
from compress.training import tensorflow

if TYPE_CHECKING:
    import keras

MAX_CONFIG_BYTES = 64 * 2**20
MAX_WEIGHTS_BYTES = 4 * 2**30
MAX_DEPTH = 250
ALLOWED = "a .keras, .h5 or .hdf5 file with architecture and weights"
RESAVE = "save it again with Keras: model.save('model.keras')"
CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
READ_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError)

#: Objects of Keras itself that run what the file, or a file beside it, says.
RUNS = {
    "Lambda": "runs Python code that it carries or names",
    "TFSMLayer": "runs a SavedModel from another path",
    "TorchModuleWrapper": "unpickles a PyTorch module",
    "JaxLayer": "runs Python code that it carries or names",
    "FlaxLayer": "runs Python code that it carries or names",
    "__lambda__": "is Python code in serialized form",
}
_OURS = re.compile(r"(keras|tf_keras|keras_core|tensorflow\.keras|builtins)(\.|$)|tensorflow\.python\.ops\.init_ops")
_OPERATIONS = re.compile(r"keras\.(src\.)?(ops|quantizers)(\.|$)")
#: Where modules of older releases are found today.
_MOVED = (("tensorflow.keras", "keras"), ("keras_core", "keras"), ("keras.engine.", "keras.src.engine."))


@dataclass(frozen=True)
class Scan:
    """What a Keras file says of itself.

    Attributes:
        format: the container, whatever the file is called.
        keras_version: the version that wrote it; empty where it does not say.
        config: the stored model configuration, for "keras" without compile_config (never loaded).
        untrusted: what loading would execute, import or read from elsewhere, in words.
        unsupported: layers of Keras 2 that no layer of Keras 3 can stand for.
    """

    format: Literal["keras", "h5"]
    keras_version: str
    config: dict[str, Any]
    untrusted: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def from_keras2(self) -> bool:
        """Whether it was written by Keras 1 or 2, or by something that does not say."""
        return not self.keras_version or self.keras_version.startswith(("1.", "2."))


def scan(path: Path) -> Scan:
    """Reads the stored configuration, without Keras and without running anything.

    Raises:
        ModelError: it is not a Keras file, is damaged, or is made to do harm.
    """
    import h5py

    try:
        is_zip = path.is_file() and zipfile.is_zipfile(path)
        is_hdf5 = path.is_file() and h5py.is_hdf5(path)
        if is_zip and is_hdf5:
            raise _refusal(path, "is a zip archive and an HDF5 file at once: which one is loaded would be chance")
        if is_zip:
            version, config = _read_keras(path)
            return _judged(path, "keras", version, config)
        if is_hdf5:
            version, config = _read_h5(path)
            return _judged(path, "h5", version, config)
        raise _refusal(path, _strange(path))
    except RecursionError as error:
        raise _refusal(path, f"its configuration is nested deeper than {MAX_DEPTH} levels") from error
    except READ_ERRORS as error:
        raise _refusal(path, f"cannot be read: {_first_line(error)}", "check that it was copied completely") from error


def load(path: Path, *, trust: bool = False) -> keras.Model:
    """Loads a Keras file as a Keras 3 Functional or Sequential model, not compiled.

    Files of Keras 2 are rebuilt layer by layer, and the outputs compared (`compress.importers.keras2`).

    Args:
        path: the file.
        trust: whether code that came with it may run.

    Raises:
        UntrustedError: it would run code, and `trust` is not given.
        ModelError: it is damaged, or Keras 3 cannot express it.
    """
    found = scan(path)
    if found.untrusted and not trust:
        what = f"loading would run or import what the file says: {'; '.join(found.untrusted)}"
        todo = "if you know where the file comes from, set `trust: true` under `model:`"
        raise UntrustedError(what, where=str(path), todo=todo)
    if found.unsupported:
        raise keras2.missing(found.unsupported, str(path))
    with _quiet(), _explained(path, found), tempfile.TemporaryDirectory() as folder:
        if (backend := tensorflow.keras().config.backend()) != "tensorflow":
            raise ModelError(f"Keras runs on {backend}", where="KERAS_BACKEND", allowed="tensorflow", todo="unset it")
        place = _prepared(path, found, Path(folder))
        if found.from_keras2:
            import tf_keras

            old = tf_keras.saving.load_model(place, compile=False, safe_mode=not trust)
            return keras2.rebuild(old, str(path))
        model = tensorflow.keras().saving.load_model(place, compile=False, safe_mode=not trust)
    if not getattr(model, "inputs", None):
        raise ModelError("the model has no defined inputs", where=str(path), todo=keras2.INPUT)
    return model


def _refusal(path: Path, what: str, todo: str = RESAVE) -> ModelError:
    return ModelError(what, where=str(path), allowed=ALLOWED, todo=todo)


def _first_line(error: BaseException) -> str:
    """What an exception says: its first line, or the first that has a cause in it."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rsplit("Exception encountered: ", 1)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if not line.startswith("Exception encountered when")), lines[0])
    return line if len(line) <= 300 else f"{line[:300]}..."


def _shown(value: object) -> str:
    """A name from the file, safe to print: short, quoted, no control characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _strange(path: Path) -> str:
    """What a file is that is neither zip nor HDF5."""
    if path.is_dir():
        return "is a folder (a SavedModel?)"
    if not path.exists():
        return "does not exist"
    with path.open("rb") as stream:
        start = stream.read(8)
    if not start:
        return "is empty"
    if start.startswith((b"PK\x03\x04", b"\x89HDF")):
        return "is cut off: its beginning is right, its end is missing"
    if start[0] == 0x80 and start[1:2] <= b"\x05":
        return "is a Python pickle, which can run code when it is opened"
    return "is neither a zip archive nor an HDF5 file"


def _read_keras(path: Path) -> tuple[str, dict[str, Any]]:
    """Version and configuration of a .keras archive, after a look at everything in it."""
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
            _check_weights(path, file)
    version = metadata.get("keras_version")
    version = version if isinstance(version, str) else ""
    return version, _loadable(config)


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuses archives that are made to fill the disk, to leave the folder, or to confuse."""
    seen: set[str] = set()
    total = 0
    for info in archive.infolist():
        name, size, packed = info.filename, info.file_size, max(info.compress_size, 1)
        parts = re.split(r"[/\\]", name)
        total += size
        if not parts[0] or ".." in parts or ":" in parts[0] or stat.S_ISLNK(info.external_attr >> 16):
            raise _refusal(path, f"has a member that leads out of the archive: {_shown(name)}")
        if name in seen:
            raise _refusal(path, f"has two members called {_shown(name)}")
        if info.flag_bits & 1:
            raise _refusal(path, f"is encrypted ({_shown(name)})")
        if name.lower().endswith((".pkl", ".pickle", ".joblib")) and CONFIG in archive.namelist():
            raise _refusal(path, f"has a Python pickle in it ({_shown(name)}), which can run code when it is opened")
        if name in (CONFIG, METADATA) and (size > MAX_CONFIG_BYTES or size > max(2**20, 200 * packed)):
            raise _refusal(path, f"its {name} would unpack from {packed:,} to {size:,} bytes")
        if total > MAX_WEIGHTS_BYTES or size > max(2**28, 100 * packed):
            raise _refusal(path, f"its {_shown(name)} would unpack from {packed:,} to {size:,} bytes")
        seen.add(name)


def _read_h5(path: Path) -> tuple[str, dict[str, Any]]:
    """Version and configuration of a whole-model HDF5 file."""
    import h5py

    with h5py.File(path, "r") as file:
        if "model_config" not in file.attrs:
            weights = "layer_names" in file.attrs or "layers" in file or "_layer_checkpoint_dependencies" in file
            raise _refusal(
                path,
                "has weights only, no architecture" if weights else "has no model_config: it is no Keras model",
                "build the model in code, load these weights into it, then model.save('model.keras')",
            )
        _check_weights(path, file)
        text = file.attrs["model_config"]
        version = file.attrs.get("keras_version", "")
    if not isinstance(text, str | bytes):
        raise _refusal(path, "its model_config is not text")
    version = version.decode() if isinstance(version, bytes) else version
    return version if isinstance(version, str) else "", _parsed(path, "model_config", text)


def _check_weights(path: Path, file: Any) -> None:
    """Refuses links and data that lie outside the file, and sizes that nobody stored."""
    import h5py

    total = 0

    def link(name: str, found: object) -> str | None:
        return None if isinstance(found, h5py.HardLink) else f"has a link in place of weights: {_shown(name)}"

    def item(name: str, found: Any) -> str | None:
        nonlocal total
        if not isinstance(found, h5py.Dataset):
            return None
        if found.external or found.is_virtual:
            return f"has weights that are in another file: {_shown(name)}"
        size, stored = found.nbytes or 0, found.id.get_storage_size()
        total += size
        if total > MAX_WEIGHTS_BYTES or size > max(2**28, 100 * stored):
            return f"its weights {_shown(name)} would unpack from {stored:,} to {size:,} bytes"
        return None

    if problem := file.visititems_links(link) or file.visititems(item):
        raise _refusal(path, problem)


def _parsed(path: Path, name: str, text: str | bytes) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise _refusal(path, f"its {name} is larger than {MAX_CONFIG_BYTES:,} bytes")
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise _refusal(path, f"its {name} is not JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise _refusal(path, f"its {name} is not a JSON object")
    return value


def _loadable(value: Any) -> Any:
    """A configuration without what compiled it, and with the module names of today."""
    if isinstance(value, list):
        return [_loadable(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _loadable(item) for key, item in value.items() if key != "compile_config"}
    if "class_name" in kept and isinstance(module := kept.get("module"), str):
        for old, new in _MOVED:
            if module == old or module.startswith(old.rstrip(".") + "."):
                kept["module"] = module = new + module[len(old) :]
    return kept


def _judged(path: Path, container: Literal["keras", "h5"], version: str, config: dict[str, Any]) -> Scan:
    """Walks the whole configuration; a loop, so that no depth can exhaust the stack."""
    if not isinstance(config.get("class_name"), str) or "config" not in config:
        raise _refusal(path, "its configuration does not describe a model (no class_name and config)")
    untrusted: list[str] = []
    unsupported: list[str] = []
    stack: list[tuple[Any, str, str, int]] = [(config, "", "", 0)]
    while stack:
        value, key, owner, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise _refusal(path, f"its configuration is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            untrusted += _judge_text(key, value, owner)
        elif isinstance(value, list):
            stack += [(item, "", owner, depth + 1) for item in reversed(value)]
        elif isinstance(value, dict):
            inner = value.get("config")
            name = inner.get("name") if isinstance(inner, dict) else None
            owner = f" {_shown(name)}" if isinstance(name, str) else owner
            if "class_name" in value:
                untrusted += _judge(value, owner)
                if str(value["class_name"]) in keras2.REFUSED:
                    unsupported.append(f"{value['class_name']}{owner}")
            stack += [(item, name, owner, depth + 1) for name, item in reversed(value.items())]
    return Scan(container, version, config, tuple(dict.fromkeys(untrusted)), tuple(dict.fromkeys(unsupported)))


def _judge(entry: dict[str, Any], owner: str) -> list[str]:
    """What one serialized object would run: nothing if it is a known one of Keras."""
    name, module, registered = entry["class_name"], entry.get("module"), entry.get("registered_name")
    ours = module is None or (isinstance(module, str) and _OURS.match(module) is not None)
    if not isinstance(name, str):
        return [f"an object of class {_shown(name)}"]
    if name in RUNS:
        return [f"{name}{owner} {RUNS[name]}"]
    if name == "function":
        name, known = entry.get("config"), keras2.ACTIVATIONS
        if isinstance(name, str) and name in known and ours and registered in (None, name, "function"):
            return []
        return [f"function {_shown(name)} of module {_shown(module)} in{owner or ' the model'}"]
    operation = isinstance(module, str) and _OPERATIONS.match(module)
    if ours and registered in (None, name) and (name in keras2.KNOWN or operation):
        return []
    shown = registered if isinstance(registered, str) else name
    return [f"custom object{owner} of class {_shown(shown)}" + (f" from {_shown(module)}" if module else "")]


def _judge_text(key: str, value: str, owner: str) -> list[str]:
    """What a plain string would run or read, where Keras takes it for a name."""
    if key == "activation" or key.endswith("_activation"):
        return (
            []
            if value in keras2.ACTIVATIONS | keras2.KNOWN
            else [f"function {_shown(value)} in{owner or ' the model'}"]
        )
    if key.endswith(("_initializer", "_regularizer", "_constraint")) and ">" in value:
        return [f"custom object {_shown(value)} in{owner or ' the model'}"]
    return [f"layer{owner} reads the file {_shown(value)}"] if key == "vocabulary" else []


def _prepared(path: Path, found: Scan, folder: Path) -> str:
    """The file as the libraries want it: a suffix that fits, and the configuration that was scanned."""
    if found.format == "h5":
        if path.suffix in (".h5", ".hdf5"):
            return str(path.absolute())
        os.symlink(path.absolute(), folder / "model.h5")
        return str(folder / "model.h5")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / "model.keras", "w") as target:
        target.writestr(CONFIG, json.dumps(found.config))
        target.writestr(METADATA, json.dumps({"keras_version": found.keras_version}))
        for name in source.namelist():
            if name == WEIGHTS or (name.startswith("assets/") and not name.endswith("/")):
                with source.open(name) as given, target.open(name, "w", force_zip64=True) as copy:
                    shutil.copyfileobj(given, copy)
    return str(folder / "model.keras")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the libraries log and warn to themselves, and nothing of it afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorflow.keras()  # first: absl must make its own logger
        loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
        levels = [logger.level for logger in loggers]
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _explained(path: Path, found: Scan) -> Iterator[None]:
    """Turns whatever the libraries raise about a file into one message."""
    import tensorflow as tf

    own = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError)
    try:
        yield
    except (*own, *READ_ERRORS, tf.errors.OpError) as error:
        version = f"Keras {found.keras_version}" if found.keras_version else "an unknown version of Keras"
        what = f"cannot be loaded (written by {version}): {type(error).__name__}: {_first_line(error)}"
        custom = "custom classes are not in the file: register them first, or " if found.untrusted else ""
        raise ModelError(what, where=str(path), todo=custom + RESAVE) from error
