"""Model files of every supported format: detection, reading, and import as a Keras model.

`read` inspects a file without TensorFlow and without running anything of it; `load` builds the Keras model.
The importers of a format are imported when a file of that format is read: most commands need one format or none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers import KERAS_SUFFIXES, SUFFIXES

if TYPE_CHECKING:
    import keras

    from compress.model.importers.common.unsupported import Refused
    from compress.model.importers.common.verification import Parity
    from compress.model.importers.onnx.onnx_inputs import Shapes
    from compress.model.importers.saved_model.conversion import Converted
    from compress.model.importers.saved_model.saved_model_folder import Content
    from compress.model.importers.tflite.tflite_file import Rounding

FORMATS = f"{', '.join(SUFFIXES)}, or a SavedModel folder"
Kind = Literal["keras", "onnx", "tflite", "saved_model"]
KINDS: Mapping[str, Kind] = {**dict.fromkeys(KERAS_SUFFIXES, "keras"), ".onnx": "onnx", ".tflite": "tflite"}
"""Format by suffix."""
Becomes = Literal["keras", "float tflite", "tflite"]
Samples = NDArray[np.float32] | None
USES = ("check", "legalize", "estimate", "compile", "package", "measure")
"""Commands and pipeline stages that take a quantized .tflite file."""
NO_SHAPES: Shapes = MappingProxyType({})


@dataclass(frozen=True)
class ModelFile:
    """A model file that was read; nothing of it was run.

    Attributes:
        producer: program that wrote it, with its version; empty if it is not stored.
        becomes: artifact that the pipeline makes of it: a Keras model, which can be trained and pruned; a float .tflite
            file, which can be quantized; a quantized one, which can be checked, compiled, packaged and measured.
        content: content as the reader of its format returns it.
        refused: operators and layers that cannot become layers of Keras.
        untrusted: code and files that loading would run, import or read.
        notes: differences between the file and the imported model.
        operators: number of operators of a graph; None for a Keras file.
    """

    path: Path
    kind: Kind
    format: str
    producer: str
    becomes: Becomes
    content: Any
    refused: tuple[Refused, ...] = ()
    untrusted: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()
    signature: str | None = None
    operators: int | None = None


@dataclass(frozen=True)
class ImportedModel:
    """A file as a Keras model.

    Attributes:
        model: Keras 3 model, not compiled.
        parity: comparison with the runtime of the file's format; None if Keras itself loaded the file.
        file_is_float_tflite: whether the file can serve as the float .tflite file of the model: it has batch 1, and
            nothing was taken off.
        detection: the thresholds of a TFLite_Detection_PostProcess that was taken off, as keys of a specification.
        rounding: comparison of a quantized file with its float form, operator by operator; None for other files.
            `parity` is then the comparison with the float form.
    """

    model: keras.Model
    parity: Parity | None
    file_is_float_tflite: bool = False
    detection: Mapping[str, Any] = field(default_factory=dict)
    rounding: Rounding | None = None


def detect(path: Path, signature: str | None = None, shapes: Shapes | None = None) -> Kind:
    """Return the format of a file by its suffix, without reading it; a folder is a SavedModel.

    Only a SavedModel may have a `signature` to take, and only an .onnx file `shapes` of inputs with open dimensions.

    Raises:
        ModelError: the file does not exist, its format is not supported, or an option does not belong to its format.
    """
    if not path.is_dir() and not path.is_file():
        raise ModelError(f"the file {path} does not exist", hint="check the path")
    suffix = path.suffix.lower()
    if not path.is_dir() and suffix not in KINDS:
        raise ModelError(f"{path.name} has an unsupported format", allowed=FORMATS)
    kind: Kind = "saved_model" if path.is_dir() else KINDS[suffix]
    if shapes and kind != "onnx":
        raise ModelError(
            "'shape' cannot be used with this format", where=str(path), allowed="'shape' with an .onnx file"
        )
    if signature is not None and kind != "saved_model":
        raise ModelError("has no signatures", where=str(path), allowed="a SavedModel folder")
    return kind


def read(path: Path, signature: str | None = None, shapes: Shapes | None = None) -> ModelFile:
    """Read a file, without TensorFlow and without running anything of it.

    Only an .onnx file may run, in a child process, which finds out whether the first dimension is a batch, or which
    sizes the model accepts. The arguments are those of `detect`.

    Raises:
        ModelError: the file is missing, damaged, malicious, or of an unsupported format.
    """
    kind = detect(path, signature, shapes)
    if kind == "saved_model":
        return _read_saved_model(path, signature)
    if kind == "onnx":
        return _read_onnx(path, shapes or NO_SHAPES)
    return _read_keras(path) if kind == "keras" else _read_tflite(path)


def load(file: ModelFile, *, trust: bool = False, samples: Samples = None) -> ImportedModel:
    """Import a file as a Keras model, and compare it with the runtime of the file's format.

    A quantized .tflite file becomes a float model with the real values of its weights. Real `samples` [n, ...] are
    compared in addition to random ones.

    Raises:
        UntrustedError: loading would run code, and `trust` is not set.
        ModelError: the file has an unsupported operator, or the outputs differ.
    """
    return LOADERS[file.kind](file, trust, samples)


def in_float(file: ModelFile) -> ModelFile:
    """Return a quantized .tflite file as one that becomes a float Keras model; other files stay as they are.

    Raises:
        ModelError: a constant or its scales are invalid.
    """
    if file.becomes != "tflite":
        return file
    from compress.model.importers.tflite import tflite_file

    content = tflite_file.in_float(file.content)
    operators = len(content.graph.operators)
    return replace(
        file, becomes="keras", content=content, refused=content.problems, notes=content.notes, operators=operators
    )


def to_float_tflite(file: ModelFile) -> Converted:
    """Convert a SavedModel with a graph to a float .tflite file.

    Raises:
        ModelError: the graph has operators that are not run, or TensorFlow cannot convert the graph.
    """
    from compress.model.importers.saved_model import conversion

    return conversion.convert(file.content, file.signature)


def check_runnable(file: ModelFile) -> None:
    """Check that the graph of a SavedModel may run; the ModelError lists all operators that may not."""
    from compress.model.importers.saved_model import conversion

    if file.refused:
        raise conversion.refused_operators(file.content)


def _read_keras(path: Path) -> ModelFile:
    from compress.model.importers.keras import keras_file

    keras_file.check_readable(path)
    scan = keras_file.scan(path)
    description = "Keras HDF5 file" if scan.format == "h5" else "Keras archive"
    producer = f"Keras {scan.keras_version}" if scan.keras_version else ""
    notes = _state_notes(scan.stateful)
    return ModelFile(path, "keras", description, producer, "keras", scan, scan.unsupported, scan.untrusted, notes)


def _state_notes(stateful: Sequence[str]) -> tuple[str, ...]:
    if not stateful:
        return ()
    layers = ", ".join(map(repr, stateful))
    return (
        f"the layers {layers} keep their state between calls (stateful): the states become inputs and outputs of the "
        "model, to be fed back after each call",
    )


def _read_tflite(path: Path) -> ModelFile:
    from compress.model.importers.tflite import tflite_file

    file = tflite_file.read(path)
    if file.imported is None:
        return ModelFile(path, "tflite", "TFLite file, quantized", "", "tflite", file)
    return ModelFile(
        path,
        "tflite",
        "TFLite file, float",
        "",
        "float tflite" if file.problems else "keras",
        file,
        refused=file.problems,
        notes=file.notes,
        operators=len(file.graph.operators),
    )


def _read_onnx(path: Path, shapes: Shapes) -> ModelFile:
    from compress.model.importers.onnx import onnx_file

    file = onnx_file.read(path, shapes)
    return ModelFile(
        path,
        "onnx",
        f"ONNX file, opset {file.graph.opset}" if file.graph.opset else "ONNX file",
        file.graph.producer,
        "keras",
        file,
        refused=file.problems,
        notes=file.notes,
        operators=len(file.graph.nodes),
    )


def _read_saved_model(path: Path, signature: str | None) -> ModelFile:
    from compress.model.importers.keras.keras_config import stateful_layers
    from compress.model.importers.saved_model import saved_model_folder

    content = saved_model_folder.read(path)
    lacks_code = any(refusal.lacks_code for refusal in content.judged.untrusted)
    cannot_rebuild = bool(content.judged.unsupported) or lacks_code
    if content.config is None or signature is not None or (cannot_rebuild and not content.refused):
        return _graph_of(content, signature)
    producers = [f"Keras {content.keras_version}"]
    if content.version:
        producers.append(f"TensorFlow {content.version}")
    return ModelFile(
        path,
        "saved_model",
        "SavedModel with a Keras model",
        ", ".join(producers),
        "keras",
        content,
        content.judged.unsupported,
        content.judged.untrusted,
        _state_notes(stateful_layers(content.config)),
    )


def _graph_of(content: Content, signature: str | None) -> ModelFile:
    """Return a SavedModel whose graph is taken, not its Keras model."""
    from compress.model.importers.saved_model import conversion

    notes = [
        "only its graph is taken, as it holds no Keras model that can be rebuilt: in a pipeline it becomes a float "
        ".tflite file, which is quantized without training"
    ]
    chosen = None if content.refused else conversion.choose_signature(content, signature).name
    others = sorted({candidate.name for candidate in content.signatures} - {chosen, signature})
    if others and not signature:
        notes.append(f"its signature {chosen} is taken, and not {', '.join(others)}")
    return ModelFile(
        content.path,
        "saved_model",
        "SavedModel with a graph",
        f"TensorFlow {content.version}" if content.version else "",
        "float tflite",
        replace(content, config=None),
        refused=content.refused,
        notes=tuple(notes),
        signature=chosen,
    )


def _load_keras(file: ModelFile, trust: bool, samples: Samples) -> ImportedModel:
    from compress.model.importers.keras import keras_file

    return _of_any_batch(*keras_file.load_scanned(file.path, file.content, trust=trust, samples=samples), file.path)


def _of_any_batch(model: keras.Model, parity: Parity | None, path: Path) -> ImportedModel:
    from compress.model.importers.common import batches, guarded_calls

    with guarded_calls.located(path):
        return ImportedModel(batches.of_any_batch(model), parity)


def _load_onnx(file: ModelFile, trust: bool, samples: Samples) -> ImportedModel:
    from compress.model.importers.onnx import onnx_file

    return ImportedModel(*onnx_file.load(file.content, samples))


def _load_tflite(model_file: ModelFile, trust: bool, samples: Samples) -> ImportedModel:
    from compress.model.importers.tflite import tflite_file

    file = tflite_file.in_float(model_file.content)
    model, parity = tflite_file.load(file, samples)
    taken = file.postprocess
    thresholds = {} if taken is None else taken.thresholds
    if file.dequantized is not None:
        rounding = tflite_file.rounding(file, samples)
        return ImportedModel(model, parity, detection=thresholds, rounding=rounding)
    is_same = file.batch == 1 and taken is None and not file.has_cast_input
    return ImportedModel(model, parity, is_same, thresholds)


def _load_saved_model(model_file: ModelFile, trust: bool, samples: Samples) -> ImportedModel:
    from compress.model.importers.common import verification
    from compress.model.importers.saved_model import keras_model

    if model_file.content.config is not None:
        model, parity = keras_model.load(model_file.content, trust=trust, samples=samples)
        return _of_any_batch(model, parity, model_file.path)
    converted = to_float_tflite(model_file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(converted.tflite)
        file = replace(_read_tflite(path), path=model_file.path)
        model = _load_tflite(file, trust, None).model
    parity, agrees = converted.compared([verification.run_model(model, inputs) for inputs in converted.inputs])
    if not agrees:
        raise verification.too_different(parity, str(model_file.path))
    return ImportedModel(model, parity)


LOADERS: Mapping[Kind, Callable[[ModelFile, bool, Samples], ImportedModel]] = {
    "keras": _load_keras,
    "onnx": _load_onnx,
    "tflite": _load_tflite,
    "saved_model": _load_saved_model,
}
