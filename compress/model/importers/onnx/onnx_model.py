"""Reader of .onnx files: a checked model in memory, with all tensors, in float32, with its nodes in order.

A file may be hostile. No path outside the model's folder is read, and sizes and attributes that make onnx or
onnxruntime crash are refused.
"""

from __future__ import annotations

import graphlib
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError, reason_of
from compress.model.importers.onnx.selection import without_selection

OPSETS = (7, 23)
"""The rules follow the definitions of the operators in these versions."""
MINIMUM_IR_VERSION = 4
"""Older versions of the file format require each initializer to be an input as well. Many files ignore this."""
MOST_BYTES = 2**31 - 1
"""Maximum size of a file with its external tensors: the limit of protobuf."""
MOST_NODES = 20_000
"""Shape inference of a damaged file with millions of operators would not end."""
MOST_NUMBERS = 2**27
"""Maximum number of values in one tensor."""
LARGEST_STEP = 2**20
"""Maximum stride, dilation, kernel size and padding."""
TYPE_NAMES = {
    **dict(enumerate(("FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING", "BOOL"), start=1)),
    10: "FLOAT16",
    11: "DOUBLE",
    16: "BFLOAT16",
}
"""Source: onnx.proto, TensorProto.DataType."""
FLOAT = 1
OTHER_FLOATS = (10, 11, 16)
EXPORT_AGAIN = "if the file is missing, export the model again and keep its files in one folder"


def read(path: Path) -> tuple[Any, tuple[str, ...]]:
    """Read a file; return the model (an onnx.ModelProto) and notes on its changes.

    Raises:
        ModelError: the file cannot be read, is not an ONNX model, is damaged, or refers to a file outside its folder.
    """
    model = parsed(_content(path))
    _check_opset(model)
    model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
    if not model.graph.node:
        raise ModelError("it is not an ONNX model: it has no operators", hint="check the file")
    if any(not isinstance(name, str) for graph in graphs_in(model) for name in _names(graph)):
        raise ModelError("it is damaged: one of its names is not text", hint="check the file")  # protobuf gives bytes
    count = _count_operators(model)
    if count > MOST_NODES:
        raise ModelError(f"it has {count:,} operators", allowed=f"{MOST_NODES:,}")
    _load_external_tensors(model, path.parent)
    notes = _as_float32(model)
    _check_settings(model)
    _sort_nodes(model)
    del model.graph.value_info[:]
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    notes += without_selection(model)
    _drop_unused(model)
    return model, tuple(notes)


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ModelError(f"the file has {size:,} bytes", allowed=f"{MOST_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", hint="check the path") from error


def parsed(content: bytes) -> Any:
    """Return the model (an onnx.ModelProto) in the content of a file."""
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise ModelError("it is not an ONNX model, or it is truncated", hint="check the file") from error
    return model


def _check_opset(model: Any) -> None:
    versions = [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError("it is not an ONNX model: it has no operator set version (opset)")
    if not OPSETS[0] <= min(versions) <= max(versions) <= OPSETS[1]:
        raise ModelError(
            f"it uses opset {max(versions)}",
            allowed=f"{OPSETS[0]} to {OPSETS[1]}",
            hint="convert it with onnx.version_converter, or export it again",
        )


def graphs_in(model: Any) -> Iterator[Any]:
    """Yield the graph, the subgraphs of its operators, and the bodies of its functions (which have nodes only)."""
    waiting = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += _subgraphs(attribute)


def _subgraphs(attribute: Any) -> list[Any]:
    return [attribute.g, *attribute.graphs] if attribute.HasField("g") else [*attribute.graphs]


def _tensors(model: Any) -> Iterator[Any]:
    for graph in graphs_in(model):
        yield from getattr(graph, "initializer", ())
        for stored in getattr(graph, "sparse_initializer", ()):
            raise ModelError(f"its tensor {stored.values.name[:80]!r} is sparse", hint="export it as a dense tensor")
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                    raise ModelError(
                        f"operator {node.name[:80]!r} has a sparse tensor", hint="export it as a dense tensor"
                    )
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def _names(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for value in [*getattr(graph, "initializer", ()), *graph.input, *graph.output]:
        yield getattr(value, "name", value)
        if hasattr(value, "type"):
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)


def _count_operators(model: Any) -> int:
    """Return the number of operators after all functions are inlined."""
    callees = {
        (function.domain, function.name): [(node.domain, node.op_type) for node in function.node]
        for function in model.functions
    }
    sizes: dict[tuple[str, str], int] = {}
    try:
        for function in graphlib.TopologicalSorter(callees).static_order():  # callees first
            if function in callees:
                sizes[function] = min(sum(sizes.get(callee, 1) for callee in callees[function]), MOST_NODES + 1)
    except graphlib.CycleError as error:
        name = error.args[1][0][1]
        raise ModelError(f"its function {name[:80]!r} calls itself") from error
    nodes = [node for graph in graphs_in(model) for node in graph.node if hasattr(graph, "initializer")]
    return sum(sizes.get((node.domain, node.op_type), 1) for node in nodes)


def _load_external_tensors(model: Any, folder: Path) -> None:
    """Read the external tensors into the model, and check the sizes of all tensors.

    Raises:
        ModelError: a tensor is outside the model's folder, is too large, or its data do not fit its shape.
    """
    remaining_bytes = MOST_BYTES
    for tensor in _tensors(model):
        count = prod(tensor.dims)
        if min(tensor.dims, default=0) < 0 or count > MOST_NUMBERS:
            raise ModelError(
                f"its tensor {tensor.name[:80]!r} has the shape {list(tensor.dims)[:8]}", allowed=f"{MOST_NUMBERS:,}"
            )
        if tensor.data_location == tensor.EXTERNAL:
            data = _external_data(tensor, folder, remaining_bytes)
            remaining_bytes -= len(data)
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = data
        array(tensor)


def _external_data(tensor: Any, folder: Path, remaining_bytes: int) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = f"its tensor {tensor.name[:80]!r}"
    inside = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(inside, location))
    is_inside = location and not os.path.isabs(location) and os.path.commonpath([inside, path]) == inside
    if not is_inside or not os.path.isfile(path):
        what = f"{name} is stored in {location[:200]!r}"
        raise ModelError(what, allowed="a file in the model's folder", hint=EXPORT_AGAIN)
    try:
        offset = int(entries.get("offset", 0))
        size = os.path.getsize(path)
        length = int(entries.get("length", size - offset))
        if not 0 <= offset <= offset + length <= size or length > remaining_bytes:
            raise ModelError(
                f"{name} is stored at bytes {offset:,} to {offset + length:,} of {location[:200]!r}",
                allowed=f"within its {size:,} bytes, and {MOST_BYTES:,} bytes for all",
            )
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be read from {location[:200]!r}: {reason_of(error)}") from error


def array(tensor: Any) -> NDArray[Any]:
    """Return the values of a stored tensor.

    Raises:
        ModelError: the data do not fit the shape, or the data type is unsupported.
    """
    from onnx import numpy_helper

    try:
        values: NDArray[Any] = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, NotImplementedError, AttributeError) as error:
        raise ModelError(f"its tensor {tensor.name[:80]!r} is damaged: {str(error)[:200]}") from error
    return values


def _as_float32(model: Any) -> list[str]:
    """Convert float16, bfloat16 and float64 to float32; return notes on this."""
    from onnx import numpy_helper

    counts: dict[int, int] = {}
    for tensor in _tensors(model):
        if tensor.data_type in OTHER_FLOATS:
            counts[tensor.data_type] = counts.get(tensor.data_type, 0) + 1
            values = np.asarray(array(tensor).astype(np.float64), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in graphs_in(model):
        for dtype in _declare_float32(graph):
            counts.setdefault(dtype, 0)
    return [
        f"its {TYPE_NAMES[kind]} values are converted to float32 ({count} stored tensors)"
        for kind, count in sorted(counts.items())
    ]


def _declare_float32(graph: Any) -> list[int]:
    """Change the declared types of inputs, outputs and casts to float32; return the types of inputs and outputs."""
    changed = []
    for value in [*graph.input, *graph.output]:
        if not isinstance(value, str) and value.type.tensor_type.elem_type in OTHER_FLOATS:
            changed.append(value.type.tensor_type.elem_type)
            value.type.tensor_type.elem_type = FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in OTHER_FLOATS:
                attribute.i = FLOAT
    return changed


SETTINGS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("strides", "dilations", "kernel_shape", "group", "blocksize", "num_groups"), (1, LARGEST_STEP)),
    **dict.fromkeys(("num_outputs", "num_heads", "hidden_size"), (1, LARGEST_STEP)),
    **dict.fromkeys(("pads", "output_padding", "output_shape"), (-LARGEST_STEP, LARGEST_STEP)),
    **dict.fromkeys(("axis", "batch_dims", "size", "keepdims"), (-LARGEST_STEP, LARGEST_STEP)),
}
"""Allowed range of attributes by name. Reason: onnx and onnxruntime divide by some of them without a check."""


def _check_settings(model: Any) -> None:
    for graph in graphs_in(model):
        for node in graph.node:
            for attribute in node.attribute:
                low, high = SETTINGS.get(attribute.name, (None, None))
                values = [*attribute.ints]
                if attribute.type == attribute.INT:
                    values.append(attribute.i)
                if low is not None and high is not None and not all(low <= value <= high for value in values):
                    raise ModelError(
                        f"{node.op_type[:40]} {node.name[:80]!r} has {attribute.name} {values[:8]}",
                        allowed=f"{low} to {high:,}",
                    )


def _sort_nodes(model: Any) -> None:
    nodes = list(model.graph.node)
    producers = _producers(nodes)
    needed = [{producers[name] for name in _used_names(node) if name in producers} for node in nodes]
    if all(max(indices, default=-1) < index for index, indices in enumerate(needed)):
        return
    try:
        order = list(graphlib.TopologicalSorter(dict(enumerate(needed))).static_order())
    except graphlib.CycleError as error:
        node = nodes[min(error.args[1])]
        raise ModelError(f"{node.op_type[:40]} {node.name[:80]!r} depends on its own result") from error
    del model.graph.node[:]
    model.graph.node.extend([nodes[index] for index in order])


def _producers(nodes: Sequence[Any]) -> dict[str, int]:
    """Return the index of the operator that computes each tensor, by tensor name."""
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in producers:
                raise ModelError(f"two operators compute {name[:80]!r}")
            producers[name] = index
    return producers


def _drop_unused(model: Any) -> None:
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.intersection(filter(None, node.output)):
            kept.append(node)
            needed.update(_used_names(node))
    if not kept:
        raise ModelError("no operator computes any of its outputs", hint="check the file")
    if len(kept) < len(model.graph.node):
        del model.graph.node[:]
        model.graph.node.extend(reversed(kept))


def _used_names(node: Any) -> Iterator[str]:
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield from filter(None, current.input)
        for attribute in current.attribute:
            for graph in _subgraphs(attribute):
                waiting += graph.node
