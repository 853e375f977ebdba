"""Fields of protobuf messages without their schema, to inspect TensorFlow files without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

VARINT, BYTES = 0, 2
"""Wire types of integers, and of messages and text. Source: protobuf.dev/programming-guides/encoding."""


def messages(data: bytes, number: int) -> list[bytes]:
    """Return the contents of the fields with this number that hold bytes: messages, text.

    Raises:
        ValueError: the data is not a message.
    """
    return [content for content in _fields(data, number, BYTES) if isinstance(content, bytes)]


def message(data: bytes, number: int) -> bytes:
    """Return the first message in the fields with this number; an empty one if the field is absent.

    Raises:
        ValueError: the data is not a message.
    """
    return next(iter(messages(data, number)), b"")


def text(data: bytes, number: int) -> str:
    """Return the last field with this number as text; empty if it is absent.

    Raises:
        ValueError: the data is not a message, or the field is not text.
    """
    return [b"", *messages(data, number)][-1].decode()


def integer(data: bytes, number: int) -> int:
    """Return the last field with this number as an integer; 0 if it is absent.

    Raises:
        ValueError: the data is not a message.
    """
    return [0, *(value for value in _fields(data, number, VARINT) if isinstance(value, int))][-1]


def _fields(data: bytes, number: int, wire_type: int) -> Iterator[bytes | int]:
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError as error:
        raise ValueError("it is not a protobuf message, or it is truncated") from error
    for field in fields:
        if (field.field_number, field.wire_type) == (number, wire_type):
            yield field.data
