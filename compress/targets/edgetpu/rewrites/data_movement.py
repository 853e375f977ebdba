"""Chains of operators that only move numbers, whatever their ranks, as one move that the Edge TPU makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.targets.edgetpu.rewrites.elementwise import is_per_tensor_8bit, scale_and_zero_point
from compress.targets.edgetpu.rewrites.layers import add_selection_convolution, add_selection_transpose_conv
from compress.tflite.comparison import Runner
from compress.tflite.edit import VALID, Edit, extract, reshape
from compress.tflite.graph import DTYPES, NONE, Graph, Operator, Tensor

MOVEMENT_OPERATORS = (
    *("BROADCAST_TO", "DEPTH_TO_SPACE", "EXPAND_DIMS", "GATHER", "MIRROR_PAD", "RESHAPE", "REVERSE_V2", "SLICE"),
    *("SPACE_TO_DEPTH", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE"),
)
"""Operators whose every output number is one of the input's, where the rest of their inputs is constant."""
MAX_ELEMENTS = 1 << 24
"""Elements of a tensor whose moves are worth following."""
MAX_AXES = 3
_MOST_PIECES = 16
"""Slices that are put together again, at most."""
_LARGEST_BLOCK = 8
"""Of rows and columns that become channels, or are made of them."""
_MOST_CHANNELS = 1024
"""Of a convolution that only moves numbers, at most."""

Table = NDArray[np.int64]
"""For each position along an axis of the output: where along an axis of the input it comes from."""


def data_movement_chain(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Tiles, mirrors, and reshapes and transposes over five dimensions (upsampling, channel shuffles) become
    RESIZE_NEAREST_NEIGHBOR, a convolution with ones and zeros, or SLICE and CONCATENATION: whatever moves alike."""
    chain = _chain(operator, graph)
    position = next((i for i, each in enumerate(chain) if each.index == operator.index), None)
    if position is None:
        return
    for first in range(position + 1):
        for last in range(len(chain) - 1, position - 1, -1):
            x, out = graph.tensors[chain[first].inputs[0]], graph.output_tensors(chain[last])[0]
            places = _source_indices(chain[first : last + 1], x, out, graph)
            if places is None:
                continue
            edit = Edit(graph)
            edit.remove(*chain[first : last + 1])
            tables = _axis_tables(places, x)
            if tables is not None:
                _write(edit, x, out, tables)
                yield edit
            elif (blocks := _block_selection(places, x)) is not None:
                _write_blocks(edit, x, out, blocks)
                yield edit
            elif _add_merged_transpose(edit, chain[first : last + 1], x, out, graph):
                yield edit


def elementwise_before_movement(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """A function of one number behind moves over more than three dimensions is computed before them."""
    chain: list[Operator] = []
    while (before := graph.producer.get((chain or [operator])[0].inputs[0])) and _moves_only(before, graph):
        if not _private(before, graph):
            break
        chain.insert(0, before)
    out = graph.output_tensors(operator)[0]
    if not chain or not is_per_tensor_8bit(out) or not is_per_tensor_8bit(graph.tensors[chain[0].inputs[0]]):
        return
    edit = Edit(graph)
    index = edit.like(out, "early", shape=graph.tensors[chain[0].inputs[0]].shape)
    edit.change(operator, inputs=[chain[0].inputs[0]], outputs=[index])
    for each in chain:
        made = out.index if each is chain[-1] else edit.like(out, "moved", shape=graph.output_tensors(each)[0].shape)
        edit.change(each, inputs=[index, *each.inputs[1:]], outputs=[made])
        index = made
    yield edit


def _chain(operator: Operator, graph: Graph) -> list[Operator]:
    """The longest chain of moves that an operator stands in, whose inner tensors nobody else reads."""
    if not _moves_only(operator, graph):
        return []
    chain = [operator]
    while (before := graph.producer.get(chain[0].inputs[0])) and _moves_only(before, graph) and _private(before, graph):
        chain.insert(0, before)
    while _private(chain[-1], graph) and _moves_only(after := graph.consumers[chain[-1].outputs[0]][0], graph):
        chain.append(after)
    return chain


def _moves_only(operator: Operator, graph: Graph) -> bool:
    rest = [graph.tensors[index] for index in operator.inputs[1:] if index != NONE]
    return operator.name in MOVEMENT_OPERATORS and not operator.custom and all(tensor.is_constant for tensor in rest)


def _private(operator: Operator, graph: Graph) -> bool:
    output = operator.outputs[0]
    return len(graph.consumers.get(output, ())) == 1 and output not in graph.outputs


def _map(tensor: Tensor) -> tuple[int, ...] | None:
    """A tensor's shape as a map [1, h, w, c], or None where more than three sides are larger than 1."""
    shape = tensor.shape
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return (1,) * (4 - len(shape)) + shape if len(shape) <= 3 else None


def _source_indices(chain: Sequence[Operator], x: Tensor, out: Tensor, graph: Graph) -> tuple[Table, ...] | None:
    """The row, column and channel of the input that each number of the output map is."""
    given, made = _map(x), _map(out)
    like = (
        is_per_tensor_8bit(x)
        and is_per_tensor_8bit(out)
        and x.dtype == out.dtype
        and scale_and_zero_point(x) == scale_and_zero_point(out)
    )
    if given is None or made is None or not like or max(x.elements, out.elements) > MAX_ELEMENTS:
        return None
    origins = _flat_source_indices(extract(graph, [each.index for each in chain], [x.index], [out.index]), x)
    return tuple(np.unravel_index(origins.reshape(made[1:]), given[1:]))


def _axis_tables(places: Sequence[Table], x: Tensor) -> list[Table] | None:
    """Where each row, column and channel of the output comes from, if each comes from one for itself."""
    tables = [np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1)[:, 0] for axis, each in enumerate(places)]
    apart = all((a == b).all() for a, b in zip(np.meshgrid(*tables, indexing="ij"), places, strict=True))
    sides = (_map(x) or x.shape)[1:3]
    pieces = sum(len(_runs(table)) for table, side in zip(tables, sides, strict=False) if not _factor(table, side))
    return tables if apart and pieces <= _MOST_PIECES else None


def _block_selection(places: Sequence[Table], x: Tensor) -> NDArray[np.bool_] | None:
    """Which channel of which block each output channel is, [out, row, column, in], where blocks become channels or
    channels blocks."""
    (height, width, channels), (rows, columns, made) = (_map(x) or x.shape)[1:], places[0].shape
    block = max(rows // height, height // rows)
    if not 2 <= block <= _LARGEST_BLOCK or max(channels, made) > _MOST_CHANNELS:
        return None
    grown = (rows, columns) == (height * block, width * block)
    inner = grown or (height, width) == (rows * block, columns * block)
    row, column, channel = (each[:block, :block] if grown else each[:1, :1] for each in places)
    down, across = np.indices(row.shape)[:2] if grown else (row, column)
    chosen = np.zeros((made, block, block, channels), np.bool_)
    if not inner or max(down.max(), across.max()) >= block:
        return None
    chosen[np.broadcast_to(np.arange(made), row.shape), down, across, channel] = True
    place = np.indices(places[0].shape)
    wanted = [each // block for each in place[:2]] if grown else [each * block for each in place[:2]]
    if not grown:
        wanted = [wanted[0] + row, wanted[1] + column]
    repeated = np.tile(channel, (height, width, 1)) if grown else np.broadcast_to(channel, places[0].shape)
    return chosen if all((a == b).all() for a, b in zip((*wanted, repeated), places, strict=True)) else None


def _flat_source_indices(moves: Graph, x: Tensor) -> Table:
    """Which number of the input each number of the output is: the digits of its place, sent through one by one."""
    runner, places = Runner(moves), np.arange(x.elements)
    digits = max(1, -(-int(x.elements - 1).bit_length() // 8))
    found: Table = np.zeros(1, np.int64)
    for digit in range(digits):
        codes = (places >> 8 * digit & 255).astype(np.uint8).view(DTYPES[x.dtype])
        (moved,) = runner.run([codes.reshape(x.shape)])
        found = found + (moved.view(np.uint8).astype(np.int64) << 8 * digit)
    return found.ravel()


# --- the operators ----------------------------------------------------------------------


def _write(edit: Edit, x: Tensor, out: Tensor, tables: Sequence[Table]) -> None:
    """The moves one after the other, those of channels first."""
    index, shape = _as_map(edit, x)
    if not np.array_equal(tables[2], np.arange(shape[3])):
        ones = np.zeros((len(tables[2]), 1, 1, shape[3]), np.bool_)
        ones[np.arange(len(ones)), 0, 0, tables[2]] = True
        shape[3] = len(ones)
        index = add_selection_convolution(edit, x, index, edit.like(x, "channels", shape=shape), ones)
    factors = [_factor(table, side) for table, side in zip(tables[:2], shape[1:3], strict=True)]
    for axis, (table, factor) in enumerate(zip(tables[:2], factors, strict=True), start=1):
        if not factor:
            index = _pieces(edit, x, index, shape, axis, table)
            shape[axis] = len(table)
    if any(factor > 1 for factor in factors):
        shape[1:3] = len(tables[0]), len(tables[1])
        made = edit.like(x, "repeated", shape=shape)
        options = edit.options("ResizeNearestNeighborOptions")
        edit.add("RESIZE_NEAREST_NEIGHBOR", [index, edit.integers("size", *shape[1:3])], [made], options)
        index = made
    _as_output(edit, index, shape, out)


def _write_blocks(edit: Edit, x: Tensor, out: Tensor, chosen: NDArray[np.bool_]) -> None:
    """Blocks to channels by a CONV_2D, channels to blocks by a TRANSPOSE_CONV."""
    index, shape = _as_map(edit, x)
    wanted = list(_map(out) or out.shape)
    made = edit.like(x, "blocks", shape=wanted)
    if wanted[1] < shape[1]:
        add_selection_convolution(edit, x, index, made, chosen)
    else:
        add_selection_transpose_conv(edit, x, index, made, chosen, wanted)
    _as_output(edit, made, wanted, out)


def _add_merged_transpose(edit: Edit, chain: Sequence[Operator], x: Tensor, out: Tensor, graph: Graph) -> bool:
    """A TRANSPOSE among reshapes, with the axes that stay together made one: whether three or fewer are left."""
    turns = [each for each in chain if each.name == "TRANSPOSE"]
    if len(turns) != 1 or any(each.name not in ("TRANSPOSE", "RESHAPE", "SQUEEZE", "EXPAND_DIMS") for each in chain):
        return False
    shape = graph.input_tensors(turns[0])[0].shape
    order = [int(axis) for axis in graph.input_tensors(turns[0])[1].array().ravel() if shape[axis] > 1]
    groups: list[list[int]] = []
    for axis in order:
        if groups and all(shape[between] == 1 for between in range(groups[-1][-1] + 1, axis)) and axis > groups[-1][-1]:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = [int(np.prod([shape[axis] for axis in group])) for group in groups]
    places = [sorted(groups).index(group) for group in groups]
    if len(groups) > MAX_AXES or (len(chain) == 1 and len(shape) <= len(groups) + 1):
        return False
    merged = [1] + [sizes[places.index(place)] for place in range(len(groups))]
    turned = [1, *sizes]
    index = reshape(edit, x.index, edit.like(x, "merged", shape=merged), merged)
    made = edit.like(x, "turned", shape=turned)
    wanted = edit.integers("order", 0, *(place + 1 for place in places))
    edit.add("TRANSPOSE", [index, wanted], [made], edit.options("TransposeOptions"))
    _as_output(edit, made, turned, out)
    return True


def _as_map(edit: Edit, x: Tensor) -> tuple[int, list[int]]:
    shape = list(_map(x) or x.shape)
    if list(x.shape) == shape:
        return x.index, shape
    return reshape(edit, x.index, edit.like(x, "map", shape=shape), shape), shape


def _as_output(edit: Edit, index: int, shape: Sequence[int], out: Tensor) -> None:
    """Lets the last operator make the output, or a RESHAPE after it."""
    if edit.added and list(edit.added[-1].outputs) == [index] and tuple(shape) == out.shape:
        edit.added[-1].outputs = [out.index]
    else:
        reshape(edit, index, out.index, out.shape)


def _factor(table: Table, side: int) -> int:
    """The number of repetitions of each position: 1 where nothing changes, 0 where it is not a repetition."""
    factor = len(table) // side
    return factor if np.array_equal(table, np.repeat(np.arange(side), factor)) else 0


def _even(table: Table) -> bool:
    """Whether a table takes one position of so many."""
    return len(table) > 1 and table[1] - table[0] > 1 and len(set(np.diff(table).tolist())) == 1


def _runs(table: Table) -> list[Table]:
    """A table in pieces of neighbours, or of equal steps."""
    if _even(table):
        return [table]
    return np.split(table, np.flatnonzero(np.diff(table) != 1) + 1)


def _strided(edit: Edit, x: Tensor, index: int, shape: Sequence[int], axis: int, table: Table) -> int:
    """Every so many positions of a map, from a first one to a last one: SLICE, and MAX_POOL_2D of one position."""
    step, first, last = int(table[1] - table[0]), int(table[0]), int(table[-1])
    size = [last + 1 - first if each == axis else side for each, side in enumerate(shape)]
    if size[axis] < shape[axis]:
        begin = [first if each == axis else 0 for each in range(4)]
        given, index = index, edit.like(x, "slice", shape=size)
        edit.add("SLICE", [given, edit.integers("begin", *begin), edit.integers("size", *size)], [index])
    made = edit.like(x, "strided", shape=[len(table) if each == axis else side for each, side in enumerate(shape)])
    strides = {"strideH": step if axis == 1 else 1, "strideW": step if axis == 2 else 1}
    options = edit.options("Pool2DOptions", padding=VALID, filterHeight=1, filterWidth=1, **strides)
    edit.add("MAX_POOL_2D", [index], [made], options)
    return made


def _pieces(edit: Edit, x: Tensor, index: int, shape: Sequence[int], axis: int, table: Table) -> int:
    """A map put together from slices of another one."""
    if _even(table):
        return _strided(edit, x, index, shape, axis, table)
    pieces = []
    for run in _runs(table):
        begin = [int(run[0]) if each == axis else 0 for each in range(4)]
        size = [len(run) if each == axis else side for each, side in enumerate(shape)]
        pieces.append(edit.like(x, "piece", shape=size))
        edit.add("SLICE", [index, edit.integers("begin", *begin), edit.integers("size", *size)], [pieces[-1]])
    if len(pieces) == 1:
        return pieces[0]
    whole = edit.like(x, "whole", shape=[len(table) if each == axis else side for each, side in enumerate(shape)])
    edit.add("CONCATENATION", pieces, [whole], edit.options("ConcatenationOptions", axis=axis))
    return whole
