"""One name, one meaning: no class name is used twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict[str, list[str]](list)
    for package in ("compress", "darwinn", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: locations for name, locations in places.items() if len(locations) > 1} == {}
