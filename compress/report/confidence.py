"""The section on calibrated confidence: the calibration error before and after, and the answer "unknown"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compress.core.measurement import Measurement, missing
from compress.report.blocks import Block, Cell, Section, Table, Text
from compress.report.json_values import decode
from compress.report.record import RunRecord
from compress.report.wording import number, show

ROWS = {
    "ece_before": "Calibration error (ECE) before",
    "ece_after": "Calibration error (ECE) after",
    "false_reject": "False rejects: a known class, answered unknown",
    "false_accept": "False accepts: no known class, answered with a class",
}
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class CalibrationFacts:
    """The manifest's `confidence` (`compress.bundling.recognition`)."""

    temperature: float
    threshold: float | None
    false_reject_rate: float
    measured: Mapping[str, Mapping[str, Measurement]] = field(default_factory=dict)


@dataclass(frozen=True)
class PackageFacts:
    """The facts of `package` that the section reads."""

    confidence: CalibrationFacts | None = None


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the section on the last `package` that calibrated a classifier."""
    facts = [decode(PackageFacts, stage.facts) for stage in record.stages if stage.stage == "package"]
    confidences = [package_facts.confidence for package_facts in facts if package_facts.confidence is not None]
    if confidences:
        yield Section("Confidence", list(_blocks(confidences[-1])))


def _blocks(facts: CalibrationFacts) -> Iterator[Block]:
    threshold = "none" if facts.threshold is None else number(facts.threshold, "fraction")
    fitted = f"temperature {number(facts.temperature, 'fraction')}, threshold of the answer unknown {threshold}"
    yield Text(f"Fitted on the validation split, for a false-reject rate of {facts.false_reject_rate:g}: {fitted}.")
    unknown = facts.measured.get("unknown", {})
    rows: list[tuple[Cell | str, ...]] = []
    for key, title in ROWS.items():
        columns = [facts.measured.get(split, {}).get(key) for split in SPLITS]
        if key == "false_accept":
            accepted = unknown.get(key, missing("fraction", "not measured"))
            rows.append((title, show(missing("fraction", "it needs images without the classes")), show(accepted)))
        else:
            rows.append((title, *(show(figure or missing("fraction", "the split is empty")) for figure in columns)))
    yield Table(("Measurement", "Validation", "Test"), rows)
