"""Who deployed what where: one JSON object in a line for each beginning and each end, added and never changed."""

from __future__ import annotations

import datetime
import fcntl
import getpass
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.files import explain


def default_path() -> Path:
    """`~/.local/state/coralline/deployments.jsonl`, or below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "coralline" / "deployments.jsonl"


def person() -> str:
    """Who works here: `user@machine`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True)
class Log:
    """The log of one command.

    Attributes:
        path: the file; it and its folder are made if need be.
        about: what stands in every line: who, which command, which bundle.
    """

    path: Path
    about: Mapping[str, Any]

    def add(self, address: str, event: str, **more: Any) -> None:
        """Adds a line, which is on the disk when this returns.

        Args:
            address: the device.
            event: `begun`, `done` or `failed`.
            more: what else is known.

        Raises:
            StoreError: it cannot be written.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"schema_version": 1, "time": now, **self.about, "address": address, "event": event, **more}
        _append(self.path, json.dumps(entry).encode() + b"\n")


def _append(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else b"\n" + line  # the one before was cut
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise explain(error, "the log of deployments cannot be written", path) from error
