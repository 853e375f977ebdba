"""The verdict on models that give one answer to nearly everything, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def in_words(record: Mapping[str, Any], prose: Callable[[str], str] = str) -> str:
    """Return which models give one answer to nearly everything; empty if none does.

    Args:
        record: the run record.
        prose: writes text that contains names from the user.
    """
    answers = record.get("answers") or {}
    result, original = (answers.get(name) or {} for name in ("result", "original"))
    what, before = (prose(str(each.get("text"))) for each in (result, original))
    if result.get("verdict") == "degenerate":
        if original.get("verdict") == "varied":
            return f"the result {what}, and the original does not"
        return f"the result {what}, and " + ("so does the original" if what == before else f"the original {before}")
    if original.get("verdict") == "degenerate":
        return f"the original {before}, so a comparison with it shows little"
    if result.get("verdict") == "undecided":
        return f"the result {what}, and too few have another label to judge that"
    return ""
