"""Procedures that load or build a model for data: import_model, build_model, model_with_new_head.

Each checks that model and data fit together, and reports what the file contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.progress import Phase
from compress.core.resources import manual
from compress.data.types import Data
from compress.learning.context import Context
from compress.learning.procedures import ModelResult
from compress.learning.procedures.settings import DetectorSettings, HeadSettings
from compress.learning.training import loop
from compress.learning.training.bn_recalibration import with_measured_statistics
from compress.model.detectors import detector_model as detectors
from compress.model.detectors.detector_model import DetectorModel
from compress.model.detectors.families import FAMILY, PRESETS, family_of
from compress.model.importers import builder as builders
from compress.model.importers import model_file
from compress.model.importers.model_file import ImportedModel, ModelFile
from compress.model.importers.onnx.onnx_inputs import Shapes
from compress.model.importers.tflite import tflite_file
from compress.model.importers.tflite.tflite_file import Rounding
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network, tensors_in
from compress.model.ir.passes import cut_head, cut_lookup, fold
from compress.model.ir.passes.copy_weights import copy_weights
from compress.model.ir.tensorflow import input_tensors, keras
from compress.model.tflite import detection_postprocess, graph
from compress.model.tflite.graph import Graph
from compress.tasks import task_of
from compress.tasks.base import Specification, takes
from compress.tasks.outputs import OutputsTask
from compress.tasks.split_outputs import split_outputs
from deploy.contract.detection import Detector

READING = Phase("reading the file")
BUILDING = Phase("layers and their check", 4.0)
LEAST_COVERED = 0.6
"""Share of the range of a quantized input that training samples usually cover."""
MOST_OUTSIDE = 0.1
"""How far training samples may leave the range of a quantized input, as a fraction of the range."""
SAMPLES = 8
"""Number of training samples on which a rebuilt model is compared with the file."""


@dataclass(frozen=True)
class ImportedForData(ModelResult):
    """An imported file.

    Attributes:
        file_is_original: whether the file itself is the float .tflite file that later results are compared with.
    """

    file_is_original: bool = False


@dataclass(frozen=True)
class BuilderSource:
    """A builder, and the trained models that the result starts from.

    Attributes:
        path: the file of the builder.
        function: the function in the file.
        arguments: further arguments of the function.
        backbone: the file of a trained model, which the builder gets; None: no such model.
        weights: the file of a trained model, whose weights are copied; None: no such model.
        detector: the specification of a detector's outputs; None if the builder or the layers define the outputs.
    """

    path: Path
    function: str
    arguments: Mapping[str, Any]
    backbone: Path | None = None
    weights: Path | None = None
    detector: Mapping[str, Any] | str | None = None


def import_model(
    path: Path, shapes: Shapes | None, options: DetectorSettings, context: Context, *, was_quantized: bool = False
) -> ImportedForData:
    """Import a file with layers, verify it on random and real samples, and cut the decoding off a detector.

    Args:
        path: the file, or the folder of a SavedModel.
        shapes: the shapes of the dynamic inputs of an .onnx file, by name.
        options: what the user says of a detector's outputs.
        context: data, trust, progress.
        was_quantized: whether the weights of a quantized .tflite file become float.

    Raises:
        ModelError: the file cannot be imported, or does not fit the data.
    """
    source, imported, samples = _imported(path, None, shapes, context)
    model = _with_fixed_input(imported.model, context)
    detector = _detector(path, model, options, context, imported.detection, was_quantized=was_quantized)
    split: list[str] = []
    if detector is not None:
        model = detector.model
    elif task_of(context.data).name == OutputsTask.name:
        model, split = split_outputs(model, samples)
    specification = options.detector if detector is None else dict(detector.specification)
    outputs_read = output_facts(model, context.data, specification)
    facts = {**_import_facts(source, imported, context), "parameters": model.count_params(), **outputs_read}
    for note in split:
        context.progress.note(f"{path.name}: {note}")
    if split:
        facts["split_outputs"] = split
    if detector is not None:
        notes = list(detector.notes)
        facts["detector"] = {"classes": detector.classes, "box_error": detector.box_error, "notes": notes}
    return ImportedForData(model, facts, imported.file_is_float_tflite and detector is None and not split)


def build_model(source: BuilderSource, context: Context) -> ModelResult:
    """Run a builder for the data's shape and classes.

    Args:
        source: the builder.
        context: data, seed, trust, progress.

    Raises:
        ModelError: the builder failed, or its model does not fit the data.
    """
    keras(context.seed)
    model, copied = _with_weights(_built(source, context), source.weights, context)
    detector = source.detector
    if detector is None and task_of(context.data).reads_specification:
        detector = builders.detector(source.path, context.data.input_shape)
    outputs_read = output_facts(model, context.data, detector)
    return ModelResult(model, {"file": source.path.name, "parameters": model.count_params(), **copied, **outputs_read})


def model_with_new_head(
    path: Path,
    signature: str | None,
    shapes: Shapes | None,
    head: HeadSettings,
    options: DetectorSettings,
    context: Context,
) -> ModelResult:
    """Import a file, cut off its head, and add an untrained one for the classes of the data.

    Args:
        path: the file, or the folder of a SavedModel.
        signature: the signature of a SavedModel that has several.
        shapes: the shapes of the dynamic inputs of an .onnx file, by name.
        head: the settings of the new head.
        options: what the user says of a detector's outputs.
        context: data, seed, trust, progress.

    Raises:
        ModelError: the file cannot be imported, or has no layer of this name.
    """
    library = keras(context.seed)
    options.refuse_keep_classes(path)
    source, imported, _ = _imported(path, signature, shapes, context)
    try:
        features = cut_head.without_head(keras_graph.read(imported.model), head.after)
        backbone = _backbone(features, path, context, restore_batch_norms=head.restore_batch_norms)
    except ModelError as error:
        error.where = error.where or str(path)
        raise
    outputs = task_of(context.data).new_head(backbone.outputs[0], context.data, head.dropout)
    model = library.Model(input_tensors(backbone), outputs, name="model")
    outputs_read = output_facts(model, context.data, options.detector)
    (last,) = tensors_in(features.outputs)
    shape = list(backbone.outputs[0].shape[1:])
    context.progress.note(f"{path.name}: the new head reads the output of the layer {last.layer!r}, {shape}")
    facts = _import_facts(source, imported, context)
    return ModelResult(model, {**facts, "parameters": model.count_params(), "features": last.layer, **outputs_read})


def tflite_facts(path: Path, copy: Path, options: DetectorSettings, context: Context) -> Facts:
    """Return how the outputs of a .tflite file that is not rebuilt are read.

    The decoding of a detector is cut off the copy, if the data needs its boxes.

    Args:
        path: the file, for messages.
        copy: the copy of the file, or what it was converted to.
        options: what the user says of a detector's outputs.
        context: data, progress.

    Raises:
        ModelError: the file is not recognized as a detector, or does not fit the data.
    """
    options.refuse_keep_classes(path)
    task = task_of(context.data)
    detector: Mapping[str, Any] | None = None
    if options.described is not None:
        detector = Detector(options.described).specification
    elif task.reads_specification:
        detector = _cut_detector(path, copy, options, context)
    try:
        specification = task.file_specification(copy, context.data, detector)
    except ModelError as error:
        error.where = str(path)  # the user does not know the copy
        raise
    return {} if specification is None else {"specification": specification}


def quantized_detector(path: Path, settings: str | Mapping[str, Any] = "auto") -> DetectorModel[Graph | None] | None:
    """Return a quantized .tflite file as a detector; None if its outputs are not those of a detector.

    Args:
        path: the file.
        settings: the name of a family, or a map of `family` and keys of the specification, such as `least_score`.

    Raises:
        ValueError: the family is unknown, or a key of `settings` is invalid.
        ModelError: the file is damaged.
    """
    file = tflite_file.read(path)
    if file.plain is not None or not detectors.may_be_detector(file.graph):
        return None
    imported = tflite_file.in_float(file).imported
    if imported is None or imported.problems:
        return None
    tensors = {value.tensor: index for index, value in imported.values.items()}
    return detectors.quantized_detector(file.graph, imported.network, tensors, settings)


def _imported(
    path: Path, signature: str | None, shapes: Shapes | None, context: Context
) -> tuple[ModelFile, ImportedModel, Any]:
    """Return the file, its Keras model, and the samples on which both were compared."""
    samples = context.data.inputs("train")[:SAMPLES]
    with context.progress.phase(READING):
        source = model_file.in_float(model_file.read(path, signature, shapes))
    with context.progress.phase(BUILDING):
        return source, model_file.load(source, trust=context.trust, samples=samples), samples


def output_facts(model: Any, data: Data, detector: Mapping[str, Any] | str | None) -> Facts:
    """Return how the outputs are read, after a check that model and data fit together.

    Raises:
        ModelError: they do not fit.
    """
    specification = loop.head_of(model, data, detector if isinstance(detector, Mapping) else None).specification
    _refuse_missing_rows(model, data)
    return {} if specification is None else {"specification": specification}


def _refuse_missing_rows(model: Any, data: Data) -> None:
    """Refuse samples with values that have no row in the embedding that reads them: its training would fail.

    Raises:
        ModelError: there are such samples.
    """
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


def _cut_detector(path: Path, copy: Path, options: DetectorSettings, context: Context) -> Specification:
    """Cut the decoding off a detector's .tflite file that is not rebuilt, and return how its outputs are decoded.

    Raises:
        ModelError: the file is not recognized as a detector, or its decoding cannot be cut off.
    """
    settings = options.detector if options.detector is not None else {FAMILY: "auto"}
    parsed = graph.read(copy)
    postprocess = detection_postprocess.read(parsed, str(path))
    if postprocess is not None:
        context.progress.note(f"{path.name}: {postprocess.note}")
        copy.write_bytes(graph.serialize(detection_postprocess.without(parsed, postprocess)))
        return Detector({**postprocess.specification, **family_of(settings)[1]}).specification
    found = quantized_detector(copy, settings)
    if found is None:
        raise ModelError(
            "the file is not rebuilt with layers, and its head is not recognized",
            where=str(path),
            hint=f"describe its outputs with `maps` under model.detector: {manual('detection.md')}",
        )
    if found.model is None:
        raise ModelError(
            "the decoding of the detector cannot be cut off in integers",
            where=str(path),
            hint="set model.dequantize: true, and add the stage quantize",
        )
    for note in found.notes:
        context.progress.note(f"{path.name}: {note}")
    copy.write_bytes(graph.serialize(found.model))
    return Detector(found.specification).specification


def _detector(
    path: Path,
    model: Any,
    options: DetectorSettings,
    context: Context,
    known: Mapping[str, Any],
    *,
    was_quantized: bool,
) -> DetectorModel[Any] | None:
    """Return the model without its decoding; None if it is not a detector, or its outputs are described.

    `known` has the keys of the specification that the file itself contains.

    Raises:
        ModelError: the outputs are not those of a detector.
    """
    if options.described is not None or not task_of(context.data).reads_specification:
        options.refuse_keep_classes(path)
        return None
    settings = options.detector if isinstance(options.detector, Mapping) else {FAMILY: options.detector or "auto"}
    size = context.data.input_shape[:2]
    try:
        detector = detectors.detector_model(
            model, {**known, **settings}, options.keep_classes, size, options.classes, rounded=was_quantized
        )
    except ModelError as error:
        error.where = error.where or str(path)
        raise
    if detector is None:
        shapes = ", ".join(str(list(output.shape[1:])) for output in model.outputs)
        raise ModelError(
            f"its outputs {shapes} are not recognized as boxes and scores",
            where=str(path),
            allowed=f"model.detector: one of the families {', '.join(PRESETS)}, or a specification with `maps`",
            hint=f"name the family if the file ends at its convolutions, or describe it: {manual('detection.md')}; "
            "rotated boxes and transformer decoders are not supported",
        )
    for note in detector.notes:
        context.progress.note(f"{path.name}: {note}")
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
    """Return notes on a file that was quantized: the rounding of its operators, and samples outside its input range."""
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
    sample = context.data.input_shape
    if not takes(shapes[0], sample):
        return model  # refused with the shapes of both
    context.progress.note(f"the input {shapes[0]} has the size of the samples, {list(sample)}")
    return keras_graph.with_input_shape(model, sample)


def _backbone(features: Network, path: Path, context: Context, *, restore_batch_norms: bool) -> Any:
    """Return the features as a Keras model for samples of the data's shape, with batch norms if it should."""
    model = keras_graph.build(keras_graph.with_input_size(features, context.data.input_shape))
    if not restore_batch_norms:
        return model
    network, norms = fold.with_restored_norms(keras_graph.read(model))
    if not norms:
        return model
    context.progress.note(f"{path.name}: {len(norms)} batch norms are restored for the training")
    return keras_graph.build(with_measured_statistics(network, norms, context))


def _built(source: BuilderSource, context: Context) -> Any:
    """Return the builder's model. A backbone without batch norms gets some: its training needs them."""
    data = context.data
    needed = (source.path, source.function, data.input_shape, len(data.class_names))
    if source.backbone is None:
        return builders.build(*needed, arguments=source.arguments)
    network, norms = fold.with_restored_norms(_trained(source.backbone, context))
    model = builders.build(*needed, keras_graph.build(network), source.arguments)
    if not norms:
        return model
    network = keras_graph.read(model)
    used = [name for name in norms if name in network.layers]
    return keras_graph.build(with_measured_statistics(network, used, context))


def _with_weights(model: Any, weights: Path | None, context: Context) -> tuple[Any, Facts]:
    """Return the model with the weights of a trained one, and facts about them."""
    if weights is None:
        return model, {}
    trained = _trained(weights, context)
    try:
        result = copy_weights(keras_graph.read(model), trained)
    except ModelError as error:
        error.where = error.where or str(weights)
        raise
    network = with_measured_statistics(result.network, result.norms, context)
    others = f"; new: {', '.join(result.others)}" if result.others else ""
    total = len(result.copied) + len(result.others)
    context.progress.note(f"{weights.name}: the weights of {len(result.copied)} of {total} layers are copied{others}")
    facts = {"weights": weights.name, "copied_layers": list(result.copied), "new_layers": list(result.others)}
    return keras_graph.build(network), facts


def _trained(path: Path, context: Context) -> Network:
    """Return the network of a model file."""
    return keras_graph.read(model_file.load(model_file.read(path), trust=context.trust).model)
