"""Signatures: Ed25519 (RFC 8032).

If `cryptography` is installed, it verifies signatures; otherwise the plain Python below does. Both follow the strict
reading of RFC 8032, section 5.1.7, without the cofactor: s < L, and canonical encodings only. Both refuse public keys
of small order, for which anybody can create signatures. No value here is secret, so constant time is not needed. The
host signs (`compress.surface.fleet.repository`).
"""

from __future__ import annotations

import hashlib
import warnings
from typing import List, Optional, Tuple

KEY_BYTES = 32
SIGNATURE_BYTES = 64


def verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether a signature of a message is valid.

    Args:
        public_key: 32 bytes.
        signature: 64 bytes.
        message: any bytes.
    """
    if not usable(public_key) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on an old Python it asks for a newer one
            from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except BaseException as error:  # missing, too old, or broken: then some versions panic, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return verify_plainly(public_key, signature, message)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except InvalidSignature:
        return False
    except UnsupportedAlgorithm:  # an OpenSSL without Ed25519
        return verify_plainly(public_key, signature, message)
    return True


# --- the curve: -x^2 + y^2 = 1 + d x^2 y^2 over the integers modulo P (RFC 8032, 5.1) --------

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
_ROOT = pow(2, (P - 1) // 4, P)
"""A square root of -1."""
Point = Tuple[int, int, int, int]
"""Extended homogeneous coordinates: x = X/Z, y = Y/Z, x y = T/Z."""
_ZERO: Point = (0, 1, 1, 0)


def _add(first: Point, second: Point) -> Point:
    """The sum of any two points (5.1.4)."""
    x1, y1, z1, t1 = first
    x2, y2, z2, t2 = second
    a, b = (y1 - x1) * (y2 - x2) % P, (y1 + x1) * (y2 + x2) % P
    c, d = 2 * D * t1 * t2 % P, 2 * z1 * z2 % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def _double(point: Point) -> Point:
    """The sum of a point and itself (5.1.4)."""
    x, y, z, _ = point
    a, b = x * x % P, y * y % P
    h = a + b
    e, g = h - (x + y) * (x + y) % P, a - b
    f = 2 * z * z % P + g
    return e * f % P, g * h % P, f * g % P, e * h % P


def _decode(text: bytes) -> Optional[Point]:
    """Return the point that 32 bytes encode, or None (5.1.3)."""
    number = int.from_bytes(text, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    if len(text) != KEY_BYTES or y >= P:
        return None
    u, v = (y * y - 1) % P, (D * y * y + 1) % P
    x = u * pow(v, 3, P) * pow(u * pow(v, 7, P), (P - 5) // 8, P) % P
    if (v * x * x + u) % P == 0:
        x = x * _ROOT % P
    if (v * x * x - u) % P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return x, y, 1, x * y % P


def _encode(point: Point) -> bytes:
    """Return the 32 bytes that encode a point (5.1.2)."""
    x, y, z, _ = point
    inverse = pow(z, P - 2, P)
    return (y * inverse % P | (x * inverse % P & 1) << 255).to_bytes(KEY_BYTES, "little")


_BASE = _decode((4 * pow(5, P - 2, P) % P).to_bytes(KEY_BYTES, "little")) or _ZERO


def usable(public_key: bytes) -> bool:
    """Whether 32 bytes are a point's canonical encoding, and not one of the eight points of small order."""
    point = _decode(public_key)
    if point is None:
        return False
    for _ in range(3):
        point = _double(point)
    return point[0] != 0


def verify_plainly(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """`verify` without `cryptography`: s B - k A is encoded as R (5.1.7)."""
    point = _decode(public_key)
    s = int.from_bytes(signature[KEY_BYTES:], "little")
    if point is None or len(signature) != SIGNATURE_BYTES or s >= L:
        return False
    k = int.from_bytes(hashlib.sha512(signature[:KEY_BYTES] + public_key + message).digest(), "little") % L
    x, y, z, t = point
    minus: Point = (P - x, y, z, P - t)
    sums: List[Point] = [_ZERO, _BASE, minus, _add(_BASE, minus)]
    total = _ZERO
    for bit in range(L.bit_length() - 1, -1, -1):  # both products at once (Straus)
        total = _double(total)
        which = (s >> bit & 1) + 2 * (k >> bit & 1)
        if which:
            total = _add(total, sums[which])
    return _encode(total) == signature[:KEY_BYTES]
