"""Latency of a network on the Edge TPU, predicted from the shapes of its layers.

A network is a list of `ArrayLayer`s and the traffic on the bus, from a .tflite file or from a table of shapes. The
model of the hardware: the array computes 4x4 tiles of a feature map, and blocks of 4 input by 64 output channels, so
time is saved in whole steps only. Instructions are sent at every inference. Streamed parameters overlap with the
computation of the same layer; on x86 hosts with PCIe, the input and the instructions overlap with the layers. The
constants are in `edgetpu.toml`; `benchmarks/latency.py` fits them and reports the error for each published measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp

from compress.targets.base import OperatorShape
from compress.targets.edgetpu import parameter_memory
from compress.targets.edgetpu.constants import CONSTANTS, InstructionConstants, LatencyConstants
from compress.targets.edgetpu.parameter_memory import Parameters
from darwinn.blocks import INPUT_BLOCK, ROW_BLOCK, round_up

TILES = CONSTANTS.tiles
WEIGHTED = ("conv", "tconv", "fc")
KINDS = (*WEIGHTED, "dw", "pool", "elt")
"""Kinds of layers: convolution, transposed convolution, dense; depthwise, pooling, element-wise."""
CLOCKS = CONSTANTS.latency.clocks
"""Duration of a cycle by clock, relative to the maximum clock (USB: libedgetpu1-std has half of it)."""


@dataclass(frozen=True)
class ArrayLayer(OperatorShape):
    """One layer that runs on the Edge TPU; its kind is one of KINDS."""

    parameters: Parameters = parameter_memory.NONE

    @cached_property
    def megacycles(self) -> float:
        """Millions of cycles of the array: whole tiles, and whole blocks of channels."""
        computed_shape = self.input_shape if self.kind == "tconv" else self.output_shape
        height, width = computed_shape[:2]
        taps = self.kernel[0] * self.kernel[1]
        positions = round_up(height, TILES) * round_up(width, TILES) // TILES**2
        output_channels = self.output_shape[2]
        blocks = round_up(output_channels, INPUT_BLOCK) // INPUT_BLOCK
        if self.kind in WEIGHTED:
            input_blocks = round_up(self.input_shape[2], INPUT_BLOCK) // INPUT_BLOCK
            blocks = input_blocks * (round_up(output_channels, ROW_BLOCK) // ROW_BLOCK)
        return positions * taps * blocks / 1e6

    @cached_property
    def passes(self) -> int:
        """How often streamed weights are sent in one inference: large feature maps are computed in several parts."""
        tile = []
        for axis in (0, 1):
            stride = max(round(self.input_shape[axis] / max(self.output_shape[axis], 1)), 1)
            tile.append(-(-self.input_shape[axis] // TILES) + max(self.kernel[axis] - stride, 0))
        tile_bytes = tile[0] * tile[1] * round_up(self.input_shape[2], INPUT_BLOCK)
        height, width, channels = self.output_shape
        tile_bytes += -(-height // TILES) * -(-width // TILES) * round_up(channels, INPUT_BLOCK)
        for passes in CONSTANTS.latency.weight_passes:
            if tile_bytes <= passes.up_to_kib * 1024:
                return passes.times
        return CONSTANTS.latency.most_weight_passes


def layer_parameters(layer: ArrayLayer) -> Parameters:
    """Return the memory for the parameters of a layer with a known shape: per-channel scales, and a bias."""
    taps = layer.kernel[0] * layer.kernel[1]
    height, width, channels = layer.output_shape
    if layer.kind == "dw":
        return parameter_memory.depthwise(channels, taps, 12)
    if layer.kind not in WEIGHTED:
        return parameter_memory.NONE
    per_output = taps * round_up(layer.input_shape[2], INPUT_BLOCK)
    overhead = 4 if layer.kind == "fc" else 12
    one_position_in = layer.input_shape[0] * layer.input_shape[1] == 1
    parameters = parameter_memory.convolution(
        channels, per_output, overhead, height * width, one_position_in=one_position_in
    )
    return parameter_memory.mark_uncacheable(parameters, per_output)


def instruction_bytes(layers: Sequence[ArrayLayer]) -> int:
    """Return the approximate bytes of instructions for the layers on the Edge TPU.

    For half of the compiled models the error is below 20%.
    """
    constants = CONSTANTS.latency.instructions
    return constants.base + sum(_layer_instruction_bytes(layer, constants) for layer in layers)


def _layer_instruction_bytes(layer: ArrayLayer, constants: InstructionConstants) -> int:
    height, width = layer.output_shape[:2]
    ragged = sum(size % TILES > 0 for size in (height, width)) if height * width > 1 else 0
    convolution = constants.convolution
    sizes = {"conv": convolution, "tconv": convolution, "fc": constants.dense, "dw": constants.depthwise}
    return sizes.get(layer.kind, constants.other) + constants.ragged_sides[ragged]


def padded_map_bytes(shape: tuple[int, int, int]) -> int:
    """Return the bytes of an output feature map on the bus: channels in blocks of 4, as observed in compiled models."""
    return shape[0] * shape[1] * round_up(shape[2], INPUT_BLOCK)


def streamed_bytes(layers: Sequence[ArrayLayer]) -> tuple[int, ...]:
    """Return the parameter bytes of each layer that are sent at every inference; 0 if they are cached."""
    allocation = parameter_memory.allocate_cache([layer.parameters for layer in layers])
    pairs = zip(layers, allocation.streamed, strict=True)
    return tuple(layer.parameters.size_bytes if streamed else 0 for layer, streamed in pairs)


@dataclass(frozen=True)
class BusTraffic:
    """The bytes on the bus at every inference.

    Attributes:
        input_bytes: bytes of inputs from the host.
        output_bytes: bytes of outputs to the host.
        streamed_bytes: bytes of the parameters of each layer, counted once; 0 for cached parameters.
        invocations: how often the Edge TPU is started.
    """

    input_bytes: int
    output_bytes: int
    instruction_bytes: int
    streamed_bytes: tuple[int, ...]
    invocations: int = 1


@dataclass(frozen=True)
class LatencyPrediction:
    """A prediction, in ms.

    Attributes:
        total: the sum of `parts`.
        low: with `high`, the interval in which measurements are expected.
        parts: `fixed_ms` (start of the inference and of each layer, and instructions), `input_ms`, `compute_ms`,
            `stream_ms`, `output_ms`, `cpu_ms`.
        layers: for each layer, the time of its computation and streaming.
    """

    total: float
    low: float
    high: float
    parts: Mapping[str, float]
    layers: tuple[float, ...]


def compute_ms(layer: ArrayLayer, constants: LatencyConstants, clock: str = "max") -> float:
    """Return the time of the array for one layer, without what a host adds (`compute_factor`)."""
    ns_per_cycle = constants.conv_ns if layer.kind in WEIGHTED else constants.window_ns
    return layer.megacycles * ns_per_cycle * CLOCKS[clock]


def predict(
    layers: Sequence[ArrayLayer], traffic: BusTraffic, constants: LatencyConstants, host: str, clock: str = "max"
) -> LatencyPrediction:
    """Predict the latency of one inference.

    `constants` are the shipped constants or fitted ones; `host` is a key of `constants.hosts`, and `clock` a key of
    CLOCKS.
    """
    bus = constants.hosts[host]
    ms_per_byte = bus.transfer_ms_per_mb / 1e6
    computing = [bus.compute_factor * compute_ms(layer, constants, clock) for layer in layers]
    layer_ms = bus.compute_factor * constants.layer_us / 1000 * CLOCKS[clock]
    sizes = zip(layers, traffic.streamed_bytes, strict=True)
    streaming = [ms_per_byte * size_bytes * layer.passes for layer, size_bytes in sizes]
    pairs = zip(streaming, computing, strict=True)
    streaming = [max(streaming_ms - computing_ms - layer_ms, 0.0) for streaming_ms, computing_ms in pairs]
    starting_ms = layer_ms * len(layers)
    instructions_ms = ms_per_byte * traffic.instruction_bytes
    input_ms = ms_per_byte * traffic.input_bytes
    if bus.overlap:
        # The longer of the two counts, with a smooth transition (p-norm).
        power = bus.overlap
        before_ms, layers_ms = instructions_ms + input_ms, sum(computing) + sum(streaming) + starting_ms
        overlapped_ms = (before_ms**power + layers_ms**power) ** (1 / power)
        factor = overlapped_ms / (before_ms + layers_ms) if before_ms + layers_ms else 1.0
        starting_ms, instructions_ms, input_ms = (part * factor for part in (starting_ms, instructions_ms, input_ms))
        streaming = [streaming_ms * factor for streaming_ms in streaming]
        computing = [computing_ms * factor for computing_ms in computing]
    parts = {
        "fixed_ms": bus.fixed_ms * traffic.invocations + instructions_ms + starting_ms,
        "input_ms": input_ms,
        "compute_ms": sum(computing),
        "stream_ms": sum(streaming),
        "output_ms": bus.output_ms_per_mb / 1e6 * traffic.output_bytes,
        "cpu_ms": 0.0,
    }
    spread = exp(bus.spread)
    total = sum(parts.values())
    of_layers = tuple(map(sum, zip(computing, streaming, strict=True)))
    return LatencyPrediction(total, total / spread, total * spread, parts, of_layers)
