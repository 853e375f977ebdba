"""`LayerSpec`: all facts about a layer kind that any part of the program needs, with defaults for unknown kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from compress.model.ir.keras_graph import Layer
from compress.model.ir.layer_specs.kernels import Kernel

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
        """Return height and width of the pooling window.

        Args:
            config: the settings of the layer.
            shape: height, width and channels of its input.
        """
        if self.pools_all:
            return shape[:2]
        size = config["pool_size"]
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return int((1, *sizes)[-2]), int(sizes[-1])
