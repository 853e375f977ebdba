"""The form of a model's outputs: probabilities of a softmax, of sigmoids, or plain values.

`activation_of` reads it from a Keras model's last layers, `form_of` from values. `OutputForm` says how two models'
values of one output are compared, and how one model learns from the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.layer_specs import ACTIVATION, spec_of_live
from compress.model.ir.tensorflow import keras
from deploy.contract.tensors import TensorLayout, unique_names

Activation = Literal["logits", "softmax", "sigmoid"]
Form = Literal["softmax", "sigmoid", "values"]
CLOSE = 0.1
"""Two values of an output agree if they differ by at most this fraction of its standard deviation."""
SMALLEST_PROBABILITY = 1e-7
"""Keras' epsilon: the logarithm of 0 is not finite."""
SEPARATE = 16.0
"""Ratio of two ranges from which they are of different scale: 8 bits that hold the larger range leave fewer than 16
steps, 4 bits, for the smaller one."""
GAP = 4.0
"""Least ratio between the ranges of two scales. The channels of a feature vector have ranges of every size between."""
NEGLIGIBLE = 0.1
"""Range below which a channel of values from -1 to 1 has no scale of its own: rare classes and unused features have
such channels."""
STILL = 1e-3
"""Range of a channel, relative to its largest value, below which the channel counts as constant."""
ScaleGroups = tuple[tuple[int, ...], ...]
"""The channels of each scale, the largest scale first."""


@dataclass(frozen=True)
class OutputForm:
    """One output of a model.

    Attributes:
        shape: the shape, without the batch.
        form: softmax: probabilities along the last axis that sum to 1. sigmoid: independent probabilities. values: any
            numbers.
        deviation: the standard deviation of the values, over samples and positions, in the original model; 1 for a
            constant output.
        channel_axis: the axis of `shape` along which there are quantities of different scale.
        channel_deviations: the standard deviation of the scale of each channel; empty for an output of one scale.
    """

    name: str
    shape: tuple[int, ...]
    form: Form
    deviation: float
    channel_axis: int = 0
    channel_deviations: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], form: Form, values: NDArray[Any]) -> OutputForm:
        """Return an output, with the deviations of its values for some samples [n, *shape]."""
        finite = np.asarray(values)[np.isfinite(np.asarray(values).reshape(len(values), -1)).all(axis=1)]
        axis, groups = scale_groups(finite.min(axis=0), finite.max(axis=0)) if len(finite) else (0, ())
        deviations = np.ones(shape[axis] if groups else 0)
        for group in groups:
            deviations[list(group)] = deviation_of(np.take(finite, group, axis=axis + 1))
        return cls(name, shape, form, deviation_of(values), axis, tuple(deviations.tolist()))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        content = {"name": self.name, "shape": list(self.shape), "form": self.form, "deviation": self.deviation}
        if self.channel_deviations:
            content |= {"channel_axis": self.channel_axis, "channel_deviations": list(self.channel_deviations)}
        return content

    @property
    def unit(self) -> NDArray[np.float32]:
        """The standard deviation that errors are divided by; an array that fits the values [n, *shape]."""
        if not self.channel_deviations:
            return np.asarray(self.deviation, np.float32)
        sizes = [-1 if axis == self.channel_axis else 1 for axis in range(len(self.shape))]
        return np.asarray(self.channel_deviations, np.float32).reshape(sizes)

    def logits(self, values: Any) -> Any:
        """Return a Keras tensor of this output as logits, up to a constant; plain values stay as they are."""
        ops = keras().ops
        if self.form == "values":
            return values
        likely = ops.clip(values, SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        return ops.log(likely) - (ops.log(1 - likely) if self.form == "sigmoid" else 0.0)

    def values(self, values: NDArray[Any], *, logits: bool) -> NDArray[np.float64]:
        """Return the values of this output [n, *shape] as the model puts them out: logits become probabilities."""
        numbers = np.asarray(values, np.float64)
        if not logits or self.form == "values":
            return numbers
        from scipy.special import expit, softmax

        return np.asarray(expit(numbers) if self.form == "sigmoid" else softmax(numbers, axis=-1))

    def divergence(self, expected: Any, actual: Any, temperature: float = 1.0) -> Any:
        """Return the distance of one model's output from another's, for each sample [n]; 0 where they are equal.

        Probabilities are compared by the Kullback-Leibler divergence, plain values by the squared error in units of
        their variance; both are averaged over positions.

        Args:
            expected: the output of the teacher in the form of `logits`: [n, *shape].
            actual: the output of the model that learns, in the same form.
            temperature: the temperature that softens probabilities. Source: Hinton et al., Distilling the Knowledge in
                a Neural Network, 2015.
        """
        if self.form == "values":
            return _mean(keras().ops.square((actual - expected) / self.unit))
        divergence = softmax_divergence if self.form == "softmax" else sigmoid_divergence
        return _mean(divergence(expected, actual, temperature))

    def agreement(self, expected: NDArray[Any], actual: NDArray[Any], *, logits: bool = False) -> NDArray[np.float64]:
        """Return the share of equal decisions of two models for each sample: [n], from 0 to 1.

        A decision is the most likely class at a position (softmax), or whether a probability is above one half
        (sigmoid). Plain values agree if they differ by at most CLOSE standard deviations.
        """
        if self.form == "softmax":
            equal = expected.argmax(axis=-1) == actual.argmax(axis=-1)
        elif self.form == "sigmoid":
            limit = 0.0 if logits else 0.5
            equal = (expected > limit) == (actual > limit)
        else:
            equal = np.abs(expected - actual) <= CLOSE * self.unit
        return np.asarray(equal.reshape(len(equal), -1).mean(axis=1), np.float64)


def softmax_divergence(expected: Any, actual: Any, temperature: float = 1.0) -> Any:
    """Return the Kullback-Leibler divergence of softmaxes over the last axis, from their logits [..., classes].

    The gradient is that of the cross entropy, but the divergence is 0 where both are equal. The divergence of the
    softened probabilities is multiplied by the square of the temperature. Source: Hinton et al., 2015.
    """
    ops = keras().ops
    before, after = (ops.log_softmax(logits / temperature) for logits in (expected, actual))
    return ops.sum(ops.exp(before) * (before - after), axis=-1) * temperature**2


def sigmoid_divergence(expected: Any, actual: Any, temperature: float = 1.0) -> Any:
    """Return the same for independent probabilities, from the logits of their sigmoids: [...]."""
    ops = keras().ops
    share = ops.sigmoid(expected / temperature)
    entropy, cross = (
        ops.softplus(logits / temperature) - share * logits / temperature for logits in (expected, actual)
    )
    return (cross - entropy) * temperature**2


def _mean(values: Any) -> Any:
    """Return the mean over all axes but that of the samples: [n]."""
    ops = keras().ops
    return ops.mean(ops.reshape(values, (ops.shape(values)[0], -1)), axis=-1)


def layout_of(outputs: Sequence[OutputForm]) -> TensorLayout:
    """Return the layout of outputs in a row."""
    return TensorLayout([output.name for output in outputs], [output.shape for output in outputs])


def forms_of(model: Any, rows: NDArray[Any]) -> tuple[OutputForm, ...]:
    """Return the outputs of a Keras model with fixed output shapes, by its layers and its outputs for some samples."""
    by_key = getattr(model, "output", None)
    if isinstance(by_key, dict) and len(by_key) == len(model.outputs):
        keys = sorted(by_key)  # the order of `model.outputs`
    else:
        keys = list(getattr(model, "output_names", None) or [tensor.name for tensor in model.outputs])
    names = unique_names(keys)
    shapes = [tuple(tensor.shape[1:]) for tensor in model.outputs]
    parts = TensorLayout(names, shapes).split(rows)
    outputs = []
    for name, shape, tensor, values in zip(names, shapes, model.outputs, parts, strict=True):
        activation = activation_of(tensor)
        form = form_of(values) if activation is None else activation
        outputs.append(OutputForm.of(name, shape, "values" if form == "logits" else form, values))
    return tuple(outputs)


def forms_by_values(layout: TensorLayout, rows: NDArray[Any]) -> tuple[OutputForm, ...]:
    """Return the outputs of a model without known layers, by their values for some samples [n, values]."""
    parts = zip(unique_names(layout.names), layout.shapes, layout.split(rows), strict=True)
    return tuple(OutputForm.of(name, shape, form_of(values), values) for name, shape, values in parts)


def from_json(entries: Sequence[Mapping[str, Any]]) -> tuple[OutputForm, ...]:
    """Return outputs from plain values."""
    outputs = []
    for entry in entries:
        deviations = tuple(entry.get("channel_deviations", ()))
        fixed = (entry["name"], tuple(entry["shape"]), entry["form"], entry["deviation"])
        outputs.append(OutputForm(*fixed, entry.get("channel_axis", 0), deviations))
    return tuple(outputs)


def scale_groups(low: NDArray[Any], high: NDArray[Any]) -> tuple[int, ScaleGroups]:
    """Return the axis along which an output mixes quantities of different scale, and the channels of each scale.

    The channels may be on any axis: the shortest one whose channels have different scales counts.
    There are no groups for an output of one scale.

    Args:
        low: the smallest values over samples [*shape].
        high: the largest values over samples [*shape].
    """
    for axis in sorted(range(low.ndim), key=lambda axis: (low.shape[axis], -axis)):
        others = tuple(other for other in range(low.ndim) if other != axis)
        groups = _grouped(low.min(axis=others).astype(np.float64), high.max(axis=others).astype(np.float64))
        if len(groups) > 1:
            return axis, groups
    return 0, ()


def _grouped(low: NDArray[np.float64], high: NDArray[np.float64]) -> ScaleGroups:
    """Return the channels by scale. Channels that hardly vary belong to the smallest scale."""
    spans = high - low
    varies = meaningful(low, high)
    groups: list[list[int]] = []
    for channel in np.argsort(-spans, kind="stable").tolist():
        largest = groups[-1][0] if groups else channel
        last = groups[-1][-1] if groups else channel
        of_other_scale = varies[channel] and are_separate((low[largest], high[largest]), (low[channel], high[channel]))
        if not groups or (of_other_scale and spans[last] >= GAP * spans[channel]):
            groups.append([channel])
        else:
            groups[-1].append(channel)
    return tuple(tuple(sorted(group)) for group in groups)


def meaningful(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which channels vary by an amount that a user can rely on, by their smallest and largest values."""
    spans, size = high - low, np.maximum(np.abs(low), np.abs(high))
    return (spans > STILL * size) & ((spans >= NEGLIGIBLE) | (size > 1))


def are_separate(larger: tuple[float, float], smaller: tuple[float, float]) -> bool:
    """Return whether two ranges are of different scale. Probabilities have one scale, however rarely they are large."""
    spans = [high - low for low, high in (larger, smaller)]
    both_probabilities = all(low >= -1e-6 and high <= 1 + 1e-6 for low, high in (larger, smaller))
    return spans[0] >= SEPARATE * spans[1] > 0 and not both_probabilities


def deviation_of(values: NDArray[Any]) -> float:
    """Return the standard deviation of an output's finite values; 1 if they are all the same."""
    finite = np.asarray(values, np.float64)[np.isfinite(values)]
    deviation = float(finite.std()) if finite.size else 0.0
    return deviation if deviation > 0 else 1.0


def form_of(values: NDArray[Any]) -> Form:
    """Return the form of an output by its values [n, ...]: probabilities lie between 0 and 1."""
    if values.ndim < 2 or not values.size or not ((values > -1e-6) & (values < 1 + 1e-6)).all():
        return "values"
    sums = np.asarray(values, np.float64).sum(axis=-1)
    if values.shape[-1] > 1 and (np.abs(sums - 1) < 1e-2).all():
        return "softmax"
    return "values"


def activation_of(tensor: Any) -> Activation | None:
    """Return the activation that a Keras tensor ends with, from its layer or nested model; None if that is unknown."""
    operation, call, tensor_index = tensor._keras_history
    if isinstance(operation, keras().Model):
        return activation_of(operation.outputs[tensor_index])
    activation = getattr(operation, "activation", None)
    activation = getattr(activation, "activation", activation)  # a layer may be another one's activation
    kind = type(operation).__name__
    name = kind if activation is None else getattr(activation, "__name__", type(activation).__name__)
    if name.lower() == "softmax":
        return "softmax"
    if name.lower() == "sigmoid":
        return "sigmoid"
    spec = spec_of_live(operation)
    if spec.keeps_values or (spec == ACTIVATION and name == "linear"):
        return activation_of(operation._inbound_nodes[call].input_tensors[0])
    return "logits" if getattr(operation, "weights", None) else None
