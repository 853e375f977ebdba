"""Verification of the bytes of a .tflite file before it is unpacked.

Unpacking follows every offset and trusts every length. In a damaged file these are arbitrary. In a hostile file a list
refers to one table a million times, and a few kilobytes unpack to gigabytes. Offsets point forward and no table
contains a table of the same kind, so cycles are impossible, and only the amount must be limited. Every table and list
is visited as in unpacking, and the memory that it will take is counted.

Source: tensorflow/lite/schema/schema.fbs, schema version 3; FlatBuffers internals, "Tables".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

MAX_EXPANSION = 7
"""The memory limit for unpacking, as a multiple of the file's size. Chosen: all real models that the tests read stay
below it with more than two thirds of EXTRA_BYTES left."""
EXTRA_BYTES = 32 << 20
"""An additional constant of this limit: a graph of thousands of operators may have few weights (an unrolled recurrent
network)."""
_TABLE = 1024
"""The approximate memory for an unpacked table with its Python objects; measured."""
_LIST = 320
"""The approximate memory for an unpacked list without its items; measured."""
_LISTS = {
    "byte": (1, 4),
    "text": (1, 8),
    "int16": (2, 8),
    "word": (4, 16),
    "int64": (8, 32),
    "number": (4, 40),
    "long": (8, 48),
}
"""Kinds of lists: bytes of an item in the file, and in memory, including copies when the file is written again. Items
of `number` and `long` become Python integers or floats."""
LAYOUT: Mapping[str, Mapping[int, str]] = {
    "Model": {
        1: "[OperatorCode]",
        2: "[SubGraph]",
        3: "text",
        4: "[Buffer]",
        5: "word",
        6: "[Metadata]",
        7: "[SignatureDef]",
        8: "[ExternalBufferGroup]",
        9: "[ExternalBuffer]",
    },
    "OperatorCode": {1: "text"},
    "SubGraph": {0: "[Tensor]", 1: "number", 2: "number", 3: "[Operator]", 4: "text"},
    "Tensor": {
        0: "number",
        3: "text",
        4: "QuantizationParameters",
        6: "SparsityParameters",
        7: "number",
        9: "[VariantSubType]",
    },
    "QuantizationParameters": {0: "word", 1: "word", 2: "number", 3: "long", 5: "QuantizationDetails?"},
    "CustomQuantization": {0: "byte"},
    "BlockwiseQuantization": {3: "word"},
    "MultiAxisQuantization": {3: "word"},
    "SparsityParameters": {0: "word", 1: "word", 2: "[DimensionMetadata]"},
    "DimensionMetadata": {3: "SparseIndexVector?", 5: "SparseIndexVector?"},
    "Int32Vector": {0: "word"},
    "Uint16Vector": {0: "int16"},
    "Uint8Vector": {0: "byte"},
    "VariantSubType": {0: "word"},
    "Operator": {
        1: "number",
        2: "number",
        4: "BuiltinOptions?",
        5: "byte",
        7: "byte",
        8: "word",
        12: "BuiltinOptions2?",
    },
    "Buffer": {0: "byte"},
    "Metadata": {0: "text"},
    "SignatureDef": {0: "[TensorMap]", 1: "[TensorMap]", 2: "text"},
    "TensorMap": {0: "text"},
    "ExternalBufferGroup": {0: "text"},
    "ExternalBuffer": {4: "text"},
    "BucketizeOptions": {0: "word"},
    "ConcatEmbeddingsOptions": {1: "word", 2: "word"},
    "FullyConnectedOptions": {5: "byte"},
    "ReshapeOptions": {0: "word"},
    "SqueezeOptions": {0: "word"},
    "VarHandleOptions": {0: "text", 1: "text"},
    "StableHLOCompositeOptions": {0: "text", 2: "byte"},
    "StablehloBroadcastInDimOptions": {0: "int64"},
    "StablehloCaseOptions": {0: "word"},
    "StablehloConvolutionOptions": {**dict.fromkeys((0, 1, 2, 3, 7, 10, 13), "int64"), 4: "byte", 16: "word"},
    "StablehloCustomCallOptions": {0: "text", 2: "text", 4: "word", 5: "byte"},
    "StablehloDotGeneralOptions": {**dict.fromkeys(range(4), "int64"), 4: "word"},
    "StablehloDynamicSliceOptions": {0: "int64"},
    "StablehloGatherOptions": dict.fromkeys((0, 1, 2, 4), "int64"),
    "StablehloPadOptions": dict.fromkeys(range(3), "int64"),
    "StablehloReduceOptions": {0: "int64"},
    "StablehloReduceWindowOptions": dict.fromkeys(range(5), "int64"),
    "StablehloScatterOptions": dict.fromkeys((1, 2, 3), "int64"),
    "StablehloSliceOptions": dict.fromkeys(range(3), "int64"),
    "StablehloTransposeOptions": {0: "int64"},
}
"""The fields with an offset in each kind of table: "[a list of tables]", a table, "a union?" with its kind in the
previous field, or one of the lists above. Other kinds of tables have no such fields."""
_INT = struct.Struct("<i")
_WORD = struct.Struct("<I")
_SHORT = struct.Struct("<H")


@dataclass
class Allowance:
    """A memory limit, with the remaining bytes."""

    left: int

    def spend(self, size: int) -> None:
        """Subtract memory from the limit.

        Raises:
            ValueError: the limit is exceeded.
        """
        self.left -= size
        if self.left < 0:
            raise ValueError("it unpacks to far more than it holds")


def verify(content: bytes, unions: Mapping[str, Mapping[int, str]]) -> Allowance:
    """Visit every table in a .tflite file, and return the remaining memory limit.

    `unions` has the kinds of tables by number, for each union of the schema.

    Raises:
        ValueError: an item ends after the end of the file, or the file takes too much memory.
        struct.error: an offset points after the end of the file.
    """
    walk = _TableWalk(content, unions)
    walk.table(_WORD.unpack_from(content, 0)[0], "Model")
    return walk.allowance


class _TableWalk:
    def __init__(self, content: bytes, unions: Mapping[str, Mapping[int, str]]) -> None:
        self.content = content
        self.unions = unions
        self.allowance = Allowance(MAX_EXPANSION * len(content) + EXTRA_BYTES)

    def table(self, position: int, kind: str) -> None:
        self.allowance.spend(_TABLE)
        vtable = position - _INT.unpack_from(self.content, position)[0]
        if vtable < 0:
            raise ValueError("an offset before the beginning")
        size = _SHORT.unpack_from(self.content, vtable)[0]
        for field, kind_of_field in LAYOUT.get(kind, {}).items():
            field_position = self._field_position(position, vtable, size, field)
            if field_position:
                if kind_of_field[-1] == "?":
                    number = self._field_position(position, vtable, size, field - 1)
                    kind_of_field = self.unions[kind_of_field[:-1]].get(self.content[number] if number else 0, "")
                self._field(field_position, kind_of_field)

    def _field_position(self, position: int, vtable: int, size: int, field: int) -> int:
        """Return the position of a field of a table; 0 if it is missing."""
        entry = 4 + 2 * field
        offset = _SHORT.unpack_from(self.content, vtable + entry)[0] if entry < size else 0
        return position + offset if offset else 0

    def _field(self, position: int, kind: str) -> None:
        target = position + _WORD.unpack_from(self.content, position)[0]
        if kind[:1] != "[" and kind not in _LISTS:
            return self.table(target, kind)
        width, cost = _LISTS.get(kind, (4, 8))
        count = _WORD.unpack_from(self.content, target)[0]
        if target + 4 + count * width > len(self.content):
            raise ValueError("a list beyond the end")
        self.allowance.spend(_LIST + count * cost)
        if kind[0] == "[":
            for entry in range(target + 4, target + 4 + 4 * count, 4):
                self.table(entry + _WORD.unpack_from(self.content, entry)[0], kind[1:-1])
        return None
