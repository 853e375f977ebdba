"""The imports between tests, tests/support and benchmarks."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from paths import ROOT

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
SUPPORT = sorted((ROOT / "tests" / "support").glob("*.py"))
TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path not in SUPPORT]


def imported(path: Path) -> set[str]:
    """Return the top-level modules that a file imports anywhere, including late imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


@pytest.mark.parametrize(
    ("importers", "forbidden"),
    [(TESTS, TESTS + BENCHMARKS), (SUPPORT, TESTS + BENCHMARKS), (BENCHMARKS, TESTS)],
    ids=["tests", "support", "benchmarks"],
)
def test_what_is_shared_is_in_support(importers: list[Path], forbidden: list[Path]) -> None:
    wrong = {str(path.relative_to(ROOT)): imported(path) & names(forbidden) for path in importers}
    assert {path: modules for path, modules in wrong.items() if modules} == {}


def test_a_module_of_support_has_a_name_of_its_own() -> None:
    """If two modules had one name, Python would import the first one on the search path."""
    others = (
        names(TESTS) | names(BENCHMARKS) | {"compress", "darwinn", "deploy", "models"} | set(sys.stdlib_module_names)
    )
    assert names(SUPPORT) & others == set()
