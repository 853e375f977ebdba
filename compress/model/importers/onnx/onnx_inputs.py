"""Inputs of an ONNX model and their shapes: requested shapes, open dimensions, the batch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.core.errors import ModelError

BATCH_NAMES = {"n", "b", "bs", "none"}
"""Names of an open batch dimension, besides all names that contain 'batch'."""
GENERATED_NAME = re.compile(r"|\?|-1|unk__\d+|s\d+|.*(dim|axes)_?\d+|.*DynamicDimension\.\d+")
"""Names that exporters give to open dimensions without a name: tf2onnx, both PyTorch exporters, and PaddlePaddle."""
Shapes = Mapping[str, Sequence[int]]
"""Requested shapes, with the batch, by input name."""
EXAMPLE_SIZES = (
    *((320, 320), (640, 640), (224, 224), (48, 320), (48, 192), (32, 320), (416, 416), (512, 512)),
    *((256, 256), (128, 128), (96, 96), (64, 64), (32, 32), (16, 16)),
)
"""Height and width that an error message proposes for open dimensions, the first ones that the model accepts: usual
inputs of detectors and classifiers, and of the text recognition of PaddleOCR (48 or 32 high)."""
IMAGE_SIZE_KEY = "imgsz"
"""Key of the height and width in the metadata of a file that Ultralytics' exporter writes."""
COLOURS = 3
"""An open dimension of channels is taken for the three colours of an image."""
SHAPE_INPUTS = {"Reshape": 1, "Expand": 1, "Resize": 3}
"""Index of the input that is a shape, in which exporters write the batch of their example, by operator."""


@dataclass(frozen=True)
class BatchAxes:
    """The dimension that is the batch, and is set to 1 in the parsed graph.

    Attributes:
        axes: index of the dimension in the shape of each input with a batch, by input name; empty for a batch of 1.
        size: size of the dimension in the file; 0 for an open dimension.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    size: int = 1
    name: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the file leaves the size open."""
        return self.size == 0

    @property
    def has_other_name(self) -> bool:
        """Whether the author of the model gave the dimension a name that is not a batch: 'num_points', 'tokens'."""
        return not _says_batch(self.name) and not GENERATED_NAME.fullmatch(self.name)


NO_BATCH = BatchAxes()
"""The batch of a file whose batch is 1 already, or that has none."""


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
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in types:
            raise ModelError(f"it has no input {name[:80]!r}", allowed=", ".join(types)[:200])
        dims = types[name].shape.dim
        fixed = [dim.dim_value < 1 or dim.dim_value == size for dim, size in zip(dims, shape, strict=False)]
        if types[name].HasField("shape") and not (len(dims) == len(shape) and all(fixed)):
            allowed = [_dimension_text(dim) for dim in dims]
            raise ModelError(f"its input {name[:80]!r} cannot have the shape {list(shape)}", allowed=f"{allowed}")
        sizes |= {dim.dim_param: size for dim, size in zip(types[name].shape.dim, shape, strict=False) if dim.dim_param}
        types[name].shape.CopyFrom(helper.make_tensor_type_proto(0, shape).tensor_type.shape)
    for dim in (dim for value in inputs for dim in _dimensions(value)):
        if dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]
    return tuple(f"its input {name!r} has the requested shape {list(shape)}" for name, shape in shapes.items())


def _dimension_text(dim: Any) -> str | int:
    return dim.dim_param or dim.dim_value or "?"


def batch(inputs: list[Any]) -> BatchAxes:
    """Return the dimension that can be the batch: an open one, or else a first dimension of one size above 1.

    Only the comparison of the results shows whether the dimension is a batch (`original.has_batch`).
    """
    open_names = {dim.dim_param for value in inputs for dim in _dimensions(value) if _is_open(dim)}
    named = {name for name in open_names if _says_batch(name)}
    first = {dims[0].dim_param for value in inputs if (dims := _dimensions(value))}
    axes = {value.name: axis for value in inputs for axis in _open_batch_axes(value, named or first)}
    if axes:
        names = [_dimensions(value)[axes[value.name]].dim_param for value in inputs if value.name in axes]
        return BatchAxes(axes, 0, max(names, key=len))
    sizes = {value.name: dims[0].dim_value for value in inputs if (dims := _dimensions(value))}
    above_one = {size for size in sizes.values() if size > 1}
    if len(above_one) != 1:
        return NO_BATCH
    (size,) = above_one
    return BatchAxes({name: 0 for name, first_size in sizes.items() if first_size == size}, size)


def _open_batch_axes(value: Any, names: set[str]) -> Iterator[int]:
    """Yield the open dimension of an input that can be its batch; none if two dimensions have the name of a batch."""
    dims = _dimensions(value)
    axes = [axis for axis, dim in enumerate(dims) if _is_open(dim) and dim.dim_param and dim.dim_param in names]
    if not axes and dims and _is_open(dims[0]) and GENERATED_NAME.fullmatch(dims[0].dim_param):
        axes = [0]
    yield from axes if len(axes) == 1 else []


def _dimensions(value: Any) -> Any:
    return value.type.tensor_type.shape.dim


def _is_open(dim: Any) -> bool:
    return bool(dim.dim_value <= 0)  # PaddlePaddle writes -1 and 0 for an open dimension


def _says_batch(name: str) -> bool:
    return "batch" in name.lower() or name.lower() in BATCH_NAMES


def with_open_dimensions(inputs: list[Any]) -> list[Any]:
    """Return the inputs with open dimensions."""
    types = [(value, value.type.tensor_type) for value in inputs]
    return [value for value, kind in types if not kind.HasField("shape") or any(map(_is_open, kind.shape.dim))]


class OpenDimensionsError(ModelError):
    """An input has open dimensions that must be set.

    Args:
        model: the original model as bytes.
        reason: why a dimension that could be the batch is none.
        shapes: shapes to propose; None for examples that were not tried.
    """

    def __init__(
        self, inputs: list[Any], path: Path, model: bytes, reason: str = "", shapes: Shapes | None = None
    ) -> None:
        opened = with_open_dimensions(inputs)
        proposed = example_shapes(inputs, EXAMPLE_SIZES[0]) if shapes is None else shapes
        texts = {value.name: [_dimension_text(dim) for dim in _dimensions(value)] for value in opened}
        messages = [f"its input {name[:80]!r} has open dimensions: {text or 'all'}" for name, text in texts.items()]
        assigned = [f"{name}={','.join(map(str, proposed[name]))}" for name in texts]
        options = [f"--shape {shlex.quote(text)}" for text in assigned]
        super().__init__(
            "; ".join([*messages, *filter(None, [reason])]),
            where=str(path),
            allowed="an open batch dimension; all other dimensions must be fixed",
            hint="set the sizes that you will use on the device: `shape` under `model` in a pipeline, or `--shape` of "
            f"`import` and `export`, for example{' with sizes that the model accepts' if shapes else ''}: "
            f"python -m compress import {shlex.quote(str(path))} {' '.join(options)}",
        )
        self.inputs, self.path, self.model, self.reason = inputs, path, model, reason

    def proposing(self, shapes: Shapes | None) -> OpenDimensionsError:
        """Return the error with shapes that the model accepts."""
        return OpenDimensionsError(self.inputs, self.path, self.model, self.reason, shapes)


def example_shapes(inputs: list[Any], size: tuple[int, int]) -> dict[str, list[int]]:
    """Return a shape for each input: the last two open dimensions are a height and a width."""
    shapes = {}
    for value in inputs:
        dims = _dimensions(value)
        if not value.type.tensor_type.HasField("shape"):
            shapes[value.name] = [1, COLOURS, *size]
            continue
        shape = [max(dim.dim_value, 0) for dim in dims]
        opened = [axis for axis, length in enumerate(shape) if length == 0]
        for axis in opened:
            is_channels = len(shape) == 4 and axis == 1 and len(opened) > 1
            shape[axis] = COLOURS if is_channels else size[axis == opened[-1]]
        shapes[value.name] = shape
    return shapes


def sizes_to_propose(model: Any) -> list[tuple[int, int]]:
    """Return heights and widths to try: the size in the metadata of a file, then the usual sizes."""
    stored = [entry.value for entry in model.metadata_props if entry.key == IMAGE_SIZE_KEY]
    sides = [int(side) for side in re.findall(r"\b[1-9]\d{0,3}\b", stored[0])] if stored else []
    return [*([(sides[0], sides[-1])] if sides else []), *EXAMPLE_SIZES]


def set_batch(model: Any, batch_axes: BatchAxes, size: int, shapes: Mapping[str, Sequence[int]]) -> None:
    """Set the batch of a model, in its inputs, and in operators that reshape to a constant shape.

    The model (an onnx.ModelProto) is changed. `shapes` are the shapes that contain the new size, by the output of the
    operator that reshapes.
    """
    for value in model.graph.input:
        if value.name in batch_axes.axes:
            value.type.tensor_type.shape.dim[batch_axes.axes[value.name]].dim_value = size
    for node in model.graph.node:
        if node.output and node.output[0] in shapes:
            node.input[SHAPE_INPUTS[node.op_type]] = _add_shape(model, node.output[0], shapes[node.output[0]])


def shapes_with_batch_of_one(model: Any, batch_axes: BatchAxes) -> dict[str, list[int]]:
    """Return the stored shapes that contain a fixed batch, with a batch of 1, by the output of their operator."""
    stored = _constant_shapes(model)
    computed = set(batch_axes.axes)
    size = batch_axes.size
    shapes = {}
    for node in model.graph.node:
        if computed.isdisjoint(node.input):
            continue
        computed.update(filter(None, node.output))
        index = SHAPE_INPUTS.get(node.op_type, len(node.input))
        shape = stored.get(node.input[index], ()) if index < len(node.input) else ()
        if node.input[0] in computed and shape and shape[0] > 0 and size > 1 and shape[0] % size == 0:
            shapes[node.output[0]] = [shape[0] // size, *shape[1:]]
    return shapes


def _constant_shapes(model: Any) -> dict[str, list[int]]:
    from onnx import TensorProto, numpy_helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: numpy_helper.to_array(tensor).tolist()
        for name, tensor in tensors.items()
        if tensor.data_type == TensorProto.INT64 and len(tensor.dims) == 1
    }


def _add_shape(model: Any, output: str, shape: Sequence[int]) -> str:
    import numpy as np
    from onnx import numpy_helper

    name = f"{output}/shape"
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), name))
    return name
