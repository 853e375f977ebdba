"""Attention masks: constants far below all scores that are added in front of a softmax, such as -1e4 or -inf.

In 8 bits they would take the whole range of the sum, and leave no steps for the scores. `limited` raises them as far as
the softmax of the 8-bit file cannot tell the difference, so that what is masked stays masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.learning.quantization import activation_statistics
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.layer_specs import ADD, MULTIPLY, SUBTRACT, LayerSpec, spec_of
from compress.model.tflite.comparison import Feed, Runner
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Operator

SOFTMAX_STEPS = 256
"""Steps of 1 in the output of an 8-bit softmax. Source: TFLite's 8-bit quantization specification, SOFTMAX."""
ARRAYS = ("__numpy__", "__tensor__")
"""Keras' serialized forms of an array in the arguments of a call."""
SIGNS: Mapping[LayerSpec, float] = {ADD: 1.0, SUBTRACT: -1.0}
"""Sign of a constant second operand, by operation."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Mask:
    """A constant that is added in front of a softmax.

    Attributes:
        sum: the sum of the scores and the mask.
        scores: the scores.
        length: number of values that the softmax normalizes together.
        layer: the layer whose call has the constant: the sum, or the product with an input that marks what is masked.
        marks: the marks that the constant is multiplied by; None for a sum with a constant.
    """

    sum: LayerOutput
    scores: LayerOutput
    length: int
    layer: str
    marks: LayerOutput | None = None


def _limit(scores: Range, length: int) -> float:
    """Return the distance at which all masked values together are less than half a step of the softmax.

    The scores of the 8-bit file cannot leave their range, so that the distance holds for all data.
    """
    return scores[1] - scores[0] + float(np.log(2 * SOFTMAX_STEPS * length))


def limited(network: Network, samples: NDArray[np.float32]) -> tuple[Network, list[str]]:
    """Return the network with its masks limited, and a note for each.

    The range of the scores is measured on preprocessed calibration samples [n, ...].
    """
    masks = list(_masks(network))
    if not masks:
        return network, []
    tensors = [tensor for mask in masks for tensor in (mask.scores, mask.marks) if tensor is not None]
    ranges = activation_statistics.measured_ranges(network, list(dict.fromkeys(tensors)), samples)
    notes = []
    for mask in masks:
        if mask.marks is not None and not (ranges[mask.marks][0] >= 0 and ranges[mask.marks][1] <= 1):
            continue
        limit = _limit(ranges[mask.scores], mask.length)
        layer = network.layers[mask.layer]
        lowest = float(min(constant.min() for constant in _constants(layer).values()))
        if np.isfinite(limit) and lowest < -limit:
            network = network.edited({layer.name: _clipped(layer, limit)}, {})
            notes.append(
                f"the attention mask of {lowest:.3g} in {layer.name!r} is limited to {-limit:.3g}, which the 8-bit "
                "softmax cannot tell apart"
            )
        low, high = ranges[mask.scores]
        ranges[mask.sum] = low - min(limit, -lowest), high  # a further mask may be added to the sum
    return network, notes


def _masks(network: Network) -> Iterator[Mask]:
    """Yield the masks in front of all softmaxes, the first additions first."""
    for layer, call in network.in_order():
        if spec_of(layer).activation(layer) != "softmax" or len(layer.inputs(call)) != 1:
            continue
        tensor = layer.inputs(call)[0]
        shape = network.shapes[tensor]
        axis = layer.config.get("axis", -1)
        length = shape[axis - (axis > 0)] if isinstance(axis, int) else prod(size or 1 for size in shape)
        yield from reversed(list(_masks_before(network, _source(network, tensor), length or 1)))


def _masks_before(network: Network, tensor: LayerOutput, length: int) -> Iterator[Mask]:
    """Yield the masks that are added to the scores, from the softmax to its beginning."""
    while spec_of(layer := network.layers[tensor.layer]) in SIGNS and len(layer.calls) == 1:
        inputs = [_source(network, source) for source in layer.inputs()]
        if len(inputs) == 1 and _constants(layer):
            yield Mask(tensor, inputs[0], length, layer.name)
            tensor = inputs[0]
            continue
        products = [source for source in inputs if _is_marked(network.layers[source.layer])]
        if spec_of(layer) != ADD or len(inputs) != 2 or len(products) != 1:
            return
        (scores,) = (source for source in inputs if source not in products)
        (marks,) = network.layers[products[0].layer].inputs()
        yield Mask(tensor, scores, length, products[0].layer, marks)
        tensor = scores


def _source(network: Network, tensor: LayerOutput) -> LayerOutput:
    """Return the tensor whose values a tensor has in another shape."""
    while network.layers[tensor.layer].calls and spec_of(network.layers[tensor.layer]).output_range == "input":
        tensor = network.sources(tensor)[0]
    return tensor


def _is_marked(layer: Layer) -> bool:
    """Return whether a layer multiplies one tensor by a constant."""
    return spec_of(layer) == MULTIPLY and len(layer.calls) == len(layer.inputs()) == 1 and bool(_constants(layer))


def _constants(layer: Layer) -> dict[int, NDArray[Any]]:
    """Return the constants among the operands of an operation, as they are added, by the number of the operand."""
    constants: dict[int, NDArray[Any]] = {}
    for number, (sign, operand) in enumerate(zip(_signs(layer), layer.calls[0]["args"], strict=False)):
        if isinstance(operand, int | float):
            constants[number] = sign * np.asarray(operand)
        elif isinstance(operand, Mapping) and operand.get("class_name") in ARRAYS:
            constants[number] = sign * np.asarray(operand["config"]["value"], np.float32)
    return constants


def _signs(layer: Layer) -> tuple[float, float]:
    return 1.0, SIGNS.get(spec_of(layer), 1.0)


def _clipped(layer: Layer, limit: float) -> Layer:
    """Return the operation with its constant not below the limit."""
    operands = [*layer.calls[0]["args"]]
    for number, added in _constants(layer).items():
        value = (_signs(layer)[number] * np.maximum(added, -limit)).tolist()
        operand = operands[number]
        is_array = isinstance(operand, Mapping)
        operands[number] = {**operand, "config": {**operand["config"], "value": value}} if is_array else value
    return replace(layer, calls=({**layer.calls[0], "args": operands},))


def limited_graph(graph: Graph, feeds: Sequence[Feed]) -> Graph:
    """Return a float graph with its masks limited: constants that are added, or selected by a constant condition.

    The graph is in its plain form, and the range of the scores is measured on calibration samples.
    """
    masks = [mask for operator in graph.operators if (mask := _graph_mask(graph, operator)) is not None]
    if not masks:
        return graph
    runner = Runner(graph, keep=True)
    values: dict[int, list[float]] = {scores: [] for _, scores, _, _ in masks}
    for feed in feeds:
        runner.run(feed, [])
        for scores, seen in values.items():
            array = runner.tensor(scores)
            seen += [] if array is None else [float(array.min()), float(array.max())]
    edit = Edit(graph)
    for operator, scores, constant, length in masks:
        low, high = min(values[scores], default=-np.inf), max(values[scores], default=np.inf)
        limit = _limit((low, high), length)
        lowest = -limit if operator.name == "ADD" else high - limit  # a selected constant replaces the scores
        array = graph.tensors[constant].array()
        if np.isfinite(limit) and array.min() < lowest:
            limited_array = np.maximum(array, np.float32(lowest))
            index = edit.like(graph.tensors[constant], "limited", values=limited_array)
            edit.change(operator, inputs=[index if source == constant else source for source in operator.inputs])
    return edit.graph()


def _graph_mask(graph: Graph, softmax: Operator) -> tuple[Operator, int, int, int] | None:
    """Return the operator that masks the scores of a softmax, the scores, the constant and the softmax's length."""
    if softmax.name != "SOFTMAX":
        return None
    tensor = softmax.inputs[0]
    while (operator := graph.producer.get(tensor)) is not None and operator.name in ("RESHAPE", "TRANSPOSE"):
        tensor = operator.inputs[0]
    if operator is None or operator.name not in ("ADD", "SELECT", "SELECT_V2"):
        return None
    operands = operator.inputs[-2:]
    constants = [index for index in operands if graph.tensors[index].is_constant]
    if len(constants) != 1 or not all(graph.tensors[index].is_constant for index in operator.inputs[:-2]):
        return None
    (scores,) = (index for index in operands if index not in constants)
    return operator, scores, constants[0], graph.tensors[softmax.inputs[0]].shape[-1]
