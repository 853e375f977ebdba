"""Reading the record of a run from its folder or its report.json."""

from __future__ import annotations

import json
from pathlib import Path

from compress.core.errors import PipelineError
from compress.report.record import RunRecord

REPORT_FILE = "report.json"
MAX_BYTES = 1 << 28
HINT = "give the folder of a run, such as runs/NAME, or its report.json"


def read_record(path: Path) -> RunRecord:
    """Return the record of a run.

    Args:
        path: the folder of the run, or a report.json.

    Raises:
        PipelineError: it is not a record of a run.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise PipelineError(f"cannot be read: {error.strerror}", where=str(file), hint=HINT) from error
    if len(content) > MAX_BYTES:
        raise PipelineError("is too large for a report", where=str(file), allowed=f"{MAX_BYTES:,} bytes", hint=HINT)
    try:
        return RunRecord.from_json(json.loads(content.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise PipelineError(f"is not the record of a run ({reason})", where=str(file), hint=HINT) from error
