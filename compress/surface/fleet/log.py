"""The log of deployments: one line of JSON for each start and each end, append-only."""

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

from compress.core.files import explain


def default_path() -> Path:
    """Return `~/.local/state/coralline/deployments.jsonl`, or the file below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "coralline" / "deployments.jsonl"


def person() -> str:
    """Return the current user as `user@machine`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True)
class Log:
    """The log of one command.

    Attributes:
        path: the file; it and its folder are created if they are missing.
        about: the values of every line: user, command, bundle.
    """

    path: Path
    about: Mapping[str, Any]

    def add(self, address: str, event: str, **more: Any) -> None:
        """Append a line and flush it to the disk.

        Args:
            address: the device.
            event: `begun`, `done` or `failed`.
            more: further values.

        Raises:
            StoreError: the log cannot be written.
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
                line = line if stream.read(1) == b"\n" else b"\n" + line  # the previous line was truncated
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise explain(error, "the log of deployments cannot be written", path) from error
