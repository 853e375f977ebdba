"""Nothing outside compress/tasks and the data sources branches on the name of a task."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from compress.tasks import TASKS

ROOT = Path(__file__).parents[2]
ALLOWED = (
    "compress/tasks/",
    "compress/data/",
    "deploy/contract/",
    "deploy/runner/answers.py",
    "deploy/runner/drawing.py",
)


def comparisons(source: str) -> list[int]:
    """Return the lines that compare a value with the name of a task, or match one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        constants = [constant for part in parts for constant in ast.walk(part) if isinstance(constant, ast.Constant)]
        lines += [constant.lineno for constant in constants if constant.value in TASKS]
    return lines


@pytest.mark.parametrize(
    "source",
    ['data.task == "detection"', 'x in ("regression", "a")', 'match x:\n  case "classification":\n    pass'],
)
def test_branches_are_found(source: str) -> None:
    assert comparisons(source)
    assert not comparisons(f"TASKS[{next(iter(TASKS))!r}]")


def test_no_other_module_branches_on_the_task() -> None:
    branches = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("compress", "darwinn", "deploy")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(ALLOWED)
        for line in comparisons(path.read_text(encoding="utf-8"))
    ]
    assert branches == []
