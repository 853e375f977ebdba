"""Parameter memory: the size of each operator's parameters in the compiled model, and which of them are cached.

Source: observed in compiled models. The layout, blocks of up to 64 outputs by 4 inputs, is visible in the files. Two
sizes are computed for every operator: the bytes in the compiled file, and the bytes that the compiler's report counts
as on-chip memory, where outputs are rounded up to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.targets.edgetpu.constants import CONSTANTS
from darwinn.blocks import FEW_ROWS, ROW_BLOCK, padded_rows, round_up


@dataclass(frozen=True)
class Parameters:
    """The memory for one operator's parameters.

    Attributes:
        size_bytes: bytes in the compiled file.
        allocated_bytes: bytes of on-chip memory in the compiler's report, if they are cached.
        order: the order in which operators are cached if memory is short (depthwise first, then few output positions).
        always_streamed: whether the compiler never caches them.
        is_confirmed: whether compiled models confirm the sizes of this operator; otherwise the sizes are the least.
    """

    size_bytes: int
    allocated_bytes: int
    order: tuple[int, int] = (0, 0)
    always_streamed: bool = False
    is_confirmed: bool = True


NONE = Parameters(0, 0)


def convolution(outputs: int, per_output: int, overhead: int, positions: int, *, one_position_in: bool) -> Parameters:
    """Return the memory for the parameters of a convolution or dense layer.

    `per_output` is the number of weights of one output: taps times input channels, rounded up to INPUT_BLOCK.
    `overhead` is the number of bytes of bias and scale for each output, and `positions` the number of output positions
    (1 for a dense layer).
    """
    is_small = outputs <= FEW_ROWS and not one_position_in
    stored_rows = FEW_ROWS if is_small else padded_rows(outputs)
    allocated_rows = FEW_ROWS if is_small else round_up(outputs, ROW_BLOCK)
    bytes_per_row = per_output + overhead
    return Parameters(
        round_up(stored_rows * bytes_per_row, 64), round_up(allocated_rows * bytes_per_row, 64), (1, positions)
    )


def depthwise(channels: int, taps: int, overhead: int) -> Parameters:
    """Return the memory for a depthwise convolution: a 4x4 diagonal matrix for each tap and four channels."""
    size = round_up(round_up(channels, 4) // 4 * (16 * taps + 4 * overhead), 64)
    return Parameters(size, size, (0, 0))


def constant_vector(channels: int) -> Parameters:
    """Return the memory for a constant vector (an element-wise operand, PReLU slopes), which is always streamed."""
    size = 16 * round_up(channels, 4)
    return Parameters(size, size, always_streamed=True)


def mark_uncacheable(parameters: Parameters, per_output: int) -> Parameters:
    """Mark an operator that is too large for the cache even if it is empty."""
    limits = CONSTANTS.memory
    large = per_output >= limits.streamed_weights_per_output or parameters.size_bytes > limits.largest_cached_bytes
    return replace(parameters, always_streamed=True) if large else parameters


@dataclass(frozen=True)
class CacheAllocation:
    """The operators whose parameters are cached or streamed, and the two figures of the compiler's report.

    Attributes:
        streamed: for each operator, whether its parameters are sent at every inference.
        cached_bytes: parameters that stay on the chip.
        streamed_bytes: parameters that are sent at every inference.
        report_on_chip_bytes: "On-chip memory used for caching model parameters".
        report_off_chip_bytes: "Off-chip memory used for streaming uncached model parameters".
    """

    streamed: tuple[bool, ...]
    cached_bytes: int
    streamed_bytes: int
    report_on_chip_bytes: int
    report_off_chip_bytes: int


def allocate_cache(parameters: Sequence[Parameters]) -> CacheAllocation:
    """Predict for each operator whether its parameters are cached.

    All parameters are cached if they fit. If they exceed the cache but not the whole memory, the largest operator is
    streamed. Otherwise operators are cached in this order as long as they fit: depthwise first, then few output
    positions, then large allocations. The cache is smaller if one operator is too large for it.

    Source: the compiler's reports for 177 stacks of layers. For real networks the compiler caches up to 1 MiB less; the
    reason is unknown.
    """
    limits = CONSTANTS.memory
    candidates = [i for i, item in enumerate(parameters) if not item.always_streamed]
    total_bytes = sum(parameters[i].allocated_bytes for i in candidates)
    has_oversized = any(item.always_streamed and item.size_bytes > limits.largest_cached_bytes for item in parameters)
    limit = limits.cache_bytes_beside_streaming if has_oversized else limits.cache_bytes
    if limit < total_bytes <= limits.memory_bytes:
        candidates.remove(max(candidates, key=lambda i: parameters[i].allocated_bytes))
        return _allocation(parameters, set(candidates))
    cached: set[int] = set()
    remaining = limits.cache_bytes
    for index in sorted(candidates, key=lambda i: (*parameters[i].order, -parameters[i].allocated_bytes, i)):
        if parameters[index].allocated_bytes <= remaining:
            cached.add(index)
            remaining -= parameters[index].allocated_bytes
    return _allocation(parameters, cached)


def _allocation(parameters: Sequence[Parameters], cached: set[int]) -> CacheAllocation:
    sizes = [item.size_bytes for item in parameters]
    streamed = sum(size for index, size in enumerate(sizes) if index not in cached)
    return CacheAllocation(
        tuple(index not in cached for index in range(len(parameters))),
        sum(sizes) - streamed,
        streamed,
        sum(parameters[index].allocated_bytes for index in cached),
        streamed,
    )
