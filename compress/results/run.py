"""The record of a run: all that the report shows. As JSON it is report.json, schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compress.core.errors import PipelineError
from compress.core.measurement import COSTS, Measurement, Measurements, Metric
from compress.results.encoding import decode, encode
from compress.results.evaluation import ComparisonRecord, DegeneracyRecord, ExamplesRecord
from compress.results.placement import HostLatencyRecord, LatencyRecord, PlacementRecord
from compress.results.pruning import SensitivityRecord

SCHEMA_VERSION = 1
RunStatus = Literal["ok", "over budget", "not usable", "failed", "interrupted"]
Level = Literal["usable", "usable with warnings", "not usable"]
StageStatus = Literal["done", "cached", "skipped", "failed", "not run"]


@dataclass(frozen=True)
class ErrorRecord:
    """The error that ended a run, or the reason why its result is not acceptable.

    `stage` is the id of the stage that failed, or None. `exit_code` is that of the command.
    """

    stage: str | None
    message: str
    exit_code: int


@dataclass(frozen=True)
class TargetRecord:
    """The target of a run."""

    name: str
    summary: str


@dataclass(frozen=True)
class TargetRange:
    """The range of a regression target in the training split."""

    name: str
    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class CorruptSamples:
    """The samples that cannot be read: their number, and the first of them with the reasons."""

    count: int = 0
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataRecord:
    """The data set: its source, and its summary (the keys are explained in `compress.data.summary`)."""

    source: str
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    preprocess: tuple[Any, ...]
    samples: Mapping[str, int]
    counts: Mapping[str, tuple[int, ...]]
    imbalance: float | None
    missing: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    range: tuple[float, ...]
    dtypes: tuple[str, ...]
    looked_at: int
    corrupt: CorruptSamples
    notes: tuple[str, ...]
    targets: tuple[TargetRange, ...] = ()
    warnings: tuple[str, ...] = ()
    samples_digest: str = ""
    """Two runs with the same digest have the same samples in the same splits; empty if it is not known."""


@dataclass(frozen=True)
class StageRecord:
    """A stage of a run.

    Attributes:
        id: its unique name in the pipeline.
        seconds: the time that it took when it was made; None if it was not.
        reason: the reason why it was skipped.
        kind: the kind of artifact after it.
        facts: what the stage reports; the classes of `compress.results` declare the parts that others read.
        measurements: the measurements of its model, the quality on the validation split.
    """

    id: str
    stage: str
    status: StageStatus
    seconds: float | None = None
    reason: str | None = None
    kind: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRecord:
    """The original or the result: the id of its stage, and its measurements, the quality on the test split."""

    stage: str
    measurements: Measurements


@dataclass(frozen=True)
class ModelsRecord:
    """The two models that are compared."""

    original: ModelRecord
    result: ModelRecord


@dataclass(frozen=True)
class VerdictRecord:
    """Whether the result of a run can be used, and the reasons: one sentence each, those of the level first."""

    level: Level
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class BudgetRecord:
    """A limit of the budget, and the measurement that it is for; `holds` is None if that is missing."""

    name: str
    limit: float
    unit: str
    measured: Measurement
    holds: bool | None

    @property
    def is_uncertain(self) -> bool:
        """Whether the limit is inside the interval of a prediction."""
        low, high = self.measured.low, self.measured.high
        return self.measured.how == "predicted" and low is not None and high is not None and low <= self.limit <= high


@dataclass(frozen=True)
class ConfidenceRecord:
    """The calibrated confidence of a classifier, as in the manifest of a bundle (`deploy.contract.confidence`).

    Attributes:
        temperature: the divisor of the logits.
        threshold: the confidence below which the answer is "unknown"; None without one.
        false_reject_rate: the share of validation samples that the threshold was chosen to reject.
        measured: measurements by split, and for images that show none of the classes ("unknown").
    """

    temperature: float
    threshold: float | None
    false_reject_rate: float
    measured: Mapping[str, Measurements] = field(default_factory=dict)


@dataclass(frozen=True)
class BundleRecord:
    """What `package` reports: where the float file of the bundle can be opened, and the confidence of a classifier."""

    original_opens: str = ""
    confidence: ConfidenceRecord | None = None


@dataclass(frozen=True)
class OutputRecord:
    """A file that the run wrote for the user."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class EnvironmentRecord:
    """The machine of the run, and the versions of the tools."""

    node: str
    cpu: str
    system: str
    python: str
    runtime: str
    tools: Mapping[str, str]


@dataclass(frozen=True)
class DeviceRecord:
    """The measurements of one device with the bundle of the run.

    Attributes:
        board: the board or the processor.
        model: the model that was measured, and on which processor.
        golden: the comparison with the outputs of the host, by model.
        doubts: the reasons why the measurements cannot be compared with others.
    """

    device: str
    board: str
    python: str
    runtime: str
    model: str
    measurements: Measurements
    golden: Mapping[str, str]
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord:
    """The record of a run. A part is None if the run did not get so far, or if it does not apply.

    Attributes:
        error: what ended the run, or why its result is not acceptable.
        coralline: the version of Coralline.
        finished: the end of the run, ISO 8601.
        metrics: the metrics of the task, the most important one first.
        pipeline: the content of the pipeline file.
        degeneracy: whether the outputs of original and result depend on the input.
        latency: the latency of the result on the host of `measure.host`.
        cpu_latency: the times of both models on this machine's CPU.
        outputs: the files for the user, by name.
        examples: test samples with the answers of both models, for tasks whose answers are drawn.
    """

    name: str
    status: RunStatus
    error: ErrorRecord | None
    coralline: str
    seed: int
    seconds: float
    finished: str
    target: TargetRecord
    metrics: tuple[Metric, ...]
    pipeline: Mapping[str, Any]
    data: DataRecord | None
    stages: tuple[StageRecord, ...]
    models: ModelsRecord | None
    degeneracy: DegeneracyRecord | None
    comparison: ComparisonRecord | None
    latency: HostLatencyRecord | None
    cpu_latency: LatencyRecord | None
    placement: PlacementRecord | None
    sensitivity: SensitivityRecord | None
    budget: tuple[BudgetRecord, ...]
    outputs: Mapping[str, OutputRecord]
    environment: EnvironmentRecord
    devices: tuple[DeviceRecord, ...] = ()
    verdict: VerdictRecord | None = None
    examples: ExamplesRecord | None = None

    @property
    def judgement(self) -> str:
        """The verdict on a result within the budget; otherwise the status."""
        return self.verdict.level if self.status == "ok" and self.verdict is not None else self.status

    @property
    def quality(self) -> Metric:
        """The most important metric of the task."""
        return self.metrics[0]

    @property
    def changes(self) -> Measurements:
        """The measurements of the comparison; empty without a comparison."""
        return {} if self.comparison is None else self.comparison.measurements

    @property
    def failed_stage(self) -> str:
        """The id of the stage that failed; empty if none did."""
        return "" if self.error is None else self.error.stage or ""

    @property
    def known_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the task, then size, MACs and latency."""
        return (*self.metrics, *COSTS)

    @classmethod
    def from_json(cls, content: object) -> RunRecord:
        """Return the record in the content of report.json.

        Raises:
            ValueError: it is not a record of schema 1, or a measurement contradicts itself.
        """
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version is not {SCHEMA_VERSION}")
        return decode(cls, content)

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json."""
        return {"schema_version": SCHEMA_VERSION, **encode(self)}


REPORT_FILE = "report.json"
MAX_BYTES = 1 << 28  # chosen; bounds the memory that a foreign file takes
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
