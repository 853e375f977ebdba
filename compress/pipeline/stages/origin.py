"""The section `model` of a pipeline file, and the stage that loads or builds the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from compress.core.errors import ModelError
from compress.core.settings import Settings
from compress.learning.procedures.settings import DetectorSettings, HeadSettings
from compress.model.detectors.families import family_of
from compress.model.importers import builder as builders
from compress.pipeline.stage import Stage
from compress.pipeline.stages.load import (
    Argument,
    Build,
    ConvertSavedModel,
    ImportFile,
    LoadFloatTflite,
    LoadTflite,
    NewHead,
)
from deploy.contract.detection import Detector

if TYPE_CHECKING:
    from compress.model.importers.model_file import ModelFile
    from compress.model.importers.onnx.onnx_inputs import Shapes


class Origin(Settings):
    """The model to start from: a builder or a file."""

    builder: str | None = None
    """A builder in models/, or your own as file.py:function, which needs `trust: true`."""
    arguments: dict[str, Argument] = {}
    """Further arguments of the builder's function, such as `width: 0.5`."""
    weights: str | None = None
    """A trained model of the same structure, of any format, even a quantized .tflite file: its weights are copied into
    the builder's model, layer by layer, as long as their shapes are equal."""
    backbone: str | None = None
    """For builders that take a trained model as the start of their own (anchor_free): its file, of any format."""
    file: str | None = None
    """A .keras, .h5, .hdf5, .onnx or .tflite file, or a SavedModel folder. The path is relative to the pipeline
    file."""
    head: Literal["new"] | HeadSettings | None = None
    """new: cut off the last layers of the file, and add an untrained head for the classes or targets of the data, which
    `train` trains (transfer learning). A map has settings of the head."""
    dequantize: bool = False
    """Rebuild a quantized .tflite file as a float Keras model, which can be trained, pruned and quantized again.
    `head` does it, too."""
    signature: str | None = None
    """The signature of a SavedModel that has several."""
    shape: dict[str, list[PositiveInt]] | None = None
    """The shapes of the dynamic inputs of an .onnx file: `images: [1, 3, 320, 320]`."""
    detector: dict[str, Any] | str | None = None
    """For detectors: `auto` or the name of a family, by which the head of the file is recognized; or a specification
    of its outputs (docs/detection.md). A builder may define it itself."""
    keep_classes: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = None
    """The classes of a detector to keep, by number or by name: the others are cut from the model."""
    classes: tuple[str, ...] | None = None
    """The names of the model's classes, in its order; by default those of COCO if the model has 80 classes."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.builder is None) == (self.file is None):
            raise ValueError("needs either the key 'builder' or the key 'file'")
        for name in ("arguments", "weights", "backbone"):
            if getattr(self, name) and self.builder is None:
                raise ValueError(f"'{name}' can be used only with 'builder'")
        if self.head is not None and self.file is None:
            raise ValueError("'head' can be used only with 'file': a builder makes the head itself")
        for name in ("dequantize", "signature", "shape", "keep_classes"):
            if getattr(self, name) not in (None, False) and self.file is None:
                raise ValueError(f"'{name}' can be used only with 'file'")
        if isinstance(self.detector, dict) and "maps" in self.detector:
            Detector(self.detector)
        elif self.detector is not None:
            family_of(self.detector)
            if self.file is None:
                raise ValueError("a family of detectors belongs to 'file'; the builder of a detector describes it")
        return self

    def with_paths_from(self, folder: Path) -> Self:
        """Return the settings with their path resolved from `folder`."""
        if self.file is not None:
            return self.model_copy(update={"file": str(folder / self.file)})
        files = {"backbone": self.backbone, "weights": self.weights}
        paths = {name: str(folder / file) for name, file in files.items() if file is not None}
        if self.builder is not None and ".py" in self.builder:
            paths["builder"] = str(folder / self.builder)
        return self.model_copy(update=paths)

    def identity(self) -> dict[str, Any]:
        """Return what the key of the model depends on, if its paths are resolved."""
        loader = self.loader(Path(), trust=True)
        return {**loader.identity(), "version": loader.version, "environment": loader.environment()}

    def loader(self, folder: Path, *, trust: bool) -> Stage:
        """Return the stage that loads or builds the model.

        Args:
            folder: the folder from which paths are resolved.
            trust: whether custom code may run.

        Raises:
            UntrustedError: a custom builder without trust.
            ModelError: the file or the builder does not exist.
        """
        if self.file is not None:
            stage = self._file_stage(folder / self.file)
            return stage.model_copy(update={name: getattr(self, name) for name in DetectorSettings.model_fields})
        path, function = builders.find(self.builder or "", folder, trust=trust)
        builders.check_arguments(path, function, self.arguments)
        return Build(
            path=path,
            function=function,
            detector=self.detector,
            backbone=None if self.backbone is None else folder / self.backbone,
            weights=None if self.weights is None else folder / self.weights,
            arguments=self.arguments,
        )

    def _file_stage(self, file: Path) -> Stage:
        if self.head is None:
            return stage_for(file, self.signature, self.shape, dequantize=self.dequantize)
        head = HeadSettings() if self.head == "new" else self.head
        _check_importable(file, self.signature, self.shape)
        return NewHead(path=file, head=head, signature=self.signature, shapes=_sizes(self.shape))


def _check_importable(file: Path, signature: str | None = None, shapes: Shapes | None = None) -> None:
    """Check that a model file can become a Keras model, as far as that is fast to see.

    Raises:
        ModelError: it does not exist, is damaged, has an unsupported format, or operators without Keras layers.
    """
    from compress.model.importers import model_file
    from compress.model.importers.common.unsupported import unsupported

    if model_file.detect(file, signature, shapes) != "tflite":
        return  # read when it is loaded: importing h5py and onnx takes long
    source = model_file.in_float(model_file.read(file))
    if source.refused:
        raise unsupported(source.refused, str(file))


def stage_for(
    file: Path, signature: str | None = None, shapes: Shapes | None = None, *, dequantize: bool = False
) -> Stage:
    """Return the stage that loads a model file or folder, by its format.

    Args:
        file: the file, or the folder.
        signature: the signature to use, of a SavedModel with several.
        shapes: the shapes of the dynamic inputs of an .onnx file, by name.
        dequantize: whether a quantized .tflite file is rebuilt as a float Keras model.

    Raises:
        ModelError: the file does not exist, is damaged, or has an unsupported format.
    """
    from compress.model.importers import model_file

    kind = model_file.detect(file, signature, shapes)
    if dequantize and kind != "tflite":
        raise _not_quantized(file)
    if kind in ("keras", "onnx"):
        return ImportFile(path=file, shapes=_sizes(shapes))  # read later: importing h5py and onnx takes long
    source = model_file.read(file, signature)
    if dequantize:
        return _dequantizing(source)
    if source.becomes == "tflite":
        return LoadTflite(path=file)
    if source.becomes == "keras":
        return ImportFile(path=file)
    if kind == "tflite":
        return LoadFloatTflite(path=file, problems=tuple(map(str, source.refused)))
    model_file.check_runnable(source)
    return ConvertSavedModel(path=file, signature=source.signature or "")


def _sizes(shapes: Shapes | None) -> dict[str, list[int]]:
    return {name: list(sizes) for name, sizes in (shapes or {}).items()}


def _not_quantized(file: Path) -> ModelError:
    return ModelError(
        f"{file.name} is not quantized", allowed="a quantized .tflite file", hint="remove model.dequantize"
    )


def _dequantizing(source: ModelFile) -> Stage:
    """Return the stage that rebuilds a quantized .tflite file with layers.

    Raises:
        ModelError: the file is not a quantized .tflite file, or has unsupported operators.
    """
    from compress.model.importers import model_file
    from compress.model.importers.common.unsupported import unsupported

    if source.becomes != "tflite":
        raise _not_quantized(source.path)
    rebuilt = model_file.in_float(source)
    if rebuilt.refused:
        raise unsupported(rebuilt.refused, str(source.path))
    return ImportFile(path=source.path, was_quantized=True)
