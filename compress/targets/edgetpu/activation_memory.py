"""Activation memory: what a tile of the Edge TPU holds while it computes.

Activations are spread over 4x4 tiles in height and width; each tile has 192 KiB of "narrow"
memory. Where more is needed the compiler works in passes, or gives up; when, is not known.
The form was found by comparing it with `used_narrow_memory_bytes_per_tile` in compiled models.
"""

from __future__ import annotations

from compress.targets.edgetpu.constants import ARRAY
from compress.targets.edgetpu.parameter_memory import round_up
from compress.tflite.graph import Graph, Operator, Tensor

TILES = ARRAY["tiles"]
"""Tiles along each side."""
_WINDOWED = {"CONV_2D", "DEPTHWISE_CONV_2D"}


def bytes_per_tile(graph: Graph, on_tpu: set[int]) -> int:
    """The largest sum of live activations in one tile, over the operators that run on the Edge TPU, in order.

    Args:
        graph: the model.
        on_tpu: indices of the operators that run there.
    """
    operators = [operator for operator in graph.operators if operator.index in on_tpu]
    last = {index: operator.index for operator in operators for index in (*operator.inputs, *operator.outputs)}
    tiles: dict[int, int] = {}
    alive: set[int] = set()
    held = largest = 0
    for operator in operators:
        touched = {
            each.index: each
            for each in (*graph.input_tensors(operator), *graph.output_tensors(operator))
            if not each.is_constant
        }
        for index in touched.keys() - alive:
            if index not in tiles:
                tiles[index] = _tile(touched[index], graph)
            held += tiles[index]
        alive |= touched.keys()
        largest = max(largest, held + _extra(operator, graph))
        gone = {index for index in touched if last[index] <= operator.index}
        alive -= gone
        held -= sum(tiles[index] for index in gone)
    return largest


def _map(tensor: Tensor) -> tuple[int, int, int]:
    height, width, channels = (1, 1, 1, *tensor.shape)[-3:]
    return height, width, channels


def _tile(tensor: Tensor, graph: Graph) -> int:
    """One tile of a tensor, with the border that the windows of its consumers reach into. A vector is in every tile."""
    height, width, channels = _map(tensor)
    if height * width == 1:
        return round_up(channels, 4)
    border_h, border_w = 0, 0
    for taker in graph.consumers.get(tensor.index, ()):
        if taker.name in _WINDOWED:
            _, kernel_h, kernel_w, _ = graph.tensors[taker.inputs[1]].shape
            border_h = max(border_h, _border(taker, kernel_h, "H"))
            border_w = max(border_w, _border(taker, kernel_w, "W"))
    return (-(-height // TILES) + border_h) * (-(-width // TILES) + border_w) * round_up(channels, 4)


def _border(operator: Operator, kernel: int, letter: str) -> int:
    reach = (kernel - 1) * operator.option(f"dilation{letter}Factor", 1) + 1
    return int(max(reach - operator.option(f"stride{letter}", 1), 0))


def _extra(operator: Operator, graph: Graph) -> int:
    """The memory that an operator needs in addition to its tensors: a flattened map whole, or tiles to multiply in."""
    given = [tensor for tensor in graph.input_tensors(operator) if not tensor.is_constant]
    if operator.name == "RESHAPE" and given:
        height, width, channels = _map(given[0])
        flat = graph.output_tensors(operator)[0]
        return (
            height * width * round_up(channels, 4) if height * width > 1 and flat.shape[-1:] == (flat.elements,) else 0
        )
    if operator.name == "MUL" and len(given) == 2:
        return 4 * _tile(graph.output_tensors(operator)[0], graph)
    return 0
