"""The bytes of TFRecord and WAV files."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from compress.data.sources.tfrecord import masked_crc


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**values: Any) -> bytes:
    """Return a serialized tf.train.Example with features of bytes, or of packed integers or floats."""
    entries = b""
    for name, value in values.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif np.asarray(value).dtype.kind == "f":
            feature = field(2, field(1, np.asarray(value, "<f4").tobytes()))
        else:
            feature = field(3, field(1, b"".join(varint(int(number) & (1 << 64) - 1) for number in np.ravel(value))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def record(content: bytes) -> bytes:
    head = struct.pack("<Q", len(content))
    return head + struct.pack("<I", masked_crc(head)) + content + struct.pack("<I", masked_crc(content))


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(tag: int = 1, bits: int = 16, channels: int = 1, rate: int = 8000, block: int | None = None) -> bytes:
    block = channels * bits // 8 if block is None else block
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits))


def sound(values: np.ndarray, rate: int = 8000) -> bytes:
    """Return a WAV file of one channel with 16 bits for each sample."""
    return riff(form(rate=rate), chunk(b"data", values.astype("<i2").tobytes()))
