"""Model files of every format that is read: what one is, and the Keras model that it becomes."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers import KERAS_SUFFIXES, SUFFIXES
from compress.importers.common import difference
from compress.importers.common.difference import Parity
from compress.importers.common.unsupported import Refused, carrying
from compress.importers.common.verification import TOLERANCE
from compress.importers.keras import keras_file
from compress.importers.onnx import onnx_file
from compress.importers.onnx.onnx_inputs import Shapes
from compress.importers.saved_model import conversion, saved_model_folder
from compress.importers.saved_model import keras_model as saved_keras
from compress.importers.tflite import tflite_file
from compress.ir import tensorflow
from compress.tflite import comparison

if TYPE_CHECKING:
    import keras

FORMATS = f"{', '.join(SUFFIXES)}, or a SavedModel folder"
Becomes = Literal["keras", "float tflite", "tflite"]
Samples = NDArray[np.float32] | None
USES = ("check", "legalize", "estimate", "compile", "package", "measure")
"""What can be done with a quantized .tflite file: commands, and stages of a pipeline."""
RUNS = 4
"""Random inputs that a .tflite file is compared on."""


@dataclass(frozen=True)
class Found:
    """What a model file is; nothing of it was run.

    Attributes:
        path: the file, or the folder.
        format: in words.
        producer: the program that wrote it and its version, where it says so.
        becomes: what the pipeline can make of it: a Keras model, which is trained and pruned like any other; a float
            .tflite file, which can be quantized; a quantized one, which can be checked, compiled, packaged, measured.
        content: as the reader of its format has it.
        refused: what cannot become layers of Keras.
        untrusted: what loading would run, import, or read from elsewhere.
        notes: what is not as it was in the file, in words.
        signature: of a SavedModel, the one that is meant.
    """

    path: Path
    format: str
    producer: str
    becomes: Becomes
    content: Any
    refused: tuple[Refused, ...] = ()
    untrusted: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()
    signature: str | None = None


@dataclass(frozen=True)
class Imported:
    """A file as a Keras model.

    Attributes:
        model: in Keras 3, not compiled.
        parity: against the runtime that the file was made for; None where Keras itself has loaded it.
    """

    model: keras.Model
    parity: Parity | None


def read(path: Path, signature: str | None = None, shapes: Shapes | None = None) -> Found:
    """Finds out what a file is, without TensorFlow and without running anything.

    Args:
        path: the file, or the folder of a SavedModel.
        signature: of a SavedModel, the one to take where there are several.
        shapes: of an .onnx file that leaves sides of its inputs open, by input what they are.

    Raises:
        ModelError: there is none, it is of no format that is read, damaged, or made to do harm.
    """
    suffix = path.suffix.lower()
    if shapes and (suffix != ".onnx" or path.is_dir()):
        raise ModelError("its inputs are given no shapes", where=str(path), allowed="those of an .onnx file")
    if path.is_dir():
        return _saved_model(path, signature)
    if not path.is_file():
        raise ModelError(f"there is no file {path}", todo="check the path")
    if suffix not in READERS:
        raise ModelError(f"{path.name} is of no format that is read", allowed=FORMATS)
    if signature is not None:
        raise ModelError("has no signatures", where=str(path), allowed="a SavedModel folder")
    return READERS[suffix](path) if not shapes else _onnx(path, shapes)


def load(found: Found, *, trust: bool = False, samples: Samples = None) -> Imported:
    """The Keras model that a file becomes, compared with the runtime that it was made for.

    Args:
        found: what `read` found.
        trust: whether code that came with it may run.
        samples: real samples [n, ...] that both are run on, beside random ones.

    Raises:
        UntrustedError: it would run code, and `trust` is not given.
        ModelError: it is quantized, something in it has no counterpart, or it answers differently.
    """
    content = found.content
    if isinstance(content, keras_file.Scan):
        return Imported(*keras_file.compared(found.path, content, trust=trust, samples=samples))
    if isinstance(content, tflite_file.File):
        return _from_tflite(found, content, samples)
    if isinstance(content, onnx_file.File):
        if content.problems:
            raise without_layers(found)
        return Imported(*onnx_file.compared(content, samples))
    if content.config is not None:
        return Imported(*saved_keras.load(content, trust=trust, samples=samples))
    made = conversion.convert(content, found.signature)
    return _from_graph(found, made)


def _keras(path: Path) -> Found:
    scan = keras_file.scan(path)
    kind = "Keras HDF5 file" if scan.format == "h5" else "Keras archive"
    producer = f"Keras {scan.keras_version}" if scan.keras_version else ""
    return Found(path, kind, producer, "keras", scan, scan.unsupported, scan.untrusted)


def _tflite(path: Path) -> Found:
    file = tflite_file.read(path)
    if file.imported is None:
        return Found(path, "TFLite file, quantized", "", "tflite", file)
    becomes: Becomes = "float tflite" if file.problems else "keras"
    return Found(path, "TFLite file, float", "", becomes, file, file.problems, (), file.notes)


def _onnx(path: Path, shapes: Shapes = MappingProxyType({})) -> Found:
    file = onnx_file.read(path, shapes)
    kind = f"ONNX file, opset {file.graph.opset}" if file.graph.opset else "ONNX file"
    return Found(path, kind, file.graph.producer, "keras", file, file.problems, (), file.notes)


def _saved_model(path: Path, signature: str | None) -> Found:
    content = saved_model_folder.read(path)
    producer = f"TensorFlow {content.version}" if content.version else ""
    found = content.judged
    if content.config is not None and signature is None and (not found.unsupported or content.refused):
        producer = f"Keras {content.keras_version}, {producer}".removesuffix(", ")
        kind = "SavedModel with a Keras model"
        return Found(path, kind, producer, "keras", content, found.unsupported, found.untrusted)
    content = replace(content, config=None)
    note = (
        "only its graph is taken, as it holds no Keras model that can be rebuilt: in a pipeline it becomes a float "
        ".tflite file, which is quantized without training"
    )
    chosen = None if content.refused else conversion.choose_signature(content, signature).name
    others = sorted({each.name for each in content.signatures} - {chosen, signature})
    told = (f"its signature {chosen} is taken, and not {', '.join(others)}",) if others and not signature else ()
    kind = "SavedModel with a graph"
    return Found(path, kind, producer, "float tflite", content, content.refused, (), (note, *told), chosen)


READERS: Mapping[str, Callable[[Path], Found]] = {
    **dict.fromkeys(KERAS_SUFFIXES, _keras),
    ".onnx": _onnx,
    ".tflite": _tflite,
}
"""By suffix who reads a file."""


def _from_tflite(found: Found, file: tflite_file.File, samples: Samples) -> Imported:
    if file.plain is None:
        todo = (
            "take a float model to train or prune; this one can be checked, legalized, compiled, packaged and measured"
        )
        raise ModelError("is quantized already: it becomes no Keras model", where=str(found.path), todo=todo)
    if file.problems:
        raise without_layers(found)
    tensorflow.keras()  # before TensorFlow itself is imported: it reads settings then
    model, _ = tflite_file.load(file, samples)
    runner, graph = comparison.Runner(file.plain.graph), file.plain.graph
    shapes = [graph.tensors[index].shape for index in graph.inputs]
    feeds = _feeds(shapes)
    if samples is not None and len(shapes) == 1 and shapes[0] == (1, *samples.shape[1:]):
        feeds += [[sample[None]] for sample in samples]
    pairs = [pair for feed in feeds for pair in zip(runner.run(feed), _answers(model, feed), strict=True)]
    return Imported(model, difference.compared(pairs, version("ai-edge-litert"), len(feeds) * file.batch))


def without_layers(found: Found) -> ModelError:
    """The error that lists every operator that cannot become a layer of Keras."""
    count = f"{len(found.refused)} operator{'s' if len(found.refused) > 1 else ''}"
    what = f"{count} cannot become layers of Keras: {'; '.join(map(str, found.refused))}"
    return carrying(ModelError(what, where=str(found.path)), found.refused)


def _from_graph(found: Found, made: conversion.Converted) -> Imported:
    """A converted graph as a Keras model, compared with what TensorFlow has answered."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(made.tflite)
        inner = _tflite(path)
        imported = _from_tflite(replace(inner, path=found.path), inner.content, None)
    pairs = [
        (wanted, given)
        for feed, outputs in zip(made.inputs, made.outputs, strict=True)
        for wanted, given in zip(outputs, _answers(imported.model, feed), strict=True)
    ]
    parity = difference.compared(pairs, made.runtime, len(made.inputs))
    if not parity.max_rel <= TOLERANCE:
        what = f"rebuilt in Keras it answers differently, by {parity.max_rel:.2g} of the largest output"
        raise ModelError(what, where=str(found.path), allowed=f"{TOLERANCE:g}")
    return Imported(imported.model, parity)


def compared(model: keras.Model, other: keras.Model) -> Parity:
    """How far the answers of two models of Keras 3 are apart, on random inputs."""
    feeds = _feeds([(1, *(32 if side is None else side for side in each.shape[1:])) for each in model.inputs], model)
    pairs = [pair for feed in feeds for pair in zip(_answers(model, feed), _answers(other, feed), strict=True)]
    return difference.compared(pairs, version("keras"), len(feeds))


def _feeds(shapes: list[tuple[int, ...]], model: Any = None) -> list[list[NDArray[Any]]]:
    """Random inputs: normal numbers, and small whole ones where a model asks for such."""
    random = np.random.default_rng(1)
    dtypes = [each.dtype for each in model.inputs] if model else ["float32"] * len(shapes)
    return [
        [
            random.standard_normal(shape).astype(np.float32) if "float" in kind else random.integers(0, 2, shape, kind)
            for shape, kind in zip(shapes, dtypes, strict=True)
        ]
        for _ in range(RUNS)
    ]


def _answers(model: Any, feed: list[NDArray[Any]]) -> list[Any]:
    """Each output of a Keras model, which remembers nothing of earlier runs."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            layer.reset_state()
    made = model(feed if len(feed) > 1 else feed[0], training=False)
    return [np.asarray(each) for each in tensorflow.keras().tree.flatten(made)]


def version(name: str) -> str:
    """A distribution and its version, as a runtime is named."""
    return f"{name} {importlib.metadata.version(name)}"
