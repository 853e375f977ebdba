"""The reason why a part of the report is missing."""

from __future__ import annotations

from compress.report.record import RunRecord
from compress.report.wording import shorten


def absence(record: RunRecord) -> str:
    """Return the reason why a part of the record is missing."""
    if record.status == "failed":
        return f"the run failed{in_stage(record)} before this step"
    if record.status == "interrupted":
        return f"the run was interrupted{in_stage(record)} before this step"
    return "not part of this run"


def in_stage(record: RunRecord) -> str:
    """Return where a run failed, for the middle of a sentence; empty if it is not known."""
    return f" in stage “{shorten(record.failed_stage)}”" if record.failed_stage else ""
