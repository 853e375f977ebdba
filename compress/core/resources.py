"""The version of this distribution, and its folders models/, calibration_data/ and docs/: next to the package in a
clone, inside it in a wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

try:
    __version__ = importlib.metadata.version("coralline")
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

PACKAGE = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Return the folder `name` that is shipped with Coralline, never one in the working directory."""
    installed = PACKAGE / "_shipped" / name
    return installed if installed.exists() else PACKAGE.parent / name


def manual(page: str) -> str:
    """Return where a page of the manuals is, for messages: `docs/PAGE` in a clone, the path of the file in a wheel."""
    installed = PACKAGE / "_shipped" / "docs" / page
    return str(installed) if installed.exists() else f"docs/{page}"
