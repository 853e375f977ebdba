"""Signed bundles: unsigned, untrusted, wrongly signed and changed ones are refused, and told apart."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden
import pytest
import signer
from archives import manifest, written
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

from deploy.contract import bundle, signature
from deploy.contract.bundle import (
    TRAILER_BYTES,
    TRAILER_MAGIC,
    Bundle,
    BundleError,
    ChangedError,
    UnsignedError,
    UntrustedBundleError,
    WronglySignedError,
)

GOOD = golden.packed()
SIGNED = signer.signed(GOOD)
KEY = signer.public_key()
TRAILER = signer.trailer(GOOD)
OTHER_SEED = hashlib.sha256(b"other").digest()
OTHER = signer.public_key(OTHER_SEED)
KINDS = {
    BundleError: "changed",
    ChangedError: "changed",
    UnsignedError: "unsigned",
    UntrustedBundleError: "untrusted",
    WronglySignedError: "wrongly signed",
}


def refused(content: bytes, kind: type[BundleError], keys: Any = (KEY,)) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle(content, keys)
    assert type(caught.value) is kind
    assert caught.value.kind == KINDS[kind]
    assert caught.value.exit_code == 8
    return str(caught.value)


def flipped(content: bytes, place: int, pattern: int = 0xFF) -> bytes:
    return content[:place] + bytes([content[place] ^ pattern]) + content[place + 1 :]


def test_form() -> None:
    assert TRAILER_BYTES == 144
    assert GOOD + TRAILER == SIGNED
    assert len(TRAILER_MAGIC) == 16


@pytest.mark.parametrize("keys", [(), (KEY,), {KEY: "some.pem", OTHER: "other.pem"}, [OTHER, KEY]])
def test_signed_by_who_is_trusted(keys: Any, tmp_path: Path) -> None:
    (tmp_path / "signed.coralline").write_bytes(SIGNED)
    for opened in (Bundle(SIGNED, keys), bundle.read(str(tmp_path / "signed.coralline"), keys)):
        assert opened.signer == KEY
        assert opened.members == golden.members()
    assert Bundle(GOOD).signer is None


def test_signed_again() -> None:
    again = signer.signed(SIGNED, OTHER_SEED)
    assert again == signer.signed(GOOD, OTHER_SEED)
    assert Bundle(again).signer == OTHER
    assert signer.signed(SIGNED) == SIGNED


def test_only_a_whole_bundle_is_signed() -> None:
    with pytest.raises(BundleError):
        signer.signed(flipped(GOOD, 100))
    with pytest.raises(WronglySignedError):
        bundle.sign(GOOD, OTHER, signer.sign)


# --- told apart -------------------------------------------------------------------------


def test_unsigned() -> None:
    message = refused(GOOD, UnsignedError)
    assert signature.key_name(KEY) in message
    assert "not signed" in message


def test_untrusted() -> None:
    message = refused(signer.signed(GOOD, OTHER_SEED), UntrustedBundleError)
    assert signature.key_name(KEY) in message
    assert signature.key_name(OTHER) in message


def test_wrongly_signed() -> None:
    for spoilt in (
        GOOD + signer.trailer(GOOD, key=OTHER),  # another key's signature
        GOOD + signer.trailer(GOOD, key=KEY, seed=OTHER_SEED),
        flipped(SIGNED, len(SIGNED) - 1),
        flipped(SIGNED, len(GOOD) + 20),  # the digest
        flipped(GOOD, 700) + TRAILER[:16] + hashlib.sha256(flipped(GOOD, 700)).digest() + TRAILER[48:],
        GOOD + TRAILER_MAGIC + hashlib.sha256(GOOD).digest() + bytes(96),
    ):
        for keys in ((), (KEY,), (OTHER,)):
            assert "does not match the key" in refused(spoilt, WronglySignedError, keys)


def test_changed() -> None:
    other = bundle.pack(golden.manifest(name="other"), golden.members())
    for keys in ((), (KEY,), (OTHER,)):
        for spoilt in (flipped(GOOD, 700), other, b"", GOOD[:-1], GOOD + b"x"):
            assert "changed after it was signed" in refused(spoilt + TRAILER, ChangedError, keys)
    refused(flipped(GOOD, 700), BundleError, ())
    refused(flipped(GOOD, 700), UnsignedError)


def test_a_signature_vouches_for_no_broken_bundle() -> None:
    """Whoever has the key may sign anything; what is signed is checked all the same."""
    for spoilt in (b"", b"hello", GOOD + b"x", flipped(GOOD, 700), written(manifest(schema_version=2))):
        for keys in ((), (KEY,)):
            refused(spoilt + signer.trailer(spoilt), BundleError, keys)


def test_a_signature_of_a_signed_bundle() -> None:
    twice = SIGNED + signer.trailer(SIGNED)
    refused(twice, BundleError)
    refused(SIGNED + TRAILER, ChangedError)


def test_nothing_is_opened_before_the_signature_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bytes] = []
    untrusted = signer.signed(GOOD, OTHER_SEED)
    monkeypatch.setattr(bundle, "read_archive", lambda archive: opened.append(archive) or {})
    for spoilt, keys in (
        (GOOD, [KEY]),
        (untrusted, [KEY]),
        (flipped(SIGNED, len(SIGNED) - 1), []),
        (flipped(GOOD, 700) + TRAILER, []),
    ):
        with pytest.raises(BundleError):
            Bundle(spoilt, keys)
    assert opened == []
    with pytest.raises(KeyError):
        Bundle(SIGNED, [KEY])
    assert opened == [GOOD]


# --- damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["any key", "one key"])
def test_every_byte_counts(pattern: int, keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the flip says what is told."""
    monkeypatch.setattr(signature, "verify", functools.cache(signature.verify))  # slow without `cryptography`
    end = len(GOOD)
    for place in range(len(SIGNED)):
        kind: type[BundleError] = ChangedError
        if end <= place < end + 16:  # no trailer any more, and so something behind the zip
            kind = UnsignedError if keys else BundleError
        elif place >= end + 16:
            kind = WronglySignedError
        refused(flipped(SIGNED, place, pattern), kind, keys)


def test_every_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "verify", functools.cache(signature.verify))
    for length in range(len(SIGNED)):
        if length != len(GOOD):  # without its whole trailer it is an unsigned bundle
            refused(SIGNED[:length], BundleError, ())
        refused(SIGNED[:length], UnsignedError)


@pytest.mark.parametrize("more", [b"\0", b"x", TRAILER_MAGIC, TRAILER, bytes(TRAILER_BYTES), SIGNED])
def test_nothing_may_stand_before_or_behind(more: bytes) -> None:
    for keys in ((), (KEY,)):
        for content in (SIGNED + more, more + SIGNED, GOOD + more + SIGNED[len(GOOD) :]):
            if content != GOOD + b"" + TRAILER:
                with pytest.raises(BundleError):
                    Bundle(content, keys)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(
            st.integers(0, TRAILER_BYTES),
            st.sampled_from(["set", "insert", "delete"]),
            st.sampled_from([TRAILER_MAGIC, KEY, OTHER, bytes(32), b"\1" + bytes(31), b"\xff" * 32, b"PK\5\6"])
            | st.binary(min_size=1, max_size=TRAILER_BYTES),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_trailer(edits: list[tuple[int, str, bytes]]) -> None:
    end = TRAILER
    for place, what, piece in edits:
        removed = 0 if what == "insert" else len(piece)
        end = end[:place] + (b"" if what == "delete" else piece) + end[place + removed :]
    for keys in ((), (KEY,)):
        try:
            opened = Bundle(GOOD + end, keys)
        except BundleError:
            continue
        assert end == TRAILER or (end == b"" and not keys and opened.signer is None)


@settings(max_examples=200)
@given(st.binary(min_size=TRAILER_BYTES, max_size=TRAILER_BYTES))
def test_any_bytes_as_a_trailer(end: bytes) -> None:
    refused(GOOD + end, BundleError, ())
    refused(GOOD + TRAILER_MAGIC + end[16:], WronglySignedError, ())


# --- on a device ------------------------------------------------------------------------

TOLD = """\
import json, sys
from deploy.contract import bundle
found = []
for path in sys.argv[2:]:
    try:
        found.append(bundle.read(path, [bytes.fromhex(sys.argv[1])]).signer.hex())
    except bundle.BundleError as error:
        found.append(error.kind)
assert "cryptography" not in sys.modules or sys.modules["cryptography"] is None
print(json.dumps(found))
"""


def test_without_cryptography(tmp_path: Path) -> None:
    contents = [SIGNED, GOOD, signer.signed(GOOD, OTHER_SEED), flipped(SIGNED, len(SIGNED) - 1), flipped(SIGNED, 700)]
    paths = [tmp_path / f"{index}.coralline" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    block = "import sys; sys.modules['cryptography'] = None\n"
    command = [sys.executable, "-W", "error", "-c", block + TOLD, KEY.hex(), *map(str, paths)]
    root = ROOT
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [KEY.hex(), "unsigned", "untrusted", "wrongly signed", "changed"]
