"""A float TFLite graph as a network of Keras layers, operator by operator, without TensorFlow.

What a rule of `tflite_rules` or `tflite_shapes` makes of an operator is plain values
(`training.network`); whether it computes the same is found out when it is loaded
(`tflite_file`). Weights become weights of Keras layers wherever there is a layer for them.

The first side of a tensor is the batch, and the network's too. Where a graph uses that side
otherwise (a reshape of [1, 7, 7, 8] to [49, 8]) the tensor is *whole*: the network has its
own batch before all of its sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.importers.common.graph_builder import UNKNOWN, NetworkBuilder, NetworkCall, PlacedValue, apply_rule
from compress.importers.common.layer_calls import NOT_MADE, NUMPY, NotImportedError, free_name
from compress.importers.common.shape_rules import replaced
from compress.importers.common.unsupported import Refused
from compress.ir.keras_graph import LayerOutput, Network
from compress.tflite.float_graph import Plain
from compress.tflite.graph import NONE, Operator
from compress.tflite.graph import Tensor as Stored

ACTIVATIONS = {1: "relu", 2: "relu_n1_to_1", 3: "relu6", 4: "tanh"}
"""Those that an operator may apply to what it makes. Source: schema.fbs, ActivationFunctionType."""


@dataclass(frozen=True)
class TfliteValue:
    """A computed tensor of the graph as the network has it.

    Attributes:
        tensor: which of the network's.
        shape: as in the graph, with the side that is the batch.
        whole: whether the network has its batch before all of these sides.
    """

    tensor: LayerOutput
    shape: tuple[int, ...]
    whole: bool = False

    @property
    def sides(self) -> tuple[int, ...]:
        """Its shape in the network, without the network's batch."""
        return self.shape if self.whole else self.shape[1:]


@dataclass(frozen=True)
class TfliteNetwork:
    """What a float graph became.

    Attributes:
        plain: the graph, in its plain form.
        network: its layers; nothing to be used where there are `problems`.
        values: by tensor of the graph where the network has it.
        problems: every operator that has no counterpart, and why.
    """

    plain: Plain
    network: Network
    values: Mapping[int, TfliteValue]
    problems: tuple[Refused, ...]


@dataclass
class TfliteNetworkBuilder(NetworkBuilder[TfliteValue]):
    """A network under construction from a TFLite graph.

    Attributes:
        plain: the graph.
        batch: first dimension of its inputs.
        values: how the network holds each tensor of the graph, by index.
    """

    plain: Plain
    batch: int
    values: dict[int, TfliteValue] = field(default_factory=dict)

    def name(self, wanted: str) -> str:
        """A free name that Keras and TensorFlow take, of a tensor's: "model/stem/conv/Relu" gives stem_conv."""
        parts = [part for part in wanted.split(";", 1)[0].split("/") if part]
        while len(parts) > 1 and parts[-1][0].isupper():  # what TensorFlow calls its operations
            parts.pop()
        return free_name("_".join(parts[1:][-2:] or parts), self.layers)

    def input(self, index: int) -> TfliteValue:
        """Add an input of the graph as an input of the network."""
        stored = self.plain.graph.tensors[index]
        return self.add_input(self.name(stored.name), TfliteValue(UNKNOWN, stored.shape))


@dataclass(frozen=True)
class TfliteCall(NetworkCall[TfliteValue]):
    """One operator, and all that a rule needs to make layers of it.

    Attributes:
        draft: where the layers go.
        operator: the operator.
    """

    builder: TfliteNetworkBuilder
    operator: Operator

    def option(self, name: str, default: Any = 0) -> Any:
        """One of the operator's options."""
        return self.operator.option(name, default)

    @property
    def count(self) -> int:
        """How many inputs it has, absent ones at the end not counted."""
        given = self.operator.inputs
        return max((place + 1 for place, index in enumerate(given) if index != NONE), default=0)

    def values(self) -> list[TfliteValue]:
        """All of its inputs, of which none may be a constant."""
        if not self.count:
            raise NotImportedError("it is given nothing")
        return [self.value(place) for place in range(self.count)]

    def stored(self, place: int) -> Stored:
        """One of its inputs, as the file has it."""
        given = self.operator.inputs
        if place >= len(given) or given[place] == NONE:
            raise NotImportedError(f"its input {place} is missing")
        return self.builder.plain.graph.tensors[given[place]]

    @property
    def made(self) -> Stored:
        """Its first output, as the file has it."""
        if not self.operator.outputs:
            raise NotImportedError("it makes nothing")
        return self.builder.plain.graph.tensors[self.operator.outputs[0]]

    def is_constant(self, place: int) -> bool:
        """Whether an input is there, and a constant."""
        given = self.operator.inputs
        return place < len(given) and given[place] != NONE and self.stored(place).is_constant

    def constant(self, place: int, *dtypes: str) -> NDArray[Any]:
        """The value of an input that must be a constant of one of these types."""
        stored = self.stored(place)
        if not stored.is_constant:
            raise NotImportedError(f"its input {place}, {stored.name[:80]!r}, is computed")
        if stored.dtype not in dtypes:
            raise NotImportedError(f"its input {place}, {stored.name[:80]!r}, is {stored.dtype}")
        try:
            return stored.array()
        except ModelError as error:
            raise NotImportedError(error.what) from error

    def weights(self, place: int) -> NDArray[np.float32]:
        """The value of an input that must be a float constant."""
        return np.asarray(self.constant(place, "FLOAT32"), np.float32)

    def integers(self, place: int) -> list[int]:
        """The value of an input that must be a constant of structure: axes, a shape."""
        return [int(number) for number in self.constant(place, "INT32", "INT64").reshape(-1)]

    def value(self, place: int) -> TfliteValue:
        """An input that must be computed from the graph's inputs."""
        stored = self.stored(place)
        if stored.is_constant:
            raise NotImportedError(f"its input {place}, {stored.name[:80]!r}, is a constant")
        if 0 in stored.shape:
            raise NotImportedError(f"its input {place}, {stored.name[:80]!r}, is empty")
        if stored.index not in self.builder.values:
            raise NotImportedError(f"nothing before it makes its input {place}, {stored.name[:80]!r}")
        return self.builder.values[stored.index]

    def batched(self, place: int, *ranks: int) -> TfliteValue:
        """An input whose first side is the network's batch, of one of these ranks."""
        value = reshaped(self, self.value(place), self.value(place).shape, whole=False)
        if len(value.shape) not in ranks:
            raise NotImportedError(f"its input has {len(value.shape)} sides, not {' or '.join(map(str, ranks))}")
        return value

    @property
    def network_builder(self) -> TfliteNetworkBuilder:
        """The network under construction."""
        return self.builder

    def layer_name(self) -> str:
        """Return a free name, after the operator's first output."""
        return self.builder.name(self.made.name or self.operator.name.lower())

    def placed(self, value: TfliteValue, *axes: int) -> PlacedTfliteValue:
        """Return the value with a dimension for each axis; none of `axes` is the batch of the network."""
        value = reshaped(self, value, value.shape, whole=value.whole or 0 in axes)
        return PlacedTfliteValue(value, tuple(range(len(value.shape))), value.whole)

    def aligned(self, values: Sequence[TfliteValue], axis: int) -> list[PlacedValue[TfliteValue]]:
        """Return values that are equal but for one axis, which is not the batch of the network."""
        if len({replaced(value.shape, axis) for value in values}) != 1:
            raise NotImportedError(f"{[list(value.shape) for value in values]} do not fit each other")
        whole_axes = [0] if axis == 0 or any(value.whole for value in values) else []
        return [self.placed(value, *whole_axes) for value in values]

    def in_shape(self, value: TfliteValue, shape: Sequence[int]) -> TfliteValue:
        """Return the same elements in another shape of the graph."""
        return reshaped(self, value, shape)

    def template(self, shape: Sequence[int]) -> TfliteValue:
        """Return a template of a result whose first axis is the batch."""
        return TfliteValue(UNKNOWN, tuple(shape))

    def activated(self, value: TfliteValue) -> TfliteValue:
        """What the operator makes of its result at the end, if anything."""
        number = self.option("fusedActivationFunction")
        if not number:
            return value
        if number not in ACTIVATIONS:
            raise NotImportedError(f"its activation is number {number}")
        return self.activation(ACTIVATIONS[number], value)

    def activation(self, name: str, value: TfliteValue) -> TfliteValue:
        """An activation by Keras' name."""
        if name == "relu_n1_to_1":
            return self.operation(NUMPY, "Clip", {"x_min": -1.0, "x_max": 1.0}, [value], value)
        return self.layer("Activation", {"activation": name}, [value], value)


class PlacedTfliteValue(PlacedValue[TfliteValue]):
    """A value whose dimensions are in the order of the graph."""

    def like(self, shape: Sequence[int]) -> TfliteValue:
        """Return a template of a result with another shape."""
        return TfliteValue(UNKNOWN, tuple(shape), self.whole)


def reshaped(call: TfliteCall, value: TfliteValue, shape: Sequence[int], *, whole: bool | None = None) -> TfliteValue:
    """The same numbers in another shape; whole only where the first side is not the batch, unless it is asked for."""
    shape, batch = tuple(int(side) for side in shape), call.builder.batch
    if prod(shape) != prod(value.shape):
        raise NotImportedError(f"{list(value.shape)} does not fill {list(shape)}")
    fits = shape[:1] == (batch,)
    whole = not fits if whole is None else whole
    if (shape, whole) == (value.shape, value.whole):
        return value
    if ((whole or value.whole) and batch != 1) or (not whole and not fits):
        raise NotImportedError(f"it mixes the samples of a batch: {list(value.shape)} becomes {list(shape)}")
    like = TfliteValue(value.tensor, shape, whole)
    if len(like.sides) == 1 and not value.whole and len(value.sides) > 1:
        return call.layer("Flatten", {}, [value], like)
    return call.layer("Reshape", {"target_shape": list(like.sides)}, [value], like)


Rule = Callable[[TfliteCall], TfliteValue]


def build_network(
    plain: Plain, rules: Mapping[str, Callable[[TfliteCall], TfliteValue | list[TfliteValue]]]
) -> TfliteNetwork:
    """Makes a network of a graph, as far as there are rules for it.

    Raises:
        ModelError: its inputs or outputs make no sense.
    """
    graph = plain.graph
    builder = TfliteNetworkBuilder(plain, _batch(plain))
    problems: list[Refused] = []
    inputs = [builder.input(index) for index in graph.inputs]
    builder.values = dict(zip(graph.inputs, inputs, strict=True))
    for operator, number in zip(graph.operators, plain.numbers, strict=True):
        try:
            made = _made(TfliteCall(builder, operator), rules)
        except NOT_MADE as error:
            made_name = graph.made(operator)[0].name[:80] if operator.outputs else ""
            problems.append(Refused(f"operator {number}, {made_name}", operator.name, str(error)))
            made = _unknown(builder, operator)
        builder.values.update(zip(operator.outputs, made, strict=False))
    if not graph.outputs:
        raise ModelError("it has no outputs")
    missing = [graph.tensors[index].name for index in graph.outputs if index not in builder.values]
    if missing:
        raise ModelError(f"its output {missing[0]!r} does not depend on its inputs")
    network = builder.network(inputs, [builder.values[index] for index in graph.outputs])
    return TfliteNetwork(plain, network, builder.values, tuple(problems))


def _batch(plain: Plain) -> int:
    """The first side of all inputs.

    Raises:
        ModelError: they have no such side, or are no floats.
    """
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


def _made(
    call: TfliteCall, rules: Mapping[str, Callable[[TfliteCall], TfliteValue | list[TfliteValue]]]
) -> list[TfliteValue]:
    """What the rule for an operator makes of it, in the order of its outputs."""
    operator = call.operator
    if operator.custom or operator.name not in rules:
        raise NotImportedError("Keras has no layer for it" if not operator.custom else "it is a custom operator")
    stored = call.builder.plain.graph.made(operator)
    odd = next((tensor for tensor in stored if tensor.dtype != "FLOAT32" or tensor.is_variable), None)
    if odd is not None or not stored:
        raise NotImportedError(f"it makes {odd.dtype}" if odd is not None else "it makes nothing")
    values = apply_rule(rules[operator.name], call)
    if [value.shape for value in values] != [tensor.shape for tensor in stored]:
        found = ", ".join(str(list(value.shape)) for value in values)
        raise NotImportedError(f"it makes {found}, but the file says {[list(tensor.shape) for tensor in stored]}")
    return values


def _unknown(builder: TfliteNetworkBuilder, operator: Operator) -> list[TfliteValue]:
    """What stands for the results of an operator without a counterpart, so that those behind it are looked at too."""
    stored = builder.plain.graph.made(operator)
    whole = [tensor.shape[:1] != (builder.batch,) for tensor in stored]
    return [TfliteValue(UNKNOWN, tensor.shape, each) for tensor, each in zip(stored, whole, strict=True)]
