"""The folder of results, and the one place where benchmarks put the repository and tests/support on the search path.

Modules of tests/support are found only after this import; ruff's import order puts it before them.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests" / "support")]
