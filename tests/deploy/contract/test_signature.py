"""Ed25519 against the RFC's vectors, Wycheproof's and hostile keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import signer
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.contract import signature

WYCHEPROOF = json.loads((Path(__file__).parent / "wycheproof_ed25519.json").read_text())["vectors"]
#: RFC 8032, section 7.1: private key, public key, message, signature.
RFC = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
#: The eight points of small order, and other encodings of some of them.
SMALL = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "0100000000000000000000000000000000000000000000000000000000000080",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
Verify = Callable[[bytes, bytes, bytes], bool]


@pytest.fixture(params=["plain Python", "cryptography"])
def verify(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Return `signature.verify` in each of its two implementations."""
    if request.param == "cryptography":
        pytest.importorskip("cryptography")
        monkeypatch.delattr(signature, "verify_plainly")
    else:
        monkeypatch.setitem(sys.modules, "cryptography", None)
        monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    return signature.verify


@pytest.mark.parametrize(("seed", "key", "message", "expected"), RFC)
def test_rfc_8032(verify: Verify, seed: str, key: str, message: str, expected: str) -> None:
    public, text, signature_bytes = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(expected)
    assert verify(public, signature_bytes, text)
    assert not verify(public, signature_bytes, text + b"\0")
    assert signer.public_key(bytes.fromhex(seed)) == public
    assert signer.sign(text, bytes.fromhex(seed)) == signature_bytes


def test_wycheproof(verify: Verify) -> None:
    assert len(WYCHEPROOF) == 151
    assert {valid for _, _, valid, *_ in WYCHEPROOF} == {True, False}
    wrong = [
        (number, flag)
        for number, flag, valid, key, message, text in WYCHEPROOF
        if verify(*map(bytes.fromhex, (key, text, message))) != valid
    ]
    assert wrong == []


@pytest.mark.parametrize("key", SMALL)
def test_keys_of_small_order(verify: Verify, key: str) -> None:
    """If the key is the neutral point, R = s B is valid for every message."""
    public = bytes.fromhex(key)
    assert not signature.usable(public)
    forged = signer._times(5) + (5).to_bytes(32, "little")
    assert not any(verify(public, forged, bytes([number])) for number in range(16))


def test_there_is_one_encoding_of_a_point() -> None:
    """A few points have two encodings in 32 bytes. The second encoding is not a valid key."""
    first = [y for y in range(19) if signature.usable(y.to_bytes(32, "little"))]
    assert first
    assert not [y for y in first if signature.usable((y + signature.P).to_bytes(32, "little"))]


def test_why_small_order_matters() -> None:
    neutral, forged = bytes.fromhex(SMALL[0]), signer._times(5) + (5).to_bytes(32, "little")
    assert signature.verify_plainly(neutral, forged, b"whatever")


def test_every_bit_counts(verify: Verify) -> None:
    key, message = signer.public_key(), b"message"
    signature_bytes = signer.sign(message)
    for place in range(0, 8 * len(signature_bytes), 3):
        changed = bytearray(signature_bytes)
        changed[place // 8] ^= 1 << place % 8
        assert not verify(key, bytes(changed), message)
    for place in range(0, 8 * len(key), 5):
        changed = bytearray(key)
        changed[place // 8] ^= 1 << place % 8
        assert not verify(bytes(changed), signature_bytes, message)
    for length in (0, 1, 31, 32, 63):
        assert not verify(key, signature_bytes[:length], message)
        assert not verify(key[: length % 32], signature_bytes, message)
    assert not verify(key, signature_bytes + b"\0", message)


def test_s_must_be_reduced(verify: Verify) -> None:
    signature_bytes = signer.sign(b"message")
    s = int.from_bytes(signature_bytes[32:], "little")
    for more in range(1, 15):
        larger = signature_bytes[:32] + (s + more * signature.L).to_bytes(32, "little")
        assert not verify(signer.public_key(), larger, b"message")


@settings(max_examples=30)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_both_ways_agree_with_another_program(seed: bytes, message: bytes) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    assert signer.public_key(seed) == key.public_key().public_bytes_raw()
    signature_bytes = key.sign(message)
    assert signer.sign(message, seed) == signature_bytes
    assert signature.verify_plainly(signer.public_key(seed), signature_bytes, message)
    assert not signature.verify_plainly(signer.public_key(seed), signature_bytes, message + b"x")


@settings(max_examples=100)
@given(st.binary(max_size=40), st.binary(max_size=70), st.binary(max_size=10))
def test_any_bytes(key: bytes, text: bytes, message: bytes) -> None:
    assert not signature.verify(key, text, message)
    assert not signature.verify_plainly(key, text, message)


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "type('Panic', (BaseException,), {})"])
def test_a_broken_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    (tmp_path / "cryptography").mkdir()
    (tmp_path / "cryptography" / "__init__.py").write_text(f"raise {error}('no library')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    signature_bytes = signer.sign(b"message")
    assert signature.verify(signer.public_key(), signature_bytes, b"message")
    assert not signature.verify(signer.public_key(), signature_bytes, b"messages")


def test_an_interruption_is_no_broken_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cryptography.py").write_text("raise KeyboardInterrupt\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        signature.verify(signer.public_key(), signer.sign(b""), b"")
