"""Classification: one class for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import DataError, ModelError
from compress.core.measurement import Measurement, Metric, drop, proportion
from compress.data.types import SPLITS, Data, Split
from compress.model.ir.tensorflow import keras, run
from compress.model.tflite.embedding import is_embedding
from compress.results.evaluation import Judgement, Spread
from compress.tasks import degeneracy
from compress.tasks.base import (
    EvaluationMembers,
    Head,
    Judge,
    ModelOutputs,
    Quality,
    Rows,
    Shapes,
    Specification,
    Task,
    first_output,
    pooled_dense,
    refuse_misfit,
)
from compress.tasks.findings import VerdictReason, against_constant, class_order, never_answered, ties
from compress.tasks.output_forms import Activation, activation_of, softmax_divergence

LOOKED_AT = 16
"""Number of samples for the inspection of outputs whose last layer does not define their meaning."""
SUM_ERROR = 0.1
"""Difference of the sum of probabilities from 1, in 8 bits: half a step of 1/256 for each of some tens of classes."""
MAJORITY = 0.5
"""Share of the most frequent class from which accuracy alone does not show that a model is useless."""
SMALLEST_FREQUENCY = 1e-6
"""Lower limit of the frequency of a class before the logarithm."""
MOST_NAMED = 6
"""Number of classes that a message names."""


@dataclass(frozen=True)
class ClassificationHead(Head):
    """The meaning of a classifier's output.

    Attributes:
        scores: logits (of a softmax), or probabilities: of a softmax, or of one sigmoid for each class.
        is_binary: whether the model has one output for two classes: the probability of the second class, or its logit.
    """

    loss_name: ClassVar[str] = "cross-entropy in nats"

    scores: Activation
    is_binary: bool = False

    @property
    def specification(self) -> Specification:
        """For a binary classifier, whether its output is a "probability" or a "logit"; otherwise nothing."""
        if not self.is_binary:
            return None
        return {"binary": "probability" if self.scores == "sigmoid" else "logit"}

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the frequencies of the classes, in the form of the model's output."""
        labels = np.asarray(targets).reshape(-1).astype(np.int64)
        counts = np.bincount(labels, minlength=2 if self.is_binary else shapes[0][-1])
        likely = np.clip(counts / max(len(labels), 1), SMALLEST_FREQUENCY, 1 - SMALLEST_FREQUENCY)
        if self.is_binary:
            likely = likely[1:]
        if self.scores == "logits":
            likely = np.log(likely / (1 - likely)) if self.is_binary else np.log(likely)
        return [likely[np.newaxis].astype(np.float32)]

    def logits(self, outputs: Any) -> Any:
        """Return outputs as logits [n, classes] (up to a constant, where they are probabilities that sum to 1).

        Of a binary classifier, 0 is the logit of the first class.
        """
        ops = keras().ops
        values = self._logits(first_output(outputs))
        return ops.concatenate([ops.zeros_like(values), values], axis=-1) if self.is_binary else values

    def _logits(self, outputs: Any) -> Any:
        ops = keras().ops
        if self.scores == "softmax":
            return ops.log(ops.clip(outputs, 1e-7, 1.0))
        if self.scores == "sigmoid":
            likely = ops.clip(outputs, 1e-7, 1 - 1e-7)
            return ops.log(likely) - ops.log(1 - likely)
        return outputs

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the cross entropy with labels [n]; of independent probabilities the sum over the classes."""
        library = keras()
        outputs = first_output(outputs)
        if self.is_binary:
            return library.losses.sparse_categorical_crossentropy(targets, self.logits(outputs), from_logits=True)
        if self.scores == "sigmoid":
            expected = library.ops.one_hot(library.ops.cast(targets, "int32"), outputs.shape[-1], dtype="float32")
            logits = self.logits(outputs)
            return library.ops.sum(library.ops.softplus(logits) - expected * logits, axis=-1)
        from_logits = self.scores == "logits"
        return library.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=from_logits)

    def smoothing_loss(self, outputs: Any) -> Any:
        """Return the mean over all classes of the loss with that class as label: [n]."""
        ops = keras().ops
        return -ops.mean(ops.log_softmax(self.logits(outputs)), axis=-1)

    def soft_targets(self, logits: Sequence[Any], weights: Sequence[float], temperature: float) -> Any:
        """Return the logarithm of the teachers' softened probabilities, averaged by weight; logits [n, classes] each.

        Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
        """
        ops = keras().ops
        log_probabilities = [
            ops.log_softmax(ops.convert_to_tensor(values, "float32") / temperature) for values in logits
        ]
        if len(log_probabilities) == 1:
            return log_probabilities[0]
        shares = np.array(weights, np.float32)
        return ops.logsumexp(ops.stack(log_probabilities) + np.log(shares / shares.sum())[:, None, None], axis=0)

    def distillation_loss(self, logits: Any, soft_targets: Any, temperature: float) -> Any:
        """Return the divergence of a student's softened scores from the soft targets, for each sample [n].

        Source: Hinton et al., 2015: soft targets at `temperature`, their gradient scaled by its square.

        `logits` and `soft_targets` are [n, classes]; soft targets are logarithms of softened probabilities, or logits
        divided by the temperature.
        """
        return softmax_divergence(keras().ops.stop_gradient(soft_targets), logits / temperature) * temperature**2

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the Kullback-Leibler divergence of the probabilities: [n]."""
        return softmax_divergence(expected, actual, temperature)


def class_scores(rows: Rows, specification: Specification) -> Rows:
    """Return the score of each class [n, classes]; for a binary classifier, the probabilities of both."""
    binary = (specification or {}).get("binary")
    if binary is None:
        return rows
    likely = np.asarray(rows, np.float64)
    if binary == "logit":
        from scipy.special import expit

        likely = expit(likely)
    return np.concatenate([1 - likely, likely], axis=1)


@dataclass(frozen=True)
class ByClass(Judge):
    """The comparison of two classifiers: all scores, and the class with the largest score; of a binary classifier with
    one output, values above `limit` mean the second class."""

    limit: float = 0.5

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return 1 where the largest output is the same, otherwise 0."""
        return np.asarray(self._classes(expected) == self._classes(actual), np.float64)

    def _classes(self, rows: Rows) -> NDArray[Any]:
        return np.asarray(rows[:, 0] > self.limit if rows.shape[1] == 1 else rows.argmax(axis=1))


class Classification(Task):
    """One class for each sample, by the highest score; the metric is the accuracy."""

    name: ClassVar[str] = "classification"
    one_vector: ClassVar[bool] = True
    models: ClassVar[str] = "classifiers"
    score_name: ClassVar[str] = "validation_accuracy"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", "Accuracy", "fraction", "accuracy_drop", limited=True),)
    counts_right: ClassVar[bool] = True
    recognition: ClassVar[Literal["", "scores", "embedding"]] = "scores"

    def head(self, model: Any, data: Data, specification: Specification = None) -> ClassificationHead:
        """Return the meaning of a classifier's output.

        Raises:
            ModelError: the model has several outputs, or its shapes are not those of the data.
            DataError: the labels are arrays.
        """
        if data.has_targets:
            raise _labels_are_arrays(data.targets("train"))
        refuse_misfit(model, data, 1)
        shape = tuple(model.outputs[0].shape[1:])
        if shape == (1,) and len(data.class_names) == 2:
            activation = activation_of(model.outputs[0])
            return ClassificationHead("sigmoid" if activation == "sigmoid" else "logits", is_binary=True)
        if shape != (len(data.class_names),):
            raise _other_classes(f"the model's output has the shape {list(shape)}", shape[-1], data)
        activation = activation_of(model.outputs[0])
        if activation is None:  # probabilities sum to 1
            outputs = np.asarray(run(model, data.inputs("train")[:LOOKED_AT]), np.float64)
            are_probabilities = (outputs > -1e-6).all() and (abs(outputs.sum(axis=1) - 1) < 1e-3).all()
            activation = "softmax" if are_probabilities else "logits"
        return ClassificationHead(activation)

    def new_head(self, features: Any, data: Data, dropout: float) -> Any:
        """Return the probability of each class."""
        return pooled_dense(features, len(data.class_names), "softmax", dropout)

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return the labels: int64 [n]."""
        return data.labels(split)

    def validation(
        self, model: Any, data: Data, specification: Specification, batches: Iterator[tuple[slice, Any]]
    ) -> Quality:
        """Return the accuracy of the first output; outputs that are not finite count as wrong."""
        labels, right = data.labels("validation"), 0
        for samples, outputs in batches:
            scores = class_scores(np.asarray(first_output(outputs)), specification)
            finite = np.isfinite(scores).all(axis=-1)
            right += int((finite & (scores.argmax(axis=-1) == labels[samples])).sum())
        return Quality("accuracy", right / len(labels))

    def evaluate(self, models: Mapping[str, ModelOutputs], data: Data, split: Split, note: str) -> Facts:
        """Return `accuracy`, `predictions` and `constant` of each model; and `labels` and `split`."""
        labels = data.labels(split)
        facts: Facts = {"labels": labels.tolist(), "split": split}
        for name, model in models.items():
            scores = class_scores(model.rows, model.specification)
            _refuse_other_width(scores, data)
            predictions = scores.argmax(axis=1)
            constant = model.floating and _is_constant(scores) and not _is_constant(data.inputs(split))
            facts[name] = {
                "accuracy": proportion(int((predictions == labels).sum()), len(labels), note).to_json(),
                "predictions": predictions.tolist(),
                "constant": constant,
                "probabilities": bool((abs(scores.sum(axis=1) - 1) < SUM_ERROR).mean() > 0.5),
                "tied": int(((scores == scores.max(axis=1, keepdims=True)).sum(axis=1) > 1).sum()),
            }
        return facts

    def compare(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Any]:
        """Return drop, agreement, accuracy per class, confusion, and the samples that are answered correctly."""
        labels = np.array(facts["labels"])
        before, after = (np.array(facts[model]["predictions"]) for model in (original, result))
        per_class = []
        for index, name in enumerate(names):
            members = labels == index
            count = int(members.sum())
            if count:
                shares = [proportion(int((p[members] == index).sum()), count).to_json() for p in (before, after)]
                per_class.append({"name": name, "samples": count, "original": shares[0], "result": shares[1]})
        agreement = proportion(int((before == after).sum()), len(labels), "same predicted class")
        return {
            "measurements": {
                "accuracy_drop": drop(before == labels, after == labels).to_json(),
                "agreement": agreement.to_json(),
            },
            "per_class": per_class,
            "confusion": {
                name: confusion(labels, predicted, len(names))
                for name, predicted in (("original", before), ("result", after))
            },
            "right": {
                "samples": len(labels),
                "original": np.packbits(before == labels).tobytes().hex(),
                "result": np.packbits(after == labels).tobytes().hex(),
            },
        }

    def judge_outputs(self, facts: Facts, names: Sequence[str], original: str, result: str) -> dict[str, Judgement]:
        """Judge whether two classifiers predict one class for nearly everything; `result` may be the original."""
        spreads = {name: _spread(facts, names, name) for name in (original, result)}
        return {
            original: degeneracy.judge(spreads[original]),
            result: degeneracy.judge(spreads[result], spreads[original]),
        }

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare both models with the most frequent class, and judge the order of the classes and ties."""
        labels = np.array(facts["labels"])
        before, after = (np.array(facts[model]["predictions"]) for model in (original, result))
        most = int(np.bincount(labels, minlength=len(names)).max())
        measured = [Measurement(**facts[model]["accuracy"]) for model in (original, result)]
        constant = proportion(most, len(labels), "the most frequent class")
        reasons = against_constant(self.metrics[0], (constant, measured[0], measured[1]), len(labels))
        # Where one class is the majority, a useful model may have fewer right answers than that class alone.
        useful = most >= MAJORITY * len(labels) and degeneracy.above_chance(_spread(facts, names, result))
        if len(labels) - most < degeneracy.ENOUGH or useful:
            reasons = [replace(finding, level="warning") for finding in reasons]
        if not facts[result]["constant"]:
            reasons += ties(facts[result]["tied"], len(labels), probabilities=facts[result]["probabilities"])
        if degeneracy.judge(_spread(facts, names, original)).verdict == "varied":
            wrong = class_order(labels, before, names)
            still_wrong = class_order(labels, after, names)  # a result that was trained further knows its classes
            reasons += wrong if still_wrong else [replace(reason, level="warning") for reason in wrong]
        if degeneracy.judge(_spread(facts, names, result)).verdict == "varied":
            reasons += never_answered(labels, before, after, names)
        return reasons

    def output_order(self, outputs: list[dict[str, Any]], specification: Specification) -> list[dict[str, Any]]:
        """Return the scores, without the embedding that `expose_embedding` adds."""
        return [detail for detail in outputs if not is_embedding(detail)]

    def fidelity(self, specification: Specification, *, logits: bool = False) -> ByClass:
        """Return the comparison by scores and classes."""
        is_logit = logits or (specification or {}).get("binary") == "logit"
        return ByClass(0.0 if is_logit else 0.5)

    def score(self, rows: Rows, data: Data, split: Split, specification: Specification) -> float:
        """Return the accuracy."""
        scores = class_scores(rows, specification)
        return float((scores.argmax(axis=1) == data.labels(split)).mean())

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return how the device reads one output for two classes."""
        return dict(specification or {})

    def packaged(
        self, rows: Mapping[str, Rows], data: Data, indices: Sequence[int], specification: Specification, note: str
    ) -> EvaluationMembers:
        """Return the labels, the accuracy of each model, the drop and the agreement."""
        labels = data.labels("test")[list(indices)]
        right, predicted = {}, []
        for role, outputs in rows.items():
            scores = class_scores(outputs, specification)
            _refuse_other_width(scores, data)
            predicted.append(scores.argmax(axis=1))
            right[role] = predicted[-1] == labels
        metrics = {f"accuracy_{role}": proportion(int(row.sum()), len(row), note) for role, row in right.items()}
        same = proportion(int((predicted[0] == predicted[1]).sum()), len(labels), "same predicted class")
        metrics |= {"accuracy_drop": drop(right["original"], right["int8"]), "agreement": same}
        plain = {name: metric.to_json() for name, metric in metrics.items()}
        return EvaluationMembers(labels.astype(np.int64), plain)


def _labels_are_arrays(targets: NDArray[Any]) -> DataError:
    """Return the error for labels that are arrays: one-hot labels, or labels of another task."""
    hint = "set data.task: multi_label, segmentation, keypoints, reconstruction or outputs; for regression, name the "
    hint += "`targets` of data.source"
    if targets.ndim == 2 and ((targets == 1).sum(axis=1) == 1).all() and ((targets == 0) | (targets == 1)).all():
        hint = f"the labels are one-hot: store the indices of the classes, `y.argmax(axis=1)`; otherwise {hint}"
    return DataError(
        "the labels are not one class for each sample, but an array",
        where="data.source",
        allowed="class indices or names [n]",
        hint=hint,
    )


def _refuse_other_width(scores: Rows, data: Data) -> None:
    if scores.shape[1] != len(data.class_names):
        raise _other_classes(f"gives {scores.shape[1]} scores", scores.shape[1], data)


def _other_classes(output: str, outputs: int | None, data: Data) -> ModelError:
    """Return the error for a model whose output (described in words) does not have one score for each class.

    The message has the rarest labels of the data, because misspelt labels are rare.
    """
    names = data.class_names
    samples = np.bincount(np.concatenate([data.labels(split) for split in SPLITS]), minlength=len(names))
    rarest = np.argsort(samples, kind="stable")[:MOST_NAMED]
    listed = ", ".join(f"{names[index]!r} ({samples[index]:,} samples)" for index in rarest)
    shown = f": {listed}" if len(names) <= MOST_NAMED else f"; the rarest are {listed}"
    if outputs is not None and len(names) == outputs + 1 and not samples[0]:
        hint = "no sample has the label 0: if the labels count from 1, subtract 1"
    elif outputs is not None and len(names) < outputs:
        hint = "name all classes of the model in `classes` of data.source, in the order of its outputs"
    else:
        hint = "check the spelling of the labels, the folders of data.source, and the model's last layer"
    return ModelError(
        f"{output}, but the data has {len(names)} classes{shown}",
        hint=f"{hint}; `data: {{task: outputs}}` needs no labels",
    )


def _is_constant(rows: NDArray[Any]) -> bool:
    """Return True if all rows equal the first one; NaN equals NaN."""
    return all(np.array_equal(row, rows[0], equal_nan=True) for row in rows)


def _spread(facts: Facts, names: Sequence[str], model: str) -> Spread:
    labels, predictions = np.array(facts["labels"]), np.array(facts[model]["predictions"])
    counts = np.bincount(predictions, minlength=len(names))
    answer = int(counts.argmax())
    constant = bool(facts[model]["constant"])
    text = f"answers {names[answer]!r} to {counts[answer]:,} of {len(labels):,} {facts['split']} samples"
    if constant:
        text = f"gives the same output for all {len(labels):,} {facts['split']} samples"
    others = labels != answer
    return Spread(
        text=text,
        samples=len(labels),
        same=int(counts[answer]),
        others=int(others.sum()),
        told_apart=int((others & (predictions != answer)).sum()),
        constant=constant,
    )


def confusion(labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> list[list[int]]:
    """Return counts by true class (row) and predicted class (column)."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, predicted), 1)
    rows: list[list[int]] = table.tolist()
    return rows
