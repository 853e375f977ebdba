"""The original file in onnxruntime, with its own batch: the outputs that the rebuilt model must have.

A row has one sample for each input, in the shape of the parsed graph: with a batch of 1. The original runs on several
rows at once where its batch allows this. A dimension is a batch only if each row then has the outputs of a run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers.common import verification
from compress.model.importers.common.verification import Runs
from compress.model.importers.onnx import child_processes, onnx_inputs, onnx_model
from compress.model.importers.onnx.onnx_graph import OnnxGraph
from compress.model.importers.onnx.onnx_inputs import SHAPE_INPUTS, Shapes
from compress.model.importers.onnx.onnx_model import TYPE_NAMES

OPEN_BATCH_SIZES = (4, 3, 1)
"""Sizes that are tried for an open batch. Reason: some files fix the batch in a Reshape and run with 1 only."""
INTEGER_DTYPES = {name: np.dtype(name.lower()).type for name in ("UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64")}
INTEGER_DTYPES["BOOL"] = np.bool_
RANDOM_VALUE_COUNTS = {"UINT8": 256, "BOOL": 2}
"""Number of different random values, from 0 up, for an input of this type."""
OTHER_RANDOM_VALUE_COUNT = 8
"""Number of different random values for the other integer types, whose values are often indices."""
MOST_TRIED = 2**22
"""Most values of inputs that are tried: more than a colour image of 1024 x 1024."""
LEAST_RANDOM_ROWS = 4
"""Different rows show whether the graph maps them independently of each other."""
ROWS_ALONE = 4
"""Number of rows that also run alone, to find out whether a dimension is a batch; `onnx_file` compares all rows."""

Row = dict[str, NDArray[Any]]
"""One sample: the arrays of all inputs, by name."""


@dataclass(frozen=True)
class OriginalRuns:
    """Runs of the original file.

    Attributes:
        batch: number of rows in each run.
        outputs: for each row, the outputs in the order of the graph.
    """

    batch: int
    rows: Sequence[Row]
    outputs: Runs


def run(graph: OnnxGraph, samples: Sequence[Row] = ()) -> OriginalRuns:
    """Run the original on samples and on random rows; an open batch is as large as the file allows.

    Raises:
        ModelError: onnxruntime does not run the file.
    """
    sizes = OPEN_BATCH_SIZES if graph.batch.is_open else (graph.batch.size,)
    for size in sizes:
        rows = _rows(graph, samples, size)
        try:
            return OriginalRuns(size, rows, outputs(graph, rows, size, graph.outputs))
        except child_processes.OnnxRuntimeFailedError as error:
            failure = error
    raise ModelError(str(failure), hint="run the file in onnxruntime, and export it again") from failure


def outputs(graph: OnnxGraph, rows: Sequence[Row], size: int, names: Sequence[str]) -> list[list[NDArray[Any]]]:
    """Return tensors of the original for each row; `size` rows run at once.

    Raises:
        OnnxRuntimeFailedError: onnxruntime does not run the file.
    """
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    feeds = []
    for group in groups:
        feed = {}
        for name in graph.inputs:
            axis = graph.batch.axes.get(name)  # without a batch, all rows have the same input
            feed[name] = group[0][name] if axis is None else np.concatenate([row[name] for row in group], axis)
        feeds.append(feed)
    runs = child_processes.run_model(graph.model, feeds, names)
    shapes = [graph.shapes.get(name, ()) for name in names]
    by_run = [[_split(array, shape, size) for array, shape in zip(run, shapes, strict=True)] for run in runs]
    return [list(row) for arrays in by_run for row in zip(*arrays, strict=True)]


def run_alone(graph: OnnxGraph, runs: OriginalRuns) -> OriginalRuns:
    """Run each row alone.

    Raises:
        ModelError: onnxruntime does not run the file with a batch of 1.
    """
    alone = graph if graph.batch.is_open else _with_batch(graph, 1)
    try:
        return OriginalRuns(1, runs.rows, outputs(alone, runs.rows, 1, graph.outputs))
    except child_processes.OnnxRuntimeFailedError as error:
        raise ModelError(f"with a batch of 1: {error}", hint="export it with a batch of 1") from error


def accepted_shapes(inputs: list[Any], model: bytes) -> Shapes | None:
    """Return the first of the usual shapes of all inputs with which the original runs; None if it runs with none."""
    sizes = onnx_inputs.sizes_to_propose(onnx_model.parsed(model))
    shapes = [
        by_input
        for by_input in (onnx_inputs.example_shapes(inputs, size) for size in sizes)
        if sum(map(prod, by_input.values())) <= MOST_TRIED
    ]
    if not shapes:
        return None
    types = {value.name: TYPE_NAMES.get(value.type.tensor_type.elem_type, "?") for value in inputs}
    feeds: list[Row] = [
        {name: np.zeros(shape, INTEGER_DTYPES.get(types[name], np.float32)) for name, shape in by_input.items()}
        for by_input in shapes
    ]
    accepted = child_processes.first_accepted(model, feeds)
    return None if accepted is None else shapes[accepted]


def has_batch(graph: OnnxGraph, runs: OriginalRuns) -> bool:
    """Whether the original computes each row without regard to the others, so that the dimension is a batch."""
    count = min(runs.batch, ROWS_ALONE)
    try:
        return _agree(graph, runs, run_alone(graph, replace(runs, rows=runs.rows[:count])).outputs)
    except ModelError:
        return False


def has_batch_of_one(graph: OnnxGraph, alone: OriginalRuns) -> bool:
    """Whether an open dimension is a batch, and the file has a batch of 1 in its shapes, such as Reshape to [1, -1]."""
    size = OPEN_BATCH_SIZES[0]
    try:
        together = outputs(_with_batch(graph, size), alone.rows, size, graph.outputs)
    except child_processes.OnnxRuntimeFailedError:
        return False
    return _agree(graph, alone, together)


def _agree(graph: OnnxGraph, runs: OriginalRuns, other: Runs) -> bool:
    """Whether other outputs for the first rows are the same, within the tolerance of a rebuilt model."""
    count = len(other)
    expected = runs.outputs[:count]
    by_row = [verification.compare_outputs(*outputs) for outputs in zip(expected, other, strict=True)]
    _, exceeding = verification.verified(
        runs.rows[:count], by_row, expected, lambda: with_last_bits_changed(graph, runs)[:count], "onnxruntime", count
    )
    return not exceeding


def with_last_bits_changed(graph: OnnxGraph, runs: OriginalRuns) -> Runs:
    """Return the outputs of the original for nearly the same rows; integer inputs stay as they are."""
    floats = [name for name in graph.inputs if graph.types[name] not in INTEGER_DTYPES]
    changed = verification.change_last_bits([[row[name] for name in floats] for row in runs.rows])
    rows = [row | dict(zip(floats, arrays, strict=True)) for row, arrays in zip(runs.rows, changed, strict=True)]
    return outputs(graph, rows, runs.batch, graph.outputs)


def as_stored(graph: OnnxGraph, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an input in the type of the file; fractions are rounded where the file has integers."""
    kind = graph.types[name]
    if kind not in INTEGER_DTYPES:
        return np.asarray(array, np.float32)
    low, high = (0, 1) if kind == "BOOL" else (np.iinfo(INTEGER_DTYPES[kind]).min, np.iinfo(INTEGER_DTYPES[kind]).max)
    return np.asarray(np.rint(array).clip(low, high).astype(INTEGER_DTYPES[kind]))


def _rows(graph: OnnxGraph, samples: Sequence[Row], size: int) -> list[Row]:
    """Return random rows and the samples, in complete runs whose rows share the inputs without a batch."""
    missing = -(LEAST_RANDOM_ROWS + len(samples)) % size
    random_rows = _random_rows(graph, LEAST_RANDOM_ROWS + missing)
    rows = [*random_rows, *(random_rows[0] | sample for sample in samples)]
    shared = [name for name in graph.inputs if name not in graph.batch.axes]
    return [row | {name: rows[index - index % size][name] for name in shared} for index, row in enumerate(rows)]


def _random_rows(graph: OnnxGraph, count: int) -> list[Row]:
    """Return random rows, each different; integral values for inputs that are integers in the file."""
    repeats = -(-count // LEAST_RANDOM_ROWS)
    runs = verification.random_inputs([(repeats, *graph.shapes[name]) for name in graph.inputs])
    rows = []
    for index in range(repeats):
        for arrays in runs:
            inputs = zip(graph.inputs, arrays, strict=True)
            rows.append({name: _random_values(graph, name, array[index]) for name, array in inputs})
    return rows[:count]


def _random_values(graph: OnnxGraph, name: str, array: NDArray[np.float32]) -> NDArray[Any]:
    if graph.types[name] in INTEGER_DTYPES:
        count = _random_value_count(graph, name)
        array = np.floor(np.abs(array) * count) % count
    return as_stored(graph, name, array)


def _random_value_count(graph: OnnxGraph, name: str) -> int:
    """Return the number of different random values for an input: at most the rows of any table that it may index."""
    reached = {name}
    counts = [RANDOM_VALUE_COUNTS.get(graph.types[name], OTHER_RANDOM_VALUE_COUNT)]
    for node in graph.nodes:
        if node.operator == "Gather" and node.inputs[0] in graph.constants:
            if node.inputs[1] in reached:
                counts.append(len(graph.constants[node.inputs[0]]))
        elif reached.intersection(node.inputs):
            reached.update(node.outputs)
    return min(counts)


def _split(array: NDArray[Any], shape: Sequence[int], size: int) -> list[NDArray[Any]]:
    """Split a tensor into a part for each row, by its shape with a batch of 1; a tensor without a batch is repeated."""
    longer = [axis for axis, (length, single) in enumerate(zip(array.shape, shape, strict=False)) if length != single]
    if array.ndim != len(shape) or len(longer) != 1 or array.shape[longer[0]] != size * shape[longer[0]]:
        return [array] * size
    return np.split(array, size, longer[0])


def _with_batch(graph: OnnxGraph, size: int) -> OnnxGraph:
    """Return the graph of a file whose batch is set to a size, also in the shapes that contain the batch."""
    model = onnx_model.parsed(graph.model)
    shapes = {}
    for node in graph.nodes:
        index = SHAPE_INPUTS.get(node.operator, len(node.inputs))
        names = graph.constants.keys() & node.inputs[index : index + 1]
        shape = [length for name in names for length in graph.constants[name].tolist()]
        if shape and shape[0] > 0:
            shapes[node.outputs[0]] = [shape[0] * size, *shape[1:]]
    onnx_inputs.set_batch(model, graph.batch, size, shapes)
    return replace(graph, model=model.SerializeToString())
