"""The tests of the vendor's library, as they are, with the import changed: `make test-pycoral CHECKOUT=path`.

CORALLINE_PYCORAL_CHECKOUT names a checkout of google-coral/pycoral. Its folder test_data may have the vendor's models.
Without an Edge TPU, models that are not compiled run on the CPU. Tests that need an Edge TPU or a missing file are
listed, and all others must pass.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

CHECKOUT = os.environ.get("CORALLINE_PYCORAL_CHECKOUT", "")
NEEDS = {
    "an Edge TPU": r"libedgetpu|no Edge TPU delegate|Not enough Edge TPUs|0 not greater than 0|cocompilation",
    "a file": r"Could not open|Failed to open|No such file",
}
"""The last line of the error of a test that needs something that this host does not have."""
DRIVER = """
import json, sys, unittest
from tests import test_utils
from coralline_pycoral.utils import edgetpu
test_utils._TEST_DATA_DIR = sys.argv[2]
try:
    edgetpu.load_edgetpu_delegate()
except (OSError, ValueError):
    edgetpu.load_edgetpu_delegate = lambda options=None: None
suite = unittest.defaultTestLoader.loadTestsFromName("tests." + sys.argv[1])
result = unittest.TestResult()
suite.run(result)
failed = {str(test): text.strip().splitlines()[-1] for test, text in result.errors + result.failures}
print("\\n" + json.dumps({"run": result.testsRun, "failed": failed}))
"""


@pytest.mark.parametrize("module", sorted(path.stem for path in Path(CHECKOUT, "tests").glob("*_test.py")) or ["none"])
def test_the_vendors_tests(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not CHECKOUT:
        pytest.skip("CORALLINE_PYCORAL_CHECKOUT is not set")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    for path in Path(CHECKOUT, "tests").glob("*.py"):
        (tests / path.name).write_text(re.sub(r"\bpycoral\b", "coralline_pycoral", path.read_text()))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, module, str(Path(CHECKOUT, "test_data"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    needs = {
        test: next((need for need, pattern in NEEDS.items() if re.search(pattern, error)), error)
        for test, error in result["failed"].items()
    }
    with capsys.disabled():
        print(f"\n{module}: {result['run']} run, {len(needs)} without their file or device")
        for test, need in needs.items():
            print(f"  {test}: {need}")
    assert set(needs.values()) <= set(NEEDS)
