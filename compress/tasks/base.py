"""The protocol of a task: everything that other packages need to know about it.

A task is one subclass of `Task` in one file, and a row of `compress.tasks.TASKS`. A model's `Head` says what its
outputs mean. Nothing outside this package compares the name of a task.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError
from compress.core.measurement import Metric
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras, sample_shape
from compress.model.tflite.interpreter import shape_hint
from compress.results.evaluation import Judgement
from compress.tasks.findings import VerdictReason

Location = tuple[str | int, ...]
"""Keys and indices in the pipeline file."""
Rows = NDArray[Any]
"""Outputs of samples, dequantized and flattened; several outputs are concatenated: [n, outputs]."""
Shapes = Sequence[tuple[int, ...]]
Specification = Mapping[str, Any] | None
"""The way to read a model's outputs, if its layers do not define it: the anchors of a detector."""
BEST_DB = 60.0
"""Signal-to-noise ratios above this count as equal."""
HEAD_LAYER = "new_head"
"""Name of the dense layer of an untrained head."""
QualityMetric = Literal["accuracy", "loss"]
Use = Literal[
    "distillation",
    "qat teacher",
    "healing by distillation",
    "channel importance",
    "measured sensitivity",
    "class weights",
    "augmentation",
    "rotation",
    "mixup",
    "label smoothing",
    "labels",
    "tfmot",
    "tfmot qat",
    "package",
    "embedding",
]
"""A method that not every task has, see `Stage.uses` and `Task.refused`."""


class Refusal(NamedTuple):
    """Why a stage, or one of its settings, cannot be used with the data; the alternatives, and what to do."""

    what: str
    allowed: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Quality:
    """An accuracy (a fraction) or a loss on the validation split; NaN where the model's outputs are not finite."""

    metric: QualityMetric
    value: float

    @property
    def score(self) -> float:
        """The value as a number that is higher for a better result; minus infinity for NaN."""
        if math.isnan(self.value):
            return -math.inf
        return self.value if self.metric == "accuracy" else -self.value

    def is_worse_than(self, other: Quality) -> bool:
        """Return whether the other result is better; NaN is worse than everything."""
        if math.isnan(self.value) or math.isnan(other.value):
            return math.isnan(self.value)
        return self.score < other.score

    def to_json(self) -> float | None:
        """Return the value; None if it is not finite."""
        return round(self.value, 6) if math.isfinite(self.value) else None


class RandomChanges(Protocol):
    """Settings of augmentation (`compress.learning.training.augmentation.Augment`)."""

    @property
    def shift(self) -> float:
        """Largest shift, a fraction of the image's dimension."""

    @property
    def zoom(self) -> float:
        """Largest change of size, a fraction."""

    @property
    def rotate(self) -> float:
        """Largest rotation, in degrees."""

    @property
    def flip(self) -> bool:
        """Whether images may be mirrored."""


class Draws(NamedTuple):
    """The random numbers of a batch: the seeds that they are drawn from, and the number of samples."""

    seeds: Any
    size: Any


Change = Callable[[Any, Any, Draws], tuple[Any, Any]]
"""(images, their training targets, random numbers) -> both, changed at random."""


class Head(ABC):
    """The meaning of a model's outputs."""

    loss_name: ClassVar[str] = "loss"
    """The name of `loss` for people, with its unit."""
    shown_values: ClassVar[tuple[str, ...]] = ()
    """The names of `training_values`."""

    @property
    def specification(self) -> Specification:
        """The way to read the outputs, if it belongs to the model and not to the data."""
        return None

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the best outputs that do not depend on the input: their loss is that of guessing.

        Args:
            targets: the training targets of many samples [n, ...].
            shapes: the shapes of the model's outputs, without the batch.

        Returns:
            One array [1, ...] for each output of a model; None without such a guess.
        """
        return None

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return values that training shows in addition to the loss, by name: the parts of the loss, or an error in the
        unit of the targets; [n] each."""
        return {}

    @abstractmethod
    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the loss of each sample [n] from training targets and a Keras model's outputs."""

    def smoothing_loss(self, outputs: Any) -> Any:
        """Return the loss with all classes as labels in equal shares, for label smoothing: [n]."""
        raise NotImplementedError

    def importance(self, targets: Any, outputs: Any) -> Any:
        """Return the value whose derivative shows how much a channel matters: [n]; by default the loss."""
        return self.loss(targets, outputs)

    @abstractmethod
    def logits(self, outputs: Any) -> Any:
        """Return outputs in the form that distillation compares."""

    def soft_targets(self, logits: Sequence[Any], weights: Sequence[float], temperature: float) -> Any:
        """Combine the outputs of several teachers, in the form of `logits`, into one training target.

        By default their weighted mean; the temperature does not apply.
        """
        ops = keras().ops
        shares = np.array(weights, np.float32) / np.float32(sum(weights))
        parts = [
            ops.convert_to_tensor(teacher_logits, "float32") * share
            for teacher_logits, share in zip(logits, shares, strict=True)
        ]
        return sum(parts[1:], parts[0])

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the distance of a model's outputs from another's, both in the form of `logits`: [n], 0 if equal.

        The temperature softens probabilities; the distance of plain values does not depend on it.
        """
        raise NotImplementedError

    def distillation_loss(self, logits: Any, soft_targets: Any, temperature: float) -> Any:
        """Return the loss of each sample [n] of a student's `logits` with the `soft_targets` of its teachers."""
        return self.divergence(keras().ops.stop_gradient(soft_targets), logits, temperature)


SMALLEST_ENERGY = 1e-3
"""Energy of the differences of a sample below which they do not count; one probability that is off by 0.03 has it."""


class Judge(Protocol):
    """A comparison of the outputs of two models, sample by sample, for the search of quantization."""

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the signal-to-noise ratio of each sample in dB: by default that of all values."""
        return snr_db(expected, actual)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the agreement of both models on each sample, from 0 to 1."""

    def differences(self, expected: Any, actual: Any, maths: Any = np) -> list[Any] | None:
        """Return what two models answer differently, as a user sees it: parts [n, values] of one unit each.

        The parts can be differentiated by `actual`. None: they are not known, and `energies` or `snr_db` decide.

        Args:
            expected: outputs of the original [n, outputs].
            actual: outputs of the other model [n, outputs].
            maths: numpy, or `keras.ops` for tensors.
        """
        return None

    def energies(self, expected: Rows, actual: Rows) -> NDArray[np.float64] | None:
        """Return the energy of the error of each sample and output: [n, outputs], positive.

        A better candidate is better in most samples, and in the sums of these energies over the samples, so that a
        large error in one sample counts. None: candidates are compared by the mean of `snr_db`.
        """
        return None

    def difference_energies(self, expected: Rows, actual: Rows) -> NDArray[np.float64] | None:
        """Return the energy of each part of the `differences` by sample: [n, parts], positive; None without parts."""
        rows = []
        for before, after in zip(expected, actual, strict=True):  # one by one: rows of a detector are long
            with np.errstate(invalid="ignore", over="ignore"):
                parts = self.differences(before[np.newaxis], after[np.newaxis])
            if parts is None:
                return None
            finite = [np.nan_to_num(part.astype(np.float64), nan=1.0, posinf=1.0, neginf=-1.0) for part in parts]
            rows.append([float((part**2).sum()) + SMALLEST_ENERGY for part in finite])
        return np.array(rows)


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a .tflite model for a split.

    Attributes:
        rows: outputs [n, outputs] of all samples; a memory map if they are large.
        floating: whether the file gives floating-point values.
    """

    rows: Rows
    floating: bool
    specification: Specification = None


@dataclass(frozen=True)
class EvaluationMembers:
    """The part of a bundle's evaluation sample that depends on the task.

    Attributes:
        targets: the correct answers, as an array that the device reads; None: the device does not measure the quality.
        metrics: measurements of the models by name, as plain values.
    """

    targets: NDArray[Any] | None
    metrics: dict[str, Any]


Image = NDArray[np.uint8]
"""RGB: [height, width, 3]."""


class Drawn(NamedTuple):
    """An image with an answer, and the answer in words."""

    image: Image
    text: str


class AnswerDifference(NamedTuple):
    """How far two answers to one sample are apart: larger is further, 0 is equal; and the same in words."""

    size: float
    text: str


class Illustrator(Protocol):
    """How answers of a task are drawn and compared, for one split."""

    note: str
    """A description of the drawing, as sentences."""

    def differences(self) -> list[AnswerDifference]:
        """Return the difference of the two models for each sample."""

    def is_empty(self, sample: int) -> bool:
        """Whether there is nothing to draw for a sample."""

    def label(self, image: Image, sample: int) -> Drawn | None:
        """Return an image with the correct answer; None for samples without labels."""

    def answers(self, image: Image, sample: int) -> list[Drawn]:
        """Return an image with the answer of the original, and one with that of the result."""


class Task(ABC):
    """A task. Methods with a body are correct for most tasks."""

    name: ClassVar[str]
    instead_of: ClassVar[frozenset[str]] = frozenset()
    """Tasks whose data can be used for this one, with `data: {task: …}`."""
    learns_from_original: ClassVar[bool] = False
    """Whether the targets are the outputs of the original model."""
    compares_values: ClassVar[bool] = False
    """Whether the verdict depends on the values of the outputs, because there are no labels or objects to judge by."""
    models: ClassVar[str]
    """Name of its models in messages, in the plural."""
    metrics: ClassVar[tuple[Metric, ...]]
    """Metrics; the first one is shown if there is space for only one."""
    score_name: ClassVar[str]
    """The key of `score` on the validation split in the facts of `quantize`."""
    refused: ClassVar[Mapping[Use, Refusal]] = {}
    """Unsupported methods and stages, with the reason."""
    reads_specification: ClassVar[bool] = False
    """Whether its models need a specification of their outputs, which a builder may contain."""
    needs_every_class: ClassVar[bool] = True
    """Whether a class without training samples is a mistake."""
    one_vector: ClassVar[bool] = False
    """Whether its models put out one vector for each sample, so that one dense layer can be their head."""
    counts_right: ClassVar[bool] = False
    """Whether training shows an accuracy, and early stopping uses it; otherwise the loss."""
    recognition: ClassVar[Literal["", "scores", "embedding"]] = ""
    """The first output, from which the device computes a calibrated confidence and learns new classes: the scores of
    classes, or an embedding. Empty: it does neither."""

    @abstractmethod
    def head(self, model: Any, data: Data, specification: Specification = None) -> Head:
        """Return the meaning of a Keras model's outputs.

        Raises:
            ModelError: the model does not fit the data.
        """

    def file_specification(self, file: Path, data: Data, detector: Specification = None) -> Specification:
        """Return how the outputs of a .tflite file are read that is not rebuilt; `detector`: its specification if the
        model is a detector."""
        return detector

    @abstractmethod
    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the training targets of every sample for `Head.loss`: [n, ...]."""

    def new_head(self, features: Any, data: Data, dropout: float) -> Any:
        """Return the output of an untrained head on the features of a trained model: a Keras tensor [n, outputs].

        Only tasks with `one_vector` have such a head.

        Args:
            features: the last feature map, a Keras tensor [n, ..., channels].
            data: the data that define the number of outputs.
            dropout: fraction of the features that the training sets to 0.
        """
        raise NotImplementedError

    def validation(
        self, model: Any, data: Data, specification: Specification, batches: Iterator[tuple[slice, Any]]
    ) -> Quality:
        """Return the quality of a Keras model on the validation split: by default its mean loss.

        Each batch has samples and the model's outputs; outputs after the task's own are for distillation alone.
        """
        head = self.head(model, data, specification)
        targets, total = self.targets(data, "validation"), 0.0
        for samples, outputs in batches:
            total += float(np.sum(np.asarray(head.loss(targets[samples], outputs), np.float64)))
        return Quality("loss", total / len(targets))

    def augmentation(self, augment: RandomChanges) -> Change | None:
        """Return the augmentation that also moves the targets; None if targets do not move."""
        return None

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return the settings of `model`, `data` and `measure` in a pipeline file that the task does not support."""
        refused: list[tuple[Location, Refusal]] = []
        if settings["model"].get("detector") and not self.reads_specification:
            what = f"model.detector describes the boxes of a detector, but the data is for {self.models}"
            refused.append((("model", "detector"), Refusal(what, "data with boxes: voc, coco, yolo")))
        if settings["model"].get("head") and not self.one_vector:
            what = f"one dense layer cannot be the head of {self.models}"
            allowed = "data for classification, multi-label, regression or embeddings"
            hint = "use a builder that takes a trained model: `model: {builder: …, backbone: FILE}`"
            refused.append((("model", "head"), Refusal(what, allowed, hint)))
        return refused

    @abstractmethod
    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return the facts of models on a split: each metric, and the input of `compare` and `judge_outputs`.

        There are one or two models, the original first; `note` has the conditions of the measurements.
        """

    @abstractmethod
    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return the comparison of two models for the report: `measurements`, and `per_class` if the task has classes.

        `facts` are those of `evaluate`; `names` the class names; `original` and `result` the names of the models.
        """

    @abstractmethod
    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether the outputs of two models depend on the input; arguments as in `compare`."""

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Return what the user of the result must know, besides `judge_outputs`; arguments as in `compare`."""
        return []

    def output_order(self, outputs: list[dict[str, Any]], specification: Specification) -> list[dict[str, Any]]:
        """Return a runtime's details of outputs in the order that the task needs: by default that of the model."""
        return outputs

    @abstractmethod
    def fidelity(self, specification: Specification, *, logits: bool = False) -> Judge:
        """Return the comparison of a quantized model's outputs with the float model's; `logits`: without the sigmoid at
        the end of both models."""

    @abstractmethod
    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the quality of outputs for a split; higher is better."""

    @abstractmethod
    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the correct answers of test samples, and the quality of the models `original` and `int8` on them."""

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the manifest entries with which the device reads the outputs.

        Raises:
            StageError: `labels`, the names of classes that do not come from the data, do not fit the outputs.
        """
        return {}

    def illustrator(
        self, models: Mapping[str, ModelOutputs], data: Data, split: Split, labels: Sequence[str] = ()
    ) -> Illustrator | None:
        """Return how the answers of the original and of the result are drawn into images; None if they are not drawn.

        `labels` are the names of classes that do not come from the data.
        """
        return None

    def why_not(self, uses: Iterable[Use]) -> Refusal | None:
        """Return why a stage cannot be used, or None."""
        return next((self.refused[use] for use in uses if use in self.refused), None)


def snr_db(expected: Rows, actual: Rows) -> NDArray[np.float64]:
    """Return the signal-to-noise ratio of each row in dB; for a constant signal, relative to its own power.

    Infinite values count as the largest float32 values, and NaN as 0.
    """
    limit = float(np.finfo(np.float32).max)
    ratios = np.empty(len(expected))
    for number, pair in enumerate(zip(expected, actual, strict=True)):  # one by one: rows of a detector are long
        before, after = (row.astype(np.float64) for row in pair)
        if not np.isfinite(before + after).all():
            before, after = (np.nan_to_num(row, posinf=limit, neginf=-limit) for row in (before, after))
        signal = max(before @ before, 1e-200)  # a row of zeros
        noise = (before - after) @ (before - after)
        ratios[number] = signal / max(noise, 1e-12 * signal)
    return np.asarray(np.clip(10 * np.log10(ratios), -BEST_DB, BEST_DB))


def refuse_misfit(model: Any, data: Data, outputs: int | None = None) -> None:
    """Raise a ModelError for a Keras model that does not take the data's samples, or that does not have this number of
    outputs (None: any number)."""
    if outputs is not None and len(model.outputs) != outputs:
        raise ModelError(
            f"the model has {len(model.outputs)} outputs",
            allowed="one output" if outputs == 1 else f"{outputs} outputs",
            hint="use `data: {task: outputs}`: it compares every output with the original model's",
        )
    expected, actual = sample_shape(model), data.input_shape
    if not takes(expected, actual):
        raise ModelError(
            f"the model takes {list(expected)}, but data.preprocess gives {list(actual)}",
            hint=shape_hint(expected, actual),
        )


def takes(expected: Sequence[int | None], actual: Sequence[int]) -> bool:
    """Return whether samples of a shape fit an input whose open dimensions are None."""
    return len(expected) == len(actual) and all(a in (None, b) for a, b in zip(expected, actual, strict=True))


def first_output(outputs: Any) -> Any:
    """Return the first output of a model; the others are for distillation alone."""
    return keras().tree.flatten(outputs)[0]


def pooled_dense(features: Any, outputs: int, activation: str | None, dropout: float) -> Any:
    """Return the output of an untrained head: the mean over all positions, dropout, and one dense layer.

    The features are a Keras tensor [n, ..., channels], of which the training sets the fraction `dropout` to 0.
    """
    layers = keras().layers
    pooling = {2: None, 3: layers.GlobalAveragePooling1D, 4: layers.GlobalAveragePooling2D}
    kind = pooling.get(len(features.shape), layers.Flatten)
    pooled = features if kind is None else kind(name=f"{HEAD_LAYER}_pooling")(features)
    if dropout:
        pooled = layers.Dropout(dropout, name=f"{HEAD_LAYER}_dropout")(pooled)
    return layers.Dense(outputs, activation=activation, name=HEAD_LAYER)(pooled)
