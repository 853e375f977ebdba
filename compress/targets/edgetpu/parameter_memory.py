"""Parameter memory: the size of each operator's parameters in the compiled model, and which of them stay on the chip.

The formulas were found by comparing models with what the real compiler made of them; the
layout behind them (blocks of up to 64 outputs by 4 inputs) is visible in the compiled files.
Two sizes are counted for every operator: the bytes in the compiled file, and the bytes
that the compiler's report counts as on-chip memory, where outputs come in steps of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.targets.base import Target
from compress.targets.edgetpu.constants import ARRAY, PARAMETERS

ROW_BLOCK = ARRAY["output_channels"]
INPUT_BLOCK = ARRAY["input_channels"]
FEW_ROWS: int = PARAMETERS["few_rows"]
"""A convolution with at most so many outputs, on more than one position, is laid out in 4 rows."""


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def padded_rows(outputs: int) -> int:
    """Rows that a layer's outputs take: steps of 16 up to 64, then of 64."""
    return round_up(outputs, PARAMETERS["row_step"]) if outputs <= ROW_BLOCK else round_up(outputs, ROW_BLOCK)


@dataclass(frozen=True)
class Parameters:
    """The memory for one operator's parameters.

    Attributes:
        size_bytes: in the compiled file.
        allocated_bytes: as the compiler's report counts them when they stay on the chip.
        order: kept on the chip in this order when memory is short (depthwise first, then few output positions).
        always_streamed: whether the compiler never caches them.
    """

    size_bytes: int
    allocated_bytes: int
    order: tuple[int, int] = (0, 0)
    always_streamed: bool = False


NONE = Parameters(0, 0)


def convolution(outputs: int, per_output: int, overhead: int, positions: int, *, one_position_in: bool) -> Parameters:
    """A convolution or dense layer.

    Args:
        outputs: output channels.
        per_output: weights of one output: taps times input channels, rounded up to INPUT_BLOCK.
        overhead: bytes in addition to the weights of each output: bias and scale.
        positions: output positions (1 for a dense layer).
        one_position_in: whether the input has one position only.
    """
    few = outputs <= FEW_ROWS and not one_position_in
    taken = FEW_ROWS if few else padded_rows(outputs)
    allocated = FEW_ROWS if few else round_up(outputs, ROW_BLOCK)
    each = per_output + overhead
    return Parameters(round_up(taken * each, 64), round_up(allocated * each, 64), (1, positions))


def depthwise(channels: int, taps: int, overhead: int) -> Parameters:
    """A depthwise convolution: a 4x4 diagonal for each tap and four channels."""
    size = round_up(round_up(channels, 4) // 4 * (16 * taps + 4 * overhead), 64)
    return Parameters(size, size, (0, 0))


def constant_vector(channels: int) -> Parameters:
    """A constant vector that is added, multiplied, ... or the slopes of a PReLU: always streamed."""
    size = 16 * round_up(channels, 4)
    return Parameters(size, size, always_streamed=True)


def mark_uncacheable(parameters: Parameters, per_output: int, target: Target) -> Parameters:
    """Mark an operator that is too large for the cache however empty it is."""
    limits = target.tables["memory"]
    large = (
        per_output >= limits["streamed_weights_per_output"] or parameters.size_bytes > limits["largest_cached_bytes"]
    )
    return replace(parameters, always_streamed=True) if large else parameters


@dataclass(frozen=True)
class CacheAllocation:
    """Which operators' parameters are streamed, and the two numbers of the compiler's report.

    Attributes:
        streamed: for each operator whether its parameters are sent at every inference.
        cached_bytes: parameters that stay on the chip.
        streamed_bytes: parameters that are sent.
        report_on_chip_bytes: "On-chip memory used for caching model parameters".
        report_off_chip_bytes: "Off-chip memory used for streaming uncached model parameters".
    """

    streamed: tuple[bool, ...]
    cached_bytes: int
    streamed_bytes: int
    report_on_chip_bytes: int
    report_off_chip_bytes: int


def allocate_cache(parameters: Sequence[Parameters], target: Target) -> CacheAllocation:
    """Decide for whole operators whether their parameters stay on the chip.

    Everything is cached if it fits at once. If it does not, though it is less than the whole memory,
    the largest operator is given up. Otherwise first fit: depthwise first, then few output
    positions, then large allocations; what does not fit is skipped and the next tried.
    Next to an operator that is too large for the cache, less fits at once. Found from the compiler's
    reports on 177 stacks of layers; real networks get up to 1 MiB less, for reasons that are not understood.
    """
    limits = target.tables["memory"]
    candidates = [i for i, each in enumerate(parameters) if not each.always_streamed]
    together = sum(parameters[i].allocated_bytes for i in candidates)
    beside = any(each.always_streamed and each.size_bytes > limits["largest_cached_bytes"] for each in parameters)
    at_once = limits["cache_bytes_beside_streaming" if beside else "cache_bytes"]
    if at_once < together <= limits["memory_bytes"]:
        candidates.remove(max(candidates, key=lambda i: parameters[i].allocated_bytes))
        return _allocation(parameters, set(candidates))
    cached: set[int] = set()
    left = limits["cache_bytes"]
    for index in sorted(candidates, key=lambda i: (*parameters[i].order, -parameters[i].allocated_bytes, i)):
        if parameters[index].allocated_bytes <= left:
            cached.add(index)
            left -= parameters[index].allocated_bytes
    return _allocation(parameters, cached)


def _allocation(parameters: Sequence[Parameters], cached: set[int]) -> CacheAllocation:
    sizes = [each.size_bytes for each in parameters]
    streamed = sum(size for index, size in enumerate(sizes) if index not in cached)
    return CacheAllocation(
        tuple(index not in cached for index in range(len(parameters))),
        sum(sizes) - streamed,
        streamed,
        sum(parameters[index].allocated_bytes for index in cached),
        streamed,
    )
