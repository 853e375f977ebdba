"""The report's sentences on trainings: batch norm recalibration, and healing that was not kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compress import report as words
from compress.report import Plain

MAX_LINES = 40


def lines(record: Plain) -> list[str]:
    """Return one sentence for each recalibration and each healing that was not kept, in the order of the stages."""
    sentences = []
    for name, facts in _trainings(record):
        healing = facts.get("healing")
        if isinstance(healing, dict) and healing.get("kept") is False:
            sentences.append(f"{name}: the training is not kept, because it changed {_change(healing)}")
        batch_norms = facts.get("batch_norms")
        if isinstance(batch_norms, dict):
            sentences.append(f"{name}: {_recalibration(batch_norms)}")
    return sentences[:MAX_LINES]


def _trainings(record: Plain) -> Iterator[tuple[str, Plain]]:
    """Yield name and facts of every stage, or of every step of a stage with steps."""
    for stage in record.get("stages") or []:
        name = words.shorten(str(stage.get("id")), 60)
        facts = stage.get("facts") or {}
        yield name, facts
        steps = [step for step in facts.get("steps") or [] if isinstance(step, dict)]
        for number, step in enumerate(steps, 1):
            yield f"{name}, step {number}", step


def _recalibration(facts: Plain) -> str:
    if facts.get("recalibrated"):
        return f"batch norms are recalibrated, which changed {_change(facts)}"
    if "reason" in facts:
        return f"batch norms are not recalibrated: {words.shorten(words.scalar(facts['reason']), 200)}"
    return f"batch norms are not recalibrated, because that changed {_change(facts)}"


def _change(facts: Plain) -> str:
    before, after = (_value(facts.get(key)) for key in ("validation_before", "validation_after"))
    return f"validation {words.shorten(words.scalar(facts.get('metric')), 20)} from {before} to {after}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not finite"
