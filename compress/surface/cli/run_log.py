"""The log of a run: every message with its time, and the output of libraries.

`log_writer` writes it, in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from compress.core.files import explain
from compress.core.version import __version__
from compress.surface.cli import log_writer
from deploy.contract import printable

LARGE_BYTES = 4 << 20
"""Size of the log above which a new run removes its beginning ..."""
KEPT_BYTES = 1 << 20
"""... and the part that is kept."""
CLOSING_S = 5.0


class RunLog:
    """A log file, to which lines are appended.

    Args:
        path: the file.
        terminal: the file descriptor where the last lines appear after a crash.

    Raises:
        StoreError: the log file cannot be written.
    """

    def __init__(self, path: Path, terminal: int) -> None:
        self._began = time.monotonic()
        self.stage = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _shorten(path)
            log = path.open("ab", buffering=0)
        except OSError as error:
            raise explain(error, "the run's folder cannot be written") from error
        self._writer = _writer(log.fileno(), terminal, path)
        pipe = log.fileno() if self._writer is None or self._writer.stdin is None else self._writer.stdin.fileno()
        self._pipe = os.dup(pipe)
        log.close()
        if self._writer is not None and self._writer.stdin is not None:
            self._writer.stdin.close()
        self._send([f"===== {log_writer.stamp()}: coralline {__version__}, process {os.getpid()} ====="])

    def fileno(self) -> int:
        """Return the file descriptor to which libraries write."""
        return self._pipe

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def write(self, text: str) -> None:
        """Write text with the time, the seconds since the run began, and the stage."""
        first, *others = text.rstrip().split("\n")
        stage = f"{self.stage}: " if self.stage and not first.startswith(f"{self.stage}:") else ""
        stamped = f"{log_writer.stamp()} {self.elapsed:8.1f} s  {stage}{first}"
        self._send([printable.line(log_line) for log_line in (stamped, *(f"    {line}" for line in others))])

    def _send(self, lines: list[str]) -> None:
        mark = b"" if self._writer is None else log_writer.OWN
        content = b"".join(mark + line.encode("utf-8", "backslashreplace") + b"\n" for line in lines)
        with suppress(OSError):
            os.write(self._pipe, content)

    def close(self) -> None:
        """End the log in order."""
        if self._writer is None:
            os.close(self._pipe)
            return
        with suppress(OSError):
            os.write(self._pipe, log_writer.OWN + log_writer.END + b"\n")
        os.close(self._pipe)
        try:
            self._writer.wait(CLOSING_S)
        except subprocess.TimeoutExpired:  # a disk that does not answer
            self._writer.kill()
            self._writer.wait()


def _writer(log: int, terminal: int, path: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that writes the log; None if there is no process left: then libraries write to the file."""
    command = [sys.executable, "-I", "-S", log_writer.__file__, str(os.getpid()), str(path)]
    try:
        # A separate process group: Ctrl-C ends the run, and the log has its last lines.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=terminal, bufsize=0, process_group=0)
    except OSError:
        return None


def _shorten(path: Path) -> None:
    """Remove the beginning of a large log."""
    if not path.exists() or path.stat().st_size <= LARGE_BYTES:
        return
    with path.open("rb") as stream:
        stream.seek(-KEPT_BYTES, os.SEEK_END)
        kept = stream.read().partition(b"\n")[2]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(b"===== earlier lines are removed =====\n" + kept)
    partial.replace(path)
