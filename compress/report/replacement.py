"""The report's section on swaps: what became of what, what was left, and what it cost before and after healing."""

from __future__ import annotations

from typing import Any

from compress import report as words
from compress.report import Plain

MAX_ROWS = 20
WHEN = {"before": "before", "swapped": "after the swap", "healed": "after healing"}


def section(record: Plain) -> dict[str, Any] | None:
    """What the last `swap` of a run says, as texts; None where there was none, or it changed nothing."""
    stages = [stage for stage in record.get("stages") or [] if stage.get("stage") == "swap"]
    facts = next((stage["facts"] for stage in reversed(stages) if (stage.get("facts") or {}).get("swapped")), None)
    if facts is None:
        return None
    accuracy = facts.get("accuracy") or {}
    return {
        "swapped": [_swapped(str(what), entry) for what, entry in facts["swapped"].items()],
        "accuracy": [_accuracy(text, accuracy[when]) for when, text in WHEN.items() if when in accuracy],
        "not_found": [words.shorten(words.scalar(each), 60) for each in facts.get("not_found") or []],
        "left": _remarks(facts.get("left")),
        "details": _remarks(facts.get("details")),
    }


def _swapped(what: str, entry: Plain) -> dict[str, str]:
    layers = [words.shorten(str(each), 60) for each in entry.get("layers") or []]
    more = f" and {len(layers) - 6} more" if len(layers) > 6 else ""
    return {
        "what": words.shorten(what.replace("_", " "), 60),
        "by": words.shorten(words.scalar(entry.get("by")), 60),
        "count": words.scalar(entry.get("count")),
        "layers": ", ".join(layers[:6]) + more,
    }


def _accuracy(text: str, measurement: Plain) -> dict[str, str]:
    shown = words.show(measurement, "accuracy")
    return {"when": text, "text": shown.text, "fine": " · ".join(part for part in (shown.fine, shown.note) if part)}


def _remarks(remarks: Any) -> list[dict[str, str]]:
    rows = list((remarks or {}).items())
    shown = [{"layer": words.shorten(str(layer), 80), "text": words.shorten(str(text), 200)} for layer, text in rows]
    more = [{"layer": f"{len(rows) - MAX_ROWS} more", "text": "in report.json"}] if len(rows) > MAX_ROWS else []
    return shown[:MAX_ROWS] + more
