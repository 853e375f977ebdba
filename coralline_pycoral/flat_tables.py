"""FlatBuffers: reading of tables, and new tables in front of an existing file.

Positions in a FlatBuffers file point forward only. New tables are therefore written in front of the old file, and point
into it. Layout of the bytes: FlatBuffers internals (google/flatbuffers).
"""

from __future__ import annotations

import struct
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

ByteString = Union[bytes, bytearray]
_ALIGNMENT = 16
"""The alignment of the data of tensors in schema.fbs."""


def u32(data: ByteString, position: int) -> int:
    """Return the number at a position: uint32."""
    (value,) = struct.unpack_from("<I", data, position)
    return int(value)


def field(data: ByteString, table: int, number: int) -> int:
    """Return the position of a field of a table; 0: the field has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number >= size:
        return 0
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def vector(data: ByteString, table: int, number: int) -> int:
    """Return the position of the vector or table of a field. A vector begins with its length.

    Raises:
        ValueError: the table has no such field.
    """
    position = field(data, table, number)
    if not position:
        raise ValueError("a table has no field %d" % number)
    return position + u32(data, position)


def tables(data: ByteString, position: int) -> List[int]:
    """Return the positions of the tables of a vector."""
    positions = range(position + 4, position + 4 + 4 * u32(data, position), 4)
    return [element + u32(data, element) for element in positions]


class Old(NamedTuple):
    """A table, vector or string of the old file, by its position there."""

    position: int


class Values(NamedTuple):
    """A new vector of numbers: its length, and its bytes."""

    length: int
    content: bytes


Node = Any
"""An `Old`, `Values`, a list of nodes (a vector of tables), or a map (a table) from field numbers to nodes, or to pairs
of a format of `struct`, of at most four bytes, and a number."""


def with_tables(old: bytes, root: Node, identifier: bytes) -> bytes:
    """Return a file with a new root table, and with the old file behind the new tables."""
    data = bytearray(b"\0\0\0\0" + identifier)
    waiting: List[Tuple[int, Node]] = [(0, root)]
    into_old: List[Tuple[int, int]] = []
    while waiting:
        place, node = waiting.pop(0)
        if isinstance(node, Old):
            into_old.append((place, node.position))
            continue
        struct.pack_into("<I", data, place, _written(data, node, waiting) - place)
    _pad(data, 0)
    for place, position in into_old:
        struct.pack_into("<I", data, place, len(data) + position - place)
    return bytes(data) + old


def _written(data: bytearray, node: Node, waiting: List[Tuple[int, Node]]) -> int:
    """Append a node to the data and what it refers to to the list; return its position."""
    if isinstance(node, Values):
        _pad(data, 4)
        start = len(data)
        data += struct.pack("<I", node.length) + node.content
        return start
    _pad(data, 0)
    if isinstance(node, dict):
        return _written_table(data, node, waiting)
    start = len(data)
    data += struct.pack("<I", len(node)) + bytes(4 * len(node))
    waiting += [(start + 4 + 4 * index, element) for index, element in enumerate(node)]
    return start


def _written_table(data: bytearray, fields: Dict[int, Any], waiting: List[Tuple[int, Node]]) -> int:
    count = max(fields, default=-1) + 1
    offsets = [4 + 4 * sorted(fields).index(number) if number in fields else 0 for number in range(count)]
    vtable = len(data)
    data += struct.pack("<HH%dH" % count, 4 + 2 * count, 4 + 4 * len(fields), *offsets)
    _pad(data, 0)
    start = len(data)
    data += struct.pack("<i", start - vtable) + bytes(4 * len(fields))
    for number, value in fields.items():
        if type(value) is tuple:
            struct.pack_into(value[0], data, start + offsets[number], value[1])
        else:
            waiting.append((start + offsets[number], value))
    return start


def _pad(data: bytearray, ahead: int) -> None:
    """Append zeros up to `ahead` bytes before an aligned position."""
    data += bytes(-(len(data) + ahead) % _ALIGNMENT)


def numbers(form: str, values: Sequence[Any]) -> Values:
    """Return a vector of numbers; `form`: the format of one number."""
    return Values(len(values), struct.pack("<%d%s" % (len(values), form), *values))
