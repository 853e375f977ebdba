"""Activation memory: the activations in one tile of the Edge TPU during an inference.

Feature maps are divided into 4x4 tiles along height and width. Each tile has 192 KiB of "narrow" memory. If a model
needs more, the compiler works in several passes or fails; the condition is unknown. Source of the formula: comparison
with `used_narrow_memory_bytes_per_tile` in compiled models.
"""

from __future__ import annotations

from compress.model.tflite.graph import Graph, Operator, Tensor
from compress.targets.edgetpu.constants import CONSTANTS
from darwinn.blocks import position, round_up

TILES = CONSTANTS.tiles
_WINDOWED = {"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"}


def bytes_per_tile(graph: Graph, on_tpu: set[int]) -> int:
    """Return the largest sum of live activations in one tile, over all Edge TPU operators in execution order."""
    operators = [operator for operator in graph.operators if operator.index in on_tpu]
    last_use = {index: operator.index for operator in operators for index in (*operator.inputs, *operator.outputs)}
    tiles: dict[int, int] = {}
    alive: set[int] = set()
    live_bytes = largest = 0
    for operator in operators:
        operands = {
            tensor.index: tensor
            for tensor in (*graph.input_tensors(operator), *graph.output_tensors(operator))
            if not tensor.is_constant
        }
        for index in operands.keys() - alive:
            if index not in tiles:
                tiles[index] = _tile(operands[index], graph)
            live_bytes += tiles[index]
        alive |= operands.keys()
        largest = max(largest, live_bytes + _extra(operator, graph))
        dead = {index for index in operands if last_use[index] <= operator.index}
        alive -= dead
        live_bytes -= sum(tiles[index] for index in dead)
    return largest


def _tile(tensor: Tensor, graph: Graph) -> int:
    """Return the bytes of one tile of a tensor, with the border that its consumers read. Every tile holds a vector."""
    height, width, channels = position(tensor)
    if height * width == 1:
        return round_up(channels, 4)
    border_h, border_w = 0, 0
    for consumer in graph.consumers.get(tensor.index, ()):
        if consumer.name in _WINDOWED:
            _, kernel_h, kernel_w, _ = graph.tensors[consumer.inputs[1]].shape
            border_h = max(border_h, _border(consumer, kernel_h, "H"))
            border_w = max(border_w, _border(consumer, kernel_w, "W"))
    return (-(-height // TILES) + border_h) * (-(-width // TILES) + border_w) * round_up(channels, 4)


def _border(operator: Operator, kernel: int, letter: str) -> int:
    if operator.name == "TRANSPOSE_CONV":  # positions of the input that reach into a tile of the output
        return int(max(kernel - 1, 0) // max(operator.option(f"stride{letter}", 1), 1))
    reach = (kernel - 1) * operator.option(f"dilation{letter}Factor", 1) + 1
    return int(max(reach - operator.option(f"stride{letter}", 1), 0))


def _extra(operator: Operator, graph: Graph) -> int:
    """Return the memory that an operator needs in addition to its tensors: for a flattened map, and for a product."""
    inputs = [tensor for tensor in graph.input_tensors(operator) if not tensor.is_constant]
    if operator.name == "RESHAPE" and inputs:
        height, width, channels = position(inputs[0])
        flat = graph.output_tensors(operator)[0]
        return (
            height * width * round_up(channels, 4) if height * width > 1 and flat.shape[-1:] == (flat.elements,) else 0
        )
    if operator.name == "MUL" and len(inputs) == 2:
        return 4 * _tile(graph.output_tensors(operator)[0], graph)
    return 0
