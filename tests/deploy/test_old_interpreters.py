"""The device side works, with bit-exact results, on every Python that Coral hosts have.

`tests/support/interpreters.py` says where the interpreters come from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from interpreters import executable, interpreters
from paths import ROOT


@pytest.mark.parametrize("interpreter", interpreters())
def test_equal_to_the_bit(interpreter: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [executable(interpreter), "-W", "error", str(Path(golden.__file__))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["found"] == golden.EXPECTED


def test_this_interpreter() -> None:
    assert golden.found() == golden.EXPECTED


def test_device_side_imports_nothing_else() -> None:
    check = (
        "import sys, deploy.contract.bundle, deploy.contract.preprocessing, deploy.contract.trust; "
        "found = set(sys.modules) & {'compress', 'cryptography', 'tuf', 'pydantic', 'tensorflow', 'ai_edge_litert'}; "
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
