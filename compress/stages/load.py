"""The first stage of every pipeline, `model:` in the file: loads a model, or builds an untrained one.

Importers are imported late: together they take as long as everything else that reads a pipeline file.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import PositiveInt, model_validator

from compress.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.errors import ModelError
from compress.files import file_digest
from compress.importers import KERAS_SUFFIXES
from compress.importers import builder as builders
from compress.settings import Settings
from compress.stage import Context, Need, Stage
from deploy.contract.detection import Detector

if TYPE_CHECKING:
    from compress.importers.onnx.onnx_inputs import Shapes

SAMPLES = 8
"""Real ones that a rebuilt model is compared on."""


class _Load(Stage):
    """What the ways to a model have in common: a file whose content is part of the key."""

    consumes: ClassVar[frozenset[Kind]] = frozenset()
    name: ClassVar[str] = "load"

    path: Path
    """The file."""
    detector: dict[str, Any] | None = None
    """How its outputs are read, if it finds objects; a builder may say it itself."""

    def identity(self) -> dict[str, Any]:
        """The file's content instead of its path."""
        try:
            digest = content_digest(self.path)
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", where=str(self.path), todo="check model") from error
        return {
            **self.model_dump(mode="json", exclude={"id", "path", "problems", "detector"}),
            **({"detector": self.detector} if self.detector else {}),
            "sha256": digest,
            "way": type(self).__name__,
        }

    def fitted(self, model: Any, context: Context) -> Facts:
        """What is to be said of how model and data fit together: of a detector, how its outputs are read.

        Raises:
            ModelError: they do not.
        """
        from compress.training import detection, loop

        if context.data.task == "classification":
            loop.head_of(model, context.data)
            return {}
        return {"detector": detection.head_of(model, context.data, self.detector).detector.specification}

    def told(self) -> Facts:
        """The same for a file that is taken as it is: what the user says."""
        return {"detector": Detector(self.detector).specification} if self.detector else {}


def content_digest(path: Path) -> str:
    """Of what a file, or a SavedModel folder, holds."""
    if not path.is_dir():
        return file_digest(path)
    from compress.importers.saved_model import saved_model_folder

    return saved_model_folder.digest(path)


class Build(_Load):
    """Builds an untrained model with a builder from models/, or one of the user's own."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    function: str
    """The function in the file."""

    def run(self, given: Artifact, context: Context) -> Facts:
        """Runs the builder for the data's shape and classes."""
        from compress.importers.keras import keras_file
        from compress.ir.tensorflow import keras
        from compress.stages import working_model

        keras(context.seed)
        shape = context.data.input_shape
        model = builders.build(self.path, self.function, shape, len(context.data.class_names))
        own = self.detector
        if own is None and context.data.task == "detection":
            own = builders.detector(self.path, shape)
        fitted = self.model_copy(update={"detector": own}).fitted(model, context)
        working_model.write_keras(model, context.folder)
        # Every later stage reads the model from its file: what cannot be, is told here.
        keras_file.load(context.folder / MODEL_KERAS, trust=context.trust)
        return {"file": self.path.name, "parameters": model.count_params(), **fitted}


class LoadKeras(_Load):
    """Loads a Keras file, or the Keras model of a SavedModel folder."""

    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras")

    def run(self, given: Artifact, context: Context) -> Facts:
        """Loads, checks that model and data fit together, and writes the working model."""
        from compress.importers import model_file
        from compress.stages import working_model

        samples = context.data.inputs("train")[:SAMPLES]
        imported = model_file.load(model_file.read(self.path), trust=context.trust, samples=samples)
        fitted = self.fitted(imported.model, context)
        working_model.write(imported.model, context.folder)
        facts: Facts = {"file": self.path.name, "parameters": imported.model.count_params(), **fitted}
        return facts | ({"parity": asdict(imported.parity)} if imported.parity else {})


class ImportTflite(_Load):
    """Rebuilds a float .tflite file with Keras layers, so that every stage can work on it."""

    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")

    def run(self, given: Artifact, context: Context) -> Facts:
        """Rebuilds it, compares it with the file on random and on real samples, and keeps the file beside it."""
        from compress.importers.tflite import tflite_file
        from compress.stages import working_model

        file = tflite_file.read(self.path)
        model, apart = tflite_file.load(file, context.data.inputs("train")[:SAMPLES])
        fitted = self.fitted(model, context)
        if file.batch == 1:  # the original that everything is compared with is the file itself
            working_model.write_keras(model, context.folder)
            shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        else:
            working_model.write(model, context.folder)
        for note in file.notes:
            context.progress.note(f"{self.path.name}: {note}")
        facts: Facts = {"file": self.path.name, "parameters": model.count_params(), "notes": list(file.notes), **fitted}
        return facts | {"operators": len(file.graph.operators), "largest_difference": apart}


class ImportOnnx(_Load):
    """Rebuilds an .onnx file with Keras layers, so that every stage can work on it."""

    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "onnx", "onnxruntime", "ai-edge-litert")

    shapes: dict[str, list[int]] = {}
    """By input its sides, where the file leaves some open."""

    def identity(self) -> dict[str, Any]:
        """The shapes only where there are some."""
        return {name: value for name, value in super().identity().items() if name != "shapes" or value}

    def run(self, given: Artifact, context: Context) -> Facts:
        """Rebuilds it, and compares it with onnxruntime on random and on real samples."""
        from compress.importers.onnx import onnx_file
        from compress.stages import working_model

        file = onnx_file.read(self.path, self.shapes)
        model, parity = onnx_file.compared(file, context.data.inputs("train")[:SAMPLES])
        fitted = self.fitted(model, context)
        working_model.write(model, context.folder)
        for note in file.notes:
            context.progress.note(f"{self.path.name}: {note}")
        facts: Facts = {"file": self.path.name, "parameters": model.count_params(), "notes": list(file.notes), **fitted}
        return facts | {"operators": len(file.graph.nodes), "parity": asdict(parity)}


class LoadFloatTflite(_Load):
    """Takes a float .tflite file that Keras has no layers for, as it is: only `quantize` can work on it."""

    produces: ClassVar[Kind] = Kind.FLOAT_TFLITE

    problems: tuple[str, ...] = ()
    """The operators that there are no layers for, and why."""

    def because(self) -> str:
        """The operators that are in the way."""
        count = f"{len(self.problems)} operator{'s' if len(self.problems) > 1 else ''}"
        listed = "; ".join(self.problems)
        return f"{self.path.name} can only be quantized as it is, since {count} cannot become layers of Keras: {listed}"

    def run(self, given: Artifact, context: Context) -> Facts:
        """Copies the file, and says why it is not more."""
        context.progress.note(self.because())
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name, "not_imported": list(self.problems), **self.told()}


class ConvertSavedModel(LoadFloatTflite):
    """Converts a SavedModel folder without a Keras model to a float .tflite file, which only `quantize` can work on."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow",)

    signature: str
    """The one of its signatures that is taken."""

    def because(self) -> str:
        """Why there is nothing to train."""
        return (
            f"{self.path.name} holds no Keras model, only a graph, so it can only be quantized as it is; "
            f"`python -m compress import {self.path.name} -o model.keras` tells whether layers can be made of it"
        )

    def run(self, given: Artifact, context: Context) -> Facts:
        """Converts, and says what it is."""
        from compress.importers.saved_model import conversion, saved_model_folder

        context.progress.note(self.because())
        made = conversion.convert(saved_model_folder.read(self.path), self.signature)
        (context.folder / MODEL_TFLITE).write_bytes(made.tflite)
        return {"file": self.path.name, "signature": self.signature, "converted_by": made.runtime}


class LoadTflite(_Load):
    """Takes a quantized .tflite file as it is."""

    produces: ClassVar[Kind] = Kind.TFLITE

    def because(self) -> str:
        """What such a file is."""
        return f"{self.path.name} is quantized already"

    def run(self, given: Artifact, context: Context) -> Facts:
        """Copies the file."""
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name, **self.told()}


def stage_for(file: Path, signature: str | None = None, shapes: Shapes | None = None) -> Stage:
    """The stage that loads a model file or folder, by what it is.

    Args:
        file: the file, or the folder.
        signature: of a SavedModel, the one to take where there are several.
        shapes: of an .onnx file that leaves sides of its inputs open, by input what they are.

    Raises:
        ModelError: no such file, a format that is not read, or a damaged file.
    """
    if file.suffix.lower() in KERAS_SUFFIXES and file.is_file() and not shapes:
        return LoadKeras(path=file)  # it is read when it is loaded: h5py takes its time to import
    if file.suffix.lower() == ".onnx" and file.is_file():
        return ImportOnnx(path=file, shapes={name: list(sides) for name, sides in (shapes or {}).items()})  # likewise
    from compress.importers import model_file
    from compress.importers.saved_model import conversion, saved_model_folder

    found = model_file.read(file, signature, shapes)
    if found.becomes == "tflite":
        return LoadTflite(path=file)
    if isinstance(found.content, saved_model_folder.Content):
        if found.becomes == "keras":
            return LoadKeras(path=file)
        if found.refused:
            raise conversion.refused_operators(found.content)
        return ConvertSavedModel(path=file, signature=found.signature or "")
    if found.becomes == "keras":
        return ImportTflite(path=file)
    return LoadFloatTflite(path=file, problems=tuple(map(str, found.refused)))


class Origin(Settings):
    """Where a model comes from: a builder or a file."""

    builder: str | None = None
    """A builder from models/, or one of your own, file.py:function, with trust."""
    file: str | None = None
    """A .keras, .h5, .hdf5, .onnx or .tflite file, or a SavedModel folder, from the pipeline file's folder."""
    signature: str | None = None
    """Which function of a SavedModel folder is taken, where it offers several."""
    shape: dict[str, list[PositiveInt]] | None = None
    """Of an .onnx file that leaves sides of its inputs open: by input what they are, `images: [1, 3, 320, 320]`."""
    detector: dict[str, Any] | None = None
    """For data with boxes: where the model's anchors stand (docs/detection.md); a builder may say it itself."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.builder is None) == (self.file is None):
            raise ValueError("needs either the key 'builder' or the key 'file'")
        if self.signature is not None and self.file is None:
            raise ValueError("'signature' belongs to 'file'")
        if self.shape is not None and self.file is None:
            raise ValueError("'shape' belongs to 'file'")
        if self.detector is not None:
            Detector(self.detector)
        return self

    def beside(self, folder: Path) -> Self:
        """The same origin with its path taken from `folder`."""
        if self.file is not None:
            return self.model_copy(update={"file": str(folder / self.file)})
        own = self.builder is not None and ".py" in self.builder
        return self.model_copy(update={"builder": str(folder / str(self.builder))}) if own else self

    def maker(self, folder: Path, *, trust: bool) -> Stage:
        """The stage that makes the model.

        Args:
            folder: what paths are relative to.
            trust: whether code of the user's own may be run.

        Raises:
            UntrustedError: a builder of one's own without trust.
            ModelError: there is no such file or builder.
        """
        if self.file is not None:
            stage = stage_for(folder / self.file, self.signature, self.shape)
            return stage.model_copy(update={"detector": self.detector})
        path, function = builders.find(self.builder or "", folder, trust=trust)
        return Build(path=path, function=function, detector=self.detector)
