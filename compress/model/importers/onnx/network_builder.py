"""The network under construction from an ONNX graph, and the operator that a rule is called with.

A rule adds layers (`compress.model.ir.keras_graph`) and returns values with their layout; `network` calls the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import (
    UNKNOWN,
    NetworkBuilder,
    NetworkCall,
    NotImportedError,
    PlacedValue,
    free_name,
)
from compress.model.importers.onnx import layout
from compress.model.importers.onnx.layout import OnnxValue, Order, laid, natural, network_shape_of
from compress.model.importers.onnx.onnx_graph import Node, OnnxGraph
from compress.model.ir.keras_graph import Layer, LayerOutput

FLOAT = "FLOAT"


@dataclass
class OnnxNetworkBuilder(NetworkBuilder[OnnxValue]):
    """A network under construction from an ONNX graph.

    Attributes:
        values: how the network holds each tensor of the graph, by name.
        holders: names of the graph's tensors that each tensor of the network holds.
        padded: input and (before, after) per dimension of each layer that only pads with zeros.
        padded_below: input and widths of each layer that pads with -inf, for max poolings only.
        changed: tensors of the graph that the network no longer computes as they were.
    """

    graph: OnnxGraph
    values: dict[str, OnnxValue] = field(default_factory=dict)
    holders: dict[LayerOutput, list[str]] = field(default_factory=dict)
    padded: dict[LayerOutput, tuple[OnnxValue, list[tuple[int, int]]]] = field(default_factory=dict)
    padded_below: dict[LayerOutput, tuple[OnnxValue, list[tuple[int, int]]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.takers = Counter(name for node in self.graph.nodes for name in node.inputs)
        self.takers.update(self.graph.outputs)

    def keep(self, name: str, value: OnnxValue) -> None:
        """Store the value in the network of a tensor of the graph."""
        self.values[name] = value
        self.holders.setdefault(value.tensor, []).append(name)

    def input(self, name: str, order: Order) -> OnnxValue:
        """Add an input of the graph as an input of the network."""
        shape = self.graph.shapes[name]
        value = laid(UNKNOWN, shape, order, network_shape_of(shape, order) or (1,))
        return self.add_input(free_name(title(name), self.layers), value)

    def alone(self, value: OnnxValue) -> Layer | None:
        """Return the layer that computes a value if only the value uses it: then a rule may change the layer."""
        names = self.holders.get(value.tensor, ())
        if self.used.get(value.tensor) or any(self.takers[name] != 1 or name in self.graph.outputs for name in names):
            return None
        return self.layers.get(value.tensor.layer)

    def rewrite(self, value: OnnxValue, layer: Layer) -> None:
        """Replace the layer that computes a value by one with a different result."""
        self.layers[layer.name] = layer
        self.changed.update(self.holders.get(value.tensor, ()))


def title(name: str) -> str:
    """Return a layer name: "model/stem/conv/Relu:0" gives stem_conv, "/features/features.0/Conv" features_0."""
    parts = [part for part in name.split(";", 1)[0].split(":", 1)[0].replace("//", "/").split("/") if part]
    while len(parts) > 1 and parts[-1][0].isupper():  # names that TensorFlow and PyTorch give to operations
        parts.pop()
    parts = [part for at, part in enumerate(parts) if at == 0 or part != parts[at - 1]]
    if len(parts) > 1 and parts[-1].startswith(f"{parts[-2]}."):
        parts.pop(-2)
    return "_".join(parts[1:][-2:] or parts)


@dataclass(frozen=True)
class OnnxCall(NetworkCall[OnnxValue]):
    """One operator, with the inputs and outputs of its import rule."""

    builder: OnnxNetworkBuilder
    node: Node

    def setting(self, name: str, default: Any = None) -> Any:
        """Return one of its attributes."""
        return self.node.settings.get(name, default)

    def has(self, index: int) -> bool:
        """Whether an input is present."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def is_constant(self, index: int) -> bool:
        """Whether an input is present and constant."""
        return self.has(index) and self.node.inputs[index] in self.builder.graph.constants

    def constant(self, index: int) -> NDArray[Any]:
        """Return an input that must be a constant."""
        if not self.has(index):
            raise NotImportedError(f"its input {index} is missing")
        if not self.is_constant(index):
            raise NotImportedError(f"its input {index}, {self.node.inputs[index][:80]!r}, is computed")
        return self.builder.graph.constants[self.node.inputs[index]]

    def weights(self, index: int) -> NDArray[np.float32]:
        """Return a constant float input."""
        array = self.constant(index)
        if array.dtype.kind != "f":
            raise NotImportedError(f"its input {index}, {self.node.inputs[index][:80]!r}, is {array.dtype}")
        return np.asarray(array, np.float32)

    def integers(self, name: str, index: int | None = None) -> list[int] | None:
        """Return axes or sizes: an attribute, or in later opsets a constant input; None if neither is present."""
        if self.setting(name) is not None:
            return [int(number) for number in np.asarray(self.setting(name)).reshape(-1)]
        if index is None or not self.has(index):
            return None
        return [int(number) for number in self.constant(index).reshape(-1)]

    def number(self, name: str, index: int | None, default: float) -> float:
        """Return a scalar: an attribute, or in later opsets a constant input."""
        if self.setting(name) is not None:
            return float(self.setting(name))
        if index is None or not self.has(index):
            return default
        array = self.constant(index).reshape(-1)
        return float(array[0]) if array.size else default

    def value(self, index: int, *types: str) -> OnnxValue:
        """Return an input that must be computed; its type must be float or one of `types`."""
        if not self.has(index):
            raise NotImportedError(f"its input {index} is missing")
        name = self.node.inputs[index]
        if name in self.builder.graph.constants:
            raise NotImportedError(f"its input {index}, {name[:80]!r}, is a constant")
        kind, shape = self.builder.graph.types.get(name, "?"), self.builder.graph.shapes.get(name)
        if kind not in (types or (FLOAT,)):
            raise NotImportedError(f"its input {index}, {name[:80]!r}, is {kind}")
        if name not in self.builder.values or shape is None or 0 in shape:
            raise NotImportedError(f"its input {index}, {name[:80]!r}, has no known shape")
        return self.builder.values[name]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of an output."""
        shape = self.builder.graph.shapes.get(self.node.outputs[index])
        if shape is None or 0 in shape:
            raise NotImportedError("the shape of its output is unknown" if shape is None else "it is empty")
        return shape

    def layer_name(self) -> str:
        """Return a free name: from the PyTorch module of the weights, from the operator, or from its output."""
        weights = [name for name in self.node.inputs[1:2] if name.endswith(".weight")]
        name = self.node.name
        if weights and "/" not in name:
            name = weights[0].removesuffix(".weight")
        if name.isdigit():
            name = f"{self.node.operator}_{name}"
        return free_name(title(name), self.builder.layers)

    def arranged(self, value: OnnxValue, order: Order, *, extra_batch: bool = False) -> OnnxValue:
        """Return the value with its axes in this order, each a dimension of the network; add layers if necessary."""
        network_shape = network_shape_of(value.shape, order, extra_batch=extra_batch) or (1,)
        target = laid(value.tensor, value.shape, order, network_shape)
        moved = layout.transposed(value, order)
        if moved is None:
            return self.arranged(self.straightened(value), order, extra_batch=extra_batch)
        if moved.straight:
            return self.in_network_shape(value, target)
        if (dims := layout.directly(value.network_shape, target.network_shape, moved)) is not None:
            return self.layer("Permute", {"dims": dims}, [value], target)
        return self.in_network_shape(self._permuted(value, moved.parts, moved.order), target)

    def straightened(self, value: OnnxValue) -> OnnxValue:
        """Return the value in the graph's memory order."""
        if value.straight:
            return value
        moved = self._permuted(value, value.parts, value.order)
        return replace(moved, parts=(prod(value.shape),), order=(0,))

    def in_network_shape(self, value: OnnxValue, target: OnnxValue) -> OnnxValue:
        """Return the elements in the order that they have in the network, in the shape and layout of `target`."""
        if value.network_shape == target.network_shape:
            return replace(target, tensor=value.tensor)
        if len(target.network_shape) == 1 and len(value.network_shape) > 1:
            return self.layer("Flatten", {}, [value], target)
        return self.layer("Reshape", {"target_shape": list(target.network_shape)}, [value], target)

    def _permuted(self, value: OnnxValue, parts: Sequence[int], order: Sequence[int]) -> OnnxValue:
        """Transpose a value from `parts` in this order to `parts` in ascending order."""
        network_shape = tuple(parts[part] for part in order)
        seen = self.in_network_shape(value, replace(value, network_shape=network_shape))
        dims = [order.index(part) + 1 for part in range(len(parts))]
        return self.layer("Permute", {"dims": dims}, [seen], replace(value, network_shape=tuple(parts)))

    def placed(self, value: OnnxValue, *axes: int) -> PlacedOnnxValue:
        """Return the value with each axis as a dimension of the network, including these axes."""
        rank = len(value.shape)
        order = natural(value)
        if order is None:
            value, order = self.straightened(value), tuple(range(rank))
        extra_batch = bool(order) and order[0] in axes
        value = self.arranged(value, order, extra_batch=extra_batch)
        return PlacedOnnxValue(value, order, len(value.network_shape) == rank)

    def aligned(self, values: Sequence[OnnxValue], axis: int) -> list[PlacedValue[OnnxValue]]:
        """Return values with the same order of dimensions, that of the largest one."""
        order = order_of(max(values, key=lambda value: prod(value.shape)))
        extra_batch = order[0] == axis or any(value.shape[order[0]] != 1 for value in values)
        return [
            PlacedOnnxValue(self.arranged(value, order, extra_batch=extra_batch), order, extra_batch)
            for value in values
        ]

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
        network_shape = tuple(shape[axis] for axis in self.order)
        return laid(UNKNOWN, shape, self.order, network_shape if self.extra_batch else network_shape[1:])


def order_of(value: OnnxValue) -> Order:
    """Return the order that the axes of a value can have without a permutation, or that of the graph."""
    return natural(value) or tuple(range(len(value.shape)))


Rule = Callable[[OnnxCall], OnnxValue | list[OnnxValue]]
