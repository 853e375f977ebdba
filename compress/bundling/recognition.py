"""The embedding and the calibrated confidence in a bundle, computed with the int8 model.

The temperature and the threshold are fitted on the validation split. The calibration error and the false rejects are
also measured on the test split, and the false accepts on images that show none of the classes, if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError, reason_of
from compress.core.files import file_digest
from compress.core.measurement import Measurement, missing, proportion
from compress.core.settings import Settings
from compress.data.splits import spread
from compress.data.types import Data, Split
from compress.model.tflite import embedding as embeddings
from compress.model.tflite import graph as graphs
from compress.model.tflite.interpreter import LoadedModel, version
from compress.tasks.classification import class_scores
from deploy.contract import bundle, confidence, pictures
from deploy.contract.confidence import Confidence
from deploy.contract.decoding import parsed
from deploy.contract.embedding import Head, LinearHead, imprinted
from deploy.contract.errors import ImageError
from deploy.contract.preprocessing import Preprocessing, PreprocessingError
from deploy.contract.tensors import TensorDescription

if TYPE_CHECKING:
    from compress.bundling.packing import Packing

MAX_SAMPLES = 1000
"""Largest number of samples of each split that are measured."""
MAX_VALIDATION = 500
"""Largest number of validation samples whose embeddings are in the bundle."""
IMAGE_SUFFIXES = (".bmp", ".jpe", ".jpeg", ".jpg", ".png", ".webp")
Rows = NDArray[Any]


class RecognitionSettings(Settings):
    """The settings of the calibrated confidence, and of what the device learns new classes from."""

    false_reject_rate: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the validation samples that may be answered "unknown"; the threshold follows from it."""
    unknown: Path | None = None
    """A folder of images that show none of the classes, to measure how many of them are accepted as one."""
    references: Annotated[int, Field(ge=0, le=100)] = 5
    """Number of training samples of each class whose embeddings are in the bundle. The device compares the photos of a
    new class with them."""

    def identity(self) -> dict[str, Any]:
        """Return the settings; of the folder of unknown images, only the images are read."""
        identity = Settings.identity(self.model_copy(update={"unknown": None}))
        if self.unknown is None:
            return identity
        return {**identity, "unknown": [file_digest(path) for path in unknown_files(self.unknown)]}


@dataclass(frozen=True)
class RecognitionEntries:
    """A part of a bundle: entries of the manifest, and files."""

    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]


def described(packing: Packing, names: Sequence[str]) -> RecognitionEntries:
    """Return the embedding and the confidence of a bundle; nothing for a task without classes, or without data.

    `names` are the names of the outputs of the int8 model.

    Raises:
        DataError: an image of `unknown` cannot be used.
    """
    data = packing.data
    if data is None or not packing.task.recognition or not len(data.labels("validation")):
        return RecognitionEntries({}, {})
    outputs = _Outputs(packing, data)
    manifest: dict[str, Any] = {}
    members: dict[str, bytes] = {}
    if outputs.embedding_index is not None:
        entry, members = _embedding(outputs, packing.recognition.references)
        manifest["embedding"] = {"output": names[outputs.embedding_index], **entry}
    form = outputs.form
    if form == "head" and outputs.head is None:
        return RecognitionEntries(manifest, members)
    manifest["confidence"] = _measured(outputs, form, packing.recognition)
    return RecognitionEntries(manifest, members)


class _Outputs:
    """The outputs of the int8 model for the splits.

    Attributes:
        embedding_index: the index of the output that is the embedding, or None.
    """

    def __init__(self, packing: Packing, data: Data) -> None:
        self.data = data
        self.embedding_index: int | None = None
        self._packing = packing
        self._model: LoadedModel = packing.models["int8"]
        self._rows: dict[Split, tuple[Rows, NDArray[np.int64]]] = {}
        names = [embeddings.is_embedding(detail) for detail in self._model.outputs]
        if packing.task.recognition == "embedding":
            self.embedding_index = 0
        elif any(names):
            self.embedding_index = names.index(True)

    @property
    def tensor(self) -> TensorDescription:
        """The output that is the embedding."""
        assert self.embedding_index is not None
        return self._model.output_tensors[self.embedding_index]

    @cached_property
    def graph(self) -> graphs.Graph:
        """The graph of the int8 model."""
        return graphs.read(self._packing.files["int8"])

    @cached_property
    def dense(self) -> LinearHead | None:
        """The last dense layer, with a row for each class; None for a model that gives only an embedding."""
        if self.embedding_index is None or self._packing.task.recognition == "embedding":
            return None
        head = embeddings.head_of(self.graph)
        if len(head.weights) == 1 < len(self.data.class_names):  # the logit of the second class
            zeros = np.zeros_like(head.weights)
            return LinearHead(np.concatenate([zeros, head.weights]), np.concatenate([[np.float32(0)], head.biases]))
        return head

    @cached_property
    def head(self) -> Head | None:
        """The function from embeddings to logits; None: there is none."""
        if self.dense is not None or self.embedding_index is None:
            return self.dense
        samples, labels = self.reference_rows(self._packing.recognition.references)
        if not len(samples):
            return None
        vectors = self.tensor.real(samples)
        return imprinted(vectors, labels, len(self.data.class_names), vectors.mean(axis=0))

    @property
    def form(self) -> str:
        """The form of the logits, one of `confidence.FORMS`."""
        if self.embedding_index is not None:
            return "head"
        is_binary = "binary" in (self._packing.specification or {})
        return "probabilities" if is_binary or embeddings.gives_probabilities(self.graph) else "scores"

    @property
    def step(self) -> float:
        """The quantization step of the scores; 0: they are not quantized."""
        tensor = self._model.output_tensors[0]
        return float(tensor.scale or 0.0) if tensor.is_quantized else 0.0

    def stored(self, split: Split) -> tuple[Rows, NDArray[np.int64]]:
        """Return the outputs for at most MAX_SAMPLES samples of a split, in the dtypes of the model, and the labels."""
        if split not in self._rows:
            labels = self.data.labels(split)
            chosen = np.asarray(spread(labels)[:MAX_SAMPLES], np.int64)
            inputs = self.data.inputs(split)
            rows = [self.run(inputs[index]) for index in chosen]
            self._rows[split] = np.concatenate(rows), labels[chosen]
        return self._rows[split]

    def run(self, sample: NDArray[np.float32]) -> Rows:
        """Return the outputs for a preprocessed sample as a row."""
        return self._model.raw(self._model.feed(sample)).reshape(1, -1)

    def embeddings(self, rows: Rows) -> Rows:
        """Return the part of rows that is the embedding, in the dtype of the model."""
        assert self.embedding_index is not None
        part: Rows = self._model.output_layout.parts(rows)[self.embedding_index].astype(self.tensor.dtype)
        return part

    def reference_rows(self, per_class: int) -> tuple[Rows, NDArray[np.int64]]:
        """Return the embeddings of the first training samples of each class, and their labels."""
        labels = self.data.labels("train")
        chosen = np.concatenate([np.flatnonzero(labels == number)[:per_class] for number in np.unique(labels)])
        if not len(chosen):
            return np.zeros((0, int(np.prod(self.tensor.shape))), self.tensor.dtype), labels[:0]
        rows = np.concatenate([self.run(sample) for sample in self.data.inputs("train")[chosen]])
        return self.embeddings(rows), labels[chosen]

    def logits(self, rows: Rows) -> NDArray[np.float64]:
        """Return the logits of the classes from the outputs."""
        if self.form == "head":
            assert self.head is not None
            return np.asarray(self.head.logits(self.tensor.real(self.embeddings(rows))), np.float64)
        part = self._model.output_layout.parts(rows)[0]
        scores = class_scores(self._model.output_tensors[0].real(part), self._packing.specification)
        return np.asarray(confidence.logits_of(scores, self.form, self.step), np.float64)


def _embedding(outputs: _Outputs, per_class: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest's `embedding` without its output, and its files (`deploy.contract.embedding`)."""
    arrays: dict[str, Rows] = {}
    if outputs.dense is not None:
        arrays["head-weights.npy"], arrays["head-biases.npy"] = outputs.dense
    references = {}
    rows, labels = outputs.stored("validation")
    validation = outputs.embeddings(rows[:MAX_VALIDATION]), labels[:MAX_VALIDATION]
    rows_of_splits = {"training": outputs.reference_rows(per_class), "validation": validation}
    for split, (vectors, classes) in rows_of_splits.items():
        files = {"embeddings": f"references-{split}.npy", "labels": f"references-{split}-labels.npy"}
        arrays |= {files["embeddings"]: vectors, files["labels"]: classes.astype(np.int64)}
        if len(vectors):
            references[split] = files
    used = {name for files in references.values() for name in files.values()} | {"head-weights.npy", "head-biases.npy"}
    head = {"weights": "head-weights.npy", "biases": "head-biases.npy"} if outputs.dense is not None else None
    entry = {"head": head, "references": references}
    return entry, {name: bundle.array_bytes(array) for name, array in arrays.items() if name in used}


def _measured(outputs: _Outputs, form: str, settings: RecognitionSettings) -> dict[str, Any]:
    """Return the manifest's `confidence` (`deploy.contract.confidence`)."""
    rows, labels = outputs.stored("validation")
    logits = outputs.logits(rows)
    temperature = confidence.fitted_temperature(logits, labels)
    likely = np.exp(confidence.log_softmax(logits, temperature)).max(axis=1)
    threshold = confidence.rejection_threshold(likely, settings.false_reject_rate)
    calibration = Confidence(form, temperature, threshold, outputs.step if form == "probabilities" else 0.0)
    measured = {
        split: _of_split(outputs, split, calibration)
        for split in ("validation", "test")
        if len(outputs.data.labels(split))
    }
    measured["unknown"] = {"false_accept": _false_accept(outputs, settings.unknown, calibration).to_json()}
    return {**calibration.to_json(), "false_reject_rate": settings.false_reject_rate, "measured": measured}


def _of_split(outputs: _Outputs, split: Any, calibration: Confidence) -> dict[str, Any]:
    """Return the calibration error before and after, the accuracy, and the share of samples that are rejected."""
    rows, labels = outputs.stored(split)
    logits = outputs.logits(rows)
    right = logits.argmax(axis=1) == labels
    values = {
        name: np.exp(confidence.log_softmax(logits, temperature)).max(axis=1)
        for name, temperature in (("ece_before", 1.0), ("ece_after", calibration.temperature))
    }
    assert calibration.threshold is not None
    rejected = values["ece_after"] < calibration.threshold
    note = f"{split} split, {version()}"
    count = f"{note}, {len(labels)} samples, {confidence.BINS} bins"
    result = {
        name: Measurement(confidence.calibration_error(likely, right), "fraction", "measured", note=count)
        for name, likely in values.items()
    }
    result["accuracy"] = proportion(int(right.sum()), len(right), note)
    result["false_reject"] = proportion(int(rejected.sum()), len(rejected), f"{note}, answered unknown")
    return {name: value.to_json() for name, value in result.items()}


def _false_accept(outputs: _Outputs, folder: Path | None, calibration: Confidence) -> Measurement:
    """Return the share of images that show none of the classes, and that are answered with a class."""
    if parsed(outputs.data.decoding).text_bytes is not None:
        if folder is not None:
            raise DataError(
                "takes images, and the samples are texts", where="package.recognition.unknown", hint="remove it"
            )
        return missing("fraction", "the samples are texts, and package.recognition.unknown takes images")
    if folder is None:
        reason = "no images without the classes: set package.recognition.unknown to a folder of them"
        return missing("fraction", reason)
    paths = unknown_files(folder)
    if not paths:
        allowed = ", ".join(IMAGE_SUFFIXES)
        raise DataError("has no images", where=str(folder), allowed=allowed, hint="check package.recognition.unknown")
    rows = np.concatenate([outputs.run(_prepared(path, outputs.data)) for path in paths[:MAX_SAMPLES]])
    likely = np.exp(confidence.log_softmax(outputs.logits(rows), calibration.temperature)).max(axis=1)
    accepted = int((likely >= (calibration.threshold or 0.0)).sum())
    return proportion(accepted, len(likely), f"images in {folder.name}, {version()}, answered with a class")


def unknown_files(folder: Path) -> Sequence[Path]:
    """Return the images in a folder and its subfolders, sorted.

    Raises:
        DataError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise DataError("is not a folder", where=str(folder), hint="check package.recognition.unknown")
    images = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    return sorted(path for path in images if not path.name.startswith("."))


def _prepared(path: Path, data: Data) -> NDArray[np.float32]:
    """Return an image as the device reads it, preprocessed."""
    settings = parsed(data.decoding)
    try:
        image = pictures.decode(path.read_bytes(), settings.image_channels, orientation=settings.orientation)
        sample: NDArray[np.float32] = Preprocessing(data.preprocessing)(image)
    except (ImageError, PreprocessingError, OSError) as error:
        raise DataError(
            f"cannot be used: {reason_of(error)}", where=str(path), hint="remove it from the folder"
        ) from error
    if sample.shape != data.input_shape:
        raise DataError(
            f"has the shape {list(sample.shape)} after preprocessing",
            where=str(path),
            allowed=f"{list(data.input_shape)}",
            hint="the images need the same channels as the data",
        )
    return sample
