"""`LayerSpec`: all facts about a layer kind that any part of the program needs, with defaults for unknown kinds.

The axes of a `Kernel` are the same for every number of spatial dimensions, so they are counted from the last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer

ChannelFlow = Literal["mixes", "depthwise", "preserves", "combines", "concatenates", "reshapes", "unknown"]
"""The relation between the channels (last axis) of a layer's inputs and outputs.

mixes: each output channel is computed from all input channels. depthwise: each input channel gives one or more output
channels. preserves: output channel i is computed from input channel i. combines: output channel i is computed from
channel i of several inputs. concatenates: the output has the channels of all inputs, in order, if they are joined along
the last axis. reshapes: the output has the same values in another shape. unknown: no channel can be removed.
"""
RangeRule = Literal["own", "input", "joined"]
"""The quantization range of a layer's output: its own, that of its input, or one that all inputs share with it."""


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

    def fan(self, shape: tuple[int, ...]) -> int:
        """Return the number of weights from which an output is computed, for a kernel of some shape."""
        return int(np.prod(shape)) // self.outputs(shape)

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


@dataclass(frozen=True)
class LayerSpec:
    """A layer kind. The defaults of this class describe an unknown kind: nothing is assumed.

    Attributes:
        kind: the Keras class name.
        rank: the number of spatial dimensions, where a family has one class for each; else 0.
        keras2: whether tf-keras has a layer of the same name, settings and weights.
    """

    kind: str
    rank: int = 0
    keras2: bool = False

    #: The kernels, in the order of the weights; biases, if any, follow them.
    kernels: ClassVar[tuple[Kernel, ...]] = ()
    #: The setting that holds the number of output channels.
    width_setting: ClassVar[str] = ""
    channels: ClassVar[ChannelFlow] = "unknown"
    output_range: ClassVar[RangeRule] = "own"
    #: TFLite computes a ReLU after it in the same operator.
    fuses_relu: ClassVar[bool] = False
    #: Each output value depends on the input values at the same index alone.
    elementwise: ClassVar[bool] = False
    #: f(s x) = s f(x) for s > 0, for each channel by itself.
    homogeneous: ClassVar[bool] = False
    #: In inference, a factor of any sign on an input channel is the same factor on the output channel.
    passes_factors: ClassVar[bool] = False
    #: In inference, the output has the values of the input in the same order; the shape may differ.
    keeps_values: ClassVar[bool] = False
    #: Changes values at random in training only.
    random_in_training: ClassVar[bool] = False
    #: Has a state that passes from time step to time step, and activations inside that loop.
    recurrent: ClassVar[bool] = False
    #: Skips time steps that another layer marks.
    reads_masks: ClassVar[bool] = False
    #: Needs 32 bits in mixed-precision training.
    float32_only: ClassVar[bool] = False
    #: A normalization by stored statistics of each channel.
    is_batch_norm: ClassVar[bool] = False
    #: Its weights, if any, run along the channels in their last axis.
    weights_by_channel: ClassVar[bool] = False
    #: One target operator reads a constant with a value for each channel.
    constant_by_channel: ClassVar[bool] = False
    #: Adds zeros around a map.
    pads: ClassVar[bool] = False
    #: Reduces each window of a map to one value.
    pools: ClassVar[bool] = False
    #: The window is the whole map.
    pools_all: ClassVar[bool] = False
    #: The name of the activation function, for a kind that applies one and nothing else.
    function: ClassVar[str | None] = None

    @property
    def bias_index(self) -> int:
        """The index of the bias in the weights of a layer that has kernels."""
        return len(self.kernels)

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of a layer that has exactly one: batch norms are folded into it, and it is quantized."""
        return self.kernels[0] if len(self.kernels) == 1 else None

    def activation(self, layer: Layer) -> str | None:
        """Return the function that the layer applies and nothing else, or None."""
        del layer
        return self.function

    def masks(self, config: Mapping[str, Any]) -> bool:
        """Return True if later layers skip time steps that this layer marks."""
        del config
        return False

    def entry(self, **config: Any) -> dict[str, Any]:
        """Return Keras' serialized form of a layer of this kind."""
        return {"module": "keras.layers", "class_name": self.kind, "config": config, "registered_name": None}

    def layer(self, name: str, calls: tuple[Any, ...], weights: tuple[Any, ...] = (), **config: Any) -> Layer:
        """Return a layer of this kind with the settings in `config`."""
        return Layer(name, self.kind, self.entry(name=name, **config), calls, weights)

    def pool_window(self, config: Mapping[str, Any], shape: tuple[int, int, int]) -> tuple[int, int]:
        """Return height and width of the pooling window for an input of the shape height, width, channels."""
        if self.pools_all:
            return shape[:2]
        size = config["pool_size"]
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return int((1, *sizes)[-2]), int(sizes[-1])
