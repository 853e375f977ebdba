"""Features: a student's inner layers learn to say what a teacher's inner layers say.

What is added to the student for that, a pooling and a projection, is thrown away after the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.data.types import Data
from compress.distillation.settings import Features, Pair
from compress.distillation.teachers import Answers, Teacher
from compress.errors import ModelError
from compress.ir import keras_graph as networks
from compress.ir.keras_graph import LayerOutput, Network, tensors_in
from compress.ir.tensorflow import keras
from compress.suggestions import listing, nearest
from compress.training.loop import head_of

SAMPLES = 256
"""Of the training split, that the spread of a teacher's features is measured on."""
EPSILON = 1e-6


@dataclass(frozen=True)
class Hints:
    """A student and a teacher, and what of their inner layers is compared.

    Attributes:
        model: what is trained: the student, whose further outputs are its features as they are compared.
        student: the same layers without what was added: what is kept.
        teacher: the teacher, whose answers carry its features, pooled as the student's.
        pairs: the layers that are compared, by name: the student's, the teacher's.
        units: for each pair what its squared error is divided by.
        how: the settings.
    """

    model: Any
    student: Any
    teacher: Teacher
    pairs: tuple[tuple[str, str], ...]
    units: tuple[float, ...]
    how: Features

    def loss(self, wanted: Sequence[Any], found: Sequence[Any]) -> Any:
        """The weighted mean error over the pairs, for each sample: [n].

        Source: values: Romero et al., FitNets: Hints for Thin Deep Nets, 2015, here beside the other losses instead
        of before them, and relative to the variance of the teacher's values. Attention: Zagoruyko and Komodakis,
        Paying More Attention to Attention, 2017.
        """
        ops = keras().ops
        errors = []
        for teacher, student, unit in zip(wanted, found, self.units, strict=True):
            teacher = ops.stop_gradient(teacher)
            if self.how.match == "attention":
                errors.append(ops.sum(ops.square(attention(student) - attention(teacher)), axis=-1))
            else:
                errors.append(ops.mean(_flat(ops.square(student - teacher)), axis=-1) / unit)
        return self.how.weight * sum(errors) / len(errors)


def attention(features: Any) -> Any:
    """Where feature maps [n, ..., channels] are large: squares summed over channels, as vectors of length 1."""
    ops = keras().ops
    energy = _flat(ops.sum(ops.square(features), axis=-1))
    return energy / (ops.norm(energy, axis=-1, keepdims=True) + EPSILON)  # a ReLU can silence all of a map


def _flat(values: Any) -> Any:
    return keras().ops.reshape(values, (values.shape[0] or -1, int(np.prod(values.shape[1:]))))


def watch(model: Any, teacher: Teacher, how: Features, data: Data) -> Hints:
    """Finds the layers to compare, and makes what is trained.

    Args:
        model: the student; it stays as it is, and its layers are built anew with its weights.
        teacher: one with layers.
        how: which layers, and how they are compared.
        data: samples for the spread of the teacher's features.

    Raises:
        ModelError: no such layers, or outputs that cannot be compared.
    """
    if teacher.model is None:
        raise ModelError(
            "is run as it is, without layers of Keras, and has no features to learn from",
            where=f"teacher {teacher.name}",
            todo="leave features out, or name a Keras or a float .tflite file first",
        )
    library = keras()
    own, other = networks.read(model), networks.read(teacher.model)
    pairs = _named(own, other, how.pairs) or [_last(own, other)]
    sizes = [_size(own, a, other, b, how) for a, b in pairs]
    trained, taught = _observed(own, [a for a, _ in pairs]), _observed(other, [b for _, b in pairs])
    found = [_pooled(x, size) for x, size in zip(trained.outputs[1:], sizes, strict=True)]
    wanted = [_pooled(x, size) for x, size in zip(taught.outputs[1:], sizes, strict=True)]
    if how.match == "projected":
        found = [_projected(x, y.shape[-1]) for x, y in zip(found, wanted, strict=True)]
    answering = _answering(teacher, library.Model(taught.inputs[0], [taught.outputs[0], *wanted]), data)
    names = tuple((a.layer, b.layer) for a, b in pairs)
    return Hints(
        library.Model(trained.inputs[0], [trained.outputs[0], *found]),
        library.Model(trained.inputs[0], trained.outputs[0], name=model.name),
        answering,
        names,
        _units(answering, names, data) if how.match == "projected" else (1.0,) * len(names),
        how,
    )


def _named(own: Network, other: Network, pairs: Sequence[Pair]) -> list[tuple[LayerOutput, LayerOutput]]:
    """The outputs of the layers that the settings name."""
    return [(_output(own, pair.student, "student"), _output(other, pair.teacher, "teacher")) for pair in pairs]


def _output(network: Network, name: str, whose: str) -> LayerOutput:
    """Return the output of the last call of a layer."""
    if name not in network.layers:
        known = [tensor.layer for tensor in _maps(network)] or [*network.layers]
        raise ModelError(
            f"the {whose} {network.name!r} has no layer {name!r}",
            where="features.pairs",
            allowed=listing(known),
            todo=nearest(name, [*network.layers]),
        )
    return LayerOutput(name, max(len(network.layers[name].calls), 1) - 1)


def _maps(network: Network) -> list[LayerOutput]:
    """The feature maps, [height, width, channels] of more than one place, in the order of their computing."""
    made = [LayerOutput(layer.name, call) for layer, call in network.in_order() if layer.calls]
    return [tensor for tensor in made if (shape := network.shapes[tensor])[2:] and shape[:2] != (1, 1)]


def _last(own: Network, other: Network) -> tuple[LayerOutput, LayerOutput]:
    """The last feature maps: of the teacher the last that has the student's size, or the last of any size."""
    students, teachers = _maps(own), _maps(other)
    for whose, found in (("student", students), ("teacher", teachers)):
        if not found:
            raise ModelError(
                f"the {whose} has no feature maps [height, width, channels]",
                where="features",
                todo="name pairs of layers: features: {pairs: [{student: …, teacher: …}]}",
            )
    size = own.shapes[students[-1]][:2]
    alike = [tensor for tensor in teachers if other.shapes[tensor][:2] == size]
    return students[-1], (alike or teachers)[-1]


def _size(own: Network, a: LayerOutput, other: Network, b: LayerOutput, how: Features) -> tuple[int, ...]:
    """Height and width on which two outputs are compared: the smaller ones; nothing for vectors."""
    shapes = own.shapes[a], other.shapes[b]
    shown = f"{a.layer!r} makes {list(shapes[0])}, {b.layer!r} makes {list(shapes[1])}"
    least = 2 if how.match == "attention" else 1
    if len(shapes[0]) != len(shapes[1]) or not least <= len(shapes[0]) <= 3 or None in (*shapes[0], *shapes[1]):
        allowed = f"two outputs of as many axes, {least} to 3, with fixed sizes"
        raise ModelError(f"cannot be compared: {shown}", where="features.pairs", allowed=allowed)
    return tuple(min(sides) for sides in zip(*(shape[:-1] for shape in shapes), strict=True))


def _observed(network: Network, tensors: Sequence[LayerOutput]) -> Any:
    """The network as a Keras model whose further outputs are some of its tensors."""
    return networks.build(networks.subnetwork(network, [*tensors_in(network.outputs), *tensors]))


def _pooled(features: Any, size: tuple[int, ...]) -> Any:
    """Features averaged down to a size."""
    layers = keras().layers
    if tuple(features.shape[1:-1]) == size:
        return features
    kind = layers.AdaptiveAveragePooling1D if len(size) == 1 else layers.AdaptiveAveragePooling2D
    return kind(size)(features)


def _projected(features: Any, channels: int) -> Any:
    """Features with as many channels as the teacher's: a dense layer over channels is a 1x1 convolution."""
    return features if features.shape[-1] == channels else keras().layers.Dense(channels)(features)


def _answering(teacher: Teacher, model: Any, data: Data) -> Teacher:
    """The teacher with its features beside its logits, in one run of its layers."""
    head = head_of(teacher.model, data)
    model.trainable = False

    def answers(inputs: Any) -> Answers:
        outputs = model(inputs, training=False)
        return head.logits(outputs[0]), outputs[1:]

    return replace(teacher, answers=answers)


def _units(teacher: Teacher, names: Sequence[tuple[str, str]], data: Data) -> tuple[float, ...]:
    """The variance of the teacher's features around the mean of each channel, averaged over channels."""
    inputs = data.inputs("train")
    _, features = teacher.answers(inputs[:: max(len(inputs) // SAMPLES, 1)][:SAMPLES])
    units = []
    for (_, name), values in zip(names, features, strict=True):
        rows = np.asarray(values).reshape(-1, values.shape[-1])
        units.append(float(rows.var(axis=0).mean()))
        if not units[-1] > EPSILON**2:
            raise ModelError(
                f"the teacher's layer {name!r} makes the same of every sample: there is nothing to learn",
                where="features",
                todo="name another layer",
            )
    return tuple(units)
