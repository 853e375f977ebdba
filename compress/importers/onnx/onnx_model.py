"""An .onnx file as a sound model in memory: its tensors inside, in float32, its nodes in order.

Files come from anywhere. Nothing here follows a path out of the model's folder, and what is
handed to onnx and onnxruntime later has sizes and settings that neither of them stumbles over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError

OPSETS = (7, 23)
KNOWN_IR = 4
"""Versions of the file format before this want stored tensors among the inputs, which many files do not heed."""
MOST_BYTES = 2**31 - 1
"""Of a file and what lies beside it: protobuf holds no more."""
MOST_NODES = 20_000
MOST_NUMBERS = 2**27
"""Of one tensor."""
LARGEST_STEP = 2**20
"""Of a stride, a dilation, a side of a kernel, a pad."""
FLOAT, FLOAT16, DOUBLE, BFLOAT16 = 1, 10, 11, 16
"""Source: onnx.proto, TensorProto.DataType."""
TYPE_NAMES = {
    1: "FLOAT",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    8: "STRING",
    9: "BOOL",
    FLOAT16: "FLOAT16",
    DOUBLE: "DOUBLE",
    BFLOAT16: "BFLOAT16",
}
AGAIN = "if it is missing, export the model again with all of its files beside it"


def read(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The model (an onnx.ModelProto), and what of it is not as it was, in words.

    Raises:
        ModelError: the file cannot be read, is no ONNX model, is damaged, or reaches out of its folder.
    """
    try:
        return _read(path)
    except ModelError as error:
        error.where = error.where or str(path)
        raise


def _read(path: Path) -> tuple[Any, tuple[str, ...]]:
    model = _parsed(path)
    _check_opset(model)
    model.ir_version = max(model.ir_version, KNOWN_IR)
    if not model.graph.node:
        raise ModelError("it is no ONNX model: it has no operators", todo="check the file")
    _check_names(model)
    count = _count(model)
    if count > MOST_NODES:
        raise ModelError(f"it has {count:,} operators", allowed=f"{MOST_NODES:,}")
    _bring_inside(model, path.parent)
    notes = _as_float32(model)
    _check_settings(model)
    _in_order(model)
    del model.graph.value_info[:]
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    _drop_unused(model)
    return model, tuple(notes)


def _parsed(path: Path) -> Any:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ModelError(f"the file has {size:,} bytes", allowed=f"{MOST_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", todo="check the path") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise ModelError("it is no ONNX model, or it was cut off", todo="check the file") from error
    return model


def _check_opset(model: Any) -> None:
    """Looks at the version of ONNX' own operators.

    Raises:
        ModelError: there is none, or it is too old or too new.
    """
    versions = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError("it is no ONNX model: it does not say which version of the operators it uses")
    if not OPSETS[0] <= min(versions) <= max(versions) <= OPSETS[1]:
        raise ModelError(
            f"its operators are those of opset {max(versions)}",
            allowed=f"{OPSETS[0]} to {OPSETS[1]}",
            todo="convert it with onnx.version_converter, or export it again",
        )


def graphs_in(model: Any) -> Iterator[Any]:
    """The graph, those inside of its operators, and the bodies of its functions (which have nodes only)."""
    waiting = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _tensors(model: Any) -> Iterator[Any]:
    """Every stored tensor, wherever it is."""
    for graph in graphs_in(model):
        yield from getattr(graph, "initializer", ())
        for stored in getattr(graph, "sparse_initializer", ()):
            raise ModelError(
                f"its tensor {stored.values.name[:80]!r} is stored as a sparse one", todo="export it dense"
            )
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                    raise ModelError(f"operator {node.name[:80]!r} holds a sparse tensor", todo="export it dense")
                yield from [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]


def _check_names(model: Any) -> None:
    """Looks for names that are no text, which protobuf gives as bytes.

    Raises:
        ModelError: there is such a name.
    """
    for graph in graphs_in(model):
        names = [
            name for node in graph.node for name in (node.op_type, node.domain, node.name, *node.input, *node.output)
        ]
        names += [attribute.name for node in graph.node for attribute in node.attribute]
        for value in [*getattr(graph, "initializer", ()), *graph.input, *graph.output]:
            names.append(getattr(value, "name", value))
            names += [dim.dim_param for dim in value.type.tensor_type.shape.dim] if hasattr(value, "type") else []
        if any(not isinstance(name, str) for name in names):
            raise ModelError("it is damaged: one of its names is no text", todo="check the file")


def _count(model: Any) -> int:
    """How many operators there are when every function is written out where it is used.

    Raises:
        ModelError: a function uses itself.
    """
    bodies = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    waiting = [(key, False) for key in bodies]
    open_: set[tuple[str, str]] = set()
    while waiting:
        key, done = waiting.pop()
        inner = [(node.domain, node.op_type) for node in bodies[key].node]
        if done:
            sizes[key] = min(sum(sizes.get(each, 1) for each in inner), MOST_NODES + 1)
            open_.discard(key)
        elif key not in sizes:
            open_.add(key)
            waiting.append((key, True))
            for each in {each for each in inner if each in bodies and each not in sizes}:
                if each in open_:
                    raise ModelError(f"its function {each[1][:80]!r} uses itself")
                waiting.append((each, False))
    nodes = [node for graph in graphs_in(model) for node in graph.node if hasattr(graph, "initializer")]
    return sum(sizes.get((node.domain, node.op_type), 1) for node in nodes)


def _bring_inside(model: Any, folder: Path) -> None:
    """Reads tensors that lie in files beside the model, and looks at the sizes of all.

    Raises:
        ModelError: a tensor lies elsewhere, or has not as many numbers as its sides say.
    """
    left = MOST_BYTES
    for tensor in _tensors(model):
        count = prod(tensor.dims)
        if min(tensor.dims, default=0) < 0 or count > MOST_NUMBERS:
            raise ModelError(
                f"its tensor {tensor.name[:80]!r} has the sides {list(tensor.dims)[:8]}", allowed=f"{MOST_NUMBERS:,}"
            )
        if tensor.data_location == tensor.EXTERNAL:
            data = _beside(tensor, folder, left)
            left -= len(data)
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            tensor.raw_data = data
        array(tensor)


def _beside(tensor: Any, folder: Path, left: int) -> bytes:
    """The bytes of a tensor in a file beside the model."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    said, name = where.get("location", ""), f"its tensor {tensor.name[:80]!r}"
    inside = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(inside, said))
    if not said or os.path.isabs(said) or os.path.commonpath([inside, path]) != inside or not os.path.isfile(path):
        raise ModelError(
            f"{name} lies in {said[:200]!r}",
            allowed="a file in the model's folder",
            todo=AGAIN,
        )
    try:
        offset, size = int(where.get("offset", 0)), os.path.getsize(path)
        length = int(where.get("length", size - offset))
        if not 0 <= offset <= offset + length <= size or length > left:
            raise ModelError(
                f"{name} lies at {offset:,} to {offset + length:,} of {said[:200]!r}",
                allowed=f"within its {size:,} bytes, and {MOST_BYTES:,} bytes for all",
            )
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be read from {said[:200]!r}: {error}") from error


def array(tensor: Any) -> NDArray[Any]:
    """The numbers of a stored tensor.

    Raises:
        ModelError: there are not as many as its sides say, or of no type that is known.
    """
    from onnx import numpy_helper

    try:
        numbers: NDArray[Any] = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, NotImplementedError, AttributeError) as error:
        raise ModelError(f"its tensor {tensor.name[:80]!r} is damaged: {str(error)[:200]}") from error
    return numbers


def _as_float32(model: Any) -> list[str]:
    """Turns float16, bfloat16 and float64 into float32, everywhere; says so."""
    from onnx import numpy_helper

    found: dict[int, int] = {}
    for tensor in _tensors(model):
        if tensor.data_type in (FLOAT16, DOUBLE, BFLOAT16):
            found[tensor.data_type] = found.get(tensor.data_type, 0) + 1
            numbers = np.asarray(array(tensor).astype(np.float64), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    for graph in graphs_in(model):
        for value in [*getattr(graph, "input", ()), *getattr(graph, "output", ())]:
            if not isinstance(value, str) and value.type.tensor_type.elem_type in (FLOAT16, DOUBLE, BFLOAT16):
                found.setdefault(value.type.tensor_type.elem_type, 0)
                value.type.tensor_type.elem_type = FLOAT
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i in (FLOAT16, DOUBLE, BFLOAT16):
                    attribute.i = FLOAT
    return [
        f"its numbers of {TYPE_NAMES[kind]} are taken as float32 ({count} stored tensors)"
        for kind, count in sorted(found.items())
    ]


SETTINGS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("strides", "dilations", "kernel_shape", "group", "blocksize", "num_groups"), (1, LARGEST_STEP)),
    **dict.fromkeys(("num_outputs", "num_heads", "hidden_size"), (1, LARGEST_STEP)),
    **dict.fromkeys(("pads", "output_padding", "output_shape"), (-LARGEST_STEP, LARGEST_STEP)),
    **dict.fromkeys(("axis", "batch_dims", "size", "keepdims"), (-LARGEST_STEP, LARGEST_STEP)),
}
"""What settings by these names may be; onnx and onnxruntime divide by some of them without looking."""


def _check_settings(model: Any) -> None:
    for graph in graphs_in(model):
        for node in graph.node:
            for attribute in node.attribute:
                low, high = SETTINGS.get(attribute.name, (None, None))
                numbers = [*attribute.ints, *([attribute.i] if attribute.type == attribute.INT else [])]
                if low is not None and high is not None and not all(low <= number <= high for number in numbers):
                    raise ModelError(
                        f"{node.op_type[:40]} {node.name[:80]!r} has {attribute.name} {numbers[:8]}",
                        allowed=f"{low} to {high:,}",
                    )


def _in_order(model: Any) -> None:
    """Puts the operators in an order in which they can be computed.

    Raises:
        ModelError: they go in circles, or two make the same tensor.
    """
    nodes = list(model.graph.node)
    made: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in made:
                raise ModelError(f"two operators make {name[:80]!r}")
            made[name] = number
    waits = [{made[name] for name in _taken(node) if name in made} for node in nodes]
    if all(max(needed, default=-1) < number for number, needed in enumerate(waits)):
        return
    users: dict[int, list[int]] = {}
    for number, needed in enumerate(waits):
        for each in needed:
            users.setdefault(each, []).append(number)
    ready = [number for number, needed in enumerate(waits) if not needed]
    for number in ready:  # grows while it is walked
        for user in users.get(number, ()):
            waits[user].discard(number)
            if not waits[user]:
                ready.append(user)
    if len(ready) < len(nodes):
        stuck = nodes[min(set(range(len(nodes))) - set(ready))]
        raise ModelError(f"{stuck.op_type[:40]} {stuck.name[:80]!r} waits for its own result")
    del model.graph.node[:]
    model.graph.node.extend([nodes[number] for number in ready])


def _drop_unused(model: Any) -> None:
    """Takes out the operators that no output depends on.

    Raises:
        ModelError: no operator is left.
    """
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.intersection(filter(None, node.output)):
            kept.append(node)
            needed.update(_taken(node))
    if not kept:
        raise ModelError("none of its operators makes one of its outputs", todo="check the file")
    if len(kept) < len(model.graph.node):
        del model.graph.node[:]
        model.graph.node.extend(reversed(kept))


def _taken(node: Any) -> Iterator[str]:
    """What an operator takes, and the graphs inside of it."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield from filter(None, each.input)
        for attribute in each.attribute:
            for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                waiting += graph.node
