"""Python interpreters of the versions that Coral hosts have."""

from __future__ import annotations

import os
from pathlib import Path

VERSIONS = ("3.7", "3.8", "3.9", "3.10", "3.12", "3.13")


def interpreters() -> list[str]:
    named = os.environ.get("CORALLINE_PYTHONS")
    if named:
        return named.split(":")
    installed = Path.home() / ".pyenv" / "versions"
    found = {version: sorted(installed.glob(f"{version}.*/bin/python")) for version in VERSIONS}
    return [str(paths[-1]) if paths else f"Python {version}" for version, paths in found.items()]
