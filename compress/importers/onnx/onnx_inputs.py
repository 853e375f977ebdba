"""Inputs of an ONNX model and their shapes: requested shapes, open dimensions, the batch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import ModelError

BATCH_NAMES = {"batch", "batch_size", "batchsize", "n", "b", "bs", "none"}
Shapes = Mapping[str, Sequence[int]]
"""Requested shapes, with the batch, by input name."""
EXAMPLE_SIZE = 320
"""Size that an error message proposes for an open dimension."""


def model_inputs(model: Any) -> list[Any]:
    """Return the inputs of a model. In old files the initializers are inputs too: these are left out.

    Raises:
        ModelError: two tensors have the same name, or an input is not a tensor.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in initializers]
    names = [value.name for value in [*inputs, *model.graph.initializer]]
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"two of its tensors have the name {duplicate[:80]!r}")
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"its input {value.name[:80]!r} is not a tensor (but a sequence, a map or an optional)")
    return inputs


def fix(inputs: list[Any], shapes: Shapes) -> tuple[str, ...]:
    """Set the requested shapes of inputs; return a note for each.

    Raises:
        ModelError: the model has no such input, or the file has a different shape.
    """
    from onnx import helper

    types = {value.name: value.type.tensor_type for value in inputs}
    for name, shape in shapes.items():
        if name not in types:
            raise ModelError(f"it has no input {name[:80]!r}", allowed=", ".join(types)[:200])
        if types[name].HasField("shape") and not _fits(types[name].shape.dim, shape):
            allowed = [_dimension_text(dim) for dim in types[name].shape.dim]
            raise ModelError(f"its input {name[:80]!r} cannot have the shape {list(shape)}", allowed=f"{allowed}")
        types[name].shape.CopyFrom(helper.make_tensor_type_proto(0, shape).tensor_type.shape)
    return tuple(f"its input {name!r} has the requested shape {list(shape)}" for name, shape in shapes.items())


def _fits(dims: Any, shape: Sequence[int]) -> bool:
    """Whether a shape agrees with all dimensions that the file fixes."""
    pairs = zip(dims, shape, strict=False)
    return len(dims) == len(shape) and all(dim.dim_value < 1 or dim.dim_value == size for dim, size in pairs)


def _dimension_text(dim: Any) -> str | int:
    """Return the name or the size of a dimension, for a message."""
    return dim.dim_param or dim.dim_value or "?"


def fix_batch(inputs: list[Any]) -> tuple[str, ...]:
    """Set open batch dimensions to 1; return a note if there were any."""
    shapes = [value.type.tensor_type.shape.dim for value in inputs]
    first_names = {dims[0].dim_param for dims in shapes if dims and dims[0].dim_param}
    changed = False
    for dims in shapes:
        for axis, dim in enumerate(dims):
            is_batch_name = dim.dim_param in first_names or dim.dim_param.lower() in BATCH_NAMES
            is_batch = axis == 0 or (dim.dim_param and is_batch_name)
            if dim.dim_value <= 0 and is_batch:  # PaddlePaddle writes -1 and 0 for an open dimension
                dim.dim_value = 1
                changed = True
    return ("its open batch dimension is set to 1",) if changed else ()


def with_open_dimensions(inputs: list[Any]) -> list[Any]:
    """Return the inputs with open dimensions."""
    return [value for value in inputs if _has_open_dimensions(value.type.tensor_type)]


def _has_open_dimensions(tensor_type: Any) -> bool:
    return not tensor_type.HasField("shape") or any(dim.dim_value <= 0 for dim in tensor_type.shape.dim)


def open_dimensions_error(with_open_dimensions: list[Any], path: Path) -> ModelError:
    """Return the error for inputs with open dimensions, with a command that sets them."""
    messages = []
    options = []
    for value in with_open_dimensions:
        dims = value.type.tensor_type.shape.dim
        shape = [_dimension_text(dim) for dim in dims] or "unknown shape"
        messages.append(f"its input {value.name[:80]!r} has open dimensions: {shape}")
        example = [max(dim.dim_value, 0) or EXAMPLE_SIZE for dim in dims] or [1, 3, EXAMPLE_SIZE, EXAMPLE_SIZE]
        options.append(f"--shape {shlex.quote(value.name + '=' + ','.join(map(str, example)))}")
    return ModelError(
        "; ".join(messages),
        where=str(path),
        allowed="an open batch dimension; all other dimensions must be fixed",
        hint="set the sizes that you will use on the device: `shape` under `model` in a pipeline, or for example: "
        f"python -m compress import {shlex.quote(str(path))} {' '.join(options)}",
    )


def batch(inputs: list[Any]) -> int:
    """Return the first dimension of all inputs if it is the same and more than 1; otherwise 0."""
    shapes = [value.type.tensor_type.shape.dim for value in inputs]
    sizes = {dims[0].dim_value if dims else 1 for dims in shapes}
    return sizes.pop() if len(sizes) == 1 and sizes != {1} else 0


def with_batch_of_one(model: Any, inputs: list[Any]) -> Any:
    """Return the model with a batch of 1."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = {value.name for value in inputs}
    for value in copy.graph.input:
        if value.name in names:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    return copy
