"""Split outputs that join quantities of different scale, such as boxes and scores, which share no 8-bit scale.

An output is split where it is a concatenation, possibly followed by layers that only move values. Each run of parts of
one scale becomes an output with a quantization of its own.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.ir import keras_graph
from compress.model.ir.tensorflow import input_tensors, keras, run
from compress.tasks.output_forms import are_separate

Ends = tuple[float, float]
"""The smallest and the largest value of a tensor."""


def split_outputs(model: Any, samples: NDArray[np.float32]) -> tuple[Any, list[str]]:
    """Return a Keras model of fixed shapes without its last concatenations of values of different scale, and a note for
    each concatenation; the samples [n, ...] show the ranges of the values."""
    if isinstance(model.output, dict):
        return model, []  # programs read the outputs by their keys
    plain = keras_graph.build(keras_graph.read(model))  # without nested models
    outputs, notes = [], []
    for index, output in enumerate(plain.outputs):
        scales = _Concatenated(plain, index).by_scale(samples)
        outputs += [tensor for tensor, _ in scales] or [output]
        if scales:
            notes.append(_note(output, scales))
    return (keras().Model(input_tensors(plain), outputs, name=model.name), notes) if notes else (model, [])


def _note(output: Any, scales: list[tuple[Any, Ends]]) -> str:
    parts = [
        f"{tensor._keras_history.operation.name!r} {list(tensor.shape[1:])} ({low:.3g} to {high:.3g})"
        for tensor, (low, high) in scales
    ]
    return (
        f"its output {output._keras_history.operation.name!r} {list(output.shape[1:])} joins values of different size, "
        f"which 8 bits cannot hold in one tensor: the output becomes {len(parts)} outputs, in the same order: "
        f"{', '.join(parts)}"
    )


class _Concatenated:
    """The parts from which an output (its index) of a Keras model without nested models is concatenated."""

    def __init__(self, model: Any, index: int) -> None:
        self._model = model
        self._index = index
        self._layers = 0

    def by_scale(self, samples: NDArray[np.float32]) -> list[tuple[Any, Ends]]:
        """Return one tensor and its range for each run of parts of one scale; empty for an output of one scale."""
        output = self._model.outputs[self._index]
        for axis in range(1, len(output.shape)):
            parts = self._along(output, axis)
            if len(parts) < 2:
                continue
            values = run(keras().Model(input_tensors(self._model), parts), samples)
            ends = [(float(np.min(part)), float(np.max(part))) for part in values]
            runs = _runs(ends)
            if len(runs) > 1:
                return [(self._joined([parts[i] for i in row], axis), _hull([ends[i] for i in row])) for row in runs]
        return []

    def _along(self, tensor: Any, axis: int) -> list[Any]:
        """Return the parts of a tensor along an axis, the batch being axis 0; the tensor itself if it has no parts."""
        operation, call, _ = tensor._keras_history
        sources = operation._inbound_nodes[call].input_tensors
        if isinstance(operation, keras().layers.Concatenate):
            joined = operation.axis % len(tensor.shape)
            columns = [self._along(source, axis) for source in sources]
            if joined == axis:
                return [part for column in columns for part in column]
            if len({tuple(part.shape[axis] for part in column) for column in columns}) == 1:
                return [self._joined(row, joined) for row in zip(*columns, strict=True)]
        elif isinstance(operation, keras().layers.Permute):
            parts = self._along(sources[0], operation.dims[axis - 1])
            return [keras().layers.Permute(operation.dims, name=self._name(operation))(part) for part in parts]
        elif isinstance(operation, keras().layers.Reshape):
            return self._reshaped(tensor, axis, sources[0], operation)
        return [tensor]

    def _reshaped(self, tensor: Any, axis: int, source: Any, operation: Any) -> list[Any]:
        """Return the parts of a reshaped tensor, if its source has the same axis."""
        size, before = tensor.shape[axis], prod(tensor.shape[1:axis])
        for place in range(1, len(source.shape)):
            if source.shape[place] == size and prod(source.shape[1:place]) == before:
                parts = self._along(source, place)
                shapes = [(*tensor.shape[1:axis], part.shape[place], *tensor.shape[axis + 1 :]) for part in parts]
                reshape = keras().layers.Reshape
                pairs = zip(parts, shapes, strict=True)
                return [reshape(shape, name=self._name(operation))(part) for part, shape in pairs]
        return [tensor]

    def _joined(self, parts: Any, axis: int) -> Any:
        if len(parts) == 1:
            return parts[0]
        output = self._model.outputs[self._index]._keras_history.operation
        return keras().layers.Concatenate(axis=axis, name=self._name(output))(list(parts))

    def _name(self, operation: Any) -> str:
        """Return a name for a layer that takes the place of another one; the same model gives the same names."""
        used = {layer.name for layer in self._model.layers}
        while (name := f"{operation.name}_{self._index}_{self._layers}") in used:
            self._layers += 1
        self._layers += 1
        return name


def _runs(ends: list[Ends]) -> list[list[int]]:
    """Return the parts in runs of one scale, in order."""
    runs = [[0]]
    for index in range(1, len(ends)):
        pair = sorted((_hull([ends[i] for i in runs[-1]]), ends[index]), key=lambda pair: pair[0] - pair[1])
        if are_separate(*pair):
            runs.append([index])
        else:
            runs[-1].append(index)
    return runs


def _hull(ends: list[Ends]) -> Ends:
    return min(low for low, _ in ends), max(high for _, high in ends)
