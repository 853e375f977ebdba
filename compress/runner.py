"""`runner.pyz`: the whole device side in one file that every Python from 3.7 on runs."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import cache
from pathlib import Path

from deploy import bundle

SHEBANG = b"#!/usr/bin/env python3\n"
MAIN = b"import sys\n\nfrom deploy.__main__ import main\n\nsys.exit(main())\n"


@cache
def content() -> bytes:
    """The bytes of runner.pyz: equal sources are equal bytes.

    Members are stored, not compressed, because what compression gives depends on the version of
    zlib. On PYTHONPATH the file is a folder with the package `deploy` in it.
    """
    folder = Path(bundle.__file__).parent
    members = {"__main__.py": MAIN}
    for path in sorted(folder.rglob("*.py")):
        members[f"deploy/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    stream = io.BytesIO(SHEBANG)
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_STORED) as archive:
        for name, text in members.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, text)
    return stream.getvalue()


def digest() -> str:
    """SHA-256 of runner.pyz."""
    return hashlib.sha256(content()).hexdigest()
