"""`runner.pyz`: the whole device side in one file that every Python from 3.7 on runs."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from deploy.contract import bundle

SHEBANG = b"#!/usr/bin/env python3\n"
MAIN = b"import sys\n\nfrom deploy.__main__ import main\n\nsys.exit(main())\n"


@cache
def content() -> bytes:
    """The bytes of runner.pyz: equal sources are equal bytes.

    Python finds a zip behind the first line too. On PYTHONPATH the file is a folder with the package `deploy` in it.
    """
    folder = Path(bundle.__file__).parents[1]
    members = {"__main__.py": MAIN}
    for path in sorted(folder.rglob("*.py")):
        members[f"deploy/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return SHEBANG + bundle.archive_of(members)


def digest() -> str:
    """SHA-256 of runner.pyz."""
    return hashlib.sha256(content()).hexdigest()
