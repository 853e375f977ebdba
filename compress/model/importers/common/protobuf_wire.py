"""Fields of a protobuf message without its schema, to inspect TensorFlow files without TensorFlow (10 s to import)."""

from __future__ import annotations

from collections.abc import Iterator

Buffer = bytes | memoryview


def fields(data: Buffer) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message in order: field number, and an integer or the bytes of the field.

    Raises:
        ValueError: the data is not a message.
    """
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    try:
        message = Empty.FromString(bytes(data))
    except DecodeError as error:
        raise ValueError("it is not a protobuf message") from error
    return ((field.field_number, field.data) for field in UnknownFieldSet(message))


def messages(data: Buffer, number: int) -> Iterator[bytes]:
    """Yield the contents of the fields with this number that hold bytes: messages, text.

    Raises:
        ValueError: the data is not a message.
    """
    return (value for field, value in fields(data) if field == number and isinstance(value, bytes))


def text(data: Buffer, number: int) -> str:
    """Return the last field with this number as text; empty if it is absent.

    Raises:
        ValueError: the data is not a message, or the field is not text.
    """
    return bytes([b"", *messages(data, number)][-1]).decode()


def integer(data: Buffer, number: int) -> int:
    """Return the last field with this number as an integer; 0 if it is absent.

    Raises:
        ValueError: the data is not a message.
    """
    return [0, *(value for field, value in fields(data) if field == number and isinstance(value, int))][-1]
