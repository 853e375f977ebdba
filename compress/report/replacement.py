"""The report's section on activation replacement: what was replaced or skipped, and the accuracy on the way."""

from __future__ import annotations

from typing import Any

from compress import report as words
from compress.report import Plain

MAX_ROWS = 20
MAX_NAMES = 6
TIMES = {"before": "before", "replaced": "after the replacement", "healed": "after training"}


def section(record: Plain) -> dict[str, Any] | None:
    """Return the facts of the last `replace_activations` as texts; None if there is none, or it changed nothing."""
    stages = [stage for stage in record.get("stages") or [] if stage.get("stage") == "replace_activations"]
    facts = next((stage["facts"] for stage in reversed(stages) if (stage.get("facts") or {}).get("replaced")), None)
    if facts is None:
        return None
    accuracy = facts.get("accuracy") or {}
    return {
        "replaced": [_row(str(kind), entry) for kind, entry in facts["replaced"].items()],
        "accuracy": [_accuracy(text, accuracy[time]) for time, text in TIMES.items() if time in accuracy],
        "not_found": [words.shorten(words.scalar(kind), 60) for kind in facts.get("not_found") or []],
        "skipped": _remarks(facts.get("skipped")),
        "details": _remarks(facts.get("details")),
    }


def _row(kind: str, entry: Plain) -> dict[str, str]:
    layers = [words.shorten(str(layer), 60) for layer in entry.get("layers") or []]
    more = f" and {len(layers) - MAX_NAMES} more" if len(layers) > MAX_NAMES else ""
    return {
        "what": words.shorten(kind.replace("_", " "), 60),
        "by": words.shorten(words.scalar(entry.get("by")), 60),
        "count": words.scalar(entry.get("count")),
        "layers": ", ".join(layers[:MAX_NAMES]) + more,
    }


def _accuracy(text: str, measurement: Plain) -> dict[str, str]:
    shown = words.show(measurement, "accuracy")
    return {"when": text, "text": shown.text, "fine": " · ".join(part for part in (shown.fine, shown.note) if part)}


def _remarks(remarks: Any) -> list[dict[str, str]]:
    rows = [
        {"layer": words.shorten(str(layer), 80), "text": words.shorten(str(text), 200)}
        for layer, text in (remarks or {}).items()
    ]
    if len(rows) > MAX_ROWS:
        return [*rows[:MAX_ROWS], {"layer": f"{len(rows) - MAX_ROWS} more", "text": "in report.json"}]
    return rows
