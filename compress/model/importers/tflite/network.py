"""A float TFLite graph as a network of Keras layers, operator by operator, without TensorFlow.

The import rules in `ops` return plain descriptions of layers (`model.ir.keras_graph`). `tflite_file` builds the Keras
model and compares it with the file. Weights become weights of Keras layers if there is a layer for them.

The first dimension of a tensor is the batch, in the graph and in the network. If a graph uses that dimension in another
way (a reshape of [1, 7, 7, 8] to [49, 8]), the tensor has an *extra batch*: the network has a batch dimension before
all of its dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers.common.graph_builder import (
    NOT_MADE,
    NUMPY,
    UNKNOWN,
    NetworkBuilder,
    NetworkCall,
    NotImportedError,
    PlacedValue,
    apply_rule,
    free_name,
)
from compress.model.importers.common.shape_rules import replaced
from compress.model.importers.common.unsupported import NO_LAYER, Refused
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.tflite.float_graph import Plain
from compress.model.tflite.graph import NONE, Operator
from compress.model.tflite.graph import Tensor as Stored

ACTIVATIONS = {1: "relu", 2: "relu_n1_to_1", 3: "relu6", 4: "tanh"}
"""Fused activations by number. Source: schema.fbs, ActivationFunctionType."""


@dataclass(frozen=True)
class TfliteValue:
    """A computed tensor of the graph, and the tensor of the network that holds it.

    Attributes:
        shape: the shape in the graph, with the batch.
        extra_batch: whether the network has its batch dimension before all of these dimensions.
    """

    tensor: LayerOutput
    shape: tuple[int, ...]
    extra_batch: bool = False

    @property
    def network_shape(self) -> tuple[int, ...]:
        """The shape in the network, without the network's batch."""
        return self.shape if self.extra_batch else self.shape[1:]


@dataclass(frozen=True)
class TfliteNetwork:
    """The network made from a float graph.

    Attributes:
        network: its layers; invalid if there are `problems`.
        values: the value in the network of each tensor of the graph, by index.
        problems: every unsupported operator, with the reason.
    """

    plain: Plain
    network: Network
    values: Mapping[int, TfliteValue]
    problems: tuple[Refused, ...]


@dataclass
class TfliteNetworkBuilder(NetworkBuilder[TfliteValue]):
    """A network under construction from a TFLite graph.

    Attributes:
        values: how the network holds each tensor of the graph, by index.
    """

    plain: Plain
    batch: int
    values: dict[int, TfliteValue] = field(default_factory=dict)

    def name(self, tensor_name: str, suffix: str = "") -> str:
        """Return a free valid layer name for a tensor name: "model/stem/conv/Relu" gives stem_conv."""
        parts = [part for part in tensor_name.split(";", 1)[0].split("/") if part]
        while len(parts) > 1 and parts[-1][0].isupper():  # names that TensorFlow gives to operations
            parts.pop()
        return free_name("_".join(parts[1:][-2:] or parts) + suffix, self.layers)

    def input(self, index: int) -> TfliteValue:
        """Add an input of the graph as an input of the network."""
        stored = self.plain.graph.tensors[index]
        return self.add_input(self.name(stored.name), TfliteValue(UNKNOWN, stored.shape))


@dataclass(frozen=True)
class TfliteCall(NetworkCall[TfliteValue]):
    """One operator, with the inputs and outputs of its import rule."""

    builder: TfliteNetworkBuilder
    operator: Operator

    def option(self, name: str, default: Any = 0) -> Any:
        """Return one of the operator's options."""
        return self.operator.option(name, default)

    @property
    def count(self) -> int:
        """The number of inputs, without absent ones at the end."""
        inputs = self.operator.inputs
        return max((index + 1 for index, tensor_index in enumerate(inputs) if tensor_index != NONE), default=0)

    def values(self) -> list[TfliteValue]:
        """Return all inputs, which must be computed."""
        if not self.count:
            raise NotImportedError("it has no inputs")
        return [self.value(index) for index in range(self.count)]

    def stored(self, index: int) -> Stored:
        """Return an input as stored in the file."""
        inputs = self.operator.inputs
        if index >= len(inputs) or inputs[index] == NONE:
            raise NotImportedError(f"its input {index} is missing")
        return self.builder.plain.graph.tensors[inputs[index]]

    @property
    def output(self) -> Stored:
        """The first output as stored in the file."""
        if not self.operator.outputs:
            raise NotImportedError("it has no output")
        return self.builder.plain.graph.tensors[self.operator.outputs[0]]

    def is_constant(self, index: int) -> bool:
        """Whether an input is present and constant."""
        inputs = self.operator.inputs
        return index < len(inputs) and inputs[index] != NONE and self.stored(index).is_constant

    def constant(self, index: int, *dtypes: str) -> NDArray[Any]:
        """Return the values of an input that must be a constant of one of these types."""
        stored = self.stored(index)
        if not stored.is_constant:
            raise NotImportedError(f"its input {index}, {stored.name[:80]!r}, is computed")
        if stored.dtype not in dtypes:
            raise NotImportedError(f"its input {index}, {stored.name[:80]!r}, is {stored.dtype}")
        try:
            return stored.array()
        except ModelError as error:
            raise NotImportedError(error.what) from error

    def weights(self, index: int) -> NDArray[np.float32]:
        """Return the values of an input that must be a float constant."""
        return np.asarray(self.constant(index, "FLOAT32"), np.float32)

    def integers(self, index: int) -> list[int]:
        """Return the values of a constant integer input: axes, a shape."""
        return [int(number) for number in self.constant(index, "INT32", "INT64").reshape(-1)]

    def value(self, index: int) -> TfliteValue:
        """Return an input that must be computed from the graph's inputs."""
        stored = self.stored(index)
        if stored.is_constant:
            raise NotImportedError(f"its input {index}, {stored.name[:80]!r}, is a constant")
        if 0 in stored.shape:
            raise NotImportedError(f"its input {index}, {stored.name[:80]!r}, is empty")
        if stored.index not in self.builder.values:
            raise NotImportedError(f"no operator before it computes its input {index}, {stored.name[:80]!r}")
        return self.builder.values[stored.index]

    def batched(self, index: int, *ranks: int) -> TfliteValue:
        """Return an input of one of these ranks, whose first dimension is the network's batch."""
        value = reshaped(self, self.value(index), self.value(index).shape, extra_batch=False)
        if len(value.shape) not in ranks:
            raise NotImportedError(
                f"its input has {len(value.shape)} dimensions; {' or '.join(map(str, ranks))} are supported"
            )
        return value

    def layer_name(self) -> str:
        """Return a free name, after the operator's first output; that of an output belongs to the fused activation."""
        is_before = self.option("fusedActivationFunction") and self.output.index in self.builder.plain.graph.outputs
        return self.builder.name(self._own_name, "_linear" if is_before else "")

    @property
    def _own_name(self) -> str:
        return self.output.name or self.operator.name.lower()

    def placed(self, value: TfliteValue, *axes: int) -> PlacedTfliteValue:
        """Return the value with a dimension for each axis; none of `axes` is the batch of the network."""
        value = reshaped(self, value, value.shape, extra_batch=value.extra_batch or 0 in axes)
        return PlacedTfliteValue(value, tuple(range(len(value.shape))), value.extra_batch)

    def aligned(self, values: Sequence[TfliteValue], axis: int) -> list[PlacedValue[TfliteValue]]:
        """Return values that are equal but for one axis, which is not the batch of the network."""
        if len({replaced(value.shape, axis) for value in values}) != 1:
            raise NotImportedError(f"{[list(value.shape) for value in values]} do not fit each other")
        batch_axes = [0] if axis == 0 or any(value.extra_batch for value in values) else []
        return [self.placed(value, *batch_axes) for value in values]

    def in_shape(self, value: TfliteValue, shape: Sequence[int]) -> TfliteValue:
        """Return the same elements in another shape of the graph."""
        return reshaped(self, value, shape)

    def template(self, shape: Sequence[int]) -> TfliteValue:
        """Return a template of a result whose first axis is the batch."""
        return TfliteValue(UNKNOWN, tuple(shape))

    def activated(self, value: TfliteValue) -> TfliteValue:
        """Apply the operator's fused activation, if it has one."""
        number = self.option("fusedActivationFunction")
        if not number:
            return value
        if number not in ACTIVATIONS:
            raise NotImportedError(f"its activation is number {number}")
        return self.activation(ACTIVATIONS[number], value, name=self.builder.name(self._own_name))

    def activation(self, kind: str, value: TfliteValue, **config: Any) -> TfliteValue:
        """Apply an activation by its Keras name."""
        if kind == "relu_n1_to_1":
            return self.operation(NUMPY, "Clip", {"x_min": -1.0, "x_max": 1.0, **config}, [value], value)
        return self.layer("Activation", {"activation": kind, **config}, [value], value)


class PlacedTfliteValue(PlacedValue[TfliteValue]):
    """A value whose dimensions are in the order of the graph."""

    def like(self, shape: Sequence[int]) -> TfliteValue:
        """Return a template of a result with another shape."""
        return TfliteValue(UNKNOWN, tuple(shape), self.extra_batch)


def reshaped(
    call: TfliteCall, value: TfliteValue, shape: Sequence[int], *, extra_batch: bool | None = None
) -> TfliteValue:
    """Reshape a value; by default with an extra batch only if its first dimension is not the batch."""
    shape = tuple(int(size) for size in shape)
    batch = call.builder.batch
    if prod(shape) != prod(value.shape):
        raise NotImportedError(f"{list(value.shape)} does not have as many values as {list(shape)}")
    fits = shape[:1] == (batch,)
    extra_batch = not fits if extra_batch is None else extra_batch
    if (shape, extra_batch) == (value.shape, value.extra_batch):
        return value
    if ((extra_batch or value.extra_batch) and batch != 1) or (not extra_batch and not fits):
        raise NotImportedError(f"it mixes the samples of a batch: it reshapes {list(value.shape)} to {list(shape)}")
    like = TfliteValue(value.tensor, shape, extra_batch)
    if len(like.network_shape) == 1 and not value.extra_batch and len(value.network_shape) > 1:
        return call.layer("Flatten", {}, [value], like)
    return call.layer("Reshape", {"target_shape": list(like.network_shape)}, [value], like)


Rule = Callable[[TfliteCall], TfliteValue | list[TfliteValue]]


def build_network(plain: Plain, rules: Mapping[str, Rule]) -> TfliteNetwork:
    """Convert a graph to a network; operators without a rule become `problems`.

    Raises:
        ModelError: the inputs or outputs of the graph are invalid.
    """
    graph = plain.graph
    builder = TfliteNetworkBuilder(plain, _batch(plain))
    problems: list[Refused] = []
    inputs = [builder.input(index) for index in graph.inputs]
    builder.values = dict(zip(graph.inputs, inputs, strict=True))
    for operator, number in zip(graph.operators, plain.numbers, strict=True):
        try:
            outputs = _import_operator(TfliteCall(builder, operator), rules)
        except NOT_MADE as error:
            output_name = graph.output_tensors(operator)[0].name[:80] if operator.outputs else ""
            problems.append(Refused(f"operator {number}, {output_name}", operator.name, str(error)))
            stored = graph.output_tensors(operator)  # placeholders, so that later operators are checked too
            outputs = [TfliteValue(UNKNOWN, tensor.shape, tensor.shape[:1] != (builder.batch,)) for tensor in stored]
        builder.values.update(zip(operator.outputs, outputs, strict=False))
    if not graph.outputs:
        raise ModelError("it has no outputs")
    missing = [graph.tensors[index].name for index in graph.outputs if index not in builder.values]
    if missing:
        raise ModelError(f"its output {missing[0]!r} does not depend on its inputs")
    conditions = [graph.tensors[index].name for index in graph.outputs if graph.tensors[index].dtype == "BOOL"]
    if conditions:
        raise ModelError(f"its output {conditions[0]!r} is BOOL", allowed="FLOAT32")
    network = builder.network(inputs, [builder.values[index] for index in graph.outputs])
    return TfliteNetwork(plain, network, builder.values, tuple(problems))


def _batch(plain: Plain) -> int:
    """Return the first dimension of all inputs."""
    stored = [plain.graph.tensors[index] for index in plain.graph.inputs]
    for tensor in stored:
        if tensor.dtype != "FLOAT32" or len(tensor.shape) < 2 or tensor.is_constant or 0 in tensor.shape:
            raise ModelError(
                f"its input {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}", allowed="FLOAT32, [1, ...]"
            )
    batches = {tensor.shape[0] for tensor in stored}
    if len(batches) != 1 or len(set(plain.graph.inputs)) != len(stored):
        raise ModelError(f"its inputs have batches of {sorted(batches)}", allowed="one or more inputs of one batch")
    return batches.pop()


def _import_operator(call: TfliteCall, rules: Mapping[str, Rule]) -> list[TfliteValue]:
    operator = call.operator
    if operator.custom or operator.name not in rules:
        raise NotImportedError("it is a custom operator" if operator.custom else NO_LAYER)
    stored = call.builder.plain.graph.output_tensors(operator)
    if not stored:
        raise NotImportedError("it has no output")
    for tensor in stored:
        if tensor.dtype not in ("FLOAT32", "BOOL") or tensor.is_variable:
            raise NotImportedError(f"its output is {tensor.dtype}")
    values = apply_rule(rules[operator.name], call)
    if [value.shape for value in values] != [tensor.shape for tensor in stored]:
        computed = ", ".join(str(list(value.shape)) for value in values)
        raise NotImportedError(f"it computes {computed}, but the file has {[list(tensor.shape) for tensor in stored]}")
    return values
