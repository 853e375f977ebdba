"""The task of a model about which nothing is known: each output stays close to the original model's.

The targets are the outputs of the original model. So all training learns from the original, and data without labels is
enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.artifact import Facts
from compress.core.errors import ModelError, StageError
from compress.core.measurement import Measurement, Metric
from compress.data.types import Data
from compress.model.ir.tensorflow import flattened, keras, run
from compress.model.tflite.interpreter import LoadedModel
from compress.tasks.base import Head, Judge, Refusal, Rows, Shapes, Specification, Use, refuse_misfit, snr_db
from compress.tasks.findings import VerdictReason, unlike_original
from compress.tasks.measured import MeasuredTask
from compress.tasks.output_forms import OutputForm, forms_by_values, forms_of, from_json, layout_of
from compress.tasks.regression import WITHOUT_CLASSES, mean_with_interval

SEED = 0
"""Seed of the random combination of outputs by which the importance of channels is measured."""
LOOKED_AT = 32
"""Number of samples that show the form and the deviation of each output."""
TOGETHER = 4
"""Number of these samples that are run at once: all values inside the network are in memory meanwhile."""


@dataclass(frozen=True)
class OutputsHead(Head):
    """All outputs of a model, in the forms of the original's; in rows, and as logits where they are probabilities."""

    loss_name: ClassVar[str] = "distance from the original's outputs: divergence in nats, or variances, averaged"

    outputs: tuple[OutputForm, ...]

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the mean of the original's outputs."""
        means = np.asarray(targets, np.float64).mean(axis=0, keepdims=True)
        return [part.astype(np.float32) for part in layout_of(self.outputs).split(means)]

    @property
    def specification(self) -> Specification:
        """The outputs of the original."""
        return {"outputs": [output.to_json() for output in self.outputs]}

    def logits(self, outputs: Any) -> Any:
        """Return all outputs as logits, flattened and concatenated: [n, values]."""
        ops = keras().ops
        flat = []
        for output, values in zip(self.outputs, keras().tree.flatten(outputs), strict=False):  # features may follow
            logits = output.logits(ops.cast(values, "float32"))
            flat.append(ops.reshape(logits, (ops.shape(logits)[0], int(np.prod(output.shape)))))
        return ops.concatenate(flat, axis=1) if len(flat) > 1 else flat[0]

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean over the outputs of the distance from the original's outputs, rows [n, values]: [n]."""
        return self.divergence(self.logits(self._split(targets)), self.logits(outputs))

    def importance(self, targets: Any, outputs: Any) -> Any:
        """Return a random combination of the outputs: [n].

        The loss cannot be used: its derivative is 0 where the model is the original. The expected square of the
        derivative of this value is the change of all outputs, in the units of the loss: the diagonal of the Fisher
        information. Source: Kunstner et al., Limitations of the Empirical Fisher Approximation, NeurIPS 2019, section 2
        (labels drawn from the model's own distribution).
        """
        library = keras()
        ops = library.ops
        rows = self.logits(outputs)
        total = 0.0
        for output, logits in zip(self.outputs, self._split(rows), strict=True):
            noise = library.random.uniform(ops.shape(logits), seed=SEED)
            if output.form == "softmax":
                # The largest of logits plus Gumbel noise is a class drawn from their softmax.
                drawn = ops.argmax(ops.stop_gradient(logits) - ops.log(-ops.log(noise + 1e-9) + 1e-9), axis=-1)
                chosen = ops.one_hot(drawn, output.shape[-1], dtype="float32")
                values = ops.sum(chosen * ops.log_softmax(logits), axis=-1, keepdims=True)
            elif output.form == "sigmoid":
                drawn = ops.cast(noise < ops.stop_gradient(ops.sigmoid(logits)), "float32")
                values = ops.softplus(logits) - drawn * logits
            else:
                values = ops.where(noise < 0.5, -1.0, 1.0) * logits / output.unit
            flat = ops.reshape(values, (ops.shape(values)[0], -1))
            total += ops.sum(flat, axis=-1) / (flat.shape[-1] or 1) ** 0.5
        return total / len(self.outputs)

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the mean over the outputs of their distance: [n]."""
        total = 0.0
        for output, one, other in zip(self.outputs, self._split(expected), self._split(actual), strict=True):
            total += output.divergence(one, other, temperature)
        return total / len(self.outputs)

    def _split(self, rows: Any) -> list[Any]:
        """Return rows [n, values] as one tensor for each output."""
        ops = keras().ops
        ends = np.cumsum(layout_of(self.outputs).sizes)[:-1].tolist()
        parts = ops.split(rows, ends, axis=1) if ends else [rows]
        return [ops.reshape(part, (-1, *output.shape)) for part, output in zip(parts, self.outputs, strict=True)]


OUTPUT_STEP = 1 / 256
"""Step of 8-bit probabilities."""
SMALLEST_ENERGY = 1e-12
"""Energy of an error, relative to the variance of the output, below which errors do not count."""


@dataclass(frozen=True)
class ByOutput(Judge):
    """The comparison of two models output by output, `as_logits` if softmaxes and sigmoids at the end were removed."""

    outputs: tuple[OutputForm, ...]
    as_logits: bool

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the mean over the outputs of their ratios: outputs of large values do not hide others."""
        layout = layout_of(self.outputs)
        ratios = []
        for output, *pair in zip(self.outputs, layout.split(expected), layout.split(actual), strict=True):
            before, after = ((values / output.unit).reshape(len(values), -1) for values in pair)
            ratios.append(snr_db(before, after))
        return np.asarray(np.mean(ratios, axis=0))

    def energies(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the energy of the error of each sample and output, in probabilities or plain values: [n, outputs]."""
        layout = layout_of(self.outputs)
        columns = []
        for output, *pair in zip(self.outputs, layout.split(expected), layout.split(actual), strict=True):
            before, after = (output.values(values, logits=self.as_logits) for values in pair)
            rounding = 0.0 if output.form == "values" else OUTPUT_STEP**2 / 12
            relative = (after - before) * (output.deviation / output.unit)
            errors = (relative**2).reshape(len(before), -1).mean(axis=1)
            columns.append(errors + rounding + SMALLEST_ENERGY * output.deviation**2)
        return np.stack(columns, axis=1)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the mean over the outputs of the share of equal decisions."""
        layout = layout_of(self.outputs)
        pairs = zip(self.outputs, layout.split(expected), layout.split(actual), strict=True)
        shares = [output.agreement(*pair, logits=self.as_logits) for output, *pair in pairs]
        return np.asarray(np.mean(shares, axis=0))


class OutputsTask(MeasuredTask):
    """Outputs close to the original's; the metric is the error in standard deviations."""

    name: ClassVar[str] = "outputs"
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification", "regression", "detection"})
    learns_from_original: ClassVar[bool] = True
    compares_values: ClassVar[bool] = True
    models: ClassVar[str] = "models without labels"
    score_name: ClassVar[str] = "validation_score"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("error", "Error in standard deviations", "fraction", "error_increase", limited=True),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        **WITHOUT_CLASSES,
        "labels": Refusal(
            "there are no labels to learn from",
            "prune, distill, quantize and replace_activations, which learn from the original model",
            "leave it out, or use data with labels",
        ),
        "augmentation": Refusal(
            "augment changes samples after the original's outputs for them were computed",
            "stages that learn with `weight: 1`, also in their `distill`: the original runs on the changed samples",
            "set weight: 1, or leave augment out",
        ),
    }
    agreement_note: ClassVar[str] = "equal decisions, or values within 0.1 standard deviations, averaged over outputs"

    def head(self, model: Any, data: Data, specification: Specification = None) -> OutputsHead:
        """Return the head of a model with the outputs of the original; without a specification, that of the original.

        Raises:
            ModelError: the model does not take the samples, or its outputs do not have the shapes of the original's.
        """
        refuse_misfit(model, data)
        if specification is None:
            samples = data.inputs("train")[:LOOKED_AT]
            starts = range(0, len(samples), TOGETHER)
            batches = [keras().tree.flatten(run(model, samples[start : start + TOGETHER])) for start in starts]
            return OutputsHead(forms_of(model, np.concatenate([flattened(outputs) for outputs in batches])))
        outputs = _outputs_in(specification)
        expected = [list(output.shape) for output in outputs]
        actual = [list(tensor.shape[1:]) for tensor in model.outputs]
        if actual[: len(expected)] != expected:  # features for distillation may follow
            raise ModelError(
                f"the model's outputs have the shapes {', '.join(map(str, actual))}",
                allowed=f"those of the original: {', '.join(map(str, expected))}",
            )
        return OutputsHead(outputs)

    def file_specification(self, file: Path, data: Data, detector: Specification = None) -> Specification:
        """Return the outputs of the file, with their forms by their values."""
        model = LoadedModel(file, reproducible=True)
        rows = model.scores(data.inputs("train")[:LOOKED_AT])
        return OutputsHead(forms_by_values(model.output_layout, rows)).specification

    def constant(self, data: Data) -> Rows | None:
        """Return None: an output that varies over positions more than over samples is nearly constant, and useful."""
        return None

    def findings(self, facts: Facts, names: Sequence[str], original: str, result: str) -> list[VerdictReason]:
        """Compare the decisions of both models, and the outputs one by one."""
        return unlike_original(facts["agreement"], facts.get("outputs", ()))

    def manifest(self, specification: Specification, labels: Sequence[str] = ()) -> dict[str, Any]:
        """Return the task that a model with one output has on the device, if its classes have names.

        Raises:
            StageError: the number of names does not fit the output.
        """
        if not labels:
            return {}
        outputs = _outputs_in(specification)
        task = _named_task(outputs[0], len(labels)) if len(outputs) == 1 else None
        if task is None:
            sizes = ", ".join(f"{output.name} {list(output.shape)}" for output in outputs)
            raise StageError(
                f"package.labels has {len(labels)} names, and the outputs are {sizes}",
                allowed="a name for each value of one output, or two names for one probability",
            )
        return task

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the error of each sample: root mean square, in standard deviations, averaged over outputs: [n]."""
        if rows.shape[1:] != targets.shape[1:]:
            raise ModelError(
                f"gives {rows.shape[1]} values, and the original {targets.shape[1]}",
                allowed="the same outputs",
                hint="choose another model",
            )
        outputs = _outputs_in(specification)
        layout = layout_of(outputs)
        difference = np.asarray(rows, np.float64) - targets
        errors = [
            np.sqrt(((part / output.unit) ** 2).reshape(len(part), -1).mean(axis=1))
            for part, output in zip(layout.split(difference), outputs, strict=True)
        ]
        return np.asarray(np.mean(errors, axis=0))

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the mean error over samples."""
        return {"error": mean_with_interval(kept, "fraction", note)}

    def fidelity(self, specification: Specification, *, logits: bool = False) -> Judge:
        """Return the comparison output by output."""
        return ByOutput(_outputs_in(specification), logits)


def _named_task(output: OutputForm, names: int) -> dict[str, Any] | None:
    """Return the manifest entries for an output whose values have names; None if their numbers differ."""
    probability = {"binary": "probability"} if output.form == "sigmoid" else {}
    if output.shape == (names,):
        return {"task": "multi_label", **probability} if probability else {"task": "classification"}
    if output.shape == (1,) and names == 2:
        return {"task": "classification", "binary": probability.get("binary", "logit")}
    return None


def _outputs_in(specification: Specification) -> tuple[OutputForm, ...]:
    assert specification is not None  # the first stage wrote it
    return from_json(specification["outputs"])
