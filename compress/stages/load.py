"""The first stage of every pipeline, `model:` in the file: loads a model, or builds an untrained one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

from compress.errors import ModelError
from compress.importers import builder as builders
from compress.stage import MODEL_KERAS, MODEL_TFLITE, Artifact, Context, Facts, Kind, Need, Stage
from compress.store import file_digest
from compress.tflite import graph

KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
SUFFIXES = (*KERAS_SUFFIXES, ".tflite")


class _Load(Stage):
    """What the three ways to a model have in common: a file whose content is part of the key."""

    consumes: ClassVar[frozenset[Kind]] = frozenset()
    name: ClassVar[str] = "load"

    path: Path
    """The file."""

    def identity(self) -> dict[str, Any]:
        """The file's content instead of its path."""
        try:
            digest = file_digest(self.path)
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", where=str(self.path), todo="check model") from error
        return {**self.model_dump(mode="json", exclude={"id", "path"}), "sha256": digest, "way": type(self).__name__}


class Build(_Load):
    """Builds an untrained model with a builder from models/, or one of the user's own."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    function: str
    """The function in the file."""

    def run(self, given: Artifact, context: Context) -> Facts:
        """Runs the builder for the data's shape and classes."""
        from compress.importers import keras_file
        from compress.training import working_model
        from compress.training.fit import head_of
        from compress.training.tensorflow import keras

        keras(context.seed)
        model = builders.build(self.path, self.function, context.data.input_shape, len(context.data.class_names))
        head_of(model, context.data)
        working_model.write_keras(model, context.folder)
        # Every later stage reads the model from its file: what cannot be, is told here.
        keras_file.load(context.folder / MODEL_KERAS, trust=context.trust)
        return {"file": self.path.name, "parameters": model.count_params()}


class LoadKeras(_Load):
    """Loads a Keras file."""

    produces: ClassVar[Kind] = Kind.KERAS
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras")

    def run(self, given: Artifact, context: Context) -> Facts:
        """Loads, checks that model and data fit together, and writes the working model."""
        from compress.importers import keras_file
        from compress.training import working_model
        from compress.training.fit import head_of

        model = keras_file.load(self.path, trust=context.trust)
        head_of(model, context.data)
        working_model.write(model, context.folder)
        return {"file": self.path.name, "parameters": model.count_params()}


class LoadTflite(_Load):
    """Takes a .tflite file as it is."""

    produces: ClassVar[Kind] = Kind.TFLITE

    def run(self, given: Artifact, context: Context) -> Facts:
        """Copies the file, once it has been read."""
        graph.read(self.path)
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name}


def stage_for(file: Path) -> Stage:
    """The stage that loads a model file, by its suffix.

    Raises:
        ModelError: no such file, or a format that is not read.
    """
    if not file.is_file():
        raise ModelError(f"there is no file {file}", todo="check model.file")
    if file.suffix.lower() == ".tflite":
        return LoadTflite(path=file)
    if file.suffix.lower() in KERAS_SUFFIXES:
        return LoadKeras(path=file)
    raise ModelError(f"{file.name} is of no format that is read", allowed=", ".join(SUFFIXES))
