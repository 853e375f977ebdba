"""Keys and signatures on the host. The signed content and its verification are in `deploy.contract.bundle`.

A private key is a PEM file (PKCS 8, without a password) that only its owner can read. It is never in pipeline.yaml, the
store or a report. This module needs the package `cryptography` (`coralline[sign]`).
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
    """Create a key pair: NAME.key, private, for this host only; NAME.pem, public, for the devices.

    Raises:
        SigningError: `cryptography` is not installed, or a file with that name exists.
        StoreError: the folder cannot be written.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise SigningError("the package `cryptography` is not installed", hint=INSTALL) from error
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
    """Write a file that does not exist."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, mode)  # independent of the umask
            stream.write(content)
            stream.flush()
            os.fsync(handle)
    except FileExistsError as error:
        raise SigningError("exists, and is not overwritten", where=str(path), hint="use another name") from error
    except OSError as error:
        raise explain(error, "the key cannot be written") from error


def sign(path: Path, key: Path, out: Path) -> str:
    """Sign a bundle.

    Args:
        path: the bundle; an existing signature is replaced.
        key: the private key.
        out: the file for the signed bundle; may be `path`.

    Returns:
        The public key, as in its .pem file.

    Raises:
        SigningError: `cryptography` is not installed, the key cannot be used, or the bundle is invalid.
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
        raise SigningError(f"cannot be signed: {error}", where=str(path), hint="run the pipeline again") from error
    try:
        write_atomically(out, signed)
    except OSError as error:
        raise explain(error, "the signed bundle cannot be written") from error
    return b64encode(public).decode()


def _read(path: Path) -> Ed25519PrivateKey:
    """Read the private key from a file that other users cannot read."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise SigningError("the package `cryptography` is not installed", hint=INSTALL) from error
    where = str(path)
    try:
        with path.open("rb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise SigningError("other users can read this private key", where=where, hint=f"chmod 600 {path}")
            content = stream.read(10_000)
    except OSError as error:
        raise explain(error, "the private key cannot be read") from error
    try:
        key = load_pem_private_key(content, None)
    except TypeError as error:
        raise SigningError("the private key has a password", where=where, allowed="no password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SigningError("is not a private key in PEM", where=where, hint="python -m compress keygen NAME") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningError("is a private key, but not for Ed25519", where=where, hint="python -m compress keygen NAME")
    return key
