"""Results of the vendor's compiler, by what went in: a folder that a team can share.

An entry is one file, `<key>-<version>`: a line of JSON, then the bytes of its parts one after
the other (the log, and the compiled model or its segments). The key is the SHA-256 of the model's
own digest and the options. The compiler is not in the key but in the name, by the version that it
printed into its log: so a machine that has no compiler can ask for "this model, these options, any
16.0", and which machine, image or host the result was made on does not matter. Failures that a
second try would not change are kept as well, as a log without a model.

An entry appears whole or not at all (one `os.replace`), and counts only if all of its bytes are
what was written. Whoever may write into the folder is trusted with the compiled model itself, as
whoever runs the compiler is; but a foreign or damaged file is never more than a miss, and whoever
asks still checks that the parts are what the compiler makes of this model.
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

from compress.files import digest_of, explain, write_atomically
from compress.targets.edgetpu.compiler.host import LOG, CompilerRun

FORMAT = 1
MAX_ENTRY_BYTES = 1 << 30
MAX_HEAD_BYTES = 1 << 16
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,12}){1,3}")


@dataclass(frozen=True)
class Cache:
    """The folder; it need not exist before something is kept."""

    folder: Path

    @property
    def names(self) -> list[str]:
        """The names of all entries, whole or not."""
        try:
            return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))
        except OSError:
            return []

    def find(
        self, model: bytes, options: Sequence[str], version: str, outputs: Sequence[str], note: Callable[[str], None]
    ) -> list[tuple[Path, CompilerRun]]:
        """Return the results for this model with these options, by compilers of this version, the newest first.

        Args:
            model: the .tflite file.
            options: the compiler's options.
            version: the compiler's, in full or its beginning: "16.0".
            outputs: names of the files that a success has.
            note: called with a message for every damaged entry.

        Returns:
            The entries, whose names end with the compilers' versions, and what they hold.
        """
        start = f"{_key(model, options)}-"
        versions = [name.removeprefix(start) for name in self.names if name.startswith(start)]
        fitting = [each for each in versions if _VERSION.fullmatch(each) and f"{each}.".startswith(f"{version}.")]
        found = []
        for each in sorted(fitting, key=lambda text: [int(part) for part in text.split(".")], reverse=True):
            path = self.folder / f"{start}{each}"
            try:
                found.append((path, _read(path, outputs)))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                note(f"the cached result {path} is damaged and not used: {error}")
        return found

    def keep(self, model: bytes, options: Sequence[str], version: str | None, outcome: CompilerRun) -> None:
        """Keeps a result, in place of what there was. One whose log tells no version is not kept.

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
    """An entry, whose every byte is what was written.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it is not.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
            raise ValueError("it is no file of a fitting size")
        content = stream.read(MAX_ENTRY_BYTES)
    line, _, rest = content.partition(b"\n")
    if len(line) > MAX_HEAD_BYTES:
        raise ValueError("its first line is too long")
    head = json.loads(line)
    exit_code, rows = head["exit_code"], head["parts"]
    names = [row["name"] for row in rows]
    if head["format"] != FORMAT or type(exit_code) is not int or names not in ([LOG], [LOG, *outputs]):
        raise ValueError("its first line is not what it should be")
    parts = {}
    for row in rows:
        part, rest = rest[: row["bytes"]], rest[row["bytes"] :]
        if type(row["bytes"]) is not int or len(part) != row["bytes"] or _sha256(part) != row["sha256"]:
            raise ValueError(f"the bytes of {row['name']} are not those that were written")
        parts[row["name"]] = part
    if rest:
        raise ValueError("it has more bytes than were written")
    return CompilerRun(exit_code, parts.pop(LOG).decode(), parts)
