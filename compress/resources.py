"""The folders models/ and calibration_data/: next to the package in a clone, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def shipped(name: str) -> Path:
    """Return the folder `name` that is shipped with Coralline, never one in the working directory."""
    installed = PACKAGE / "_shipped" / name
    return installed if installed.exists() else PACKAGE.parent / name
