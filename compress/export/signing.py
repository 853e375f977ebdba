"""Keys and signatures on the host. What is signed, and how it is verified, is in `deploy.contract.bundle`.

A private key is a PEM file (PKCS 8, without a password) that only its owner can read; it never
is in pipeline.yaml, the store or a report. Needs the package `cryptography` (`coralline[sign]`).
"""

from __future__ import annotations

import os
import stat
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import SigningError
from compress.files import explain, write_atomically
from deploy.contract import bundle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

INSTALL = "install it: pip install 'coralline[sign]'"


def generate(name: Path) -> tuple[Path, Path]:
    """Makes a key pair: NAME.key, private, which stays here; NAME.pem, public, which devices are given.

    Raises:
        SigningError: there is no `cryptography`, or a file of that name is there already.
        StoreError: the folder cannot be written.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise SigningError("there is no package `cryptography`", todo=INSTALL) from error
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    private, public = (name.with_name(name.name + ending) for ending in (".key", ".pem"))
    _create(private, secret, 0o600)
    try:
        _create(public, _pem(key.public_key()), 0o644)
    except BaseException:
        private.unlink()
        raise
    return private, public


def _pem(key: Ed25519PublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    text: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return text


def _create(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that was not there before."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, mode)  # whatever the umask is
            stream.write(content)
            stream.flush()
            os.fsync(handle)
    except FileExistsError as error:
        raise SigningError(
            "is there already, and is not overwritten", where=str(path), todo="take another name"
        ) from error
    except OSError as error:
        raise explain(error, "the key cannot be written") from error


def sign(path: Path, key: Path, out: Path) -> str:
    """Signs a bundle.

    Args:
        path: the bundle; a signature that it has is replaced.
        key: the private key.
        out: where the signed bundle goes; may be `path`.

    Returns:
        The public key, as in its .pem file.

    Raises:
        SigningError: no `cryptography`, a key that cannot be used, or what is to be signed is no whole bundle.
        StoreError: the bundle cannot be read or written.
    """
    private = _read(key)
    public = private.public_key().public_bytes_raw()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise explain(error, "the bundle cannot be read") from error
    try:
        signed = bundle.sign(content, public, private.sign)
    except bundle.BundleError as error:
        raise SigningError(f"is not signed: {error}", where=str(path), todo="run the pipeline again") from error
    try:
        write_atomically(out, signed)
    except OSError as error:
        raise explain(error, "the signed bundle cannot be written") from error
    return b64encode(public).decode()


def _read(path: Path) -> Ed25519PrivateKey:
    """The private key in a file that nobody else can read."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise SigningError("there is no package `cryptography`", todo=INSTALL) from error
    where = str(path)
    try:
        with path.open("rb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise SigningError("others can read this private key", where=where, todo=f"chmod 600 {path}")
            content = stream.read(10_000)
    except OSError as error:
        raise explain(error, "the private key cannot be read") from error
    try:
        key = load_pem_private_key(content, None)
    except TypeError as error:
        raise SigningError("the private key has a password", where=where, allowed="a key without one") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SigningError("is no private key in PEM", where=where, todo="python -m compress keygen NAME") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningError("is a private key, but not for Ed25519", where=where, todo="python -m compress keygen NAME")
    return key
