"""The costs of a network on the Edge TPU, for the pruner: from shapes, or from a .tflite file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from compress.model.tflite.graph import Graph
from compress.targets.base import ChannelBlocks, HardwareCostModel, NetworkCost, OperatorShape, Target
from compress.targets.edgetpu import estimate, inspection, latency, parameter_memory
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.estimate import Estimate
from compress.targets.edgetpu.latency import ArrayLayer
from darwinn.blocks import INPUT_BLOCK, ROW_BLOCK

ACTIVATION_OPERATORS: Mapping[str, int] = {
    **dict.fromkeys(("linear", "relu", "relu6"), 0),
    **dict.fromkeys(("sigmoid", "tanh", "softmax", "hard_sigmoid", "leaky_relu"), 1),
    "silu": 2,
    "hard_silu": 3,
    "gelu": 6,
    "softsign": 7,
    **dict.fromkeys(("elu", "selu", "celu", "mish", "softplus", "exponential"), 25),
}
"""The number of operators for an activation in addition to the operator before it, by its Keras name. A hard sigmoid
is a multiplication after a fused ReLU6. A fitted activation (`rewrites.function_fitting`) takes at most 25 operators.
Counted in legalized files; `tests/architecture/test_layer_specs.py` counts them again."""


@dataclass(frozen=True)
class LayersCost(NetworkCost):
    """The cost of layers.

    Attributes:
        input_bytes: bytes from the host at every inference.
        output_bytes: bytes to the host at every inference.
    """

    layers: Sequence[ArrayLayer]
    input_bytes: int
    output_bytes: int

    def compute_ms(self, clock: str) -> float:
        """Return the time of the array alone."""
        return sum(latency.compute_ms(layer, CONSTANTS.latency, clock) for layer in self.layers)

    def latency_ms(self, host: str, clock: str) -> float:
        """Return the predicted latency of one inference on a host."""
        instructions = latency.instruction_bytes(self.layers)
        traffic = latency.BusTraffic(self.input_bytes, self.output_bytes, instructions, self._streamed)
        return latency.predict(self.layers, traffic, CONSTANTS.latency, host, clock).total

    @cached_property
    def _streamed(self) -> tuple[int, ...]:
        return latency.streamed_bytes(self.layers)

    @property
    def streamed_bytes(self) -> int:
        """Parameters that are sent at every inference."""
        return sum(self._streamed)

    @property
    def never_cached(self) -> Mapping[int, int]:
        """By layer index, the bytes of parameters that are streamed even if the memory is empty."""
        uncacheable = [layer for layer in self.layers if layer.parameters.always_streamed]
        return {layer.index: layer.parameters.size_bytes for layer in uncacheable}

    def cached_bytes(self, without: Collection[int] = ()) -> int:
        """Return the on-chip memory that all parameters would take together, except those of some layers."""
        return sum(layer.parameters.allocated_bytes for layer in self.layers if layer.index not in without)


@dataclass(frozen=True)
class FileCost(LayersCost):
    """The cost of a .tflite file: its latency includes the operators on the CPU."""

    graph: Graph
    target: Target

    def latency_ms(self, host: str, clock: str) -> float:
        """Return the latency that `estimate` predicts."""
        return estimate.estimate(self.graph, self.target, host, clock).latency.total


@dataclass(frozen=True)
class EdgeTpuCost(HardwareCostModel):
    """The costs that the Edge TPU's constants predict."""

    target: Target
    blocks = ChannelBlocks(INPUT_BLOCK, ROW_BLOCK)
    objectives = frozenset({"compute", "latency", "cache"})
    hosts = {name: host.summary for name, host in CONSTANTS.latency.hosts.items()}
    clocks = tuple(CONSTANTS.latency.clocks)
    default_host = CONSTANTS.latency.default_host

    def operator(self, shape: OperatorShape) -> ArrayLayer:
        """Return an operator with the memory for its parameters."""
        layer = ArrayLayer(
            shape.kind, shape.output_shape, shape.input_shape, shape.kernel, index=shape.index, name=shape.name
        )
        if shape.constant:
            return replace(layer, parameters=parameter_memory.constant_vector(shape.output_shape[2]))
        return replace(layer, parameters=latency.layer_parameters(layer))

    def activation_operators(self, function: str) -> int:
        """Return the number of operators that an activation becomes in a legalized file."""
        return ACTIVATION_OPERATORS.get(function, 1)

    def input_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an input tensor on the bus."""
        return prod(shape)

    def output_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of an output tensor on the bus, with its channels in blocks."""
        height, width, channels = (1, 1, 1, *shape)[-3:]
        return latency.padded_map_bytes((height, width, channels))

    def of_operators(self, operators: Sequence[ArrayLayer], input_bytes: int, output_bytes: int) -> LayersCost:
        """Return the cost of layers that `operator` returned."""
        return LayersCost(operators, input_bytes, output_bytes)

    def of_file(self, graph: Graph) -> FileCost:
        """Return the cost of a .tflite file."""
        return FileCost(estimate.array_layers(graph, self.target), 0, 0, graph, self.target)

    def cache_bytes(self) -> int:
        """Return the on-chip memory for parameters that is available to every network."""
        return CONSTANTS.memory.plan_bytes

    def cache_limit_bytes(self, smallest: NetworkCost) -> int:
        """Return the limit for all parameters: it is lower if an operator is too large for the cache."""
        memory = CONSTANTS.memory
        if any(size > memory.largest_cached_bytes for size in smallest.never_cached.values()):
            return min(memory.plan_bytes, memory.cache_bytes_beside_streaming)
        return self.cache_bytes()

    def estimate(self, graph: Graph, host: str | None, clock: str | None, compiled: Path | None = None) -> Estimate:
        """Predict the latency of a model on a host; with a compiled model, from its real streamed bytes."""
        inspected = None
        if compiled is not None:
            inspected = inspection.inspect(compiled)
            inspection.verify_same_model(inspected, graph, self.target, str(compiled))
        return estimate.estimate(graph, self.target, self.host(host), self.clock(clock), inspected)
