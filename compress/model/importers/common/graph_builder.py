"""Construction of a network of Keras layers from the operators of a graph, for every graph format.

A format adds its own value (how the network holds a tensor of the graph), its own builder and its own operator call,
with the bookkeeping of its axes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network, tensors_in

UNKNOWN = LayerOutput("?")
"""Tensor of a value that no layer computes."""


@runtime_checkable
class GraphValue(Protocol):
    """A tensor of the graph as the network holds it: a frozen dataclass."""

    @property
    def tensor(self) -> LayerOutput:
        """The tensor of the network."""

    @property
    def network_shape(self) -> tuple[int, ...]:
        """Shape of the network's tensor, without the batch."""


ValueT = TypeVar("ValueT", bound=GraphValue)
AnyValueT = TypeVar("AnyValueT")
Item = TypeVar("Item")


@dataclass
class NetworkBuilder(Generic[ValueT]):
    """A network under construction.

    Attributes:
        shapes: shape of each tensor of the network, without the batch.
        used: number of layers that take each tensor.
    """

    layers: dict[str, Layer] = field(default_factory=dict, init=False)
    shapes: dict[LayerOutput, tuple[int | None, ...]] = field(default_factory=dict, init=False)
    used: dict[LayerOutput, int] = field(default_factory=dict, init=False)

    def add(self, layer: Layer, like: ValueT) -> ValueT:
        """Add a layer, and return its output with the layout of `like`."""
        self.layers[layer.name] = layer
        for tensor in tensors_in(list(layer.calls)):
            self.used[tensor] = self.used.get(tensor, 0) + 1
        value: ValueT = replace(like, tensor=LayerOutput(layer.name))  # type: ignore[type-var]
        self.shapes[value.tensor] = value.network_shape
        return value

    def add_input(self, name: str, like: ValueT) -> ValueT:
        """Add a float32 input with a batch of any size."""
        config = {"name": name, "batch_shape": [None, *like.network_shape], "dtype": "float32"}
        return self.add(Layer(name, "InputLayer", entry(LAYERS, "InputLayer", config), (), ()), like)

    def network(self, inputs: Sequence[ValueT], outputs: Sequence[ValueT]) -> Network:
        """Return the network; a single input or output is a tensor and not a list, as in Keras."""
        first, last = ([value.tensor for value in values] for values in (inputs, outputs))
        ends = [tensors[0] if len(tensors) == 1 else tensors for tensors in (first, last)]
        return Network("model", self.layers, ends[0], ends[1], self.shapes)


@dataclass(frozen=True)
class PlacedValue(ABC, Generic[AnyValueT]):
    """A value whose axes are all dimensions of the network's tensor.

    Attributes:
        order: axes of the graph's tensor in the order of the network's dimensions.
        extra_batch: True if the network has a batch in front of all these axes, False if the first axis is its batch.
    """

    value: AnyValueT
    order: tuple[int, ...]
    extra_batch: bool

    def axis(self, axis: int) -> int:
        """Return the network's dimension of an axis of the graph, with the batch as 0; the last one is -1."""
        dimension = self.order.index(axis) + self.extra_batch
        return -1 if dimension == len(self.order) + self.extra_batch - 1 else dimension

    def per_dimension(self, by_axis: Sequence[Item], batch: Item) -> list[Item]:
        """Return the items of the axes in the order of the network's dimensions, after an item for the batch."""
        axes = self.order if self.extra_batch else self.order[1:]
        return [batch, *(by_axis[axis] for axis in axes)]

    @abstractmethod
    def like(self, shape: Sequence[int]) -> AnyValueT:
        """Return a template of a result: another shape in the graph, with the same order of its axes."""


class LayerFactory(ABC, Generic[AnyValueT]):
    """The layers and operations that the rule for one operator makes, and the layout of the values it takes."""

    @abstractmethod
    def operation(
        self,
        module: str,
        kind: str,
        config: Mapping[str, Any],
        arguments: Sequence[Any],
        like: AnyValueT,
        weights: Sequence[NDArray[np.float32]] = (),
    ) -> AnyValueT:
        """Add a Keras operation, where no layer computes the same; return its output with the layout of `like`."""

    def layer(
        self,
        kind: str,
        config: Mapping[str, Any],
        arguments: Sequence[Any],
        like: AnyValueT,
        weights: Sequence[NDArray[np.float32]] = (),
    ) -> AnyValueT:
        """Add a Keras layer, and return its output with the layout of `like`."""
        return self.operation(LAYERS, kind, config, arguments, like, weights)

    @abstractmethod
    def placed(self, value: AnyValueT, *axes: int) -> PlacedValue[AnyValueT]:
        """Return the value with a dimension for each axis; none of `axes` is the batch of the network."""

    @abstractmethod
    def aligned(self, values: Sequence[AnyValueT], axis: int) -> list[PlacedValue[AnyValueT]]:
        """Return values with the same order of dimensions; `axis` is not the batch of the network."""

    @abstractmethod
    def in_shape(self, value: AnyValueT, shape: Sequence[int]) -> AnyValueT:
        """Return the same elements in another shape of the graph."""

    @abstractmethod
    def template(self, shape: Sequence[int]) -> AnyValueT:
        """Return a template of a result whose first axis is the batch."""


class NetworkCall(LayerFactory[ValueT]):
    """The layers that the rule for one operator adds to a network under construction."""

    builder: NetworkBuilder[ValueT]

    @abstractmethod
    def layer_name(self) -> str:
        """Return a free name for a layer of this operator."""

    def operation(
        self,
        module: str,
        kind: str,
        config: Mapping[str, Any],
        arguments: Sequence[Any],
        like: ValueT,
        weights: Sequence[NDArray[np.float32]] = (),
    ) -> ValueT:
        """Add a layer or an operation that is called once."""
        settings = {"name": self.layer_name(), **config}
        call = {"args": [argument(value) for value in arguments], "kwargs": {}}
        entry_of_layer = entry(module, kind, settings)
        return self.builder.add(Layer(settings["name"], kind, entry_of_layer, (call,), tuple(weights)), like)


def selection_as_sum(
    condition: NDArray[np.bool_], first: Any, second: Any
) -> tuple[list[tuple[Any, NDArray[np.float32]]], NDArray[np.float32]]:
    """Return a selection by a constant condition as a sum: each computed operand with its factor, and a constant.

    A constant of -inf needs no factor of 0 for the operand in its place.
    """
    constant = np.zeros((), np.float32)
    computed = []
    for chosen, operand in ((condition, first), (~condition, second)):
        if isinstance(operand, np.ndarray):
            constant = np.where(chosen, operand.astype(np.float32), constant)
        else:
            computed.append((chosen, operand))
    infinite = np.isinf(constant)
    return [(operand, (chosen | infinite).astype(np.float32)) for chosen, operand in computed], constant


CallT = TypeVar("CallT")


def apply_rule(rule: Callable[[CallT], ValueT | list[ValueT]], call: CallT) -> list[ValueT]:
    """Return the values that a rule makes for an operator, in the order of its outputs."""
    values = rule(call)
    return values if isinstance(values, list) else [values]


LAYERS, NUMPY, NN, MATH, IMAGE, CORE = (
    "keras.layers",
    *(f"keras.src.ops.{module}" for module in ("numpy", "nn", "math", "image", "core")),
)
"""Modules of layers and operations, as Keras files name them."""
LONGEST_NAME = 60
"""Converted graphs name a layer by the path of its nested scopes; its end tells layers apart."""
MOST_IN_CONFIG = 200_000
"""Largest size of a constant that is not a weight: Keras stores it as text."""


class NotImportedError(Exception):
    """An operator or a function has no counterpart in Keras; the message gives the reason in a few words."""


NOT_MADE = (NotImportedError, ArithmeticError, IndexError, ValueError)
"""Exceptions of a rule: an untrusted file may hold values that no rule expects."""


def entry(module: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a layer or an operation."""
    registered = None if module == LAYERS else kind
    return {"module": module, "class_name": kind, "config": dict(config), "registered_name": registered}


def argument(value: Any) -> Any:
    """Return an argument of a call in the form of Keras files: a tensor, list, number, array or slice."""
    if isinstance(value, GraphValue):
        return value.tensor
    if isinstance(value, list):
        return [argument(element) for element in value]
    if isinstance(value, slice):
        parts = {"start": value.start, "stop": value.stop, "step": value.step}
        return {"class_name": "__slice__", "config": parts}
    if isinstance(value, np.ndarray):
        if value.size == 1 and value.ndim == 0:
            return value.item()
        if value.size > MOST_IN_CONFIG:
            raise NotImportedError(f"its constant has {value.size:,} values, more than {MOST_IN_CONFIG:,}")
        return {"class_name": "__numpy__", "config": {"value": value.tolist(), "dtype": str(value.dtype)}}
    return value


def free_name(proposal: str, taken: Collection[str]) -> str:
    """Return a name that is valid in Keras and TensorFlow and not yet taken."""
    stem = re.sub(r"[^A-Za-z0-9]+", "_", proposal)[-LONGEST_NAME:].strip("_") or "layer"
    if stem not in taken:
        return stem
    # A hostile file repeats a name thousands of times: the number is searched by doubling and halving.
    low, high = 0, 1
    while f"{stem}_{high}" in taken:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f"{stem}_{middle}" in taken else (low, middle)
    return f"{stem}_{high}"
