"""A cache of the vendor compiler's results: a folder that a team can share.

An entry is one file, `<key>-<version>`: a line of JSON, then the bytes of its parts (the log, and the compiled model or
its segments). The key is the SHA-256 of the model's digest and the options. The compiler's version, as printed in its
log, is in the name and not in the key: a machine without a compiler can search for a model, options and any 16.0. The
machine, image or host does not matter. Permanent failures are cached too, as a log without a model.

Entries are written atomically (one `os.replace`), and are used only if all bytes agree with their checksums. A damaged
or foreign file counts as a miss. Users with write access to the folder are trusted like users who run the compiler, and
the caller still validates every result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.core.errors import reason_of
from compress.core.files import digest_of, explain
from compress.targets.edgetpu.compiler.host import LOG, CompilerRun
from deploy.contract.durable_files import write_atomically

FORMAT = 1
"""To be increased when entries change: models are then compiled again."""
MAX_ENTRY_BYTES = 1 << 30
"""A damaged entry cannot ask for more memory; compiled models have tens of MB."""
MAX_HEAD_BYTES = 1 << 16
"""The head is one line that names a few files."""
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,12}){1,3}")


@dataclass(frozen=True)
class Cache:
    """A folder with results; the first result creates it."""

    folder: Path

    @property
    def names(self) -> list[str]:
        """The names of all entries, including damaged ones."""
        try:
            return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))
        except OSError:
            return []

    def find(
        self, model: bytes, options: Sequence[str], version: str, outputs: Sequence[str], note: Callable[[str], None]
    ) -> list[tuple[Path, CompilerRun]]:
        """Return the results for a model and options from a version of the compiler, the newest version first.

        `version` is the complete version or its beginning ("16.0"), and `outputs` has the names of the files in a
        successful result. `note` is called with a message for every damaged entry.

        Returns:
            The entries, whose names end with the compiler's version, and their contents.
        """
        start = f"{_key(model, options)}-"
        versions = [name.removeprefix(start) for name in self.names if name.startswith(start)]
        matching = [
            candidate
            for candidate in versions
            if _VERSION.fullmatch(candidate) and f"{candidate}.".startswith(f"{version}.")
        ]
        entries = []
        for candidate in sorted(matching, key=lambda text: [int(part) for part in text.split(".")], reverse=True):
            path = self.folder / f"{start}{candidate}"
            try:
                entries.append((path, _read(path, outputs)))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                note(f"the cached result {path} is damaged and not used: {reason_of(error)}")
        return entries

    def keep(self, model: bytes, options: Sequence[str], version: str | None, outcome: CompilerRun) -> None:
        """Store a result, and replace an older one. A result without a version in its log is not stored.

        Raises:
            StoreError: the folder cannot be written.
        """
        if version is None or not _VERSION.fullmatch(version):
            return
        parts = {LOG: outcome.log.encode(), **outcome.files}
        rows = [{"name": name, "bytes": len(part), "sha256": _sha256(part)} for name, part in parts.items()]
        head = {"format": FORMAT, "exit_code": outcome.exit_code, "options": list(options), "parts": rows}
        content = json.dumps(head).encode() + b"\n" + b"".join(parts.values())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / f"{_key(model, options)}-{version}", content)
        except OSError as error:
            raise explain(error, "the compiler's result cannot be cached", self.folder) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _key(model: bytes, options: Sequence[str]) -> str:
    return digest_of({"format": FORMAT, "model": _sha256(model), "options": list(options)})


def _read(path: Path, outputs: Sequence[str]) -> CompilerRun:
    """Return an entry whose checksums agree.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: the entry is damaged.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
            raise ValueError("it is not a file, or is too large")
        content = stream.read(MAX_ENTRY_BYTES)
    line, _, rest = content.partition(b"\n")
    if len(line) > MAX_HEAD_BYTES:
        raise ValueError("its first line is too long")
    head = json.loads(line)
    exit_code, rows = head["exit_code"], head["parts"]
    names = [row["name"] for row in rows]
    if head["format"] != FORMAT or type(exit_code) is not int or names not in ([LOG], [LOG, *outputs]):
        raise ValueError("its first line is invalid")
    parts = {}
    for row in rows:
        part, rest = rest[: row["bytes"]], rest[row["bytes"] :]
        if type(row["bytes"]) is not int or len(part) != row["bytes"] or _sha256(part) != row["sha256"]:
            raise ValueError(f"the checksum of {row['name']} is wrong")
        parts[row["name"]] = part
    if rest:
        raise ValueError("it has extra bytes at the end")
    return CompilerRun(exit_code, parts.pop(LOG).decode(), parts)
