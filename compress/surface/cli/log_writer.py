"""The process that writes run.log: it adds times to the output of libraries, and reports a crash.

It is a separate process because a crash ends the other one at once: an abort in C++, or the kernel when memory is
short. What was written until then is still in the pipe, so that this process can write it to the log, and show the last
lines on the terminal. It runs as a file, with the standard library alone, and starts in some milliseconds.

Our own lines begin with OWN and are complete; everything else is the output of libraries. A line of OWN and END says
that the run ended in order.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

OWN, END = b"\x1e", b"\x04"
MAX_LINE_BYTES = 2_000
MAX_LIBRARY_BYTES = 1 << 20
"""Output of libraries in one run that is kept."""
MAX_BYTES = 4 << 20
"""Everything in one run that is kept."""
LAST_LINES = 12
"""Number of lines that are shown after a crash."""
POLL_S = 1.0
UNPRINTABLE = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8b\x8e\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]"
)
"""The same characters as in `deploy.contract.printable`, in UTF-8: this file runs without our packages."""
HEADER = re.compile(rb"^([IWEF]?[0-9]{4}|[0-9]{4}-[0-9]{2}-[0-9]{2}) [0-9:.,]+:?\s+([0-9]+\s+)?")
"""Time and process number at the beginning of a line of absl or TensorFlow; the rest may be a repetition."""
VMSTAT = "/proc/vmstat"
"""Linux counts there the processes that it killed because memory was short."""


class LogLines:
    """Turns the bytes of the pipe into lines of the log.

    Args:
        log: the log file.
    """

    def __init__(self, log: Any) -> None:
        self.log = log
        self.ended = False
        self.last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._rest = b""
        self._seen: set[bytes] = set()
        self._repeated = self._left_out = self._library_bytes = self._bytes = 0

    def feed(self, content: bytes) -> None:
        """Write the complete lines of what was read."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > 64 * MAX_LINE_BYTES:  # a line without an end
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Write what is left, and what was left out."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._repeated or self._left_out:
            counts = f"left out of the output of libraries: {self._repeated:,} repeated lines"
            more = f", and {self._left_out:,} lines above {MAX_LIBRARY_BYTES:,} bytes" if self._left_out else ""
            self.write(f"{stamp()} | {counts}{more}".encode())

    def _line(self, line: bytes) -> None:
        before, mark, message = line.partition(OWN)
        if before.strip():
            self._library(before)
        if mark and message == END:
            self.ended = True
        elif mark:
            self.last.append(message)
            self.write(message)

    def _library(self, line: bytes) -> None:
        text = UNPRINTABLE.sub(b" ", line.rpartition(b"\r")[2] or line).strip()[:MAX_LINE_BYTES]
        if not text:
            return
        self.last.append(text)
        key = HEADER.sub(b"", text)
        if key in self._seen:
            self._repeated += 1
            return
        if self._library_bytes > MAX_LIBRARY_BYTES:
            self._left_out += 1
            return
        self._seen.add(key)
        self._library_bytes += len(text)
        self.write(f"{stamp()} | ".encode() + text)

    def write(self, line: bytes) -> None:
        """Write one line."""
        if self._bytes > MAX_BYTES:
            return
        self._bytes += len(line) + 1
        with suppress(OSError):  # a full disk does not end a run
            self.log.write(line + b"\n")


def stamp() -> str:
    """Return the present time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def killed_processes(path: str = VMSTAT) -> int | None:
    """Return how many processes the kernel has killed because memory was short; None if it does not say."""
    try:
        with open(path, encoding="ascii") as stream:
            lines = [line.split() for line in stream]
    except (OSError, ValueError):
        return None
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill"), None)


def crash_report(lines: LogLines, path: str, killed: bool) -> str:
    """Return the text for the terminal after a crash."""
    shown = b"\n".join(b"  " + line for line in lines.last).decode("utf-8", "replace")
    text = f"coralline: the process ended without a message. The last lines of {path}:\n{shown}\n"
    if killed:
        text += (
            "coralline: the system killed a process at that time because memory was short, most likely this one; "
            "lower batch_size or the number of samples, or close other programs\n"
        )
    return text + "coralline: run the same command to continue\n"


def main() -> None:
    """Write the log until the pipe is closed, or the other process is gone."""
    parent, path = int(sys.argv[1]), sys.argv[2]
    killed_before = killed_processes()
    lines = LogLines(os.fdopen(1, "wb", buffering=0))
    while not lines.ended:
        readable = select.select([0], [], [], POLL_S)[0]
        content = os.read(0, 1 << 16) if readable else b""
        lines.feed(content)
        if not content and (readable or os.getppid() != parent):
            break
    lines.close()
    if lines.ended:
        return
    killed = killed_before is not None and (killed_processes() or 0) > killed_before
    report = crash_report(lines, path, killed)
    if os.isatty(2):
        report = "\r\x1b[K\x1b[?25h" + report  # the line of progress, and the cursor
    with suppress(OSError):
        os.write(2, report.encode("utf-8", "backslashreplace"))
    lines.write(f"{stamp()} the process ended without a message".encode())


if __name__ == "__main__":
    main()
