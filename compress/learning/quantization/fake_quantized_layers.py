"""Keras layers whose weights are rounded in every call, to the steps of the 8-bit file.

Weights are rounded symmetrically, per output channel (dense layers: one scale), with a
straight-through gradient. Such a layer can also keep equal weights equal and zeros zero
(`weight_sparsity`), and include a batch norm.

Sources: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, CVPR 2018; for the batch norm Krishnamoorthi, Quantizing
deep convolutional networks for efficient inference, 2018, section 3.2.2.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from compress.model.ir.layer_specs import Kernel

MOMENTUM = 0.9
"""Momentum of the batch norm's statistics; Keras' 0.99 is too slow for short trainings."""
EPSILON = 1e-6
"""Added to variances."""


def quantized(library: Any, kind: str, axes: Kernel) -> Any:
    """Return the class of the Keras layer `kind` with a rounded kernel; `axes` are those of the kernel."""
    plain = getattr(library.layers, kind)
    attributes = {"plain": plain, "rounded": staticmethod(_rounded(library, axes)), "library": library, "axes": axes}
    return type(f"Quantized{kind}", (RoundedKernel, plain), attributes)


class RoundedKernel:
    """The additions of a quantized layer to the plain Keras layer.

    Attributes:
        distinct: number of codes, 0 without codes; weights with the same code stay equal, weights with code 0 stay 0.
        normalized: whether it includes a batch norm.
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
    # The plain classes read their kernel as an attribute in call(); this replaces it.
    replaced: Any = MappingProxyType({})

    def __init__(self, *values: Any, distinct: int = 0, normalized: bool = False, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.distinct, self.normalized = distinct, normalized

    def build(self, shape: Any) -> None:
        """Add the plain layer's weights, those of the batch norm, and the codes."""
        super().build(shape)  # type: ignore[misc]
        if self.normalized:
            _add_norm(self, self.axes.outputs(tuple(self.kernel.shape)))
        if self.distinct:
            codes = {"shape": self.kernel.shape, "dtype": "int32", "initializer": "zeros", "trainable": False}
            self.codes = self.add_weight(name="codes", **codes)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Compute the plain layer with its kernel rounded, and the batch norm if there is one."""
        kernel = self.tied()
        if not self.normalized:
            return self.used(inputs, self.rounded(kernel))
        outputs = self.used(inputs, self.rounded(kernel * _by_output(self, self.gamma / _deviation(self))))
        if not training:
            return outputs + self.beta - self.gamma * self.mean / _deviation(self)
        correction, shift = _batch(self.library, self, self.used(inputs, kernel))
        return outputs * correction + shift

    def used(self, inputs: Any, kernel: Any) -> Any:
        """Compute the plain layer with another kernel."""
        self.replaced = MappingProxyType({"kernel": kernel})
        try:
            return self.plain.call(self, inputs)
        finally:
            self.replaced = MappingProxyType({})

    def tied(self) -> Any:
        """Return the kernel with the mean of its code for each weight, and 0 for code 0."""
        return _tied(self.kernel, self.codes, self.distinct) if self.distinct else self.kernel

    def plain_weights(self) -> list[Any]:
        """Return kernel and bias, not yet rounded, of the plain layer with the same function in inference."""
        kernel = self.tied()
        weights = [kernel, *([self.bias] if self.use_bias else [])]
        if self.normalized:
            factor = self.gamma / _deviation(self)
            weights = [kernel * _by_output(self, factor), self.beta - self.mean * factor]
        return [np.asarray(self.library.ops.convert_to_tensor(weight)) for weight in weights]

    def get_config(self) -> dict[str, Any]:
        """Return the plain layer's settings, `distinct` and `normalized`."""
        plain: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**plain, "distinct": self.distinct, "normalized": self.normalized}

    def __getattribute__(self, name: str) -> Any:
        replaced = super().__getattribute__("replaced")
        return replaced[name] if name in replaced else super().__getattribute__(name)


def _rounded(library: Any, axes: Kernel) -> Any:
    """Return a function that rounds a kernel onto its grid, with a straight-through gradient."""
    ops = library.ops

    def rounded(kernel: Any) -> Any:
        largest = ops.max(ops.abs(kernel), axis=axes.scale_axes(len(kernel.shape)), keepdims=True)
        scale = ops.maximum(largest, 1e-9) / 127
        grid = ops.clip(ops.round(kernel / ops.stop_gradient(scale)), -127, 127) * scale
        return kernel + ops.stop_gradient(grid - kernel)

    return rounded


def _tied(kernel: Any, codes: Any, distinct: int) -> Any:
    """Return the kernel with equal weights for equal codes, so that their gradients are averaged."""
    import tensorflow

    codes = tensorflow.convert_to_tensor(codes)
    means = tensorflow.math.unsorted_segment_mean(tensorflow.convert_to_tensor(kernel), codes, distinct)
    return tensorflow.gather(tensorflow.concat([[0.0], means[1:]], 0), codes)


def _by_output(layer: Any, values: Any) -> Any:
    """Return one number for each output channel in a shape that broadcasts over the kernel."""
    return layer.library.ops.reshape(values, layer.axes.output_shape(tuple(layer.kernel.shape)))


def _add_norm(layer: Any, outputs: int) -> None:
    """Add the weights of a batch norm: gamma, beta, mean, variance; `moves` is 1 while the statistics are updated."""
    for name, start in (("gamma", "ones"), ("beta", "zeros")):
        setattr(layer, name, layer.add_weight(name=name, shape=(outputs,), initializer=start))
    for name, start in (("mean", "zeros"), ("variance", "ones")):
        setattr(layer, name, layer.add_weight(name=name, shape=(outputs,), initializer=start, trainable=False))
    layer.moves = layer.add_weight(name="moves", shape=(), initializer="ones", trainable=False)


def _deviation(layer: Any) -> Any:
    return (layer.variance + EPSILON) ** 0.5


def _batch(library: Any, layer: Any, outputs: Any) -> tuple[Any, Any]:
    """Return the factor and offset that turn outputs with the long-term statistics into those of this batch.

    Rounded weights with this batch's factor would jump from batch to batch. When the statistics
    are frozen, the factor is 1.
    """
    ops = library.ops
    mean, variance = ops.moments(outputs, axes=list(range(len(outputs.shape) - 1)))
    moves, long_term = layer.moves, _deviation(layer)
    for stored, current in ((layer.mean, mean), (layer.variance, variance)):
        stored.assign(stored + moves * (1 - MOMENTUM) * (ops.stop_gradient(current) - stored))
    deviation = (variance + EPSILON) ** 0.5
    correction = moves * long_term / deviation + (1 - moves)
    shift = layer.beta - layer.gamma * (moves * mean / deviation + (1 - moves) * layer.mean / long_term)
    return correction, shift
