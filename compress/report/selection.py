"""The report's lines on selected samples: their number, and the time of the selection."""

from __future__ import annotations

from typing import Any

from compress import report as words
from compress.report import Plain

MAX_LINES = 20
WHAT = {"subset": "training", "calibration": "calibration"}


def lines(record: Plain) -> list[str]:
    """Return a line for each selection in any stage; none if all samples were used."""
    sentences = []
    for stage in record.get("stages") or []:
        facts = stage.get("facts") or {}
        steps = [step for step in facts.get("steps") or [] if isinstance(step, dict)]
        for part in (facts, *steps):
            sentences += [
                _line(str(stage.get("id")), key, part[key]) for key in WHAT if isinstance(part.get(key), dict)
            ]
    return sentences[:MAX_LINES]


def _line(stage: str, key: str, chosen: dict[str, Any]) -> str:
    samples, total, seconds = (float(chosen.get(name) or 0) for name in ("samples", "of", "seconds"))
    saved = f"{1 - samples / total:.0%}" if total else "unknown"
    by = words.shorten(words.scalar(chosen.get("by")), 40)
    return (
        f"{words.shorten(stage, 60)}: {samples:,.0f} of {total:,.0f} samples for {WHAT[key]} ({saved} fewer), "
        f"selected by {by}; the selection took {seconds:.1f} s"
    )
