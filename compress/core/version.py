"""The version of the installed distribution."""

from __future__ import annotations

import importlib.metadata

try:
    __version__ = importlib.metadata.version("coralline")
except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
