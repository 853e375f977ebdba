"""Accidental and deliberate damage to .tflite files: `mutate` makes one damaged file from a valid one.

All randomness comes from the generator `dice`: a generator in the same state gives the same file.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import fuzz_mutations
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compress.model.tflite import graph

WORDS = (0, 1, 4, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF)
NUMBERS = (0, 1, -1, 2, 5, 127, 128, 65536, 2**31 - 1, -(2**31))
WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")


@dataclass(frozen=True)
class Model:
    name: str
    content: bytes

    @cached_property
    def blobs(self) -> list[tuple[int, int]]:
        """Byte ranges (start, end) of the contents of buffers and custom operators. All other bytes are structure."""
        source, start = _source(self.content)
        arrays = [buffer.data for buffer in source.buffers or []]
        arrays += [operator.customOptions for part in source.subgraphs for operator in part.operators or []]
        return sorted(_range(array, start) for array in arrays if array is not None and len(array) > 64)

    @cached_property
    def weights(self) -> list[tuple[int, int]]:
        """The byte ranges (start, end) of 8-bit weights whose values do not affect the reports about the model."""
        parsed = graph.parse(self.content)
        weight_indices = {operator.inputs[1] for operator in parsed.operators if operator.name in WEIGHTED}
        used = [op.inputs[position] for op in parsed.operators for position in range(len(op.inputs)) if position != 1]
        source, start = _source(self.content)
        tensors = [parsed.tensors[index] for index in weight_indices.difference(used)]
        buffers = [
            source.subgraphs[0].tensors[tensor.index].buffer for tensor in tensors if tensor.dtype in ("INT8", "UINT8")
        ]
        return [_range(source.buffers[index].data, start) for index in buffers if index]

    @cached_property
    def structure(self) -> list[int]:
        """The byte offsets of the words of 4 bytes in its structure."""
        taken = np.zeros(len(self.content), bool)
        for start, end in self.blobs:
            taken[start:end] = True
        return [int(place) for place in np.flatnonzero(~taken[: len(taken) // 4 * 4 : 4]) * 4]


def _source(content: bytes) -> tuple[Any, int]:
    """Parse a file; return the model and the memory address of its first byte."""
    held = bytearray(content)
    return schema.ModelT.InitFromPackedBuf(held, 0), np.frombuffer(held, np.uint8).ctypes.data


def _range(array: Any, start: int) -> tuple[int, int]:
    return array.ctypes.data - start, array.ctypes.data - start + len(array)


Mutator = Callable[[Model, random.Random], bytes]


def flipped_structure(model: Model, dice: random.Random) -> bytes:
    """Flip bits of offsets, lengths and numbers."""
    changed = bytearray(model.content)
    for _ in range(dice.choice((1, 1, 2, 4))):
        changed[dice.choice(model.structure) + dice.randrange(4)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def flipped_weights(model: Model, dice: random.Random) -> bytes:
    """Flip bits of 8-bit weights: the reports must not change."""
    changed = bytearray(model.content)
    for start, end in dice.choices(model.weights, k=5) if model.weights else ():
        changed[dice.randrange(start, end)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def words(model: Model, dice: random.Random) -> bytes:
    """Replace words of the structure by extreme numbers, or by offsets to themselves or backwards."""
    changed = bytearray(model.content)
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.choice(model.structure)
        back = (-dice.randrange(0, place + 4)) & 0xFFFFFFFF
        struct.pack_into("<I", changed, place, dice.choice((*WORDS, back, len(changed) - place)))
    return bytes(changed)


def redirected(model: Model, dice: random.Random) -> bytes:
    """Redirect offsets to the targets of other offsets: shared and overlapping tables and lists."""
    changed = bytearray(model.content)
    for _ in range(dice.choice((1, 2, 4, 16))):
        place, other = sorted(dice.choices(model.structure, k=2))
        (offset,) = struct.unpack_from("<I", changed, other)
        struct.pack_into("<I", changed, place, (other + offset - place) & 0xFFFFFFFF)
    return bytes(changed)


def bomb(model: Model, dice: random.Random) -> bytes:
    """Repeat one table in a list very many times: small to store, large to unpack."""
    copy = len(model.content)
    buffer = bytearray(model.content)
    root = schema.Model.GetRootAs(buffer, 0)
    owners = [(root, slot) for slot in (6, 8, 12)] + [(root.Subgraphs(0), slot) for slot in (4, 10)]
    owner, slot = dice.choice(owners)
    table = owner._tab
    field = table.Pos + table.Offset(slot)
    (first,) = struct.unpack_from("<I", buffer, table.Vector(table.Offset(slot)))
    target = table.Vector(table.Offset(slot)) + first
    count = dice.choice((10, 1000, 100_000))
    # Offsets point forward only: a second copy of the model follows the list, as the target of its entries.
    start = copy + (-copy) % 4
    struct.pack_into("<I", buffer, field, start - field)
    entries = start + 4 + 4 * np.arange(count, dtype="<u4")
    listed = (start + 4 + 4 * count + target - entries).astype("<u4").tobytes()
    return bytes(buffer) + bytes(start - copy) + struct.pack("<I", count) + bytes(listed) + model.content


def one_blob(model: Model, dice: random.Random) -> bytes:
    """Use the same bytes in many buffers: small to store, large to write again."""
    buffer = bytearray(model.content)
    root = schema.Model.GetRootAs(buffer, 0)
    tables = [root.Buffers(index)._tab for index in range(root.BuffersLength())]
    filled = [(table.Vector(table.Offset(4)) - 4, table) for table in tables if table.Offset(4)]
    last = max((place for place, _ in filled), default=0)
    for _, table in filled:
        field = table.Pos + table.Offset(4)
        if field < last and dice.random() < 0.9:
            struct.pack_into("<I", buffer, field, last - field)
    return bytes(buffer)


def edited(model: Model, dice: random.Random) -> bytes:
    """Return a file with a valid format and an invalid model."""
    source, _ = _source(model.content)
    for _ in range(dice.choice((1, 1, 2, 3))):
        dice.choice((_tensor, _tensor, _quantization, _operator, _operator, _options, _code, _lists))(source, dice)
    return graph.serialize(SimpleNamespace(source=source))  # type: ignore[arg-type]


def _tensor(source: Any, dice: random.Random) -> None:
    tensor = dice.choice(source.subgraphs[0].tensors)
    what = dice.randrange(6)
    if what == 0:
        sides = dice.choice((1, 2, 4, 5, 9, 100, 5000))
        tensor.shape = [dice.choice(NUMBERS) if dice.random() < 0.5 else 3 for _ in range(sides)]
    elif what == 1:
        tensor.shape = [] if tensor.shape is None else [dice.choice((*NUMBERS, side)) for side in tensor.shape]
    elif what == 2:
        tensor.type = dice.randrange(30)
    elif what == 3:
        tensor.buffer = dice.choice((0, 1, len(source.buffers) - 1, len(source.buffers), 2**32 - 1))
    elif what == 4:
        tensor.name = dice.choice((None, b"", b"\xff\xfe", b"n" * 20_000))
        tensor.isVariable = dice.random() < 0.5
        tensor.shapeSignature = [dice.choice(NUMBERS) for _ in range(dice.randrange(6))]
    else:
        held = source.buffers[tensor.buffer] if tensor.buffer < len(source.buffers) else schema.BufferT()
        size = dice.choice((0, 1, 3, 4, 8, 16))
        numbers = np.array([dice.choice(NUMBERS) for _ in range(size)], "<i4").view(np.uint8)
        held.data = numbers[: len(numbers) - dice.randrange(2)]


def _quantization(source: Any, dice: random.Random) -> None:
    tensor = dice.choice(source.subgraphs[0].tensors)
    tensor.quantization = tensor.quantization or schema.QuantizationParametersT()
    length, value = (
        dice.choice((0, 1, 2, 3, 17, 3000)),
        dice.choice((float("nan"), float("inf"), 0.0, -1.0, 1e-45, 0.5)),
    )
    tensor.quantization.scale = [value] * length
    tensor.quantization.zeroPoint = [dice.choice((0, -1, 2**63 - 1, -(2**63)))] * dice.choice((0, 1, length))
    tensor.quantization.quantizedDimension = dice.choice(NUMBERS)


def _operator(source: Any, dice: random.Random) -> None:
    main = source.subgraphs[0]
    operator, count = dice.choice(main.operators), len(main.tensors)
    what, side = dice.randrange(5), dice.choice(("inputs", "outputs"))
    listed = [int(index) for index in getattr(operator, side)]
    if what == 0 and listed:
        listed[dice.randrange(len(listed))] = dice.choice((-1, -2, 0, count - 1, count, 2**31 - 1, *operator.outputs))
        setattr(operator, side, [int(index) for index in listed])
    elif what == 1:
        setattr(operator, side, dice.choice(([], None, listed[:1], listed * 2, listed * 1000)))
    elif what == 2:
        operator.opcodeIndex = dice.choice((0, len(source.operatorCodes) - 1, len(source.operatorCodes), 2**32 - 1))
    elif what == 3:
        operator.customOptions = list(dice.randbytes(dice.choice((0, 8, 40))))
    else:
        main.operators = dice.choice((main.operators[::-1], main.operators * 3, [operator] * 200, []))


OPTIONS = sorted(name for name in vars(schema) if name.endswith("OptionsT"))


def _options(source: Any, dice: random.Random) -> None:
    operator = dice.choice(source.subgraphs[0].operators)
    if operator.builtinOptions is None or dice.random() < 0.4:
        name = dice.choice(OPTIONS)
        kind = getattr(schema.BuiltinOptions, name[:-1], None)
        if kind is not None:
            operator.builtinOptionsType, operator.builtinOptions = kind, getattr(schema, name)()
    for name, value in vars(operator.builtinOptions or SimpleNamespace()).items():
        if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.7:
            small = name not in ("strideH", "strideW", "dilationHFactor", "dilationWFactor", "filterHeight", "axis")
            setattr(operator.builtinOptions, name, dice.choice((0, 1, 5, 100) if small else NUMBERS))


def _code(source: Any, dice: random.Random) -> None:
    code = dice.choice(source.operatorCodes)
    code.builtinCode = dice.choice((*range(160), 206, 32, 1000, 2**31 - 1, -1))
    code.deprecatedBuiltinCode = max(min(code.builtinCode, 127), -128)
    code.version = dice.choice((1, 1, *NUMBERS))
    code.customCode = dice.choice((None, b"", b"edgetpu-custom-op", b"\xff", b"c" * 20_000))


def _lists(source: Any, dice: random.Random) -> None:
    main = source.subgraphs[0]
    what = dice.randrange(7)
    if what == 0:
        source.subgraphs = dice.choice(([], None, source.subgraphs * 3))
    elif what == 1:
        source.buffers = dice.choice(([], None, source.buffers[:1], source.buffers[::-1]))
    elif what == 2:
        source.operatorCodes = dice.choice(([], None, source.operatorCodes[::-1]))
    elif what == 3:
        main.tensors = dice.choice(([], None, main.tensors[::-1], main.tensors[:-1], main.tensors * 20))
    elif what == 4:
        main.inputs = dice.choice(([], None, [-1], [len(main.tensors or [])], [0] * 5000))
    elif what == 5:
        main.outputs = dice.choice(([], None, [-1], [len(main.tensors or [])], [0] * 5000))
    else:
        main.operators = None


MUTATORS: dict[str, Mutator] = {
    "bytes": lambda model, dice: fuzz_mutations.byte_changes(model.content, dice),
    "bits of the structure": flipped_structure,
    "bits of weights": flipped_weights,
    "words": words,
    "offsets": redirected,
    "bombs": bomb,
    "one blob for many": one_blob,
    "edited": edited,
    "edited, then words": lambda model, dice: words(Model(model.name, edited(model, dice)), dice),
}


def mutate(kind: str, model: Model, dice: random.Random) -> bytes:
    """Return a damaged file, or the unchanged file if this damage is not possible."""
    try:
        return MUTATORS[kind](model, dice)
    except (AttributeError, IndexError, TypeError):  # a second edit of something that the first one has removed
        return model.content
