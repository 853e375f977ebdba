"""Checksum manifests: the SHA-256 of every file of a data set, by its path from the manifest's folder.

A TOML file with one table::

    [sha256]
    "photos/cat/1.jpg" = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import DataError
from compress.core.files import explain
from compress.data import files
from deploy.contract.durable_files import write_atomically

if TYPE_CHECKING:
    from compress.data.source import Source

MAX_BYTES = 256 << 20
"""Chosen: about two million files, with 64 characters of the digest and a path for each."""


def verify(path: Path, digests: Mapping[Path, str]) -> None:
    """Compare the SHA-256 of all files in use with a manifest.

    Raises:
        DataError: a file differs, is not listed or has an invalid name, or a listed file is not used.
    """
    expected, actual = _read(path), {_relative(file, path): digest for file, digest in digests.items()}
    changed = sorted(name for name in actual if name in expected and actual[name] != expected[name])
    added, gone = sorted(actual.keys() - expected.keys()), sorted(expected.keys() - actual.keys())
    problems = [
        f"{len(names)} {what}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
        for what, names in (("changed", changed), ("not listed", added), ("listed, but not there", gone))
        if names
    ]
    if problems:
        raise DataError(
            f"files are not what the manifest says: {'; '.join(problems)}",
            where=str(path),
            hint="get the data again, or write the manifest again with `data --write-manifest`",
        )


def write_for(source: Source, path: Path) -> int:
    """Write the checksums of all files of a source, and return the number of files.

    Raises:
        DataError: the source does not read files, or a file has a name that a manifest cannot hold.
        StoreError: the manifest cannot be written.
    """
    paths = source.files()
    if not paths:
        raise DataError("does not come from files", where=f"data.source.{source.name}")
    digests = files.digests(paths)
    write(path, {paths[name]: digest for name, digest in digests.items()})
    return len(digests)


def write(path: Path, digests: Mapping[Path, str]) -> None:
    """Write a manifest.

    Raises:
        DataError: a file has a name that it cannot hold.
        StoreError: it cannot be written.
    """
    names = sorted((_relative(file, path), digest) for file, digest in digests.items())
    lines = ["[sha256]", *(f'{json.dumps(name, ensure_ascii=False)} = "{digest}"' for name, digest in names)]
    try:
        write_atomically(path, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise explain(error, "the manifest cannot be written", path.parent) from error


def _relative(file: Path, manifest: Path) -> str:
    name = Path(os.path.relpath(file, manifest.parent)).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 are surrogates in Python, which TOML cannot hold
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise DataError("its name is not UTF-8, and a manifest is", where=shown, hint="rename the file") from error
    return name


def _read(path: Path) -> dict[str, str]:
    content = files.read(path, MAX_BYTES)
    try:
        table = tomllib.loads(content.decode())["sha256"]
    except (ValueError, KeyError, RecursionError) as error:
        raise DataError(f"is not a manifest: {error}", where=str(path), allowed="a table [sha256]") from error
    if not isinstance(table, dict) or not all(isinstance(digest, str) for digest in table.values()):
        raise DataError("is not a manifest", where=str(path), allowed="digests by file in [sha256]")
    return table
