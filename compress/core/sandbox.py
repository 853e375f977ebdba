"""Child processes with limits, for native libraries that read or run files of unknown origin.

TensorFlow, the TFLite runtime, onnx, onnxruntime and HDF5 are C++ or C. A file can crash them (for example
github.com/onnx/onnx/issues/6180), keep them busy without end, or make them allocate any amount of memory. In a child
process such a file ends the child, and the parent reports one message.

`run` is for one call. `start` is for a child that serves several requests: `compress.model.tflite.runtime`.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compress.core import memory

OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "Cannot allocate memory", "memory allocation failed")
"""Messages of Python and of native libraries in a process that reached its memory limit."""


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
        if is_out_of_memory(self.last_line):
            return f"it needs more memory than allowed: {self.last_line}"
        if self.status < 0:
            return f"signal {-self.status}, {signal_name(-self.status)}"
        return self.last_line or f"exit status {self.status}"


def is_out_of_memory(message: str) -> bool:
    """Return whether a message says that memory could not be allocated."""
    return any(text in message for text in OUT_OF_MEMORY)


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
    command, environment = _command(function, arguments, memory_bytes)
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxTimeoutError from error
    if memory.killed_for_memory(finished.returncode):
        raise memory.exhausted(f"the process that runs {function.__name__} was killed: most likely memory was short")
    return ended(finished.returncode, finished.stderr)


def start(
    function: Callable[..., None], arguments: Sequence[str], *, pipe: int, stderr: IO[Any], memory_bytes: int
) -> subprocess.Popen[bytes]:
    """Call a module-level function of ours in a child process with a memory limit, without waiting for its end.

    Args:
        function: the function; the child imports it by its module and name.
        arguments: its arguments.
        pipe: a file descriptor that the child inherits under the same number.
        stderr: the file for its stderr.
        memory_bytes: limit of its data segment (RLIMIT_DATA).
    """
    command, environment = _command(function, arguments, memory_bytes)
    null = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=stderr, pass_fds=(pipe,))


def ended(status: int, stderr: str) -> ChildExit:
    """Return the end of a child with an exit status and a text on stderr."""
    lines = stderr.strip().splitlines() or [""]
    return ChildExit(status, lines[-1][:300])


def _command(
    function: Callable[..., None], arguments: Sequence[str], memory_bytes: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a child process."""
    code = (
        f"from {function.__module__} import {function.__name__} as function; "
        "from compress.core import sandbox; sandbox.child(function)"
    )
    command = [sys.executable, "-P", "-W", "ignore", "-c", code, str(memory_bytes), *arguments]
    return command, environment()


def environment() -> dict[str, str]:
    """Return the environment of a Python process that is started with -P: it imports from where this process does, and
    not from the working directory."""
    # The root is repeated at the end: an interactive session has "" in sys.path, which -P would not search.
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), root])}


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "not a standard signal"


def child(function: Callable[..., None]) -> None:
    """Set the limits of this process, and call the function with the arguments of the command line."""
    memory_bytes, *arguments = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    function(*arguments)
