"""The report of a run, computed from its record and the pictures that it names: report.html, report.json and report.md.

The sections say what the record holds; `html` and `markdown` render them, and `charts` draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.report.blocks import Section
    from compress.results.run import RunRecord


def render(record: RunRecord, pictures: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the report's files by name; the same record gives the same bytes.

    Args:
        record: the run record. Strings in it are not trusted.
        pictures: the content of the pictures of its examples by name (`examples.read`).

    Returns:
        report.html (one file that needs nothing else), report.json (the record) and report.md.
    """
    from compress.report import html, markdown, verdict

    overview, content = verdict.overview(record), sections(record, pictures or {})
    exact = json.dumps(record.to_json(), indent=2, allow_nan=False) + "\n"
    return {
        "report.html": html.page(overview, content).encode(),
        "report.json": exact.encode(),
        "report.md": markdown.page(overview, content).encode(),
    }


def sections(record: RunRecord, pictures: Mapping[str, bytes]) -> Sequence[Section]:
    """Return the sections of the report, in order."""
    from compress.report import (
        classes,
        comparison,
        examples,
        latency,
        placement,
        pruning,
        quantization,
        run_context,
        training,
    )

    return [
        comparison.budget(record),
        comparison.before_and_after(record),
        *comparison.outputs(record),
        comparison.costs(record),
        comparison.stages(record),
        classes.section(record),
        *classes.confidence(record),
        *examples.sections(record, pictures),
        latency.section(record),
        *latency.limits(record),
        *latency.devices(record),
        *pruning.sections(record),
        *pruning.replacements(record),
        *quantization.sections(record),
        placement.section(record),
        run_context.data(record),
        *training.time_use(record),
        run_context.outputs(record),
        run_context.environment(record),
        run_context.stage_facts(record),
    ]
