"""Ed25519 signatures in plain Python (RFC 8032, 5.1.6): for tests on any interpreter, never for a real key."""

from __future__ import annotations

import hashlib

from deploy.contract import bundle, signature

SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
"""The private key of the RFC's first test."""


def _number(text):
    return int.from_bytes(text, "little")


def _times(factor):
    total, point = signature._ZERO, signature._BASE
    while factor:
        if factor & 1:
            total = signature._add(total, point)
        factor, point = factor >> 1, signature._double(point)
    return signature._encode(total)


def _secret(seed):
    digest = hashlib.sha512(seed).digest()
    scalar = _number(digest[:32]) & ((1 << 254) - 8) | 1 << 254
    return scalar, digest[32:]


def public_key(seed=SEED):
    """Return the public key of a private key: 32 bytes."""
    return _times(_secret(seed)[0])


def sign(message, seed=SEED):
    """Return the signature of a message: 64 bytes."""
    scalar, prefix = _secret(seed)
    nonce = _number(hashlib.sha512(prefix + message).digest()) % signature.L
    start = _times(nonce)
    challenge = _number(hashlib.sha512(start + public_key(seed) + message).digest())
    return start + ((nonce + challenge * scalar) % signature.L).to_bytes(32, "little")


def signed(content, seed=SEED):
    """Return a bundle as earlier versions of Coralline signed it."""
    return content + trailer(content, seed=seed)


def trailer(archive, key=None, seed=SEED):
    """Return a valid trailer for any bytes, or one that names another key."""
    message = bundle.TRAILER_MAGIC + hashlib.sha256(archive).digest()
    return message + (key or public_key(seed)) + sign(message, seed)
