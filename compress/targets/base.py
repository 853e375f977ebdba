"""What a target can do: the numbers in targets/*/*.toml, each with its source.

The file stays data: modules that need a number ask for its table, so that a new
target is a new file and no code.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.errors import PipelineError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Target:
    """One parsed target file.

    Attributes:
        name: the word used for it in pipeline.yaml.
        digest: SHA-256 of the file, part of the key of every stage that reads the target.
        tables: the file's content.
    """

    name: str
    digest: str
    tables: Mapping[str, Any]

    def compiled_by(self, version: str) -> Target:
        """The same target with another version of its compiler.

        Raises:
            PipelineError: there is no such version.
        """
        known = self.tables["compiler"]["runtimes"]
        if version not in known:
            raise PipelineError(f"there is no compiler {version!r}", allowed=", ".join(known))
        compiler = {**self.tables["compiler"], "version": version}
        return replace(self, tables={**self.tables, "compiler": compiler})

    @property
    def summary(self) -> str:
        """One line about the target."""
        return str(self.tables["summary"])

    @property
    def accelerated(self) -> bool:
        """Whether there is an accelerator, with a compiler and placement rules."""
        return "operators" in self.tables


def names() -> list[str]:
    """The targets there are."""
    return sorted(path.stem for path in FOLDER.glob("*/*.toml"))


def load(name: str) -> Target:
    """Reads a target.

    Raises:
        PipelineError: there is no target of that name.
    """
    if name not in names():
        raise PipelineError(f"there is no target {name!r}", allowed=", ".join(names()))
    content = (FOLDER / name / f"{name}.toml").read_bytes()
    return Target(name, hashlib.sha256(content).hexdigest(), tomllib.loads(content.decode()))
