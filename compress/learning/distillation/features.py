"""Feature distillation: intermediate layers of a student learn the outputs of intermediate layers of a teacher.

The pooling and the projection that this adds to the student are removed after the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.core.errors import ModelError, listing, nearest
from compress.data.types import Data
from compress.learning.distillation.settings import Features
from compress.learning.distillation.teachers import Teacher, TeacherOutput
from compress.learning.training.loop import head_of
from compress.model.ir import keras_graph as networks
from compress.model.ir.keras_graph import LayerOutput, Network, tensors_in
from compress.model.ir.tensorflow import input_tensors, keras, run
from compress.tasks.base import Specification

SAMPLES = 256
"""Number of training samples for the variance of a teacher's features."""
EPSILON = 1e-6
"""Added to the norm of an attention map, which can be 0; its square is the least variance of features. Chosen."""


@dataclass(frozen=True)
class FeatureDistillation:
    """A student and a teacher, and the features of both that are compared.

    Attributes:
        model: the model to train: the student, with the compared features as further outputs.
        student: the student alone, with the same layers.
        teacher: the teacher, which returns its features too, pooled to the student's size.
        pairs: names of the compared layers: (student's, teacher's).
        scales: divisor of the squared error of each pair.
        settings: the settings.
    """

    model: Any
    student: Any
    teacher: Teacher
    pairs: tuple[tuple[str, str], ...]
    scales: tuple[float, ...]
    settings: Features

    def loss(self, teacher_features: Sequence[Any], student_features: Sequence[Any]) -> Any:
        """Return the weighted mean error over the pairs, for each sample [n].

        Sources: projected: Romero et al., FitNets: Hints for Thin Deep Nets, 2015; here added to the other losses, not
        before them, and relative to the variance of the teacher's values. attention: Zagoruyko and Komodakis, Paying
        More Attention to Attention, 2017.
        """
        ops = keras().ops
        errors = []
        for expected, actual, scale in zip(teacher_features, student_features, self.scales, strict=True):
            expected = ops.stop_gradient(expected)
            if self.settings.match == "attention":
                errors.append(ops.sum(ops.square(attention(actual) - attention(expected)), axis=-1))
            else:
                errors.append(ops.mean(_flat(ops.square(actual - expected)), axis=-1) / scale)
        return self.settings.weight * sum(errors) / len(errors)


def attention(features: Any) -> Any:
    """Return the attention of feature maps [n, ..., channels]: squares summed over channels, as unit vectors [n, d]."""
    ops = keras().ops
    energy = _flat(ops.sum(ops.square(features), axis=-1))
    return energy / (ops.norm(energy, axis=-1, keepdims=True) + EPSILON)  # a ReLU can make a complete map 0


def _flat(values: Any) -> Any:
    return keras().ops.reshape(values, (values.shape[0] or -1, int(np.prod(values.shape[1:]))))


def set_up(
    model: Any, teacher: Teacher, settings: Features, data: Data, specification: Specification = None
) -> FeatureDistillation:
    """Choose the layers to compare, and build the model to train.

    The student is not changed: its layers are built again with the same weights. The variance of the teacher's features
    is measured on samples of the data.

    Raises:
        ModelError: the teacher has no layers, the layers do not exist, or their outputs cannot be compared.
    """
    if teacher.model is None:
        raise ModelError(
            "runs in the TFLite runtime, and has no Keras layers whose features could be compared",
            where=f"teacher {teacher.name}",
            hint="remove features, or name a Keras or a float .tflite file first",
        )
    library = keras()
    student = networks.read(model)
    taught_by = networks.read(teacher.model)
    pairs = [
        (_output(student, pair.student, "student"), _output(taught_by, pair.teacher, "teacher"))
        for pair in settings.pairs
    ] or [_last_maps(student, taught_by)]
    sizes = [_common_size(student, ours, taught_by, theirs, settings) for ours, theirs in pairs]
    student_model = _with_outputs(student, [ours for ours, _ in pairs])
    teacher_model = _with_outputs(taught_by, [theirs for _, theirs in pairs])
    student_outputs = student_model.outputs[: len(model.outputs)]
    teacher_outputs = teacher_model.outputs[: len(teacher.model.outputs)]
    student_maps = student_model.outputs[len(student_outputs) :]
    teacher_maps = teacher_model.outputs[len(teacher_outputs) :]
    student_features = [_pooled(x, size) for x, size in zip(student_maps, sizes, strict=True)]
    teacher_features = [_pooled(x, size) for x, size in zip(teacher_maps, sizes, strict=True)]
    names = tuple((ours.layer, theirs.layer) for ours, theirs in pairs)
    combined = library.Model(input_tensors(teacher_model), [*teacher_outputs, *teacher_features])
    with_features = _with_features(teacher, combined, data, specification)
    scales = (1.0,) * len(names)
    if settings.match == "projected":
        for index, teacher_feature in enumerate(teacher_features):
            channels = teacher_feature.shape[-1]
            if student_features[index].shape[-1] != channels:  # a dense layer over channels is a 1x1 convolution
                student_features[index] = library.layers.Dense(channels)(student_features[index])
        scales = _variances(with_features, names, data)
    return FeatureDistillation(
        library.Model(input_tensors(student_model), [*student_outputs, *student_features]),
        library.Model(
            input_tensors(student_model),
            student_outputs[0] if len(student_outputs) == 1 else student_outputs,
            name=model.name,
        ),
        with_features,
        names,
        scales,
        settings,
    )


def _output(network: Network, name: str, role: str) -> LayerOutput:
    """Return the output of the last call of a layer."""
    if name not in network.layers:
        known = [tensor.layer for tensor in _feature_maps(network)] or [*network.layers]
        raise ModelError(
            f"the {role} {network.name!r} has no layer {name!r}",
            where="features.pairs",
            allowed=listing(known),
            hint=nearest(name, [*network.layers]),
        )
    return LayerOutput(name, max(len(network.layers[name].calls), 1) - 1)


def _feature_maps(network: Network) -> list[LayerOutput]:
    """Return the feature maps [height, width, channels] larger than 1x1, in the order of their computation."""
    outputs = [LayerOutput(layer.name, call) for layer, call in network.in_order() if layer.calls]
    return [tensor for tensor in outputs if (shape := network.shapes[tensor])[2:] and shape[:2] != (1, 1)]


def _last_maps(student: Network, teacher: Network) -> tuple[LayerOutput, LayerOutput]:
    """Return the last feature map of each; for the teacher the last one of the student's size, if there is one."""
    student_maps = _feature_maps(student)
    teacher_maps = _feature_maps(teacher)
    for role, maps in (("student", student_maps), ("teacher", teacher_maps)):
        if not maps:
            raise ModelError(
                f"the {role} has no feature maps [height, width, channels]",
                where="features",
                hint="name pairs of layers: features: {pairs: [{student: …, teacher: …}]}",
            )
    size = student.shapes[student_maps[-1]][:2]
    same_size = [tensor for tensor in teacher_maps if teacher.shapes[tensor][:2] == size]
    return student_maps[-1], (same_size or teacher_maps)[-1]


def _common_size(
    student: Network, ours: LayerOutput, teacher: Network, theirs: LayerOutput, settings: Features
) -> tuple[int, ...]:
    """Return the height and width for the comparison: the smaller ones; () for vectors."""
    shape, other = student.shapes[ours], teacher.shapes[theirs]
    least = 2 if settings.match == "attention" else 1
    if len(shape) != len(other) or not least <= len(shape) <= 3 or None in (*shape, *other):
        raise ModelError(
            f"cannot be compared: {ours.layer!r} has the shape {list(shape)}, {theirs.layer!r} has {list(other)}",
            where="features.pairs",
            allowed=f"two outputs with the same number of dimensions, {least} to 3, of fixed sizes",
        )
    return tuple(min(sizes) for sizes in zip(shape[:-1], other[:-1], strict=True))  # type: ignore[type-var,misc]


def _with_outputs(network: Network, tensors: Sequence[LayerOutput]) -> Any:
    """Build the network as a Keras model with further tensors as outputs."""
    return networks.build(networks.subnetwork(network, [*tensors_in(network.outputs), *tensors]))


def _pooled(features: Any, size: tuple[int, ...]) -> Any:
    """Return features averaged to a smaller size."""
    layers = keras().layers
    if tuple(features.shape[1:-1]) == size:
        return features
    kind = layers.AdaptiveAveragePooling1D if len(size) == 1 else layers.AdaptiveAveragePooling2D
    return kind(size)(features)


def _with_features(teacher: Teacher, model: Any, data: Data, specification: Specification) -> Teacher:
    """Return the teacher with its features in addition to its logits, from one run of its layers."""
    head = head_of(teacher.model, data, specification)
    model.trainable = False
    count = len(teacher.model.outputs)

    def predict(inputs: Any) -> TeacherOutput:
        outputs = run(model, inputs)
        return head.logits(outputs[:count]), outputs[count:]

    return replace(teacher, predict=predict)


def _variances(teacher: Teacher, names: Sequence[tuple[str, str]], data: Data) -> tuple[float, ...]:
    """Return the variance of the teacher's features around the mean of each channel, averaged over channels."""
    inputs = data.inputs("train")
    _, features = teacher.predict(inputs[:: max(len(inputs) // SAMPLES, 1)][:SAMPLES])
    variances = []
    for (_, name), values in zip(names, features, strict=True):
        rows = np.asarray(values).reshape(-1, values.shape[-1])
        variances.append(float(rows.var(axis=0).mean()))
        if not variances[-1] > EPSILON**2:
            raise ModelError(
                f"the output of the teacher's layer {name!r} is the same for every sample",
                where="features",
                hint="name another layer",
            )
    return tuple(variances)
