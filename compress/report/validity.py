"""What of a report can be relied on where a run has failed, or has broken its budget."""

from __future__ import annotations

from compress.report import Plain, scalar, shorten


def still_valid(record: Plain) -> str:
    """What of the report can be relied on in spite of the error."""
    if record.get("status") == "over budget":
        return "The run is complete and everything below is valid; the result only breaks the budget."
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
