"""CRC-32C, the checksum of TFRecord files, in numpy.

Source: Castagnoli et al., Optimization of Cyclic Redundancy-Check Codes, 1993; RFC 3720, appendix B.4. The checksum
is linear: that of a whole is the exclusive or of those of its parts, each taken past the bytes that follow it. So
parts of LANE bytes are worked on side by side, and then joined two by two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

POLYNOMIAL = 0x82F63B78
LANE = 64
Words = Any
"""A numpy array of uint32."""


def _table() -> Words:
    values: Any = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = (values >> 1) ^ np.where(values & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return values.astype(np.uint32)


TABLE = _table()


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    if len(content) < LANE:
        value = 0xFFFFFFFF
        for byte in content:
            value = int(TABLE[(value ^ byte) & 0xFF]) ^ (value >> 8)
        return value ^ 0xFFFFFFFF
    lanes = 1 << (-(-len(content) // LANE) - 1).bit_length()
    padded = np.zeros(lanes * LANE, np.uint8)  # zeros in front change nothing, since each lane begins with 0
    start = len(padded) - len(content)
    padded[start:] = np.frombuffer(content, np.uint8)
    padded[start : start + 4] ^= 0xFF  # the same as beginning with 0xFFFFFFFF
    values = np.zeros(lanes, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(lanes, LANE).T):
        values = TABLE[(values ^ column) & 0xFF] ^ (values >> 8)
    level = 0
    while len(values) > 1:
        values = _past(values[0::2], level) ^ values[1::2]
        level += 1
    return int(values[0]) ^ 0xFFFFFFFF


def masked(value: int) -> int:
    """Return a checksum in the masked form of TFRecord files."""
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _past(values: Words, level: int) -> Words:
    """Return checksums advanced by LANE * 2**level zero bytes."""
    tables = _tables(level)
    return (
        tables[0][values & 0xFF]
        ^ tables[1][values >> 8 & 0xFF]
        ^ tables[2][values >> 16 & 0xFF]
        ^ tables[3][values >> 24]
    )


@lru_cache(maxsize=64)
def _tables(level: int) -> Words:
    """Return the contribution of each byte of a checksum: [4, 256]."""
    every = np.arange(256, dtype=np.uint32)
    values = np.stack([every << np.uint32(shift) for shift in (0, 8, 16, 24)])
    if level:
        return _past(_past(values, level - 1), level - 1)
    for _ in range(LANE):
        values = TABLE[values & 0xFF] ^ (values >> 8)
    return values
