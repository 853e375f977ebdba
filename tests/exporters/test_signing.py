"""Keys and signatures on the host: `keygen` and `sign`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.errors import SigningError, StoreError
from compress.exporters import signing
from deploy.contract import bundle, signature

pytest.importorskip("cryptography")
OPENSSL = shutil.which("openssl", path="/usr/bin:/bin")


def small(name: str = "tiny") -> bytes:
    """A bundle of hardly anything."""
    tensor = {"name": "x", "tensor": "x", "shape": [1], "dtype": "int8", "scale": 1.0, "zero_point": 0}
    digest = hashlib.sha256(json.dumps([1, []], separators=(",", ":")).encode()).hexdigest()
    manifest: dict[str, Any] = {
        "name": name,
        "coralline": "0",
        "task": "classification",
        "labels": ["tea"],
        "preprocessing": {"version": 1, "digest": digest, "steps": []},
        "models": {"int8": {"file": "int8.tflite", "inputs": [tensor], "outputs": [tensor]}},
        "golden": {"inputs": [], "outputs": {}},
    }
    return bundle.pack(manifest, {"int8.tflite": b"model"})


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return signing.generate(tmp_path / "shop")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.coralline"
    path.write_bytes(small())
    return path


def test_a_pair_of_keys(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        private, public = signing.generate(tmp_path / "shop.2026")
    finally:
        os.umask(old)
    assert [path.name for path in (private, public)] == ["shop.2026.key", "shop.2026.pem"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert private.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert len(signature.read_key(str(public))) == 32
    other, _ = signing.generate(tmp_path / "other")
    assert private.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("there", ["shop.key", "shop.pem"])
def test_no_key_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(SigningError, match=f"{there}: exists"):
        signing.generate(tmp_path / "shop")
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_link_is_no_place_for_a_key(tmp_path: Path) -> None:
    (tmp_path / "shop.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SigningError):
        signing.generate(tmp_path / "shop")
    assert not (tmp_path / "elsewhere").exists()


def test_a_signed_bundle(keys: tuple[Path, Path], file: Path, tmp_path: Path) -> None:
    public = signature.read_key(str(keys[1]))
    told = signing.sign(file, keys[0], tmp_path / "signed")
    assert told == signature.key_name(public)
    assert file.read_bytes() == small()
    assert bundle.read(str(tmp_path / "signed"), signature.trusted([str(keys[1])])).signer == public
    signing.sign(file, keys[0], file)
    assert file.read_bytes() == (tmp_path / "signed").read_bytes()  # Ed25519 has no chance in it
    other, _ = signing.generate(tmp_path / "other")
    signing.sign(file, other, file)
    with pytest.raises(bundle.UntrustedBundleError):
        bundle.read(str(file), [public])
    signing.sign(file, keys[0], file)
    assert file.read_bytes() == (tmp_path / "signed").read_bytes()
    header, secret, _ = keys[0].read_text().splitlines()
    assert header
    assert secret.encode() not in file.read_bytes()


@pytest.mark.parametrize("spoil", [lambda content: content[:-1], lambda content: b"", lambda content: content + b"x"])
def test_only_a_whole_bundle_is_signed(keys: tuple[Path, Path], file: Path, spoil: Callable[[bytes], bytes]) -> None:
    file.write_bytes(spoil(small()))
    with pytest.raises(SigningError, match=r"tiny\.coralline: cannot be signed"):
        signing.sign(file, keys[0], file)
    assert file.read_bytes() == spoil(small())


def test_files_that_are_not_there(keys: tuple[Path, Path], file: Path, tmp_path: Path) -> None:
    for path, key, out in (
        (tmp_path / "absent", keys[0], file),
        (file, tmp_path / "absent", file),
        (file, keys[0], tmp_path / "absent" / "out"),
    ):
        with pytest.raises(StoreError):
            signing.sign(path, key, out)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read(keys: tuple[Path, Path], file: Path, mode: int) -> None:
    keys[0].chmod(mode)
    with pytest.raises(SigningError, match="other users can read this private key; chmod 600"):
        signing.sign(file, keys[0], file)


def private_key(path: Path, kind: str, password: bool = False) -> Path:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed448

    key = ec.generate_private_key(ec.SECP256R1()) if kind == "ec" else ed448.Ed448PrivateKey.generate()
    lock = form.BestAvailableEncryption(b"secret") if password else form.NoEncryption()
    path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, lock))
    path.chmod(0o600)
    return path


def test_keys_that_cannot_sign(keys: tuple[Path, Path], file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.key"
    for kind in ("ec", "ed448"):
        with pytest.raises(SigningError, match="not for Ed25519"):
            signing.sign(file, private_key(wrong, kind), file)
    with pytest.raises(SigningError, match="has a password"):
        signing.sign(file, private_key(wrong, "ec", password=True), file)
    for text in (keys[1].read_bytes(), b"", b"hello", keys[0].read_bytes()[:60]):
        wrong.write_bytes(text)
        with pytest.raises(SigningError, match="not a private key in PEM"):
            signing.sign(file, wrong, file)
    assert file.read_bytes() == small()


@pytest.mark.skipif(OPENSSL is None, reason="there is no openssl")
def test_keys_and_signatures_of_openssl(file: Path, tmp_path: Path) -> None:
    """Its keys sign here, and it verifies what is signed here, as docs/bundles.md says."""

    def openssl(*arguments: object) -> None:
        subprocess.run([str(OPENSSL), *map(str, arguments)], check=True, capture_output=True, cwd=tmp_path)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "a.key")
    openssl("pkey", "-in", "a.key", "-pubout", "-out", "a.pem")
    (tmp_path / "a.key").chmod(0o600)
    signing.sign(file, tmp_path / "a.key", file)
    content = file.read_bytes()
    assert bundle.read(str(file), signature.trusted([str(tmp_path / "a.pem")])).signer == content[-96:-64]
    (tmp_path / "message").write_bytes(content[-144:-96])
    (tmp_path / "signature").write_bytes(content[-64:])
    assert hashlib.sha256(content[:-144]).digest() == content[-128:-96]
    openssl("pkeyutl", "-verify", "-pubin", "-inkey", "a.pem", "-rawin", "-in", "message", "-sigfile", "signature")


def test_the_command_line(coralline: tiny.Coralline, file: Path, tmp_path: Path) -> None:
    made = coralline("keygen", "shop")
    assert (made.returncode, made.stderr) == (0, "")
    assert [line.split()[0] for line in made.stdout.splitlines()] == ["shop.key", "shop.pem"]
    done = coralline("sign", "tiny.coralline", "--key", "shop.key", "--out", "signed.coralline")
    assert (done.returncode, done.stderr) == (0, "")
    public = signature.trusted([str(tmp_path / "shop.pem")])
    assert done.stdout == f"signed.coralline: signed with {signature.key_name(next(iter(public)))}\n"
    assert bundle.read(str(tmp_path / "signed.coralline"), public).signer in public
    assert file.read_bytes() == small()
    assert coralline("sign", "tiny.coralline", "--key", "shop.key").returncode == 0
    assert file.read_bytes() == (tmp_path / "signed.coralline").read_bytes()
    again = coralline("keygen", "shop")
    assert (again.returncode, again.stdout) == (8, "")
    assert again.stderr == "coralline: shop.key: exists, and is not overwritten; use another name\n"
    assert coralline("sign", "tiny.coralline").returncode == 2
    assert coralline("sign", "shop.pem", "--key", "shop.key").returncode == 8


@pytest.mark.parametrize("command", [["keygen", "shop"], ["sign", "tiny.coralline", "--key", "some.key"]])
def test_without_cryptography(command: list[str], tmp_path: Path, file: Path) -> None:
    block = "import sys; sys.modules['cryptography'] = None; from compress.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block, *command],
        cwd=tmp_path,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 8
    assert (
        done.stderr
        == "coralline: the package `cryptography` is not installed; install it: pip install 'coralline[sign]'\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.coralline"]
