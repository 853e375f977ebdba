"""`runner.pyz`: the complete device side in one file for Python 3.7 and later."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from deploy.contract import bundle

SHEBANG = b"#!/usr/bin/env python3\n"
MAIN = b"import sys\n\nfrom deploy.__main__ import main\n\nsys.exit(main())\n"


@cache
def content() -> bytes:
    """Return the bytes of runner.pyz, which depend on the sources only.

    Python accepts a zip archive after the first line. On PYTHONPATH the file works like a folder with the package
    `deploy`.
    """
    folder = Path(bundle.__file__).parents[1]
    members = {"__main__.py": MAIN}
    for path in sorted(folder.rglob("*.py")):
        members[f"deploy/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return SHEBANG + bundle.archive_of(members)


def digest() -> str:
    """Return the SHA-256 digest of runner.pyz."""
    return hashlib.sha256(content()).hexdigest()
