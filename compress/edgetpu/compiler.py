"""The vendor's compiler, where there is one.

It is closed, x86-64 only and no longer developed, so most machines have none: then the
answer is None, and `HOW_TO_COMPILE` says what can be done about it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import StageError
from compress.store import file_digest
from compress.target import Target

HOW_TO_COMPILE = (
    "run `edgetpu_compiler -s model.tflite` on an x86-64 Debian or Ubuntu machine (or container) that has the "
    "vendor's package edgetpu-compiler, then run the pipeline again with it on PATH, or name it with "
    "`compile: {compiler: /path/to/edgetpu_compiler}`"
)


@dataclass(frozen=True)
class Compiled:
    """What one run of the compiler said.

    Attributes:
        log: everything it printed, unchanged.
        on_chip_bytes: "On-chip memory used for caching model parameters", if printed.
        off_chip_bytes: "Off-chip memory used for streaming uncached model parameters", if printed.
    """

    log: str
    on_chip_bytes: float | None
    off_chip_bytes: float | None


def find(setting: str | None, target: Target) -> Path | None:
    """The compiler named by the setting, or the one on PATH, or None.

    Raises:
        StageError: the setting names something that cannot be run.
    """
    if setting is None:
        found = shutil.which(target.tables["compiler"]["name"])
        return Path(found) if found else None
    path = Path(setting).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise StageError("is not a program that can be run", where=setting, todo="check compile.compiler")
    return path.absolute()  # a bare name would be looked for on PATH


def identity(program: Path | None) -> dict[str, str]:
    """What changes when the compiler does."""
    return {"compiler": file_digest(program.resolve()) if program else "none"}


def compile_model(program: Path, model: Path, folder: Path, timeout_s: float) -> Compiled:
    """Compiles `model`; leaves `<stem>_edgetpu.tflite` and the compiler's log in `folder`.

    Raises:
        StageError: the compiler failed, printed no model, or took too long.
    """
    command = [str(program), "-s", "-o", str(folder), str(model)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **pipes)
    except OSError as error:
        raise StageError(f"the compiler cannot be run: {error.strerror}", where=str(program)) from error
    try:
        log = "".join(process.communicate(timeout=timeout_s))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the real program works in a child of its own
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise StageError(f"the compiler took longer than {timeout_s:g} s", where=str(program)) from error
        raise
    compiled = folder / f"{model.stem}_edgetpu.tflite"
    if process.returncode != 0 or not compiled.is_file():
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "no message")
        raise StageError(f"the compiler failed (exit code {process.returncode}): {last}", where=str(program))
    return Compiled(log, _memory(log, "On-chip memory used"), _memory(log, "Off-chip memory used"))


_UNITS = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}


def _memory(log: str, label: str) -> float | None:
    """A line like `On-chip memory used for caching model parameters: 3.33MiB`, in bytes."""
    found = re.search(rf"^{label}.*: *([0-9]+(?:\.[0-9]+)?)(B|KiB|MiB|GiB)\s*$", log, re.MULTILINE)
    return float(found[1]) * _UNITS[found[2]] if found else None
