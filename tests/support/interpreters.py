"""Python interpreters of the versions that Coral hosts have, each with numpy and a TFLite runtime.

Interpreters under ~/.pyenv/versions or on PATH get a virtual environment in ~/.cache/coralline-tests, once. The
environment variable CORALLINE_PYTHONS names other interpreters (paths with colons between them), used as they are.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "coralline-tests"
RUNTIMES = {
    "3.7": ("numpy", "tflite-runtime==2.11.0"),
    "3.8": ("numpy", "tflite-runtime==2.14.0"),
    "3.9": ("numpy<2", "tflite-runtime==2.14.0"),
    "3.10": ("numpy<2", "tflite-runtime==2.14.0"),
    "3.12": ("numpy", "ai-edge-litert==2.3.0"),
    "3.13": ("numpy", "ai-edge-litert==2.3.0"),
}
"""The packages for each version: the newest runtime that a board with this Python would have."""
INSTALL_SECONDS = 240


def interpreters() -> list[str]:
    """Return versions, or the paths in CORALLINE_PYTHONS; pass each to `executable` inside a test."""
    named = os.environ.get("CORALLINE_PYTHONS")
    return named.split(":") if named else list(RUNTIMES)


def executable(interpreter: str) -> str:
    """Return the path of an interpreter that has numpy; skip the test if it is not available."""
    path = interpreter
    if os.sep not in interpreter:
        path, failure = _environment(interpreter)
        if failure:
            pytest.skip(f"Python {interpreter}: {failure}")
    if not os.access(path, os.X_OK):
        pytest.skip(f"{path} is not installed")
    if subprocess.run([path, "-c", "import numpy"], capture_output=True, check=False).returncode:
        pytest.skip(f"{path} has no numpy")
    return path


@functools.cache
def _environment(version: str) -> tuple[str, str]:
    """Return the interpreter of the cached virtual environment (created if necessary), and the reason of a failure."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    base = str(installed[-1]) if installed else shutil.which(f"python{version}")
    if base is None:
        return "", "not installed"
    folder = CACHE / f"python-{version}"
    requirements = "\n".join(RUNTIMES[version])
    ready = folder / "requirements.txt"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"python-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of pytest-xdist share the folder
        if not ready.exists() or ready.read_text() != requirements:
            failure = _create(base, folder, version)
            if failure:
                return "", failure
            ready.write_text(requirements)
    return str(folder / "bin" / "python"), ""


def _create(base: str, folder: Path, version: str) -> str:
    """Create the environment; return the reason of a failure, or an empty text."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([base, "-m", "venv", str(folder)], [*pip, "--retries", "1", *RUNTIMES[version]]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip took more than {INSTALL_SECONDS} s; is the package index reachable?"
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"no environment with numpy and a TFLite runtime: {reason}"
    return ""
