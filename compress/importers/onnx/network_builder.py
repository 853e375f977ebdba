"""The network under construction from an ONNX graph, and the operator that a rule is called with.

A rule adds layers (`compress.ir.keras_graph`) and returns values with their layout (`layout`); `network` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.importers.common.graph_builder import UNKNOWN, NetworkBuilder, NetworkCall, PlacedValue
from compress.importers.common.layer_calls import NotImportedError, free_name
from compress.importers.onnx import layout
from compress.importers.onnx.layout import OnnxValue, Order, laid, natural, sides_of
from compress.importers.onnx.onnx_graph import Node, OnnxGraph
from compress.ir.keras_graph import Layer, LayerOutput

FLOAT = "FLOAT"


@dataclass
class OnnxNetworkBuilder(NetworkBuilder[OnnxValue]):
    """A network under construction from an ONNX graph.

    Attributes:
        graph: the graph.
        values: how the network holds each tensor of the graph, by name.
        holders: names of the graph's tensors that each tensor of the network holds.
        padded: input and (before, after) per dimension of each layer that only pads with zeros.
        changed: tensors of the graph that the network no longer computes as they were.
    """

    graph: OnnxGraph
    values: dict[str, OnnxValue] = field(default_factory=dict)
    holders: dict[LayerOutput, list[str]] = field(default_factory=dict)
    padded: dict[LayerOutput, tuple[OnnxValue, list[tuple[int, int]]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.takers = Counter(name for node in self.graph.nodes for name in node.inputs)
        self.takers.update(self.graph.outputs)

    def keep(self, name: str, value: OnnxValue) -> None:
        """Notes how the network has a tensor of the graph."""
        self.values[name] = value
        self.holders.setdefault(value.tensor, []).append(name)

    def input(self, name: str, order: Order) -> OnnxValue:
        """An input of the graph as an input of the network."""
        shape = self.graph.shapes[name]
        made = laid(UNKNOWN, shape, order, sides_of(shape, order) or (1,))
        return self.add_input(free_name(title(name), self.layers), made)

    def alone(self, value: OnnxValue) -> Layer | None:
        """The layer that makes a value, if nothing else takes what it makes: it may be changed."""
        names = self.holders.get(value.tensor, ())
        if self.used.get(value.tensor) or any(self.takers[name] != 1 or name in self.graph.outputs for name in names):
            return None
        return self.layers.get(value.tensor.layer)

    def rewrite(self, value: OnnxValue, layer: Layer) -> None:
        """Puts a layer in the place of the one that makes a value; it makes something else."""
        self.layers[layer.name] = layer
        self.changed.update(self.holders.get(value.tensor, ()))


def title(name: str) -> str:
    """What a layer may be called: "model/stem/conv/Relu:0" gives stem_conv, "/features/features.0/Conv" features_0."""
    parts = [part for part in name.split(";", 1)[0].split(":", 1)[0].replace("//", "/").split("/") if part]
    while len(parts) > 1 and parts[-1][0].isupper():  # what TensorFlow and PyTorch call their operations
        parts.pop()
    parts = [part for at, part in enumerate(parts) if at == 0 or part != parts[at - 1]]
    if len(parts) > 1 and parts[-1].startswith(f"{parts[-2]}."):
        parts.pop(-2)
    return "_".join(parts[1:][-2:] or parts)


@dataclass(frozen=True)
class OnnxCall(NetworkCall[OnnxValue]):
    """One operator, and all that a rule needs to make layers of it.

    Attributes:
        draft: where the layers go.
        node: the operator.
    """

    builder: OnnxNetworkBuilder
    node: Node

    # --- what the operator is given ------------------------------------------------------

    def setting(self, name: str, default: Any = None) -> Any:
        """One of its attributes."""
        return self.node.settings.get(name, default)

    def has(self, place: int) -> bool:
        """Whether it has such an input."""
        return place < len(self.node.inputs) and bool(self.node.inputs[place])

    def is_constant(self, place: int) -> bool:
        """Whether an input is there, and a constant."""
        return self.has(place) and self.node.inputs[place] in self.builder.graph.constants

    def constant(self, place: int) -> NDArray[Any]:
        """An input that must be a constant."""
        if not self.has(place):
            raise NotImportedError(f"its input {place} is missing")
        if not self.is_constant(place):
            raise NotImportedError(f"its input {place}, {self.node.inputs[place][:80]!r}, is computed")
        return self.builder.graph.constants[self.node.inputs[place]]

    def weights(self, place: int) -> NDArray[np.float32]:
        """A constant input of floats."""
        numbers = self.constant(place)
        if numbers.dtype.kind != "f":
            raise NotImportedError(f"its input {place}, {self.node.inputs[place][:80]!r}, is {numbers.dtype}")
        return np.asarray(numbers, np.float32)

    def integers(self, name: str, place: int | None = None) -> list[int] | None:
        """Axes, sizes and the like: an attribute, or in later opsets a constant input; None if neither is there."""
        if self.setting(name) is not None:
            return [int(number) for number in np.asarray(self.setting(name)).reshape(-1)]
        if place is None or not self.has(place):
            return None
        return [int(number) for number in self.constant(place).reshape(-1)]

    def number(self, name: str, place: int | None, default: float) -> float:
        """A number, likewise."""
        if self.setting(name) is not None:
            return float(self.setting(name))
        if place is None or not self.has(place):
            return default
        numbers = self.constant(place).reshape(-1)
        return float(numbers[0]) if numbers.size else default

    def value(self, place: int, *types: str) -> OnnxValue:
        """An input that must be computed, and of floats unless other types are named."""
        if not self.has(place):
            raise NotImportedError(f"its input {place} is missing")
        name = self.node.inputs[place]
        if name in self.builder.graph.constants:
            raise NotImportedError(f"its input {place}, {name[:80]!r}, is a constant")
        kind, shape = self.builder.graph.types.get(name, "?"), self.builder.graph.shapes.get(name)
        if kind not in (types or (FLOAT,)):
            raise NotImportedError(f"its input {place}, {name[:80]!r}, is {kind}")
        if name not in self.builder.values or shape is None or 0 in shape:
            raise NotImportedError(f"its input {place}, {name[:80]!r}, has no shape, or none that could be told")
        return self.builder.values[name]

    def made(self, place: int = 0) -> tuple[int, ...]:
        """The shape of what it makes."""
        shape = self.builder.graph.shapes.get(self.node.outputs[place])
        if shape is None or 0 in shape:
            raise NotImportedError("the shape of what it makes could not be told" if shape is None else "it is empty")
        return shape

    # --- layers --------------------------------------------------------------------------

    @property
    def network_builder(self) -> OnnxNetworkBuilder:
        """The network under construction."""
        return self.builder

    def layer_name(self) -> str:
        """A free name: that of the module for weights of PyTorch, that of the operator, or that of what it makes."""
        weights = [name for name in self.node.inputs[1:2] if name.endswith(".weight")]
        own = self.node.name if "/" in self.node.name else weights[0][: -len(".weight")] if weights else self.node.name
        return free_name(title(own if not own.isdigit() else f"{self.node.operator}_{own}"), self.builder.layers)

    # --- how numbers are laid out --------------------------------------------------------

    def arranged(self, value: OnnxValue, order: Order, *, whole: bool = False) -> OnnxValue:
        """The value with its axes in this order, and each one a side of the network; layers only where need be."""
        sides = sides_of(value.shape, order, whole=whole) or (1,)
        target = laid(value.tensor, value.shape, order, sides)
        moved = layout.transposed(value, order)
        if moved is None:
            return self.arranged(self.straightened(value), order, whole=whole)
        if moved.straight:
            return self._in_sides(value, target)
        if (dims := layout.directly(value.sides, target.sides, moved)) is not None:
            return self.layer("Permute", {"dims": dims}, [value], target)
        return self._in_sides(self._permuted(value, moved.parts, moved.order), target)

    def straightened(self, value: OnnxValue) -> OnnxValue:
        """The value with its numbers in the graph's order."""
        if value.straight:
            return value
        moved = self._permuted(value, value.parts, value.order)
        return replace(moved, parts=(prod(value.shape),), order=(0,))

    def in_line(self, value: OnnxValue) -> OnnxValue:
        """The value with a single side in the network, its numbers in the order that they have there."""
        return self._in_sides(value, replace(value, sides=(prod(value.shape),)))

    def _in_sides(self, value: OnnxValue, target: OnnxValue) -> OnnxValue:
        if value.sides == target.sides:
            return replace(target, tensor=value.tensor)
        if len(target.sides) == 1 and len(value.sides) > 1:
            return self.layer("Flatten", {}, [value], target)
        return self.layer("Reshape", {"target_shape": list(target.sides)}, [value], target)

    def _permuted(self, value: OnnxValue, parts: Sequence[int], order: Sequence[int]) -> OnnxValue:
        """The numbers moved: seen as `parts` in this order they become `parts` in their own."""
        sides = tuple(parts[part] for part in order)
        seen = self._in_sides(value, replace(value, sides=sides))
        dims = [order.index(part) + 1 for part in range(len(parts))]
        return self.layer("Permute", {"dims": dims}, [seen], replace(value, sides=tuple(parts)))

    def placed(self, value: OnnxValue, *axes: int) -> PlacedOnnxValue:
        """Return the value with a dimension for each axis; none of `axes` is the batch of the network."""
        rank = len(value.shape)
        order = natural(value)
        if order is None:
            value, order = self.straightened(value), tuple(range(rank))
        whole = bool(order) and order[0] in axes
        value = self.arranged(value, order, whole=whole)
        return PlacedOnnxValue(value, order, len(value.sides) == rank)

    def aligned(self, values: Sequence[OnnxValue], axis: int) -> list[PlacedValue[OnnxValue]]:
        """Return values with the same order of dimensions, that of the largest one."""
        order = order_of(max(values, key=lambda value: prod(value.shape)))
        whole = order[0] == axis or any(value.shape[order[0]] != 1 for value in values)
        return [PlacedOnnxValue(self.arranged(value, order, whole=whole), order, whole) for value in values]

    def in_shape(self, value: OnnxValue, shape: Sequence[int]) -> OnnxValue:
        """Return the same elements in another shape of the graph; the network does not change."""
        return layout.in_shape(value, shape)

    def template(self, shape: Sequence[int]) -> OnnxValue:
        """Return a template of a result with its axes in the order of the graph."""
        return laid(UNKNOWN, shape, tuple(range(len(shape))))


class PlacedOnnxValue(PlacedValue[OnnxValue]):
    """A value of which each axis is a dimension of the network."""

    def like(self, shape: Sequence[int]) -> OnnxValue:
        """Return a template of a result: another shape in the graph, with the same order of its axes."""
        sides = tuple(shape[axis] for axis in self.order)
        return laid(UNKNOWN, shape, self.order, sides if self.whole else sides[1:])


def order_of(value: OnnxValue) -> Order:
    """Return the order that the axes of a value can have without a permutation, or that of the graph."""
    return natural(value) or tuple(range(len(value.shape)))


Rule = Callable[[OnnxCall], OnnxValue | list[OnnxValue]]
