"""The folder of results, and the search path of all benchmarks: the repository, tests/support and others.

Import this module before modules of tests/support; ruff's import order keeps it first.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"


def is_missing(path: Path) -> bool:
    """Return whether a shared file or folder does not exist, and say where it is expected."""
    if not path.exists():
        print(f"skipped: {path} does not exist; CORALLINE_SHARED names the folder of shared files")
    return not path.exists()


sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests" / "support"), str(FOLDER / "others")]
