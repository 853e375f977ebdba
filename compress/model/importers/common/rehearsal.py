"""Reading a file of unknown origin once in a child process, before this process reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from compress.core import sandbox
from compress.core.errors import ModelError

TIMEOUT_S = 120
"""A library that reads a damaged file may never end."""


def check_readable(
    path: Path, library: str, function: Callable[..., None], arguments: Sequence[str], *, memory_bytes: int
) -> None:
    """Check that a native library reads a file within the limits.

    Args:
        path: the file, for the message.
        library: the native library that reads it, for the message.
        function: a module-level function that reads all of the file. It returns normally for a file that it refuses:
            this process reads the file again, and reports the refusal.
        arguments: its arguments.
        memory_bytes: limit of the data segment of the child process.

    Raises:
        ModelError: the child process crashed, or exceeded a limit.
    """
    try:
        ended = sandbox.run(function, arguments, timeout_s=TIMEOUT_S, memory_bytes=memory_bytes)
    except sandbox.SandboxTimeoutError as error:
        raise ModelError(f"{library} did not finish reading it in {TIMEOUT_S} s", where=str(path)) from error
    hint = "check that it was copied completely"
    if ended.status and sandbox.is_out_of_memory(ended.last_line):
        limit = f"{memory_bytes >> 20:,} MiB"
        raise ModelError(f"{library} needs more than {limit} of memory to read it", where=str(path), hint=hint)
    if ended.status:
        raise ModelError(f"{library} crashes when it reads it ({ended.reason})", where=str(path), hint=hint)
