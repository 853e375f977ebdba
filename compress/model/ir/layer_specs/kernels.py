"""The axes of a kernel: the same for every number of spatial dimensions, so counted from the last axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Kernel:
    """The axes of one kernel.

    Attributes:
        into: the axis of the input channels.
        out: the axis of the output channels; of a depthwise kernel that of the multiplier, which together with `into`
            numbers the outputs.
        depthwise: whether each output channel is computed from one input channel.
        transposed: whether the kernel is applied at each position of the input instead of the output.
        per_channel: whether each output channel has its own scale in an 8-bit file.
    """

    into: int = -2
    out: int = -1
    depthwise: bool = False
    transposed: bool = False
    per_channel: bool = True

    @property
    def output_axes(self) -> tuple[int, ...]:
        """The axes that number the output channels, in the order of the kernel's axes."""
        return (self.into, self.out) if self.depthwise else (self.out,)

    def outputs(self, shape: tuple[int, ...]) -> int:
        """Return the number of output channels of a kernel of some shape (of one group, if it is grouped)."""
        return int(np.prod([shape[axis] for axis in self.output_axes]))

    def scale_axes(self, rank: int) -> tuple[int, ...]:
        """Return the axes that share one quantization scale, for a kernel with `rank` axes."""
        kept = {axis % rank for axis in self.output_axes} if self.per_channel else set()
        return tuple(axis for axis in range(rank) if axis not in kept)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that broadcasts one value for each output channel over a kernel."""
        return _broadcast_shape(shape, self.output_axes)

    def input_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that broadcasts one value for each input channel over a kernel."""
        return _broadcast_shape(shape, (self.into,))

    def times_outputs(self, kernel: NDArray[Any], factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiply the weights of each output channel by a factor, in double precision."""
        values = np.broadcast_to(factors, (self.outputs(kernel.shape),))
        return kernel.astype(np.float64) * values.reshape(self.output_shape(kernel.shape))

    def times_inputs(self, kernel: NDArray[Any], factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiply the weights of each input channel by a factor, in double precision."""
        return kernel.astype(np.float64) * factors.reshape(self.input_shape(kernel.shape))


def _broadcast_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    kept = {axis % len(shape) for axis in axes}
    return tuple(size if axis in kept else 1 for axis, size in enumerate(shape))
