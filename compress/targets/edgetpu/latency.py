"""The latency of one inference, predicted from the shapes of the layers.

A network is a list of `ArrayLayer`s and what is sent over the bus; where they come from (a .tflite file, a table of
published shapes) is not known here. The form: the array computes 4x4 tiles of the map, 4 input by 64 output channels at
a time, so only whole steps save time; instructions are sent at every inference; parameters that are streamed overlap
with their own layer's computing, and on x86 hosts all that is sent overlaps with all that is computed. The constants
are in `edgetpu.toml`; `benchmarks/latency.py` fits them and reports the error of each published measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

from compress.targets.base import OperatorShape, Target
from compress.targets.edgetpu import parameter_memory
from compress.targets.edgetpu.constants import ARRAY, LATENCY
from compress.targets.edgetpu.parameter_memory import INPUT_BLOCK, ROW_BLOCK, Parameters, CacheAllocation, round_up

TILES = ARRAY["tiles"]
WEIGHTED = ("conv", "tconv", "fc")
KINDS = (*WEIGHTED, "dw", "pool", "elt")
"""Kinds of layers: convolution, transposed, dense; depthwise, pooling, and whatever goes element by element."""
CLOCKS: dict[str, float] = LATENCY["clocks"]
"""Cycles take so many times as long: libedgetpu1-std runs an Edge TPU on USB at half of what libedgetpu1-max does."""


@dataclass(frozen=True)
class ArrayLayer(OperatorShape):
    """One layer that runs on the Edge TPU; its kind is one of KINDS.

    Attributes:
        parameters: the memory for its parameters.
    """

    parameters: Parameters = parameter_memory.NONE

    @cached_property
    def megacycles(self) -> float:
        """Millions of cycles of the array: whole tiles, whole steps of channels."""
        height, width = (self.input_shape if self.kind == "tconv" else self.output_shape)[:2]
        taps = self.kernel[0] * self.kernel[1]
        positions = round_up(height, TILES) * round_up(width, TILES) // TILES**2
        if self.kind in WEIGHTED:
            blocks = (
                round_up(self.input_shape[2], INPUT_BLOCK)
                * round_up(self.output_shape[2], ROW_BLOCK)
                // (INPUT_BLOCK * ROW_BLOCK)
            )
        else:
            blocks = round_up(self.output_shape[2], INPUT_BLOCK) // INPUT_BLOCK
        return positions * taps * blocks / 1e6

    @cached_property
    def passes(self) -> int:
        """The number of times that its weights are sent if they are streamed: large maps are computed part by part."""
        sides = []
        for side in (0, 1):
            stride = max(round(self.input_shape[side] / max(self.output_shape[side], 1)), 1)
            sides.append(-(-self.input_shape[side] // TILES) + max(self.kernel[side] - stride, 0))
        held = sides[0] * sides[1] * round_up(self.input_shape[2], INPUT_BLOCK)
        held += (
            -(-self.output_shape[0] // TILES)
            * -(-self.output_shape[1] // TILES)
            * round_up(self.output_shape[2], INPUT_BLOCK)
        )
        fitting = (row["times"] for row in LATENCY["weight_passes"] if held <= row["up_to_kib"] * 1024)
        return int(next(fitting, LATENCY["most_weight_passes"]))


def layer_parameters(layer: ArrayLayer, target: Target) -> Parameters:
    """Return the memory for the parameters of a layer with a known shape: per-channel scales, and a bias."""
    taps = layer.kernel[0] * layer.kernel[1]
    if layer.kind == "dw":
        return parameter_memory.depthwise(layer.output_shape[2], taps, 12)
    if layer.kind not in WEIGHTED:
        return parameter_memory.NONE
    each, one = taps * round_up(layer.input_shape[2], INPUT_BLOCK), layer.input_shape[0] * layer.input_shape[1] == 1
    positions = layer.output_shape[0] * layer.output_shape[1]
    found = parameter_memory.convolution(
        layer.output_shape[2], each, 4 if layer.kind == "fc" else 12, positions, one_position_in=one
    )
    return parameter_memory.mark_uncacheable(found, each, target)


def instruction_bytes(layers: Sequence[ArrayLayer], sent_bytes: int) -> int:
    """About how many bytes of instructions the compiler makes; half of compiled models are within a fifth of it.

    Args:
        layers: what runs on the Edge TPU.
        sent_bytes: inputs and outputs together.
    """
    constants = LATENCY["instructions"]
    total = constants["per_mb"] * max(sent_bytes / 2**20 - constants["fixed_mb"], 0)
    return int(total + sum(_layer_instruction_bytes(layer, constants) for layer in layers))


def _layer_instruction_bytes(layer: ArrayLayer, constants: Mapping[str, Any]) -> int:
    """About how many bytes of instructions the compiler makes for one layer."""
    if layer.kind == "fc":
        return int(constants["dense"] + constants["dense_per_block"] * -(-layer.output_shape[2] // ROW_BLOCK))
    if layer.kind in WEIGHTED:
        ragged = sum(side % TILES > 0 for side in layer.output_shape[:2])
        return int(constants["convolution"] + constants["ragged_side"] * constants["ragged_times"][ragged])
    return int(constants["depthwise"] if layer.kind == "dw" else constants["other"])


def padded_map_bytes(made: tuple[int, int, int]) -> int:
    """Return the bytes of a map on the bus to the host: its channels in blocks of 4, as compiled models have it."""
    return made[0] * made[1] * round_up(made[2], INPUT_BLOCK)


def allocate_cache(layers: Sequence[ArrayLayer], target: Target) -> CacheAllocation:
    """Which layers' parameters are streamed: what `check` says of the same operators."""
    return parameter_memory.allocate_cache([layer.parameters for layer in layers], target)


@dataclass(frozen=True)
class BusTraffic:
    """The traffic on the bus at every inference, in bytes.

    Attributes:
        inputs: from the host.
        outputs: to the host.
        instructions: of the program.
        streamed: parameters of each layer, once; 0 where they are cached.
        entries: how many times the Edge TPU is started.
    """

    inputs: int
    outputs: int
    instructions: int
    streamed: tuple[int, ...]
    entries: int = 1


@dataclass(frozen=True)
class LatencyPrediction:
    """A prediction, in ms.

    Attributes:
        total: the sum of `parts`.
        low: with `high`, the interval that measurements are expected in.
        high: see `low`.
        parts: `fixed_ms` (starting, and instructions), `input_ms`, `compute_ms`, `stream_ms`, `output_ms`, `cpu_ms`.
        layers: of each layer, its share of computing and streaming.
    """

    total: float
    low: float
    high: float
    parts: Mapping[str, float]
    layers: tuple[float, ...]


def compute_ms(layer: ArrayLayer, constants: Mapping[str, Any], clock: str = "max") -> float:
    """Return the time of the array for one layer."""
    each = constants["conv_ns"] if layer.kind in WEIGHTED else constants["window_ns"]
    return float(layer.megacycles * each * CLOCKS[clock])


def predict(
    layers: Sequence[ArrayLayer], sent: BusTraffic, constants: Mapping[str, Any], host: str, clock: str = "max"
) -> LatencyPrediction:
    """The latency of one inference.

    Args:
        layers: what runs on the Edge TPU.
        sent: what goes over the bus.
        constants: the target's table `latency`.
        host: a key of `constants["hosts"]`.
        clock: a key of CLOCKS.
    """
    bus = constants["hosts"][host]
    each = bus["transfer_ms_per_mb"] / 1e6
    computed = [compute_ms(layer, constants, clock) for layer in layers]
    streamed = [each * count * layer.passes for layer, count in zip(layers, sent.streamed, strict=True)]
    orders = each * sent.instructions + constants["layer_us"] * len(layers) / 1000
    inputs = each * sent.inputs
    if bus["overlap"]:  # of everything sent with everything computed: the longer of both, rounded where they meet
        power = bus["overlap"]
        moved = orders + inputs + sum(streamed)
        apart = sum(computed) + moved
        share = (sum(computed) ** power + moved**power) ** (1 / power) / apart if apart else 1.0
        orders, inputs = orders * share, inputs * share
        streamed, computed = [each * share for each in streamed], [each * share for each in computed]
    else:  # layer by layer
        streamed = [max(slow - fast, 0.0) for slow, fast in zip(streamed, computed, strict=True)]
    parts = {
        "fixed_ms": bus["fixed_ms"] * sent.entries + orders,
        "input_ms": inputs,
        "compute_ms": sum(computed),
        "stream_ms": sum(streamed),
        "output_ms": bus["output_ms_per_mb"] / 1e6 * sent.outputs,
        "cpu_ms": 0.0,
    }
    spread = exp(bus["spread"])
    total = sum(parts.values())
    each_layer = tuple(fast + slow for fast, slow in zip(computed, streamed, strict=True))
    return LatencyPrediction(total, total / spread, total * spread, parts, each_layer)
