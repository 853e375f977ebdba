"""Private keys for signed metadata: PEM files (PKCS 8, Ed25519) that only their owner can read.

A private key is never in pipeline.yaml, the store, a report or a repository. This module needs the package
`cryptography` (the extra `sign`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import SigningError
from compress.core.files import explain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ENDING = ".key"
CREATE = "python -m compress trust init creates keys"


def generate(folder: Path, role: str) -> Path:
    """Create a private key in a folder; its name is the role with a number. An existing file is never overwritten.

    Raises:
        StoreError: the folder cannot be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = 1
        while True:
            path = folder / f"{role}-{number}{ENDING}"
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                break
            except FileExistsError:
                number += 1
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, 0o600)  # independent of the umask
            stream.write(secret)
            stream.flush()
            os.fsync(handle)
    except OSError as error:
        raise explain(error, "the key cannot be written") from error
    return path


def find(places: Sequence[Path]) -> list[Path]:
    """Return key files: each file in `places`, and all `*.key` of each folder.

    Raises:
        StoreError: a folder cannot be read.
    """
    paths: list[Path] = []
    for place in places:
        try:
            paths += sorted(place.glob(f"*{ENDING}")) if place.is_dir() else [place]
        except OSError as error:
            raise explain(error, "the keys cannot be read", place) from error
    return paths


def read(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a file that other users cannot read.

    Raises:
        SigningError: the key cannot be used.
        StoreError: the file cannot be read.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

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
        raise SigningError("is not a private key in PEM", where=where, hint=CREATE) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningError("is a private key, but not for Ed25519", where=where, hint=CREATE)
    return key
