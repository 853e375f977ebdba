"""The first stage of every pipeline, `model:` in the file: loads a model, or builds an untrained one.

Importers are imported late, because importing them takes as long as reading a pipeline file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import ModelError
from compress.core.progress import Phase
from compress.core.resources import manual
from compress.core.settings import Settings
from compress.learning.context import Context, Need
from compress.model.detectors.families import FAMILY, PRESETS, family_of
from compress.model.importers import builder as builders
from compress.model.ir.keras_graph import Network, tensors_in
from compress.pipeline.stage import Stage
from compress.tasks import task_of
from compress.tasks.base import Specification, takes
from compress.tasks.outputs import OutputsTask
from deploy.contract.detection import Detector

if TYPE_CHECKING:
    from compress.data.types import Data
    from compress.model.detectors.detector_model import DetectorModel
    from compress.model.detectors.quantized_detector import QuantizedDetector
    from compress.model.importers.model_file import ImportedModel, ModelFile
    from compress.model.importers.onnx.onnx_inputs import Shapes
    from compress.model.importers.tflite.tflite_file import Rounding

Argument = bool | int | float | str | tuple[int | float, ...]
"""An argument of a builder's function."""
OF_DETECTORS = ("detector", "keep_classes", "classes")
"""Settings of detectors; they do not belong to the key of other models."""
READING = Phase("reading the file")
BUILDING = Phase("layers and their check", 4.0)
LEAST_COVERED = 0.6
"""Share of the range of a quantized input that training samples usually cover."""
MOST_OUTSIDE = 0.1
"""How far training samples may leave the range of a quantized input, as a fraction of the range."""
SAMPLES = 8
"""Number of training samples on which a rebuilt model is compared with the file."""


class _Load(Stage):
    """The common base of the stages that load a model: the content of its file is part of the key."""

    consumes: ClassVar[frozenset[Kind]] = frozenset()
    name: ClassVar[str] = "load"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})

    path: Path
    """The file."""
    detector: dict[str, Any] | str | None = None
    """The specification of a detector's outputs, or the family that it is recognized as; a builder may define it."""
    keep_classes: tuple[int | str, ...] | None = None
    """The classes of a detector to keep, by number or by name; None for all."""
    classes: tuple[str, ...] | None = None
    """The names of the detector's classes, by which `keep_classes` names them."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the content of the file instead of its path."""
        from compress.model.importers import model_file

        try:
            digest = model_file.content_digest(self.path)
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", where=str(self.path), hint="check model") from error
        return {
            **self.model_dump(mode="json", exclude={"id", "path", "problems", *OF_DETECTORS}),
            **{name: getattr(self, name) for name in OF_DETECTORS if getattr(self, name)},
            "sha256": digest,
            "way": type(self).__name__,
        }

    def fitted(self, model: Any, context: Context) -> Facts:
        """Return how the outputs are read, after a check that model and data fit together.

        Raises:
            ModelError: they do not fit.
        """
        from compress.learning.training import loop

        described = self.detector if isinstance(self.detector, dict) else None
        specification = loop.head_of(model, context.data, described).specification
        _refuse_missing_rows(model, context.data)
        return {} if specification is None else {"specification": specification}

    def refuse_keep_classes(self) -> None:
        """Refuse `keep_classes` for a model whose head is not cut.

        Raises:
            ModelError: it is set.
        """
        if self.keep_classes is not None:
            what = "keep_classes cuts the head of a detector that is recognized, and this model is used as it is"
            allowed = "a .keras, .h5, .onnx or float .tflite file with model.detector: auto, or a family"
            raise ModelError(what, where=str(self.path), allowed=allowed, hint="remove model.keep_classes")

    def file_facts(self, context: Context) -> Facts:
        """Return how the outputs of MODEL_TFLITE are read, for a file that is not rebuilt.

        The decoding of a detector is cut off the file, if the data needs its boxes.
        """
        self.refuse_keep_classes()
        task, file = task_of(context.data), context.folder / MODEL_TFLITE
        detector: Mapping[str, Any] | None = None
        if isinstance(self.detector, dict) and "maps" in self.detector:
            detector = Detector(self.detector).specification
        elif task.reads_specification:
            detector = self._cut_detector(file, context)
        try:
            specification = task.file_specification(file, context.data, detector)
        except ModelError as error:
            error.where = str(self.path)  # the user does not know the copy
            raise
        return {} if specification is None else {"specification": specification}

    def _cut_detector(self, file: Path, context: Context) -> Specification:
        """Cut the decoding off a detector's .tflite file that is not rebuilt, and return how its outputs are decoded.

        Raises:
            ModelError: the file is not recognized as a detector, or its decoding cannot be cut off.
        """
        from compress.model.tflite import detection_postprocess, graph

        settings = self.detector if self.detector is not None else {FAMILY: "auto"}
        parsed = graph.read(file)
        postprocess = detection_postprocess.read(parsed, str(self.path))
        if postprocess is not None:
            context.progress.note(f"{self.path.name}: {postprocess.note}")
            file.write_bytes(graph.serialize(detection_postprocess.without(parsed, postprocess)))
            return Detector({**postprocess.specification, **family_of(settings)[1]}).specification
        found = quantized_detector(file, settings)
        if found is None:
            raise ModelError(
                "the file is not rebuilt with layers, and its head is not recognized",
                where=str(self.path),
                hint=f"describe its outputs with `maps` under model.detector: {manual('detection.md')}",
            )
        if found.graph is None:
            raise ModelError(
                "the decoding of the detector cannot be cut off in integers",
                where=str(self.path),
                hint="set model.dequantize: true, and add the stage quantize",
            )
        for note in found.notes:
            context.progress.note(f"{self.path.name}: {note}")
        file.write_bytes(graph.serialize(found.graph))
        return Detector(found.specification).specification


def quantized_detector(path: Path, settings: str | Mapping[str, Any] = "auto") -> QuantizedDetector | None:
    """Return a quantized .tflite file as a detector; None if its outputs are not those of a detector.

    Args:
        path: the file.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.

    Raises:
        ValueError: the family is unknown, or a key of `settings` is invalid.
        ModelError: the file is damaged.
    """
    from compress.model.detectors import quantized_detector as detectors
    from compress.model.importers.tflite import tflite_file

    file = tflite_file.read(path)
    if file.plain is not None or not detectors.may_be_detector(file.graph):
        return None
    imported = tflite_file.in_float(file).imported
    if imported is None or imported.problems:
        return None
    tensors = {value.tensor: index for index, value in imported.values.items()}
    return detectors.quantized_detector(file.graph, imported.network, tensors, settings)


def _refuse_missing_rows(model: Any, data: Data) -> None:
    """Refuse samples with values that have no row in the embedding that reads them: its training would fail.

    Raises:
        ModelError: there are such samples.
    """
    from compress.model.ir.passes import cut_lookup

    rows = cut_lookup.input_rows(model)
    if rows is None:
        return
    samples = data.inputs("train")
    low, high = float(samples.min()) + 0.0, float(samples.max()) + 0.0  # no -0
    if low < 0 or high > rows - 1:
        raise ModelError(
            f"the embedding of the model has {rows:,} rows, and the samples have values from {low:g} to {high:g}",
            allowed=f"0 to {rows - 1:,}",
            hint="texts need the step tokens, and a row for each of its buckets and one for 0 "
            "(the builder text_cnn: `arguments: {tokens: …}`, the same number as `buckets`)",
        )


class Build(_Load):
    """Build an untrained model with a builder from models/, or a custom builder."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras")
    imports_tensorflow: ClassVar[bool] = True

    function: str
    """The function in the file."""
    arguments: dict[str, Argument] = {}
    """Further arguments of the function."""
    backbone: Path | None = None
    """The file of a trained model, which the builder gets."""
    weights: Path | None = None
    """The file of a trained model, whose weights are copied."""

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the content of files instead of their paths."""
        from compress.model.importers import model_file

        settings = super().identity()
        if not self.arguments:
            del settings["arguments"]
        imports = builders.imported_files(self.path)
        if imports:
            settings["imports"] = [model_file.content_digest(file) for file in imports]
        for name in ("backbone", "weights"):
            path = getattr(self, name)
            del settings[name]
            if path is None:
                continue
            try:
                settings[name] = model_file.content_digest(path)
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise ModelError(what, where=str(path), hint=f"check model.{name}") from error
        return settings

    def _built(self, context: Context) -> Any:
        """Return the builder's model. A backbone without batch norms gets some: its training needs them."""
        from compress.learning.training.bn_recalibration import with_measured_statistics
        from compress.model.ir import keras_graph
        from compress.model.ir.passes.restore_norms import restored

        data = context.data
        needed = (self.path, self.function, data.input_shape, len(data.class_names))
        if self.backbone is None:
            return builders.build(*needed, arguments=self.arguments)
        backbone, norms = restored(_trained(self.backbone, context))
        model = builders.build(*needed, keras_graph.build(backbone), self.arguments)
        if not norms:
            return model
        network = keras_graph.read(model)
        used = [name for name in norms if name in network.layers]
        return keras_graph.build(with_measured_statistics(network, used, context))

    def _with_weights(self, model: Any, context: Context) -> tuple[Any, Facts]:
        """Return the model with the weights of `weights`, and facts about them."""
        from compress.learning.training.bn_recalibration import with_measured_statistics
        from compress.model.ir import keras_graph
        from compress.model.ir.passes.copy_weights import copy_weights

        if self.weights is None:
            return model, {}
        trained = _trained(self.weights, context)
        try:
            result = copy_weights(keras_graph.read(model), trained)
        except ModelError as error:
            error.where = error.where or str(self.weights)
            raise
        network = with_measured_statistics(result.network, result.norms, context)
        others = f"; new: {', '.join(result.others)}" if result.others else ""
        total = len(result.copied) + len(result.others)
        context.progress.note(
            f"{self.weights.name}: the weights of {len(result.copied)} of {total} layers are copied{others}"
        )
        facts = {"weights": self.weights.name, "copied_layers": list(result.copied), "new_layers": list(result.others)}
        return keras_graph.build(network), facts

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Run the builder for the data's shape and classes."""
        from compress.model.importers.keras import keras_file
        from compress.model.ir.tensorflow import keras
        from compress.pipeline.stages import working_model

        keras(context.seed)
        model, copied = self._with_weights(self._built(context), context)
        detector = self.detector
        if detector is None and task_of(context.data).reads_specification:
            detector = builders.detector(self.path, context.data.input_shape)
        fitted = self.model_copy(update={"detector": detector}).fitted(model, context)
        working_model.write_keras(model, context.folder)
        # Every later stage reads the model from its file: a model that cannot be read fails here.
        keras_file.load(context.folder / MODEL_KERAS, trust=context.trust)
        return {"file": self.path.name, "parameters": model.count_params(), **copied, **fitted}


def _trained(path: Path, context: Context) -> Network:
    """Return the network of a model file."""
    from compress.model.importers import model_file
    from compress.model.ir import keras_graph

    return keras_graph.read(model_file.load(model_file.read(path), trust=context.trust).model)


class _Import(_Load):
    """Import of a file as a Keras model, which every stage can work on."""

    produces: ClassVar[Kind] = Kind.KERAS
    imports_tensorflow: ClassVar[bool] = True
    was_quantized: ClassVar[bool] = False

    shapes: dict[str, list[int]] = {}
    """Shapes of the dynamic inputs of an .onnx file, by name."""

    def identity(self) -> dict[str, Any]:
        """Return the settings without empty shapes."""
        return {name: value for name, value in super().identity().items() if name != "shapes" or value}

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Import the file, verify it on random and real samples, and write the working model."""
        from compress.model.importers import model_file
        from compress.pipeline.stages import working_model

        context.progress.plan(READING, BUILDING, working_model.WRITING)
        samples = context.data.inputs("train")[:SAMPLES]
        with context.progress.phase(READING):
            source = model_file.in_float(model_file.read(self.path, shapes=self.shapes))
        with context.progress.phase(BUILDING):
            imported = model_file.load(source, trust=context.trust, samples=samples)
        model = _with_fixed_input(imported.model, context)
        detector = self._detector(model, context, imported.detection)
        split: list[str] = []
        if detector is not None:
            model = detector.model
        elif task_of(context.data).name == OutputsTask.name:
            from compress.tasks.split_outputs import split_outputs

            model, split = split_outputs(model, samples)
        specification = self.detector if detector is None else dict(detector.specification)
        fitted = self.model_copy(update={"detector": specification}).fitted(model, context)
        if imported.file_is_float_tflite and detector is None and not split:
            # the file itself is the original that later results are compared with
            working_model.write_keras(model, context.folder)
            shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        else:
            working_model.write(model, context.folder, context.progress)
        facts = {**_import_facts(source, imported, context), "parameters": model.count_params(), **fitted}
        for note in split:
            context.progress.note(f"{self.path.name}: {note}")
        if split:
            facts["split_outputs"] = split
        if detector is not None:
            facts["detector"] = {
                "classes": detector.classes,
                "box_error": detector.box_error,
                "notes": list(detector.notes),
            }
        return facts

    def _detector(self, model: Any, context: Context, known: Mapping[str, Any]) -> DetectorModel | None:
        """Return the model without its decoding; None if it is not a detector, or its outputs are described.

        Args:
            model: the Keras model.
            context: the data.
            known: keys of the specification that the file itself has.

        Raises:
            ModelError: the outputs are not those of a detector.
        """
        from compress.model.detectors.detector_model import detector_model

        described = isinstance(self.detector, dict) and "maps" in self.detector
        if described or not task_of(context.data).reads_specification:
            self.refuse_keep_classes()
            return None
        settings = self.detector if isinstance(self.detector, dict) else {FAMILY: self.detector or "auto"}
        size = context.data.input_shape[:2]
        try:
            detector = detector_model(
                model, {**known, **settings}, self.keep_classes, size, self.classes, rounded=self.was_quantized
            )
        except ModelError as error:
            error.where = error.where or str(self.path)
            raise
        if detector is None:
            shapes = ", ".join(str(list(output.shape[1:])) for output in model.outputs)
            raise ModelError(
                f"its outputs {shapes} are not recognized as boxes and scores",
                where=str(self.path),
                allowed=f"model.detector: one of the families {', '.join(PRESETS)}, or a specification with `maps`",
                hint=f"name the family if the file ends at its convolutions, or describe it: {manual('detection.md')}; "
                "rotated boxes and transformer decoders are not supported",
            )
        for note in detector.notes:
            context.progress.note(f"{self.path.name}: {note}")
        return detector


def _import_facts(source: ModelFile, imported: ImportedModel, context: Context) -> Facts:
    """Return the facts about an imported file; its notes are reported."""
    facts: Facts = {"file": source.path.name}
    notes = [*source.notes]
    if imported.rounding is not None:
        facts["rounding"] = asdict(imported.rounding)
        notes += _rounding_notes(imported.rounding, context)
    if source.operators is not None:
        facts |= {"operators": source.operators, "notes": notes}
    for note in notes:
        context.progress.note(f"{source.path.name}: {note}")
    return facts | ({"parity": asdict(imported.parity)} if imported.parity else {})


def _rounding_notes(rounding: Rounding, context: Context) -> list[str]:
    """Return what the user must know of a file that was quantized: its rounding, and samples of another range."""
    notes = [
        f"its weights become float: each of its {rounding.operators} operators differs from the file by at most "
        f"{rounding.largest_steps:.2g} steps of its output, which is the rounding of the file"
    ]
    if len(rounding.inputs) != 1:
        return notes
    expected = rounding.inputs[0]
    samples = context.data.inputs("train")[:SAMPLES]
    low, high = float(np.min(samples)), float(np.max(samples))
    covered = (min(high, expected.high) - max(low, expected.low)) / (expected.high - expected.low)
    outside = max(expected.low - low, high - expected.high) / (expected.high - expected.low)
    if covered < LEAST_COVERED or outside > MOST_OUTSIDE:
        notes.append(
            f"its input has values from {expected.low:.3g} to {expected.high:.3g}, and the first training samples from "
            f"{low:.3g} to {high:.3g}: if the model was trained on photos, scale them to its range in data.preprocess"
        )
    return notes


def _with_fixed_input(model: Any, context: Context) -> Any:
    """Return the model with the shape of the samples in place of open dimensions: the Edge TPU compiles for one size.

    Raises:
        ModelError: the layers do not work with this shape, or one of several inputs has open dimensions.
    """
    shapes = [list(tensor.shape[1:]) for tensor in model.inputs]
    if not any(None in shape for shape in shapes):
        return model
    if len(shapes) > 1:
        raise ModelError(
            f"an input has open dimensions: {', '.join(map(str, shapes))}",
            allowed="fixed sizes: the Edge TPU compiles for one",
            hint="build the model again with fixed sizes in keras.Input, and load its weights",
        )
    from compress.model.ir.keras_graph import with_input_shape

    sample = context.data.input_shape
    if not takes(shapes[0], sample):
        return model  # refused with the shapes of both
    context.progress.note(f"the input {shapes[0]} has the size of the samples, {list(sample)}")
    return with_input_shape(model, sample)


class HeadSettings(Settings):
    """A new head on the features of a trained model."""

    after: str | None = None
    """The layer whose output is the features: an earlier one makes a smaller and faster model. By default the last
    feature map. `python -m compress import MODEL --layers` lists the layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of the features that the training sets to 0."""
    restore_batch_norms: bool = True
    """If the file has no batch norms, because they were folded, put one after each convolution: the model stays the
    same, and learns much better."""


class NewHead(_Load):
    """Load a trained model of any format, cut off its head, and add an untrained one for the classes of the data."""

    produces: ClassVar[Kind] = Kind.UNTRAINED
    needs: ClassVar[frozenset[Need]] = frozenset({"data", "seed"})
    imports_tensorflow: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras", "onnx", "ai-edge-litert")

    head: HeadSettings = HeadSettings()
    """The head."""
    signature: str | None = None
    """The signature of a SavedModel that has several."""
    shapes: dict[str, list[int]] = {}
    """Shapes of the dynamic inputs of an .onnx file, by name."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Import the file, replace its head, and write the working model."""
        from compress.model.importers import model_file
        from compress.model.ir import keras_graph
        from compress.model.ir.passes import cut_head
        from compress.model.ir.tensorflow import input_tensors, keras
        from compress.pipeline.stages import working_model

        library = keras(context.seed)
        self.refuse_keep_classes()
        context.progress.plan(READING, BUILDING)
        samples = context.data.inputs("train")[:SAMPLES]
        with context.progress.phase(READING):
            source = model_file.in_float(model_file.read(self.path, self.signature, self.shapes))
        with context.progress.phase(BUILDING):
            imported = model_file.load(source, trust=context.trust, samples=samples)
        try:
            features = cut_head.without_head(keras_graph.read(imported.model), self.head.after)
            backbone = self._backbone(features, context)
        except ModelError as error:
            error.where = error.where or str(self.path)
            raise
        task = task_of(context.data)
        outputs = task.new_head(backbone.outputs[0], context.data, self.head.dropout)
        model = library.Model(input_tensors(backbone), outputs, name="model")
        fitted = self.fitted(model, context)
        working_model.write_keras(model, context.folder)
        (last,) = tensors_in(features.outputs)
        shape = list(backbone.outputs[0].shape[1:])
        context.progress.note(f"{self.path.name}: the new head reads the output of the layer {last.layer!r}, {shape}")
        facts = _import_facts(source, imported, context)
        return {**facts, "parameters": model.count_params(), "features": last.layer, **fitted}

    def _backbone(self, features: Network, context: Context) -> Any:
        """Return the features as a Keras model for samples of the data's shape, with batch norms if it should."""
        from compress.learning.training.bn_recalibration import with_measured_statistics
        from compress.model.ir import keras_graph
        from compress.model.ir.passes import restore_norms

        model = keras_graph.build(keras_graph.with_input_size(features, context.data.input_shape))
        if not self.head.restore_batch_norms:
            return model
        network, norms = restore_norms.restored(keras_graph.read(model))
        if not norms:
            return model
        context.progress.note(f"{self.path.name}: {len(norms)} batch norms are restored for the training")
        return keras_graph.build(with_measured_statistics(network, norms, context))


class LoadKeras(_Import):
    """Load a Keras file, or the Keras model of a SavedModel folder."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "tf-keras")


class ImportTflite(_Import):
    """Rebuild a float .tflite file with Keras layers."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")


class ImportOnnx(_Import):
    """Rebuild an .onnx file with Keras layers."""

    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "onnx", "onnxruntime", "ai-edge-litert")


class DequantizeTflite(_Import):
    """Rebuild a quantized .tflite file with Keras layers and the real values of its weights."""

    was_quantized: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "ai-edge-litert")


class LoadFloatTflite(_Load):
    """Load a float .tflite file with operators that have no Keras layers; only `quantize` can use it."""

    produces: ClassVar[Kind] = Kind.FLOAT_TFLITE

    problems: tuple[str, ...] = ()
    """The operators without a Keras layer, with the reasons."""

    def kind_reason(self) -> str:
        """Return the operators that have no Keras layer."""
        count = f"{len(self.problems)} operator{'s' if len(self.problems) > 1 else ''}"
        from compress.model.importers.common.unsupported import MOST_LISTED

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
        return {"file": self.path.name, "not_imported": list(self.problems), **self.file_facts(context)}


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
        return facts | self.file_facts(context)


class LoadTflite(_Load):
    """Load a quantized .tflite file."""

    produces: ClassVar[Kind] = Kind.TFLITE

    def kind_reason(self) -> str:
        """Return the reason for the kind of the artifact."""
        return f"{self.path.name} is quantized already"

    def run(self, artifact: Artifact, context: Context) -> Facts:
        """Copy the file."""
        shutil.copyfile(self.path, context.folder / MODEL_TFLITE)
        return {"file": self.path.name, **self.file_facts(context)}


def check_importable(file: Path, signature: str | None = None, shapes: Shapes | None = None) -> None:
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
    if kind == "keras":
        return LoadKeras(path=file)  # read when it is loaded: importing h5py takes long
    if kind == "onnx":
        named = {name: list(sizes) for name, sizes in (shapes or {}).items()}
        return ImportOnnx(path=file, shapes=named)  # likewise, for onnx
    source = model_file.read(file, signature)
    if dequantize:
        return _dequantizing(source)
    if source.becomes == "tflite":
        return LoadTflite(path=file)
    if source.becomes == "keras":
        return ImportTflite(path=file) if kind == "tflite" else LoadKeras(path=file)
    if kind == "tflite":
        return LoadFloatTflite(path=file, problems=tuple(map(str, source.refused)))
    model_file.check_runnable(source)
    return ConvertSavedModel(path=file, signature=source.signature or "")


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
    return DequantizeTflite(path=source.path)


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
        if self.dequantize and self.file is None:
            raise ValueError("'dequantize' can be used only with 'file'")
        if self.signature is not None and self.file is None:
            raise ValueError("'signature' can be used only with 'file'")
        if self.shape is not None and self.file is None:
            raise ValueError("'shape' can be used only with 'file'")
        if isinstance(self.detector, dict) and "maps" in self.detector:
            Detector(self.detector)
        elif self.detector is not None:
            family_of(self.detector)
            if self.file is None:
                raise ValueError("a family of detectors belongs to 'file'; the builder of a detector describes it")
        if self.keep_classes is not None and self.file is None:
            raise ValueError("'keep_classes' can be used only with 'file'")
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

    def loader(self, folder: Path, *, trust: bool) -> Stage:
        """Return the stage that loads or builds the model.

        Args:
            folder: the folder from which paths are resolved.
            trust: whether custom code may run.

        Raises:
            UntrustedError: a custom builder without trust.
            ModelError: the file or the builder does not exist.
        """
        if self.head is not None:
            head = HeadSettings() if self.head == "new" else self.head
            shapes = {name: list(sizes) for name, sizes in (self.shape or {}).items()}
            file = folder / (self.file or "")
            check_importable(file, self.signature, self.shape)
            stage: Stage = NewHead(path=file, head=head, signature=self.signature, shapes=shapes)
            return stage.model_copy(update={name: getattr(self, name) for name in OF_DETECTORS})
        if self.file is not None:
            stage = stage_for(folder / self.file, self.signature, self.shape, dequantize=self.dequantize)
            return stage.model_copy(update={name: getattr(self, name) for name in OF_DETECTORS})
        path, function = builders.find(self.builder or "", folder, trust=trust)
        backbone = None if self.backbone is None else folder / self.backbone
        weights = None if self.weights is None else folder / self.weights
        builders.check_arguments(path, function, self.arguments)
        return Build(
            path=path,
            function=function,
            detector=self.detector,
            backbone=backbone,
            weights=weights,
            arguments=self.arguments,
        )
