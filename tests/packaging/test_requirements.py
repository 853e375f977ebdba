"""Packages that the code needs, against those that the wheel requires; and the hints that name packages."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import installation
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
OPTIONAL = {line for lines in PROJECT["optional-dependencies"].values() for line in lines}
OURS = {"compress", "coralline_pycoral", "darwinn", "deploy"}
CODE = sorted((ROOT / "compress").rglob("*.py"))
EXTRAS = {
    "compress/pipeline/search": "postgresql",
    "compress/surface/fleet": "sign",
    "compress/pipeline/shared_store.py": "s3",
}
"""The parts of compress/ that import packages of an extra."""
FOLDERS = ("benchmarks", "compress", "coralline_pycoral", "darwinn", "deploy", "docs", "examples", "models", "tests")
TEXTS = [path for path in ROOT.glob("*") if path.suffix in (".md", ".yaml", "")] + [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".j2", ".yaml", ".toml")
]
UNPUBLISHED = re.compile(r"pip3? install [^`\n]*(?<![\w./-])coralline\b(?!\S*\.whl)")
HINTS = re.compile(r"pip install ((?:'[^']+' ?)+)")


def versions_read(tree: ast.AST) -> Iterator[str]:
    """Yield the distributions whose versions a module reads: its strings in `tools`, `TOOLS` and calls of `version`."""
    for node in ast.walk(tree):
        values: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = [node.value] if ast.unparse(targets[0]) in ("tools", "TOOLS") else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("metadata.version", "runtime_version")):
            values = [*node.args]
        for constant in (part for value in values for part in ast.walk(value)):
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield canonicalize_name(constant.value)


def test_versions_are_of_packages_that_the_wheel_requires() -> None:
    """A version that cannot be read ends a run: pycocotools was only in the extra `dev`."""
    read = {name: path for path in CODE for name in versions_read(ast.parse(path.read_text()))}
    assert {"tensorflow", "onnxruntime", "pillow"} <= read.keys()
    assert {name: path for name, path in read.items() if name not in DIRECT | {"coralline"}} == {}


def test_read_versions_are_found_where_they_are() -> None:
    text = "class A:\n tools: B = ('one', *('two',))\nTOOLS = 'x-y',\nimportlib.metadata.version('z')\ntools = f()\n"
    assert {*versions_read(ast.parse(text))} == {"one", "two", "x-y", "z"}


@cache
def required(extra: str) -> frozenset[str]:
    """Return the distributions that the wheel requires with an extra, directly or not."""
    return frozenset(installation.required("coralline", (extra,) if extra else ()))


def test_every_line_of_the_constraints_has_a_version_and_hashes() -> None:
    text = (ROOT / "constraints.txt").read_text()
    packages = re.split(r"\n(?=[A-Za-z0-9])", text)[1:]
    assert len(packages) > 50
    assert [line for line in packages if not re.match(r"[\w.-]+==\S+ .*\\\n    --hash=sha256:[0-9a-f]{64}", line)] == []
    assert "://" not in text


def modules_imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_imports_are_of_packages_that_the_wheel_requires() -> None:
    distributions = metadata.packages_distributions()
    missing = []
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        extra = next((extra for place, extra in EXTRAS.items() if name.startswith(place)), "")
        for module in {*modules_imported(ast.parse(path.read_text()))} - {*OURS, "__future__"}:
            if module in sys.stdlib_module_names:
                continue
            candidates = {canonicalize_name(distribution) for distribution in distributions.get(module, ())}
            if not candidates & required(extra):
                missing.append(f"{name} imports {module}")
    assert missing == []


def test_no_text_installs_a_package_that_is_not_ours() -> None:
    """No `coralline` is published: whoever registers the name would be installed by `pip install coralline`."""
    texts = {path: path.read_text(errors="replace") for path in TEXTS if path != Path(__file__) and path.is_file()}
    assert ROOT / "Makefile" in texts
    assert [path for path, text in texts.items() if UNPUBLISHED.search(text)] == []


def test_unpublished_names_are_found() -> None:
    wrong = ("pip install coralline", "pip install -U 'coralline[s3]'", 'pip install "coralline[a]" x')
    assert all(map(UNPUBLISHED.search, wrong))
    right = ("pip install '.[s3]'", "pip install coralline-0.1.0-py3-none-any.whl", "coralline/bin/pip install numpy")
    assert not any(map(UNPUBLISHED.search, right))


def test_hints_install_what_the_extras_require() -> None:
    hints = [hint for path in CODE for hint in HINTS.findall(path.read_text())]
    named = {requirement for hint in hints for requirement in re.findall(r"'([^']+)'", hint)}
    assert len(named) >= 5
    assert named <= OPTIONAL | {*PROJECT["dependencies"]}
