"""What an ONNX model is given: which of its inputs are meant, and how large they are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import ModelError

BATCH_NAMES = {"batch", "batch_size", "batchsize", "n", "b", "bs", "none"}
Shapes = Mapping[str, Sequence[int]]
"""By input the sides that it is to have, the batch among them."""
EXAMPLE_SIDE = 320
"""What an error proposes for a side that is not fixed."""


def given_to(model: Any) -> list[Any]:
    """The inputs; in old files the stored tensors are among them too.

    Raises:
        ModelError: two have the same name, or one is no tensor.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    found = [value for value in model.graph.input if value.name not in stored]
    names = [value.name for value in [*found, *model.graph.initializer]]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"two of its tensors are called {twice[:80]!r}")
    for value in found:
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"its input {value.name[:80]!r} is no tensor but a sequence, a map or an optional")
    return found


def fix(given: list[Any], shapes: Shapes) -> tuple[str, ...]:
    """Gives inputs the sides that they are to have; what is fixed so, in words.

    Raises:
        ModelError: there is no such input, or the file itself says otherwise.
    """
    from onnx import helper

    inputs = {value.name: value.type.tensor_type for value in given}
    for name, sides in shapes.items():
        if name not in inputs:
            raise ModelError(f"it has no input {name[:80]!r} to give a shape", allowed=", ".join(inputs)[:200])
        dims = inputs[name].shape.dim
        free = [side if dim.dim_value < 1 else dim.dim_value for dim, side in zip(dims, sides, strict=False)]
        if inputs[name].HasField("shape") and (len(dims) != len(sides) or free != list(sides)):
            found = [dim.dim_param or dim.dim_value or "?" for dim in dims]
            raise ModelError(f"its input {name[:80]!r} cannot have the shape {list(sides)}", allowed=f"{found}")
        inputs[name].shape.CopyFrom(helper.make_tensor_type_proto(0, sides).tensor_type.shape)
    return tuple(f"its input {name!r} is taken as {list(sides)}, as it was asked for" for name, sides in shapes.items())


def fix_batch(given: list[Any]) -> tuple[str, ...]:
    """Makes batches of any size batches of 1; what is fixed so, in words."""
    first = [value.type.tensor_type.shape.dim for value in given]
    batches = {dims[0].dim_param for dims in first if dims and dims[0].dim_param}
    changed = False
    for dims in first:
        for axis, dim in enumerate(dims):
            named = dim.dim_param in batches or dim.dim_param.lower() in BATCH_NAMES
            if dim.dim_value <= 0 and (axis == 0 or (dim.dim_param and named)):  # -1 and 0 are "any" to PaddlePaddle
                dim.dim_value, changed = 1, True
    return ("its batch of any size is taken as 1",) if changed else ()


def unfixed(given: list[Any]) -> list[Any]:
    """The inputs that have sides which are not fixed."""
    kinds = [value.type.tensor_type for value in given]
    return [
        value
        for value, kind in zip(given, kinds, strict=True)
        if not kind.HasField("shape") or any(dim.dim_value <= 0 for dim in kind.shape.dim)
    ]


def not_fixed(unfixed: list[Any], path: Path) -> ModelError:
    """The error for inputs whose sides are not fixed, with a command that fixes them."""
    told, options = [], []
    for value in unfixed:
        dims = value.type.tensor_type.shape.dim
        found = [dim.dim_param or dim.dim_value or "?" for dim in dims] or "none are told"
        told.append(f"its input {value.name[:80]!r} has sides that are not fixed: {found}")
        numbers = [max(dim.dim_value, 0) or EXAMPLE_SIDE for dim in dims] or [1, 3, EXAMPLE_SIDE, EXAMPLE_SIDE]
        options.append(f"--shape {shlex.quote(value.name + '=' + ','.join(map(str, numbers)))}")
    return ModelError(
        "; ".join(told),
        where=str(path),
        allowed="a batch of any size, and else numbers",
        todo="say the sizes that the device will work with, `shape` under `model` in a pipeline, or for example: "
        f"python -m compress import {shlex.quote(str(path))} {' '.join(options)}",
    )


def batch(given: list[Any]) -> int:
    """The first side of all inputs, if it is the same one, and more than 1; else 0."""
    sides = {
        value.type.tensor_type.shape.dim[0].dim_value if value.type.tensor_type.shape.dim else 1 for value in given
    }
    return sides.pop() if len(sides) == 1 and sides != {1} else 0


def of_one(model: Any, given: list[Any]) -> Any:
    """The model with a batch of 1."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = {value.name for value in given}
    for value in copy.graph.input:
        if value.name in names:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    return copy
