"""Comparison of two graphs: both are run in the TFLite interpreter, and their outputs are compared in steps.

A step is the difference of two adjacent codes of a quantized tensor. For a float tensor, a step is 1/255 of the range
of its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, ModelError, reason_of
from compress.core.files import NUMPY_ERRORS
from compress.model.tflite import edit, limits
from compress.model.tflite.graph import DTYPES, Graph, Tensor, serialize
from compress.model.tflite.runtime import IsolatedInterpreter

Feed = Sequence[NDArray[Any]]
"""One array for each input of a graph, in order."""


@dataclass(frozen=True)
class Difference:
    """The largest and the mean difference between the outputs of two graphs in a number of runs, in steps."""

    largest: float
    mean: float
    feeds: int


class Runner:
    """A graph in the TFLite interpreter, with the default kernels and without a delegate.

    Args:
        keep: whether intermediate tensors can be read.

    Raises:
        ModelError: the interpreter rejects the graph.
    """

    def __init__(self, graph: Graph, *, keep: bool = False) -> None:
        self.graph = graph
        shapes = {index: graph.tensors[index].shape for index in graph.inputs}
        check_runnable(graph)
        self._runtime = IsolatedInterpreter(serialize(graph), keep=keep, shapes=shapes)

    def run(self, feed: Feed, tensors: Collection[int] | None = None) -> list[NDArray[Any]]:
        """Return the outputs for one feed, or the requested tensors.

        Raises:
            ModelError: the runtime cannot run the graph.
        """
        inputs = dict(zip(self.graph.inputs, feed, strict=True))
        return self._runtime.run(inputs, list(self.graph.outputs if tensors is None else tensors))

    def tensor(self, index: int) -> NDArray[Any] | None:
        """Return a tensor after a run; None for a tensor without a readable value."""
        return self._runtime.tensor(index)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a tensor after a run; the shape in the file for a tensor without a readable value."""
        value = self.tensor(index)
        return self.graph.tensors[index].shape if value is None else value.shape


def check_runnable(graph: Graph) -> None:
    """Check the inputs of a graph before arrays for them are made.

    Raises:
        ModelError: the inputs have too many values, or values of a type that is not run.
    """
    tensors = [graph.tensors[index] for index in graph.inputs]
    other = next((tensor for tensor in tensors if tensor.dtype not in DTYPES), None)
    if other is not None:
        raise ModelError(f"its input {other.name[:80]!r} is {other.dtype}", allowed=", ".join(DTYPES))
    try:
        limits.check_runnable([tensor.shape for tensor in tensors])
    except ValueError as error:
        raise ModelError(str(error)) from error


RUNNABLE_CUSTOMS = ("TFLite_Detection_PostProcess", "NumericVerify", "Mfcc", "AudioSpectrogram")
"""Custom operators that the interpreter supports."""


def without_unknown_customs(graph: Graph) -> Graph:
    """Return the graph without custom operators that the interpreter does not support; their inputs become outputs."""
    lost: set[int] = set()
    kept = []
    ends = []
    for operator in graph.operators:
        unknown = operator.custom and operator.name not in RUNNABLE_CUSTOMS
        if unknown or lost.intersection(operator.inputs):
            lost.update(operator.outputs)
            ends += [index for index in operator.inputs if index in graph.producer]
        else:
            kept.append(operator.index)
    if not lost:
        return graph
    outputs = dict.fromkeys(index for index in (*graph.outputs, *ends) if index not in lost)
    return edit.select_operators(graph, kept, graph.inputs, list(outputs))


def compare(before: Graph, after: Graph, feeds: Sequence[Feed]) -> Difference:
    """Run two graphs with the same inputs and outputs on every feed, and return the difference.

    Raises:
        ModelError: the interpreter rejects one of the graphs.
    """
    first = Runner(before)
    second = Runner(after)
    differences = []
    for feed in feeds:
        pairs = zip(first.run(feed), second.run(feed), strict=True)
        differences += [steps(a, b).reshape(-1) for a, b in pairs]
    return summarize(differences, len(feeds))


def summarize(differences: Sequence[NDArray[np.float64]], feeds: int) -> Difference:
    """Return the largest and the mean of differences (vectors, in steps) over a number of runs."""
    values = np.concatenate([np.zeros(0), *differences])
    return Difference(float(values.max(initial=0)), float(values.mean()) if values.size else 0.0, feeds)


def steps(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Return the difference of two values of a tensor, element by element."""
    if one.shape != other.shape:
        return np.full(1, np.inf)
    difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    if np.issubdtype(one.dtype, np.integer):
        return difference
    extent = float(np.ptp(one)) if one.size else 0.0
    return np.asarray(difference / (extent or 1.0) * 255)


def read_feeds(path: Path, graph: Graph) -> list[list[NDArray[Any]]]:
    """Read inputs from a file: .npy [n, ...] for a model with one input, or .npz with one array for each input's name.

    Raises:
        DataError: the file is invalid, or its arrays do not fit the model's inputs.
    """
    tensors = {graph.tensors[index].name: graph.tensors[index] for index in graph.inputs}
    try:
        stored = np.load(path, allow_pickle=False)
        arrays = {next(iter(tensors)): stored} if isinstance(stored, np.ndarray) else dict(stored)
    except (OSError, *NUMPY_ERRORS) as error:
        raise DataError(
            f"cannot be read: {reason_of(error)}", where=str(path), hint="give a .npy or .npz file"
        ) from error
    if arrays.keys() != tensors.keys():
        raise DataError(f"has the arrays {sorted(arrays)}", where=str(path), allowed=", ".join(tensors))
    for name, array in arrays.items():
        _refuse_unfit(array, tensors[name], str(path))
    count = min(len(array) for array in arrays.values())
    if not count:
        raise DataError("contains no samples", where=str(path), allowed="at least one")
    columns = [list(arrays[name][:count].reshape(count, *tensor.shape)) for name, tensor in tensors.items()]
    return [list(feed) for feed in zip(*columns, strict=True)]


def _refuse_unfit(array: NDArray[Any], tensor: Tensor, where: str) -> None:
    sample = array.shape[1:]
    if sample in (tensor.shape, tensor.shape[1:]) and np.issubdtype(array.dtype, np.number):
        return
    message = f"{tensor.name} contains {list(array.shape)} of {array.dtype}"
    dimensions = ", ".join(map(str, tensor.shape[1:]))
    raise DataError(message, where=where, allowed=f"[n, {dimensions}], numbers")


def random_feed(graph: Graph, generator: np.random.Generator) -> list[NDArray[Any]]:
    """Return random inputs, uniform over the range of their types; floats from 0 to 1.

    Raises:
        ModelError: the inputs have too many values.
    """
    check_runnable(graph)
    feed = []
    for index in graph.inputs:
        tensor = graph.tensors[index]
        dtype = np.dtype(DTYPES[tensor.dtype])
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(dtype)
            low, high = (limits.min, limits.max) if dtype.itemsize == 1 else (0, 2)
            feed.append(generator.integers(low, high, tensor.shape, endpoint=True).astype(dtype))
        else:
            feed.append(generator.random(tensor.shape).astype(dtype))
    return feed


def ramp_feeds(graph: Graph) -> list[list[NDArray[Any]]]:
    """Return inputs that contain every code of an 8-bit type, in order; small tensors need several feeds."""
    check_runnable(graph)
    tensors = [graph.tensors[index] for index in graph.inputs]
    smallest = max(min((tensor.elements for tensor in tensors), default=256), 1)
    return [[_ramp(tensor, first) for tensor in tensors] for first in range(0, 256, smallest)]


def _ramp(tensor: Tensor, first: int) -> NDArray[Any]:
    codes = (np.arange(tensor.elements) + first) % 256 + np.iinfo(np.int8).min
    return codes.astype(DTYPES[tensor.dtype]).reshape(tensor.shape)


def record_tensors(graph: Graph, feeds: Sequence[Feed], tensors: Collection[int]) -> list[Mapping[int, NDArray[Any]]]:
    """Return the values of the requested tensors for every feed."""
    runner = Runner(without_unknown_customs(graph), keep=True)
    return [dict(zip(tensors, runner.run(feed, tensors), strict=True)) for feed in feeds]
