"""Child processes with limits, for native libraries that read or run files of unknown origin.

TensorFlow, onnx and onnxruntime are C++. A file can crash them (for example github.com/onnx/onnx/issues/6180), keep
them busy without end, or make them allocate any amount of memory. In a child process such a file ends the child, and
the parent reports one message.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress import memory

OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "Cannot allocate memory")
"""Ends of processes that reached their memory limit."""


class SandboxTimeoutError(Exception):
    """The child process exceeded its time limit and was killed."""


@dataclass(frozen=True)
class ChildExit:
    """The end of a child process.

    Attributes:
        status: exit status; negative for the signal that killed it.
        last_line: last line of its stderr, at most 300 characters; empty if it wrote none.
    """

    status: int
    last_line: str

    @property
    def reason(self) -> str:
        """The cause of a failure: the signal, the last line of stderr, or the exit status."""
        if any(text in self.last_line for text in OUT_OF_MEMORY):
            return f"it needs more memory than allowed: {self.last_line}"
        if self.status < 0:
            return f"signal {-self.status}"
        return self.last_line or f"exit status {self.status}"


def run(function: Callable[..., None], arguments: Sequence[str], *, timeout_s: float, memory_bytes: int) -> ChildExit:
    """Call a module-level function of ours in a child process with a time limit and a memory limit.

    Args:
        function: the function; the child imports it by its module and name.
        arguments: its arguments.
        timeout_s: seconds until the child is killed.
        memory_bytes: limit of its data segment (RLIMIT_DATA).

    Raises:
        SandboxTimeoutError: it took longer.
        StageError: the system killed it, as it does when memory is short.
    """
    code = (
        f"from {function.__module__} import {function.__name__} as function; "
        "from compress.importers.common import sandbox; sandbox.child(function)"
    )
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(memory_bytes), *arguments]
    # The root is repeated at the end: an interactive session has "" in sys.path, which -P would not search.
    root = str(Path(__file__).resolve().parents[3])
    search_path = os.pathsep.join([*filter(None, sys.path), root])
    environment = {**os.environ, "PYTHONPATH": search_path}
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxTimeoutError from error
    if memory.killed_for_memory(finished.returncode):
        raise memory.exhausted(f"the process that runs {function.__name__} was killed: most likely memory was short")
    lines = finished.stderr.strip().splitlines() or [""]
    return ChildExit(finished.returncode, lines[-1][:300])


def child(function: Callable[..., None]) -> None:
    """Set the limits of this process, and call the function with the arguments of the command line."""
    memory_bytes, *arguments = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    function(*arguments)
