"""What an ONNX model is given: which of its inputs are meant, and how large they are."""

from __future__ import annotations

from typing import Any

from compress.errors import ModelError

BATCH_NAMES = {"batch", "batch_size", "batchsize", "n", "b", "bs", "none"}


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


def fixed(given: list[Any]) -> tuple[str, ...]:
    """Makes batches of any size batches of 1; what is fixed so, in words.

    Raises:
        ModelError: another side is not fixed.
    """
    first = [value.type.tensor_type.shape.dim for value in given]
    batches = {dims[0].dim_param for dims in first if dims and dims[0].dim_param}
    changed = False
    for value, dims in zip(given, first, strict=True):
        for axis, dim in enumerate(dims):
            named = dim.dim_param in batches or dim.dim_param.lower() in BATCH_NAMES
            if dim.dim_value <= 0 and (axis == 0 or (dim.dim_param and named)):  # -1 and 0 are "any" to PaddlePaddle
                dim.dim_value, changed = 1, True
        absent = not value.type.tensor_type.HasField("shape")
        if absent or any(dim.dim_value <= 0 for dim in dims):
            sides = [dim.dim_param or dim.dim_value or "?" for dim in dims]
            raise ModelError(
                f"its input {value.name[:80]!r} has sides that are not fixed: {'none are told' if absent else sides}",
                allowed="a batch of any size, and else numbers",
                todo="fix them, for example with python -m onnxruntime.tools.make_dynamic_shape_fixed",
            )
    return ("its batch of any size is taken as 1",) if changed else ()


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
