"""Figures of the code itself: `python benchmarks/code_figures.py [FOLDER ...] [--list] [--sample N] [--seed N]`.

Prints the size of the project by package, with its tests, benchmarks and manuals; and, for the product or for the
folders in the arguments, class names that are used more than once, vague names and words, small modules, private
functions that are used once, and constants without a cause. `--list` prints where they are. `--sample N` prints N
random docstrings and N random messages of exceptions for review. Writes no file. `ruff check --select C901` lists
complex functions.

A constant is a name at module level whose value is a number, or arithmetic of numbers and names; round numbers and the
limits of 8-bit integers (TRIVIAL) are none. Its cause or source is a docstring below, or a comment on its lines or on
the line above. A short private function is referred to once in its module, and its body without the docstring has at
most SHORT lines.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from repository import FOLDER

ROOT = FOLDER.parent
PRODUCT = ("compress", "deploy", "coralline_pycoral", "darwinn")
FOLDERS = tuple(folder for folder in PRODUCT if (ROOT / folder).exists())
SHORT = 3
SMALL_MODULE = 80
"""Both from the issue "A trunk one person can carry"."""
TRIVIAL = frozenset({0, 1, -1, 2, 10, 100, 127, 128, 255, 256})
ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Name, ast.operator, ast.unaryop, ast.expr_context)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE_NAMES = frozenset({"found", "each", "given", "made", "told", "wanted", "apart", "whole", "some", "own", "asked"})
"""Variables whose name does not say what they hold."""
PRIVATE_WORDS = re.compile(
    r"\b(anew|mend(s|ed)?|otherwise than|of (one's|its|their|your) own|as ever|at hand|tells?|told|beside"
    r"|stands?|there (is|are) (no|none)|truth values|learnt|swapp?(s|ed)?|alike|nothing that)\b"
)
"""Words of docstrings and messages that have a plainer form, by the table of the style guide."""


@dataclass
class Figures:
    """Counts over all modules that were read."""

    lines: int = 0
    vague_names: Counter[str] = field(default_factory=Counter)
    private_words: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    docstrings: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    small_modules: list[str] = field(default_factory=list)
    short_functions: list[str] = field(default_factory=list)
    constants: int = 0
    bare_constants: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one module."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        name = path.relative_to(ROOT).as_posix()
        self.lines += len(text.splitlines())
        if len(text.splitlines()) < SMALL_MODULE and path.name != "__init__.py":
            self.small_modules.append(name)
        self.short_functions += [f"{name}:{function.lineno} {function.name}" for function in _used_once(tree)]
        for constant, has_cause in _constants(tree, text.splitlines()):
            self.constants += 1
            self.bare_constants += [] if has_cause else [f"{name}:{constant.lineno} {ast.unparse(constant)}"]
        for node in ast.walk(tree):
            self._add_node(node, name)

    def _add_node(self, node: ast.AST, name: str) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name].append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.Raise):
            self.messages.append(f"{name}:{node.lineno}\n    {ast.unparse(node)}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
            self.vague_names[node.id] += 1
        elif isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            self.vague_names[node.arg] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.private_words.update(match.group(0) for match in PRIVATE_WORDS.finditer(node.value))
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and (docstring := ast.get_docstring(node)):
            self.docstrings.append(f"{name}:{node.lineno} {node.name}\n    {docstring}")

    def report(self) -> str:
        """Return the figures as text."""
        repeated = sum(len(places) > 1 for places in self.classes.values())
        rows = (
            ("lines", str(self.lines)),
            ("class names used more than once", str(repeated)),
            ("variables with a vague name", str(self.vague_names.total())),
            ("words of private language", str(self.private_words.total())),
            (f"modules under {SMALL_MODULE} lines", str(len(self.small_modules))),
            (f"private functions used once, at most {SHORT} lines", str(len(self.short_functions))),
            ("numeric constants", str(self.constants)),
            ("numeric constants without a cause or source", str(len(self.bare_constants))),
        )
        return _table(rows)

    def details(self) -> str:
        """Return the places and words behind the figures as text."""
        lines = []
        sections = {
            f"modules under {SMALL_MODULE} lines": self.small_modules,
            "short private functions used once": self.short_functions,
            "constants without a cause": self.bare_constants,
        }
        for title, places in sections.items():
            lines += [f"== {title}", *places]
        lines += [f"{name}: {', '.join(places)}" for name, places in sorted(self.classes.items()) if len(places) > 1]
        for counter in (self.vague_names, self.private_words):
            lines.append(", ".join(f"{word} {count}" for word, count in counter.most_common()))
        return "\n".join(lines)


def _used_once(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the private functions and methods that the module refers to once, and that have a short body."""
    names = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    names.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for function in ast.walk(tree):
        if not isinstance(function, FUNCTIONS) or not re.match("_[^_]", function.name) or names[function.name] != 1:
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if body and (body[-1].end_lineno or 0) - body[0].lineno < SHORT:
            yield function


def _constants(tree: ast.Module, lines: Sequence[str]) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the numeric constants of a module, and whether a docstring or a comment says their cause."""
    for index, node in enumerate(tree.body):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not node.value:
            continue
        parts = [*ast.walk(node.value)]
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        numbers = [value for value in values if type(value) in (int, float) and value not in TRIVIAL]
        if not numbers or any(type(value) not in (int, float) for value in values):
            continue
        if any(not isinstance(part, ARITHMETIC) for part in parts):
            continue
        below = tree.body[index + 1 : index + 2]
        has_docstring = bool(below) and isinstance(below[0], ast.Expr) and _is_text(below[0].value)
        has_comment = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
        yield node, has_docstring or has_comment or lines[node.lineno - 2].lstrip().startswith("#")


def sizes() -> str:
    """Return the lines of the packages, tests and benchmarks, the rooms of compress/, and the words of the manuals."""
    command = ["git", "ls-files", "*.py", "docs/*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()}
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        lines[name.partition("/")[0]] += len(text.splitlines()) if name.endswith(".py") else 0
    inside = {Path(name).parts[1] for name in texts if name.startswith("compress/")}
    rooms = {name for name in inside if not name.startswith("__")}
    words = sum(len(text.split()) for name, text in texts.items() if name.endswith(".md"))
    rows = [(f"lines of {folder}/", f"{lines[folder]:,}") for folder in (*PRODUCT, "tests", "benchmarks")]
    rows.insert(0, ("lines of the product", f"{sum(lines[folder] for folder in PRODUCT):,}"))
    rows += [("rooms in compress/", str(len(rooms))), ("words of the manuals in git", f"{words:,}")]
    return _table(rows)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<48}{value:>14}" for name, value in rows)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _print_sample(title: str, texts: Sequence[str], count: int, draw: random.Random) -> None:
    print(f"\n== {min(count, len(texts))} of {len(texts)} {title}")
    for text in draw.sample(list(texts), min(count, len(texts))):
        print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N docstrings and N messages")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--list", action="store_true", help="list the functions, classes and words that are counted")
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    figures = Figures()
    for folder in options.folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            figures.add(path)
    print(sizes())
    print(figures.report())
    if options.list:
        print(figures.details())
    if options.sample:
        draw = random.Random(options.seed)
        _print_sample("docstrings", figures.docstrings, options.sample, draw)
        _print_sample("messages", figures.messages, options.sample, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
