"""Comparison of two graphs: both are run in the TFLite interpreter, and their outputs are compared in steps.

A step is the difference of two adjacent codes of a quantized tensor. For a float tensor, a step is 1/255 of the range
of its values.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import DataError, ModelError
from compress.tflite import edit
from compress.tflite.graph import DTYPES, Graph, serialize

Feed = Sequence[NDArray[Any]]
"""One array for each input of a graph, in order."""


@dataclass(frozen=True)
class Difference:
    """The difference between the outputs of two graphs, in steps.

    Attributes:
        largest: the largest difference.
        mean: the mean over all values.
        feeds: the number of runs.
    """

    largest: float
    mean: float
    feeds: int


class Runner:
    """A graph in the TFLite interpreter, with the reference kernels.

    Args:
        graph: the graph.
        keep: whether intermediate tensors can be read.

    Raises:
        ModelError: the interpreter rejects the graph.
    """

    def __init__(self, graph: Graph, *, keep: bool = False) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        self.graph = graph
        resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        try:
            self.interpreter = Interpreter(
                model_content=serialize(graph),
                experimental_op_resolver_type=resolver,
                experimental_preserve_all_tensors=keep,
            )
            for index in graph.inputs:
                self.interpreter.resize_tensor_input(index, list(graph.tensors[index].shape))
            self.interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"the TFLite runtime refuses it: {str(error).strip().splitlines()[0]}") from error

    def run(self, feed: Feed, tensors: Collection[int] | None = None) -> list[NDArray[Any]]:
        """Return the outputs for one feed, or the requested tensors."""
        try:
            for index, value in zip(self.graph.inputs, feed, strict=True):
                self.interpreter.set_tensor(index, value)
            self.interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"the TFLite runtime cannot run it: {str(error).strip().splitlines()[0]}") from error
        return [self.interpreter.get_tensor(index) for index in (self.graph.outputs if tensors is None else tensors)]

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a tensor after a run."""
        return tuple(int(side) for side in self.interpreter.get_tensor(index).shape)


RUNNABLE_CUSTOMS = ("TFLite_Detection_PostProcess", "NumericVerify", "Mfcc", "AudioSpectrogram")
"""Custom operators that the interpreter supports."""


def without_unknown_customs(graph: Graph) -> Graph:
    """Return the graph without custom operators that the interpreter does not support; their inputs become outputs."""
    lost: set[int] = set()
    kept, ends = [], []
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
        ModelError: the interpreter rejects one of them.
    """
    first, second = Runner(before), Runner(after)
    differences = [steps(a, b) for feed in feeds for a, b in zip(first.run(feed), second.run(feed), strict=True)]
    all_differences = (
        np.concatenate([difference.reshape(-1) for difference in differences]) if differences else np.zeros(1)
    )
    return Difference(
        float(all_differences.max(initial=0)),
        float(all_differences.mean()) if all_differences.size else 0.0,
        len(feeds),
    )


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
    names = {graph.tensors[index].name: graph.tensors[index] for index in graph.inputs}
    try:
        stored = np.load(path, allow_pickle=False)
        arrays = {next(iter(names)): stored} if isinstance(stored, np.ndarray) else dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), todo="give a .npy or .npz file") from error
    if set(arrays) != set(names):
        raise DataError(f"has the arrays {sorted(arrays)}", where=str(path), allowed=", ".join(names))
    for name, array in arrays.items():
        if array.shape[1:] not in (names[name].shape, names[name].shape[1:]) or not np.issubdtype(
            array.dtype, np.number
        ):
            message = f"{name} holds {list(array.shape)} of {array.dtype}"
            raise DataError(
                message, where=str(path), allowed=f"[n, {', '.join(map(str, names[name].shape[1:]))}], numbers"
            )
    count = min(len(array) for array in arrays.values())
    if not count:
        raise DataError("holds no samples", where=str(path), allowed="at least one")
    return [[arrays[name][i].reshape(tensor.shape) for name, tensor in names.items()] for i in range(count)]


def random_feed(graph: Graph, generator: np.random.Generator) -> list[NDArray[Any]]:
    """Return random inputs, uniform over the range of their types; floats from 0 to 1."""
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
    tensors = [graph.tensors[index] for index in graph.inputs]
    smallest = max(min((tensor.elements for tensor in tensors), default=256), 1)
    return [
        [
            ((np.arange(tensor.elements) + first) % 256 + np.iinfo(np.int8).min)
            .astype(DTYPES[tensor.dtype])
            .reshape(tensor.shape)
            for tensor in tensors
        ]
        for first in range(0, 256, smallest)
    ]


def record_tensors(graph: Graph, feeds: Sequence[Feed], tensors: Collection[int]) -> list[Mapping[int, NDArray[Any]]]:
    """Return the values of the requested tensors for every feed."""
    runner = Runner(without_unknown_customs(graph), keep=True)
    return [dict(zip(tensors, runner.run(feed, tensors), strict=True)) for feed in feeds]
