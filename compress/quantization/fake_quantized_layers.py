"""Keras layers with weights that are rounded whenever they are used, as the 8-bit file will have them.

Weights are rounded symmetrically, per output channel (dense layers: one scale), and their
gradient passes straight through. Such a layer can also keep weights equal that are, and zeros
zero (`patterns`), and have a batch norm of its own.

Sources: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018; for the batch norm Krishnamoorthi, Quantizing
deep convolutional networks for efficient inference, 2018, section 3.2.2.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from compress.ir.layer_specs import Kernel

MOMENTUM = 0.9
"""Share of a batch norm's statistics that stays in one step; Keras' 0.99 is too slow for short trainings."""
EPSILON = 1e-6
"""Added to variances."""


def quantized(library: Any, kind: str, axes: Kernel) -> Any:
    """The Keras layer `kind` with a kernel that is rounded; `axes` are those of the kernel."""
    plain = getattr(library.layers, kind)
    own = {"plain": plain, "rounded": staticmethod(_rounded(library, axes)), "library": library, "axes": axes}
    return type(f"Quantized{kind}", (RoundedKernel, plain), own)


class RoundedKernel:
    """What a quantized layer has beside those of the plain one.

    Attributes:
        distinct: number of codes, where weights of one code stay equal and those of code 0 stay 0; 0 without codes.
        normalized: whether it has a batch norm of its own.
    """

    plain: Any
    rounded: Any
    library: Any
    axes: Kernel
    kernel: Any
    bias: Any
    use_bias: bool
    codes: Any
    gamma: Any
    beta: Any
    mean: Any
    variance: Any
    add_weight: Any
    # The plain classes read their kernel as an attribute in call(): here they get another one.
    replaced: Any = MappingProxyType({})

    def __init__(self, *values: Any, distinct: int = 0, normalized: bool = False, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.distinct, self.normalized = distinct, normalized

    def build(self, shape: Any) -> None:
        """The plain layer's weights, those of the batch norm, the codes."""
        super().build(shape)  # type: ignore[misc]
        if self.normalized:
            _add_norm(self, self.axes.outputs(tuple(self.kernel.shape)))
        if self.distinct:
            codes = {"shape": self.kernel.shape, "dtype": "int32", "initializer": "zeros", "trainable": False}
            self.codes = self.add_weight(name="codes", **codes)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """What the plain layer computes, with its kernel rounded; normalized, where that is asked for."""
        kernel = self.tied()
        if not self.normalized:
            return self.used(inputs, self.rounded(kernel))
        made = self.used(inputs, self.rounded(kernel * _by_output(self, self.gamma / _deviation(self))))
        if not training:
            return made + self.beta - self.gamma * self.mean / _deviation(self)
        correction, shift = _batch(self.library, self, self.used(inputs, kernel))
        return made * correction + shift

    def used(self, inputs: Any, kernel: Any) -> Any:
        """What the plain layer makes of its inputs with another kernel."""
        self.replaced = MappingProxyType({"kernel": kernel})
        try:
            return self.plain.call(self, inputs)
        finally:
            self.replaced = MappingProxyType({})

    def tied(self) -> Any:
        """The kernel with the mean of its code at each place, and 0 where the code is 0."""
        return _tied(self.kernel, self.codes, self.distinct) if self.distinct else self.kernel

    def plain_weights(self) -> list[Any]:
        """Kernel and bias of the plain layer that computes the same outside of training, not yet rounded."""
        kernel = self.tied()
        weights = [kernel, *([self.bias] if self.use_bias else [])]
        if self.normalized:
            factor = self.gamma / _deviation(self)
            weights = [kernel * _by_output(self, factor), self.beta - self.mean * factor]
        return [np.asarray(self.library.ops.convert_to_tensor(weight)) for weight in weights]

    def get_config(self) -> dict[str, Any]:
        """The plain layer's settings and the two of its own."""
        plain: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**plain, "distinct": self.distinct, "normalized": self.normalized}

    def __getattribute__(self, name: str) -> Any:
        replaced = super().__getattribute__("replaced")
        return replaced[name] if name in replaced else super().__getattribute__(name)


def _rounded(library: Any, axes: Kernel) -> Any:
    """Rounds a kernel onto its grid; the gradient passes as if it did not."""
    ops = library.ops

    def rounded(kernel: Any) -> Any:
        largest = ops.max(ops.abs(kernel), axis=axes.scale_axes(len(kernel.shape)), keepdims=True)
        scale = ops.maximum(largest, 1e-9) / 127
        grid = ops.clip(ops.round(kernel / ops.stop_gradient(scale)), -127, 127) * scale
        return kernel + ops.stop_gradient(grid - kernel)

    return rounded


def _tied(kernel: Any, codes: Any, distinct: int) -> Any:
    """Equal weights stay equal: each gets the mean of all gradients of its code, and so the same step."""
    import tensorflow

    codes = tensorflow.convert_to_tensor(codes)
    means = tensorflow.math.unsorted_segment_mean(tensorflow.convert_to_tensor(kernel), codes, distinct)
    return tensorflow.gather(tensorflow.concat([[0.0], means[1:]], 0), codes)


def _by_output(layer: Any, values: Any) -> Any:
    """One number for each output channel, shaped to be multiplied with the kernel."""
    return layer.library.ops.reshape(values, layer.axes.output_shape(tuple(layer.kernel.shape)))


def _add_norm(layer: Any, outputs: int) -> None:
    """The weights of a batch norm: gamma, beta; mean, variance, and 1 as long as these move."""
    for name, start in (("gamma", "ones"), ("beta", "zeros")):
        setattr(layer, name, layer.add_weight(name=name, shape=(outputs,), initializer=start))
    for name, start in (("mean", "zeros"), ("variance", "ones")):
        setattr(layer, name, layer.add_weight(name=name, shape=(outputs,), initializer=start, trainable=False))
    layer.moves = layer.add_weight(name="moves", shape=(), initializer="ones", trainable=False)


def _deviation(layer: Any) -> Any:
    return (layer.variance + EPSILON) ** 0.5


def _batch(library: Any, layer: Any, made: Any) -> tuple[Any, Any]:
    """What turns outputs with the long-term factor into those normalized by this batch: a factor and an offset.

    Rounded weights with this batch's factor would jump from batch to batch. Once the statistics
    stand still, nothing is left to correct.
    """
    ops = library.ops
    mean, variance = ops.moments(made, axes=list(range(len(made.shape) - 1)))
    moves, long_term = layer.moves, _deviation(layer)
    for stored, found in ((layer.mean, mean), (layer.variance, variance)):
        stored.assign(stored + moves * (1 - MOMENTUM) * (ops.stop_gradient(found) - stored))
    deviation = (variance + EPSILON) ** 0.5
    correction = moves * long_term / deviation + (1 - moves)
    shift = layer.beta - layer.gamma * (moves * mean / deviation + (1 - moves) * layer.mean / long_term)
    return correction, shift
