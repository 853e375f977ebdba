"""docs/troubleshooting.md: every message is one of the code, and every exit code has a section."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache

from paths import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| [^|]+ \|$", TEXT, re.MULTILINE)
MESSAGES = [message for cell in ROWS for message in re.findall(r"`([^`]+)`", cell)]
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdrgfx]")


@cache
def texts() -> str:
    """Return all texts in the code, one per line, with "…" for each value that is filled in."""
    lines = []
    for package in ("compress", "deploy"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = text_of(node)
                if text is not None:
                    lines.append(" ".join(text.split()))
    return "\n".join(lines)


def text_of(node: ast.AST) -> str | None:
    """Return a text or an f-string, with "…" for each value; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return PLACEHOLDER.sub("…", node.value)
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_the_messages_are_in_the_code() -> None:
    assert len(ROWS) == TEXT.count("\n| `")  # every row is read
    assert [message for message in MESSAGES if message not in texts()] == []


def test_every_exit_code_has_a_section() -> None:
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    from write_reference import MEANINGS

    headings = " ".join(re.findall(r"^## (Exit codes? .*):", TEXT, re.MULTILINE))
    assert {int(code) for code in re.findall(r"\d+", headings)} == MEANINGS.keys() - {0}
