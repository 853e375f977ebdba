"""The .tflite file of a plan from the file of another plan, without another conversion.

TensorFlow's converter takes seconds, and hundreds of megabytes. Its files for two plans of the same network have the
same operators: only the scales, the zero points, and the values of kernels and biases differ. They are computed here as
the converter does it, to the bit, so a search compares the files themselves.

Source for the arithmetic: tensorflow/compiler/mlir/quantization/common/quantization_lib, TensorFlow 2.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.learning.quantization import export, quantizer_placement
from compress.learning.quantization.plan import LEVELS, QuantizationPlan, edited, gridded, restructured
from compress.model.ir.keras_graph import Layer, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.layer_specs.functions import PRESCRIBED_RANGES
from compress.model.tflite import graph as graphs
from compress.model.tflite.edit import Edit, compact
from compress.model.tflite.graph import NONE, Graph, Tensor

STEP = 0.01
"""Distance of the widths of the ranges by which points are recognized; chosen: no two of 10,000 have the same scale."""
SMALLEST = 5e-7
"""The converter treats kernels with smaller weights as if their largest weight were this (kNearZeroTolerance / 2)."""
LARGEST_BIAS = 2**30 - 1
"""The converter makes the scale of a kernel larger if a bias would be beyond this: half of int32's largest value."""
INPUT_OF = {"CONV_2D": 0, "DEPTHWISE_CONV_2D": 0, "FULLY_CONNECTED": 0, "TRANSPOSE_CONV": 2}
"""By operator with a kernel, the index of its input; the kernel is input 1."""
BIAS_OF = {"CONV_2D": 2, "DEPTHWISE_CONV_2D": 2, "FULLY_CONNECTED": 2, "TRANSPOSE_CONV": 3}
"""The index of the bias."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class _Weights:
    """The constants of one operator.

    Attributes:
        layer: the layer with their values.
        source: the tensor index of the operator's input.
        kernel: the tensor index of the kernel.
        bias: the tensor index of the bias; NONE without a bias.
    """

    layer: str
    source: int
    kernel: int
    bias: int


@dataclass(frozen=True)
class ConvertedNetwork:
    """A network that was converted once.

    Attributes:
        network: in canonical form.
        graph: its file for one plan.
        points: by tensor index the point that its scale and zero point come from; other scales are prescribed.
        weights: the constants that a plan changes.
    """

    network: Network
    graph: Graph
    points: Mapping[int, str]
    weights: tuple[_Weights, ...]

    @classmethod
    def of(cls, network: Network, plan: QuantizationPlan, io: export.InputType) -> ConvertedNetwork | None:
        """Convert a network in canonical form, for plans with the same separated gates as `plan`.

        Return None if the origin of a scale or a constant in the file is unknown, or a value would not be the same to
        the bit: then every plan needs a conversion.

        Raises:
            FloatOperatorsError: an operator would stay float.
            StageError: a layer is a loop, which has no 8-bit form.
        """
        tensors = quantizer_placement.find(restructured(network, plan))
        fixed = quantizer_placement.fixed(restructured(network, plan), tensors)
        ranges = dict(plan.ranges)
        for number, (point, (low, _)) in enumerate(plan.ranges.items()):
            if point not in fixed:
                width = 1.0 + STEP * number
                ranges[point] = (-width / 2, width / 2) if low < 0 else (0.0, width)
        plan = replace(plan, ranges=ranges)
        graph = compact(graphs.parse(export.convert(network, plan, io)))
        points = _points(graph, {point: limits for point, limits in ranges.items() if point not in fixed})
        weights = _weights(graph, gridded(edited(network, plan), plan))
        if points is None or weights is None:
            return None
        converted = cls(network, graph, points, weights)
        content = converted.file(plan)
        return converted if content is not None and _are_equal(graphs.parse(content), graph) else None

    def file(self, plan: QuantizationPlan) -> bytes | None:
        """Return the file of a plan; None if the plan shifts the bias of an operator without one."""
        network = gridded(edited(self.network, plan), plan)
        edit = Edit(self.graph)
        scales: dict[int, float] = {}
        for index, point in self.points.items():
            scales[index], zero_point = scale_and_zero_point(*plan.ranges[point])
            offset = 128 if self.graph.tensors[index].dtype == "UINT8" else 0
            edit.requantize(index, [scales[index]], zero_point + offset)
        for constants in self.weights:
            layer = network.layers[constants.layer]
            if len(layer.weights) > 1 and constants.bias == NONE:
                return None
            source = self.graph.tensors[constants.source].quantization
            assert source is not None
            _assign(edit, constants, layer, scales.get(constants.source, float(source.scale[0])))
        return graphs.serialize(compact(edit.graph()))


def _are_equal(first: Graph, second: Graph) -> bool:
    """Return whether two graphs with the same tensors have the same quantization and the same constants.

    The converter's biases are not exact where all channels have the same bias (`constant_biases`).
    """
    for tensor, other in zip(first.tensors, second.tensors, strict=True):
        if tensor.quantization != other.quantization:
            return False
        tolerance = 1e-6 if tensor.dtype == "INT32" else 0.0
        if tensor.is_constant and not np.allclose(tensor.array(), other.array(), rtol=tolerance, atol=1e6 * tolerance):
            return False
    return True


def scale_and_zero_point(low: float, high: float) -> tuple[float, int]:
    """Return scale and zero point of an int8 tensor with a range."""
    low, high = float(np.float32(low)), float(np.float32(high))  # attributes of the fake quantization
    scale = (high - low) / LEVELS
    return scale, min(max(floor(-128 - low / scale + 0.5), -128), 127)


def _points(graph: Graph, ranges: Mapping[str, tuple[float, float]]) -> dict[int, str] | None:
    """Return by tensor index its point; None if a scale is neither that of a point nor prescribed."""
    by_scale = {np.float32(scale_and_zero_point(*limits)[0]): point for point, limits in ranges.items()}
    prescribed = {np.float32(scale_and_zero_point(*limits)[0]) for limits in PRESCRIBED_RANGES.values()}
    points = {}
    for tensor in graph.tensors:
        if tensor.dtype not in ("INT8", "UINT8") or tensor.is_constant or tensor.quantization is None:
            continue
        scale = np.float32(tensor.quantization.scale[0])
        if scale in by_scale:
            points[tensor.index] = by_scale[scale]
        elif scale not in prescribed:
            return None
    return points


def _weights(graph: Graph, network: Network) -> tuple[_Weights, ...] | None:
    """Return the constants of all operators with kernels; None if the layer of one is unknown.

    `network` is the converted network, with its kernels on their grid.
    """
    layers = [layer for layer in network.layers.values() if spec_of(layer).kernel is not None]
    weights: list[_Weights] = []
    for operator in graph.operators:
        if operator.name not in INPUT_OF:
            continue
        kernel = graph.tensors[operator.inputs[1]]
        if not kernel.is_constant:
            continue
        names = [layer.name for layer in layers if kernel.dtype == "INT8" and _has_kernel(layer, kernel)]
        if len(names) != 1:
            return None
        source = operator.inputs[INPUT_OF[operator.name]]
        bias = (*operator.inputs, NONE)[min(BIAS_OF[operator.name], len(operator.inputs))]
        weights.append(_Weights(names[0], source, kernel.index, bias))
    shared = {constants.bias: constants for constants in weights}
    is_shared = any(constants.bias != NONE and shared[constants.bias] != constants for constants in weights)
    complete = {constants.layer for constants in weights} == {layer.name for layer in layers}
    return tuple(weights) if complete and not is_shared else None


def _has_kernel(layer: Layer, tensor: Tensor) -> bool:
    """Return whether a constant is the kernel of a layer."""
    assert tensor.quantization is not None
    kernel = _as_stored(layer, layer.weights[0])
    scales = np.array(tensor.quantization.scale)
    if kernel.size != tensor.elements or len(scales) != _largest(layer).size:
        return False
    scales = scales.reshape(_largest(layer).shape)
    # One channel is enough: the converter chooses other scales for channels with small weights.
    if not np.isclose(_largest(layer) / 127, scales, rtol=1e-5).any():
        return False
    stored = tensor.array().reshape(kernel.shape)
    steps = _as_stored(layer, np.broadcast_to(scales, layer.weights[0].shape))
    return bool((np.abs(stored * steps - kernel) <= 0.51 * steps).all())


def _as_stored(layer: Layer, kernel: NDArray[Any]) -> NDArray[Any]:
    """Return values for each weight in the order of the file: outputs first, but last for a depthwise kernel."""
    axes = spec_of(layer).kernels[0]
    return kernel if axes.depthwise else np.moveaxis(kernel, axes.out, 0)


def _largest(layer: Layer) -> Doubles:
    """Return the largest magnitude of the weights that share a scale, in a shape that broadcasts over the kernel."""
    kernel = layer.weights[0]
    axes = spec_of(layer).kernels[0].scale_axes(kernel.ndim)
    return np.asarray(np.abs(kernel).max(axis=axes, keepdims=True), np.float64)


def _assign(edit: Edit, constants: _Weights, layer: Layer, input_scale: float) -> None:
    """Store kernel and bias of a layer."""
    kernel = layer.weights[0]
    scales = np.maximum(_largest(layer), SMALLEST) / 127
    bias = layer.weights[1].astype(np.float64) if len(layer.weights) > 1 else np.zeros(1)
    magnitude = np.abs(bias).reshape(scales.shape) if bias.size == scales.size else np.abs(bias).max()
    scales = np.where(magnitude > LARGEST_BIAS * input_scale * scales, magnitude / (input_scale * LARGEST_BIAS), scales)
    codes = np.clip(np.rint(kernel / scales), -127, 127).astype(np.int8)
    edit.assign(constants.kernel, _as_stored(layer, codes))
    edit.requantize(constants.kernel, scales.ravel().tolist())
    if constants.bias != NONE:
        steps = input_scale * scales.ravel()
        shape = edit.before.tensors[constants.bias].shape
        stored = np.rint(np.broadcast_to(bias, shape) / steps)
        edit.assign(constants.bias, np.clip(stored, -LARGEST_BIAS, LARGEST_BIAS).astype(np.int32))
        edit.requantize(constants.bias, steps.tolist())
