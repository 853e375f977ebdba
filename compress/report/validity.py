"""The parts of a report that can be relied on if a run failed or its result is not acceptable."""

from __future__ import annotations

from compress.report import Plain, culprit, label, quality, scalar, shorten


def is_complete(record: Plain) -> bool:
    """Whether all stages and measurements were done, although there is an error."""
    return record.get("status") in ("over budget", "degenerate")


def of_complete(record: Plain) -> str:
    """Return what can be relied on where the run is complete but its result is not acceptable."""
    if record.get("status") != "degenerate":
        return "The run is complete and everything below is valid; the result only breaks the budget."
    text = "The run is complete. Sizes, MACs, latencies and placement below are valid. Do not use the result: its "
    text += f"{label(quality(record)).lower()} is that of a model whose answers do not depend on the input."
    original = (record.get("answers") or {}).get("original") or {}
    if original.get("verdict") == "degenerate":
        text += " The same holds for the original, so drop and agreement show nothing."
    return text


def still_valid(record: Plain) -> str:
    """Return what of the report can be relied on in spite of the error."""
    if is_complete(record):
        return of_complete(record)
    stages = record.get("stages") or []
    done = [scalar(stage.get("id")) for stage in stages if stage.get("status") in ("made", "kept", "skipped")]
    compared = " The comparison of the two models below is complete and valid." if record.get("comparison") else ""
    if not done:
        return f"No stage was completed, so there are no numbers below.{compared}"
    listed = ", ".join(f"“{shorten(each, 40)}”" for each in done[:12]) + (", …" if len(done) > 12 else "")
    word = "stage that was" if len(done) == 1 else "stages that were"
    return (
        f"Still valid: the {len(done)} {word} completed ({listed}), with the numbers given for them below. "
        f"They are stored; the next run goes on from there.{compared}"
    )


def heading(record: Plain) -> str:
    """Return the heading of the box with the error."""
    complete = {
        "over budget": "The budget is not kept",
        "degenerate": "The result gives one answer to nearly everything",
    }
    status = str(record.get("status") or "unknown")
    if status in complete:
        return complete[status]
    stage = shorten(culprit(record), 60)
    return f"{status.capitalize()} in stage “{stage}”" if stage else f"{status.capitalize()}, outside of any stage"
