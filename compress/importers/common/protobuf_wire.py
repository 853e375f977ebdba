"""Protobuf's wire format, read without its schema: for a look at files of TensorFlow without TensorFlow.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

Buffer = bytes | memoryview


def fields(data: Buffer) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message in order: number, and a whole number or the bytes that stand in it.

    Raises:
        ValueError: it is no message.
    """
    view, place = memoryview(data), 0
    while place < len(view):
        key, place = _varint(view, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(view, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(view, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field {number} is of the kind {kind}")
        if number == 0 or size > len(view) - place:
            raise ValueError(f"field {number} reaches beyond the end")
        yield number, view[place : place + size]
        place += size


def messages(data: Buffer, number: int) -> Iterator[memoryview]:
    """The fields of one number that hold bytes: messages, text.

    Raises:
        ValueError: it is no message.
    """
    return (value for found, value in fields(data) if found == number and isinstance(value, memoryview))


def text(data: Buffer, number: int) -> str:
    """The last field of a number as text; empty where there is none.

    Raises:
        ValueError: it is no message, or no text.
    """
    return bytes([b"", *messages(data, number)][-1]).decode()


def whole(data: Buffer, number: int) -> int:
    """The last field of a number as a whole number; 0 where there is none.

    Raises:
        ValueError: it is no message.
    """
    return [0, *(value for found, value in fields(data) if found == number and isinstance(value, int))][-1]


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(view):
            break
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), place
    raise ValueError("a number has no end")
