"""Bundles that earlier versions of Coralline signed: they are read, and every change is detected."""

from __future__ import annotations

import functools
import hashlib

import golden
import pytest
import signer
from archives import manifest, written
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.contract import bundle, signature
from deploy.contract.bundle import TRAILER_BYTES, TRAILER_MAGIC, Bundle, BundleError

GOOD = golden.packed()
TRAILER = signer.trailer(GOOD)
SIGNED = GOOD + TRAILER
KEY = signer.public_key()
OTHER_SEED = hashlib.sha256(b"other").digest()
OTHER = signer.public_key(OTHER_SEED)


def refused(content: bytes, message: str | None = None) -> None:
    with pytest.raises(BundleError, match=message):
        Bundle(content)


def flipped(content: bytes, place: int, pattern: int = 0xFF) -> bytes:
    return content[:place] + bytes([content[place] ^ pattern]) + content[place + 1 :]


def test_form() -> None:
    assert TRAILER_BYTES == 144
    assert len(TRAILER_MAGIC) == 16
    assert Bundle(SIGNED).members == Bundle(GOOD).members == golden.members()
    assert Bundle(SIGNED).digest == Bundle(GOOD).digest


def test_changed() -> None:
    other = bundle.pack(golden.manifest(name="other"), golden.members())
    for spoilt in (flipped(GOOD, 700), other, b"", GOOD[:-1], GOOD + b"x"):
        refused(spoilt + TRAILER, "changed after an earlier version of Coralline signed it")
    for spoilt in (
        GOOD + signer.trailer(GOOD, key=OTHER),  # another key's signature
        GOOD + signer.trailer(GOOD, key=KEY, seed=OTHER_SEED),
        GOOD + TRAILER_MAGIC + hashlib.sha256(GOOD).digest() + bytes(96),
        SIGNED + signer.trailer(SIGNED),
    ):
        refused(spoilt)


def test_a_signature_vouches_for_no_broken_bundle() -> None:
    for spoilt in (b"", b"hello", GOOD + b"x", flipped(GOOD, 700), written(manifest(schema_version=2))):
        refused(spoilt + signer.trailer(spoilt))


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF])
def test_every_byte_counts(pattern: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "verify", functools.cache(signature.verify))  # slow without `cryptography`
    for place in range(len(SIGNED)):
        refused(flipped(SIGNED, place, pattern))


def test_every_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "verify", functools.cache(signature.verify))
    for length in range(len(SIGNED)):
        if length != len(GOOD):  # without the trailer, it is the unsigned bundle
            refused(SIGNED[:length])


@settings(max_examples=200)
@given(st.binary(min_size=TRAILER_BYTES, max_size=TRAILER_BYTES))
def test_any_bytes_as_a_trailer(end: bytes) -> None:
    refused(GOOD + end)
    refused(GOOD + TRAILER_MAGIC + end[16:])
