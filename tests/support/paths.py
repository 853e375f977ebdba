"""Folders that tests and benchmarks read."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
SHARED = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared"))
EDGETPU = SHARED / "edgetpu"
"""Real models and data sets, which are not part of the repository: tests that need them skip without them."""
