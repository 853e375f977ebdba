"""The data that the vendor's compiler adds to a compiled model, assembled field by field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
from flatbuffers import flexbuffers

from compress.model.tflite import graph
from darwinn import package

Write = Callable[[flatbuffers.Builder], int]


def table(fields: dict[int, Any]) -> Write:
    """Return a writer of a table: fields by number, integers and floats as ("<type>", value), all others as writers."""

    def write(builder: flatbuffers.Builder) -> int:
        written = {slot: value(builder) if callable(value) else value for slot, value in fields.items()}
        builder.StartObject(max(fields, default=0) + 1)
        for slot, value in written.items():
            if isinstance(value, tuple):
                kind, number = value
                getattr(builder, f"Prepend{kind}Slot")(slot, number, 0)
            else:
                builder.PrependUOffsetTRelativeSlot(slot, value, 0)
        return int(builder.EndObject())

    return write


def raw(content: bytes) -> Write:
    return lambda builder: int(builder.CreateByteVector(content))


def many(items: list[Write]) -> Write:
    def write(builder: flatbuffers.Builder) -> int:
        offsets = [item(builder) for item in items]
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())

    return write


def finished(write: Write, identifier: bytes | None = None) -> bytes:
    builder = flatbuffers.Builder(0)
    builder.Finish(write(builder), identifier)
    return bytes(builder.Output())


def layer(name: str, scale: float = 0.25) -> Write:
    numerics = table({0: ("Int32", 7), 1: ("Float32", scale)})
    sizes = {1: ("Int32", 96), 2: ("Int32", 4), 3: ("Int32", 6), 4: ("Int32", 3), 6: ("Int16", 8)}
    return table({0: raw(name.encode()), **sizes, 5: numerics})


def one_many_times(item: Write, count: int) -> Write:
    def write(builder: flatbuffers.Builder) -> int:
        offset = item(builder)
        return many([lambda builder: offset] * count)(builder)

    return write


def executable(kind: int, parameters: bytes, token: int = 99, scale: float = 0.25, inputs: int = 1) -> bytes:
    streams = many([table({0: raw(b"i" * 100)}), table({0: raw(b"j" * 11)})])
    numbers = {4: ("Int32", 64), 12: ("Int32", 1024), 13: ("Int16", kind), 14: ("Uint64", token)}
    input_layers = one_many_times(layer("in", scale), inputs)
    return finished(table({**numbers, 5: streams, 6: raw(parameters), 8: input_layers, 9: many([layer("out")])}))


def options(*executables: bytes, runtime: int = 14, identifier: bytes = b"DWN1") -> bytes:
    """Return the options of a custom operator as the compiler writes them."""
    multi = finished(table({0: many([raw(executable_bytes) for executable_bytes in executables])}))
    content = finished(table({0: ("Int32", runtime), 1: raw(multi), 4: raw(b"cl/1")}), identifier)
    builder = flexbuffers.Builder()
    with builder.Map():
        builder.Int("1", 1)
        builder.Key("4")
        # The compiler stores the package as a string, although it is not a string.
        start = builder._WriteBlob(content, append_zero=True, type_=flexbuffers.Type.STRING)
        del start
        builder.Int("5", 0)
    return bytes(builder.Finish())


CACHING, EXECUTION, ALONE = (executable(kind, b"p" * size) for kind, size in ((1, 4096), (2, 64), (0, 128)))


def compiled(model: bytes, on_cpu: int = 0, executables: Sequence[bytes] = (CACHING, EXECUTION)) -> bytes:
    """Return a model as if compiled: one custom operator, followed by the last `on_cpu` operators, unchanged."""
    from ai_edge_litert import schema_py_generated as schema

    parsed = graph.parse(model)
    main = parsed.source.subgraphs[0]
    code, operator = schema.OperatorCodeT(), schema.OperatorT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode, code.version = package.OPERATOR.encode(), 1
    operator.opcodeIndex = len(parsed.source.operatorCodes)
    kept = len(main.operators) - on_cpu
    operator.inputs, operator.outputs = list(main.inputs), list(main.operators[kept - 1].outputs)
    operator.customOptions = list(options(*executables))
    parsed.source.operatorCodes.append(code)
    main.operators = [operator, *main.operators[kept:]]
    return graph.serialize(parsed)
