"""The verdict on models that give one answer to nearly everything, in words."""

from __future__ import annotations

from compress.report.record import DegeneracyRecord


def in_words(record: DegeneracyRecord | None) -> str:
    """Return which models give one answer to nearly everything; empty if none does."""
    if record is None:
        return ""
    original, result = record.original, record.result
    if result.verdict == "degenerate":
        if original.verdict == "varied":
            return f"the result {result.text}, and the original does not"
        same = "so does the original" if result.text == original.text else f"the original {original.text}"
        return f"the result {result.text}, and {same}"
    if original.verdict == "degenerate":
        return f"the original {original.text}, so a comparison with it shows little"
    if result.verdict == "undecided":
        return f"the result {result.text}, and too few have another label to judge that"
    return ""
