"""The folder of results, and the search path of all benchmarks: the repository, tests/support and others.

Import this module before modules of tests/support; ruff's import order keeps it first.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests" / "support"), str(FOLDER / "others")]
