"""The Python environments of the tools: the versions are those in requirements/NAME.txt, with all dependencies."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
LONGEST = 400
"""Characters of pip's error that are kept."""


class UnavailableError(Exception):
    """An environment cannot be made; the message is the reason."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        name: of its file of requirements, and of its folder.
        python: the version of its interpreter, such as "3.12".
        about: what to know before it is made.
    """

    name: str
    python: str
    about: str = ""

    @property
    def requirements(self) -> Path:
        """The file with the exact versions."""
        return REQUIREMENTS / f"{self.name}.txt"

    def version(self, package: str) -> str:
        """Return the version of a package in the requirements."""
        for line in self.requirements.read_text().splitlines():
            name, _, version = line.partition("==")
            if name.lower().replace("_", "-") == package:
                return version
        raise KeyError(f"{self.requirements}: {package}")


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("tensorflow", "3.11"),
        Environment("tfmot", "3.11"),
        Environment("ai_edge_quantizer", "3.11"),
        Environment("onnx2tf", "3.12"),
        Environment("litert_torch", "3.12", "7 GB: PyTorch of the index contains CUDA"),
    )
}


def interpreter(version: str) -> str:
    """Return a Python interpreter of a version: on the path, or of pyenv.

    Raises:
        UnavailableError: there is none.
    """
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    interpreters = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    name = str(interpreters[-1]) if interpreters else shutil.which(f"python{version}")
    if name is None:
        raise UnavailableError(f"needs Python {version}, which is not on this machine")
    return name


def made(environment: Environment, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made if it does not exist or has other versions.

    Raises:
        UnavailableError: the interpreter is missing, or pip fails.
    """
    place = folder / environment.name
    digest = hashlib.sha256(environment.requirements.read_bytes() + environment.python.encode()).hexdigest()
    ready = place / "ready"
    python = place / "bin" / "python"
    if ready.exists() and ready.read_text() == digest:
        return python
    shutil.rmtree(place, ignore_errors=True)
    about = f" ({environment.about})" if environment.about else ""
    print(f"environment {environment.name}: is made{about}", file=sys.stderr, flush=True)
    _checked([interpreter(environment.python), "-m", "venv", str(place)])
    _checked([str(python), *PIP, "--requirement", str(environment.requirements)])
    ready.write_text(digest)
    return python


def _checked(command: list[str]) -> None:
    """Run a command.

    Raises:
        UnavailableError: it failed; the message has the last line of its output.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise UnavailableError(f"{Path(command[0]).name} failed: {errors[0]}"[:LONGEST])
