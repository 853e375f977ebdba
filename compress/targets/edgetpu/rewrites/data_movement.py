"""Chains of operators of any rank that only move values, replaced by operators that the Edge TPU supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from compress.model.tflite.comparison import Runner
from compress.model.tflite.edit import VALID, Edit, extract, reshape
from compress.model.tflite.graph import DTYPES, NONE, Graph, Operator, Tensor
from compress.targets.edgetpu.constants import CONSTANTS
from compress.targets.edgetpu.rewrites.elementwise import is_per_tensor_8bit, scale_and_zero_point
from compress.targets.edgetpu.rewrites.layers import add_selection_convolution, add_selection_transpose_conv
from compress.targets.edgetpu.rewrites.shapes import add_slice

MOVEMENT_OPERATORS = (
    *("BROADCAST_TO", "DEPTH_TO_SPACE", "EXPAND_DIMS", "GATHER", "MIRROR_PAD", "RESHAPE", "REVERSE_V2", "SLICE"),
    *("SPACE_TO_DEPTH", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE"),
)
"""Operators that only move the values of their first input, if their other inputs are constant."""
MAX_ELEMENTS = 1 << 24
"""The most elements of a tensor whose values are followed."""
MAX_AXES = CONSTANTS.max_active_rank
_MOST_PIECES = 16
"""The most slices that are concatenated."""
_LARGEST_BLOCK = 8
"""The largest block of rows and columns that becomes channels, or the other way round."""
_MOST_CHANNELS = 1024
"""The most channels of a convolution that only moves values."""

Table = NDArray[np.int64]
"""For each position along an axis of the output, its position along the axis of the input."""


def data_movement_chain(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace tiles, mirrors, and 5-dimensional reshapes and transposes (upsampling, channel shuffles, splits of even
    and odd channels) by RESIZE_NEAREST_NEIGHBOR, a convolution with ones and zeros, or SLICE and CONCATENATION."""
    chain = _chain(operator, graph)
    position = next((i for i, link in enumerate(chain) if link.index == operator.index), None)
    if position is None:
        return
    for first in range(position + 1):
        for last in range(len(chain) - 1, position - 1, -1):
            edit = Edit(graph)
            if _replace(edit, chain[first : last + 1], graph):
                yield edit
    # Several chains may read the last tensor: all of them are replaced, or none.
    branches = [[*chain, *_chain_behind(after, graph)] for after in graph.consumers.get(chain[-1].outputs[0], ())]
    if len(branches) > 1 and chain[-1].outputs[0] not in graph.outputs:
        edit = Edit(graph)
        if all(_replace_longest(edit, branch, len(chain) + 1, graph) for branch in branches):
            yield edit


def _replace_longest(edit: Edit, links: Sequence[Operator], least: int, graph: Graph) -> bool:
    """Replace as many operators of a chain as possible, at least the first `least` ones; return whether it can be."""
    return any(_replace(edit, links[:count], graph) for count in range(len(links), least - 1, -1))


def _replace(edit: Edit, links: Sequence[Operator], graph: Graph) -> bool:
    """Replace operators that only move values by others with the same effect; return whether there are such."""
    x, out = graph.tensors[links[0].inputs[0]], graph.output_tensors(links[-1])[0]
    indices = _source_indices(links, x, out, graph)
    if indices is None:
        return False
    tables = _axis_tables(indices, x)
    if tables is not None:
        _write(edit, x, out, tables)
    elif (blocks := _block_selection(indices, x)) is not None:
        _write_blocks(edit, x, out, blocks)
    elif not _add_merged_transpose(edit, links, x, out, graph):
        return False
    edit.remove(*links)
    return True


def elementwise_before_movement(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Compute an element-wise function before the operators that move its input over more than three dimensions."""
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
    for movement in chain:
        output = (
            out.index
            if movement is chain[-1]
            else edit.like(out, "moved", shape=graph.output_tensors(movement)[0].shape)
        )
        edit.change(movement, inputs=[index, *movement.inputs[1:]], outputs=[output])
        index = output
    yield edit


def _chain(operator: Operator, graph: Graph) -> list[Operator]:
    """Return the longest chain of movement operators around an operator; only the chain uses its inner tensors."""
    if not _moves_only(operator, graph):
        return []
    chain = _chain_behind(operator, graph)
    while (before := graph.producer.get(chain[0].inputs[0])) and _moves_only(before, graph) and _private(before, graph):
        chain.insert(0, before)
    return chain


def _chain_behind(operator: Operator, graph: Graph) -> list[Operator]:
    """Return an operator and the chain of movement operators that follows it; empty if it is not one itself."""
    if not _moves_only(operator, graph):
        return []
    chain = [operator]
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
    """Return a tensor's shape as [1, h, w, c], or None if more than three dimensions are larger than 1."""
    shape = tensor.shape
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return (1,) * (4 - len(shape)) + shape if len(shape) <= 3 else None


def _source_indices(chain: Sequence[Operator], x: Tensor, out: Tensor, graph: Graph) -> tuple[Table, ...] | None:
    """Return the row, column and channel of the input for each value of the output."""
    input_map, output_map = _map(x), _map(out)
    comparable = (
        is_per_tensor_8bit(x)
        and is_per_tensor_8bit(out)
        and x.dtype == out.dtype
        and scale_and_zero_point(x) == scale_and_zero_point(out)
    )
    if input_map is None or output_map is None or not comparable or max(x.elements, out.elements) > MAX_ELEMENTS:
        return None
    origins = _flat_source_indices(extract(graph, [operator.index for operator in chain], [x.index], [out.index]), x)
    return tuple(np.unravel_index(origins.reshape(output_map[1:]), input_map[1:]))


def _axis_tables(source_indices: Sequence[Table], x: Tensor) -> list[Table] | None:
    """Return the source of each row, column and channel of the output, if the three axes are independent."""
    tables = [
        np.moveaxis(indices, axis, 0).reshape(indices.shape[axis], -1)[:, 0]
        for axis, indices in enumerate(source_indices)
    ]
    separable = all((a == b).all() for a, b in zip(np.meshgrid(*tables, indexing="ij"), source_indices, strict=True))
    *dimensions, channels = (_map(x) or x.shape)[1:]
    pieces = sum(len(_runs(table)) for table, size in zip(tables, dimensions, strict=False) if not _factor(table, size))
    moved = not np.array_equal(tables[2], np.arange(channels))
    if moved and max(len(tables[2]), channels) > _MOST_CHANNELS:
        return None
    return tables if separable and pieces <= _MOST_PIECES else None


def _block_selection(source_indices: Sequence[Table], x: Tensor) -> NDArray[np.bool_] | None:
    """Return the source of each output channel, [out, row, column, in], if blocks become channels or the reverse."""
    (height, width, channels), (rows, columns, output_channels) = (_map(x) or x.shape)[1:], source_indices[0].shape
    block = max(rows // height, height // rows)
    if not 2 <= block <= _LARGEST_BLOCK or max(channels, output_channels) > _MOST_CHANNELS:
        return None
    grown = (rows, columns) == (height * block, width * block)
    inner = grown or (height, width) == (rows * block, columns * block)
    row, column, channel = (indices[:block, :block] if grown else indices[:1, :1] for indices in source_indices)
    down, across = np.indices(row.shape)[:2] if grown else (row, column)
    selection = np.zeros((output_channels, block, block, channels), np.bool_)
    if not inner or max(down.max(), across.max()) >= block:
        return None
    selection[np.broadcast_to(np.arange(output_channels), row.shape), down, across, channel] = True
    position = np.indices(source_indices[0].shape)
    expected = (
        [indices // block for indices in position[:2]] if grown else [indices * block for indices in position[:2]]
    )
    if not grown:
        expected = [expected[0] + row, expected[1] + column]
    repeated = np.tile(channel, (height, width, 1)) if grown else np.broadcast_to(channel, source_indices[0].shape)
    return (
        selection if all((a == b).all() for a, b in zip((*expected, repeated), source_indices, strict=True)) else None
    )


def _flat_source_indices(moves: Graph, x: Tensor) -> Table:
    """Return the input index of each output value: the operators are run on each byte of the indices."""
    runner, positions = Runner(moves), np.arange(x.elements)
    digits = max(1, -(-int(x.elements - 1).bit_length() // 8))
    indices: Table = np.zeros(1, np.int64)
    for digit in range(digits):
        codes = (positions >> 8 * digit & 255).astype(np.uint8).view(DTYPES[x.dtype])
        (moved,) = runner.run([codes.reshape(x.shape)])
        indices = indices + (moved.view(np.uint8).astype(np.int64) << 8 * digit)
    return indices.ravel()


# --- the operators ----------------------------------------------------------------------


def _write(edit: Edit, x: Tensor, out: Tensor, tables: Sequence[Table]) -> None:
    """Add the operators for independent axes, channels first."""
    index, shape = _as_map(edit, x)
    if not np.array_equal(tables[2], np.arange(shape[3])):
        ones = np.zeros((len(tables[2]), 1, 1, shape[3]), np.bool_)
        ones[np.arange(len(ones)), 0, 0, tables[2]] = True
        shape[3] = len(ones)
        index = add_selection_convolution(edit, x, index, edit.like(x, "channels", shape=shape), ones)
    factors = [_factor(table, size) for table, size in zip(tables[:2], shape[1:3], strict=True)]
    for axis, (table, factor) in enumerate(zip(tables[:2], factors, strict=True), start=1):
        if not factor:
            index = _pieces(edit, x, index, shape, axis, table)
            shape[axis] = len(table)
    if any(factor > 1 for factor in factors):
        shape[1:3] = len(tables[0]), len(tables[1])
        resized = edit.like(x, "repeated", shape=shape)
        options = edit.options("ResizeNearestNeighborOptions")
        edit.add("RESIZE_NEAREST_NEIGHBOR", [index, edit.integers("size", *shape[1:3])], [resized], options)
        index = resized
    _as_output(edit, index, shape, out)


def _write_blocks(edit: Edit, x: Tensor, out: Tensor, selection: NDArray[np.bool_]) -> None:
    """Add a CONV_2D (blocks to channels) or a TRANSPOSE_CONV (channels to blocks)."""
    index, shape = _as_map(edit, x)
    output_shape = list(_map(out) or out.shape)
    blocks = edit.like(x, "blocks", shape=output_shape)
    if output_shape[1] < shape[1]:
        add_selection_convolution(edit, x, index, blocks, selection)
    else:
        add_selection_transpose_conv(edit, x, index, blocks, selection, output_shape)
    _as_output(edit, blocks, output_shape, out)


def _add_merged_transpose(edit: Edit, chain: Sequence[Operator], x: Tensor, out: Tensor, graph: Graph) -> bool:
    """Add a TRANSPOSE with adjacent axes merged, for a chain of reshapes and one TRANSPOSE.

    Returns:
        Whether the chain is such a chain, and at most three axes remain.
    """
    turns = [link for link in chain if link.name == "TRANSPOSE"]
    if len(turns) != 1 or any(link.name not in ("TRANSPOSE", "RESHAPE", "SQUEEZE", "EXPAND_DIMS") for link in chain):
        return False
    shape = graph.input_tensors(turns[0])[0].shape
    order = [int(axis) for axis in graph.input_tensors(turns[0])[1].array().ravel()]
    sizes, permutation = _merged_axes(shape, order)
    if len(sizes) > MAX_AXES or (len(chain) == 1 and len(shape) <= len(sizes) + 1):
        return False
    merged = [1, *(sizes[position] for position in np.argsort(permutation))]
    turned = [1, *sizes]
    index = reshape(edit, x.index, edit.like(x, "merged", shape=merged), merged)
    output = edit.like(x, "turned", shape=turned)
    axes = edit.integers("order", 0, *(axis + 1 for axis in permutation))
    edit.add("TRANSPOSE", [index, axes], [output], edit.options("TransposeOptions"))
    _as_output(edit, output, turned, out)
    return True


def _merged_axes(shape: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge the axes that stay adjacent in a transpose, without the axes of size 1.

    Returns:
        The sizes of the merged axes in the output, and their order, as in TRANSPOSE.
    """
    sizes: list[int] = []
    firsts: list[int] = []
    number = np.cumsum([size > 1 for size in shape])
    last = -1
    for axis in order:
        if shape[axis] == 1:
            continue
        if number[axis] == last + 1 and sizes:
            sizes[-1] *= shape[axis]
        else:
            sizes.append(shape[axis])
            firsts.append(axis)
        last = number[axis]
    return sizes, np.argsort(np.argsort(firsts)).tolist()


def _as_map(edit: Edit, x: Tensor) -> tuple[int, list[int]]:
    shape = list(_map(x) or x.shape)
    if list(x.shape) == shape:
        return x.index, shape
    return reshape(edit, x.index, edit.like(x, "map", shape=shape), shape), shape


def _as_output(edit: Edit, index: int, shape: Sequence[int], out: Tensor) -> None:
    """Write the output with the last operator if the shapes agree, otherwise with a RESHAPE after it."""
    if edit.added and list(edit.added[-1].outputs) == [index] and tuple(shape) == out.shape:
        edit.added[-1].outputs = [out.index]
    else:
        reshape(edit, index, out.index, out.shape)


def _factor(table: Table, size: int) -> int:
    """Return how often each position is repeated: 1 if nothing changes, 0 if the table is not a repetition."""
    factor = len(table) // size
    return factor if np.array_equal(table, np.repeat(np.arange(size), factor)) else 0


def _even(table: Table) -> bool:
    """Return whether a table has a constant step larger than 1."""
    return len(table) > 1 and table[1] - table[0] > 1 and len(set(np.diff(table).tolist())) == 1


def _runs(table: Table) -> list[Table]:
    """Split a table into runs of consecutive positions; a table with a constant step is one run."""
    if _even(table):
        return [table]
    return np.split(table, np.flatnonzero(np.diff(table) != 1) + 1)


def _resized(shape: Sequence[int], axis: int, size: int) -> list[int]:
    """Return a shape with another size of one axis."""
    return [*shape[:axis], size, *shape[axis + 1 :]]


def _strided(edit: Edit, x: Tensor, index: int, shape: Sequence[int], axis: int, table: Table) -> int:
    """Add operators that take every n-th position along an axis: SLICE, and a 1x1 MAX_POOL_2D with a stride."""
    step, first, last = int(table[1] - table[0]), int(table[0]), int(table[-1])
    size = _resized(shape, axis, last + 1 - first)
    if size[axis] < shape[axis]:
        source, index = index, edit.like(x, "slice", shape=size)
        add_slice(edit, source, axis, first, size, index)
    strided = edit.like(x, "strided", shape=_resized(shape, axis, len(table)))
    strides = {"strideH": step if axis == 1 else 1, "strideW": step if axis == 2 else 1}
    options = edit.options("Pool2DOptions", padding=VALID, filterHeight=1, filterWidth=1, **strides)
    edit.add("MAX_POOL_2D", [index], [strided], options)
    return strided


def _pieces(edit: Edit, x: Tensor, index: int, shape: Sequence[int], axis: int, table: Table) -> int:
    """Add operators that concatenate slices of a map."""
    if _even(table):
        return _strided(edit, x, index, shape, axis, table)
    pieces = []
    for run in _runs(table):
        size = _resized(shape, axis, len(run))
        pieces.append(edit.like(x, "piece", shape=size))
        add_slice(edit, index, axis, int(run[0]), size, pieces[-1])
    if len(pieces) == 1:
        return pieces[0]
    joined = edit.like(x, "joined", shape=_resized(shape, axis, len(table)))
    edit.add("CONCATENATION", pieces, [joined], edit.options("ConcatenationOptions", axis=axis))
    return joined
