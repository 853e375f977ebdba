"""The first stage of every pipeline, `model:` in the file: loads a model, or builds an untrained one.

Importers are imported late, because importing them takes as long as reading a pipeline file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.files import content_digest
from compress.learning.context import Context, Need
from compress.learning.procedures import ModelResult
from compress.learning.procedures.settings import DetectorSettings, HeadSettings
from compress.model.importers import builder as builders
from compress.pipeline.stage import Stage

if TYPE_CHECKING:
    from compress.learning.procedures.importing import ImportedForData

Argument = bool | int | float | str | tuple[int | float, ...]
"""An argument of a builder's function."""


class _Load(Stage, DetectorSettings):
    """The common base of the stages that load a model from a file."""

    consumes: ClassVar[frozenset[Kind]] = frozenset()
    name: ClassVar[str] = "load"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    makes_original: ClassVar[bool] = True

    path: Path
    """The file."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, and the name of the class: a file can be loaded in several ways."""
        return {**super().identity(), "way": type(self).__name__}


class LoadKerasModel(_Load):
    """The common base of the stages that leave a Keras model."""

    imports_tensorflow: ClassVar[bool] = True

    def load(self, context: Context) -> ModelResult:
        """Return the model, and facts about it."""
        raise NotImplementedError

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the working model."""
        from compress.pipeline.stages import working_model

        result = self.load(context)
        working_model.write_keras(result.model, context.folder)
        return dict(result.facts)


class Build(LoadKerasModel):
    """Build an untrained model with a builder from models/, or a custom builder."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")

    function: str
    """The function in the file."""
    arguments: dict[str, Argument] = {}
    """Further arguments of the function."""
    backbone: Path | None = None
    """The file of a trained model, which the builder gets."""
    weights: Path | None = None
    """The file of a trained model, whose weights are copied."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the contents of the files that the builder imports."""
        return {**super().identity(), "imports": [content_digest(file) for file in builders.imported_files(self.path)]}

    def load(self, context: Context) -> ModelResult:
        """Run the builder for the data's shape and classes."""
        from compress.learning.procedures import importing

        source = importing.BuilderSource(
            self.path, self.function, self.arguments, self.backbone, self.weights, self.detector
        )
        return importing.build_model(source, context)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the builder's model, and read it again: every later stage reads the model from its file."""
        from compress.model.importers.keras import keras_file

        facts = super().run(artifact, context)
        keras_file.load(context.folder / MODEL_KERAS, trust=context.trust)
        return facts


class _FromFile(LoadKerasModel):
    """The common base of the stages that import a file with layers."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "onnx", "onnxruntime", "ai-edge-litert")

    shapes: dict[str, list[int]] = {}
    """Shapes of the dynamic inputs of an .onnx file, by name."""


class NewHead(_FromFile):
    """Load a trained model of any format, cut off its head, and add an untrained one for the classes of the data."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})

    head: HeadSettings = HeadSettings()
    """The head."""
    signature: str | None = None
    """The signature of a SavedModel that has several."""

    def load(self, context: Context) -> ModelResult:
        """Import the file, and replace its head."""
        from compress.learning.procedures import importing

        context.progress.plan(importing.READING, importing.BUILDING)
        return importing.model_with_new_head(self.path, self.signature, self.shapes, self.head, self, context)


class ImportFile(_FromFile):
    """Import a file of any format, or a SavedModel with a Keras model, as a Keras model, which every
    stage can work on."""

    produces: ClassVar[Kind] = Kind.KERAS

    was_quantized: bool = False
    """Whether the file is a quantized .tflite file, whose weights get their real values."""

    def load(self, context: Context) -> ImportedForData:
        """Import the file, and verify the model on random and real samples."""
        from compress.learning.procedures import importing

        return importing.import_model(self.path, self.shapes, self, context, was_quantized=self.was_quantized)

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Write the working model. A float .tflite file that the data takes unchanged is the original itself."""
        from compress.learning.procedures import importing
        from compress.pipeline.stages import working_model

        context.progress.plan(importing.READING, importing.BUILDING, working_model.WRITING)
        result = self.load(context)
        if result.file_is_original:
            working_model.write_keras(result.model, context.folder)
            shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        else:
            working_model.write(result.model, context.folder, context.progress)
        return dict(result.facts)


class LoadFloatTflite(_Load):
    """Load a float .tflite file with operators that have no Keras layers; only `quantize` can use it."""

    produces: ClassVar[Kind] = Kind.FLOAT_TFLITE

    problems: tuple[str, ...] = ()
    """The operators without a Keras layer, with the reasons."""

    def kind_reason(self) -> str:
        """Return the operators that have no Keras layer."""
        from compress.model.importers.common.unsupported import MOST_LISTED

        count = f"{len(self.problems)} operator{'s' if len(self.problems) > 1 else ''}"
        more = len(self.problems) - MOST_LISTED
        listed = "; ".join([*self.problems[:MOST_LISTED], *([f"and {more} more"] if more > 0 else [])])
        return (
            f"{self.path.name} can only be quantized as it is, since {count} cannot be converted to Keras layers: "
            f"{listed}"
        )

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Copy the file, and report why it has no layers."""
        from compress.model.tflite import interpreter

        interpreter.refuse_flex(self.path)
        context.progress.note(self.kind_reason())
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name, "not_imported": list(self.problems), **_facts(self, context)}


class ConvertSavedModel(LoadFloatTflite):
    """Convert a SavedModel folder without a Keras model to a float .tflite file, which only `quantize` can use."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "ai-edge-litert")

    signature: str
    """The signature that is converted."""

    def kind_reason(self) -> str:
        """Return the reason why the model cannot be trained."""
        return (
            f"{self.path.name} contains no Keras model, only a graph, so it can only be quantized; "
            f"`python -m compress import {self.path.name} -o model.keras` tries to rebuild it with layers"
        )

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Convert the folder, and report why the model has no layers."""
        from compress.model.importers import model_file

        context.progress.note(self.kind_reason())
        converted = model_file.to_float_tflite(model_file.read(self.path, self.signature))
        (context.folder / MODEL_TFLITE).write_bytes(converted.tflite)
        facts: Facts = {"file": self.path.name, "signature": self.signature, "converted_by": converted.runtime}
        return facts | _facts(self, context)


class LoadTflite(_Load):
    """Load a quantized .tflite file."""

    produces: ClassVar[Kind] = Kind.TFLITE

    def kind_reason(self) -> str:
        """Return the reason for the kind of the artifact."""
        return f"{self.path.name} is quantized already"

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Copy the file."""
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name, **_facts(self, context)}


def _facts(stage: _Load, context: Context) -> Facts:
    """Return how the outputs of the written .tflite file, which is not rebuilt, are read."""
    from compress.learning.procedures import importing

    return importing.tflite_facts(stage.path, context.folder / MODEL_TFLITE, stage, context)
