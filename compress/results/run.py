"""The record of a run: all that the report shows. As JSON it is report.json, schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compress.core.errors import PipelineError
from compress.core.measurement import COSTS, How, Measurement, Metric
from compress.results.encoding import decode, encode
from compress.results.pruning import SensitivityRecord

SCHEMA_VERSION = 1
RunStatus = Literal["ok", "over budget", "not usable", "failed", "interrupted"]
Level = Literal["usable", "usable with warnings", "not usable"]
ExampleKind = Literal["different", "typical"]
EXAMPLES = "examples"
"""The folder of a run with the pictures of examples."""
PROCESSORS = {"tpu": "Edge TPU", "cpu": "CPU"}
"""The processors by their names in the placement of operators."""
StageStatus = Literal["done", "cached", "skipped", "failed", "not run"]
Measurements = Mapping[str, Measurement]
"""Measurements by the name of their metric."""


@dataclass(frozen=True)
class ErrorRecord:
    """The error that ended a run, or the reason why its result is not acceptable.

    Attributes:
        stage: the id of the stage that failed; None if the error is not in a stage.
        message: the message of the error.
        exit_code: the exit code of the command.
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
        stage: the name of the stage.
        status: what became of it.
        seconds: the time that it took when it was made; None if it was not.
        reason: the reason why it was skipped.
        kind: the kind of artifact after it.
        settings: its settings.
        facts: what the stage reports; the report's sections decode what they show.
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
class AnswersRecord:
    """Whether the outputs of a model depend on its input.

    Attributes:
        verdict: "degenerate" if it gives one answer to nearly everything.
        text: its most frequent answer and the count, as a predicate.
        counts: the counts behind the verdict.
    """

    verdict: Literal["varied", "degenerate", "undecided"]
    text: str
    counts: Mapping[str, Any]


@dataclass(frozen=True)
class DegeneracyRecord:
    """The verdicts on the outputs of both models."""

    original: AnswersRecord
    result: AnswersRecord


@dataclass(frozen=True)
class VerdictRecord:
    """Whether the result of a run can be used.

    Attributes:
        level: usable, usable with warnings, or not usable.
        reasons: one sentence each; those of the level first.
    """

    level: Level
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScaleRecord:
    """The channels of one scale in an output that mixes quantities of different size.

    Attributes:
        channels: the indices of the channels.
        low: the smallest value of the original in these channels.
        high: the largest value.
        sqnr_db: the ratio of the variation of the original's values to their error in dB.
        constant: the channels that vary in the original, and have one value in the result.
    """

    channels: tuple[int, ...]
    low: float
    high: float
    sqnr_db: float
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputComparisonRecord:
    """How close one output of the result is to the original's.

    Attributes:
        name: the output.
        shape: its shape, without the batch.
        sqnr_db: the ratio of the original's values to their error in dB.
        max_abs_error: the largest difference of a value.
        agreement: the share of equal decisions; None for an output without decisions.
        channel_axis: the axis of the channels in `shape`; None for an output of one scale.
        scales: the channels by scale, the largest first; empty for an output of one scale.
        step: the quantization step of the result; None for an output in floating point.
        flat_channels: the number of channels that vary in the original, and have one value in the result.
    """

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    max_abs_error: float
    agreement: float | None = None
    channel_axis: int | None = None
    scales: tuple[ScaleRecord, ...] = ()
    step: float | None = None
    flat_channels: int = 0


@dataclass(frozen=True)
class ClassRecord:
    """The quality of both models for one class.

    Attributes:
        name: the class.
        samples: the number of its test samples; for detection, of its objects.
        original: the quality of the original.
        result: the quality of the result.
        ap50: for detection, the average precision at IoU 0.5 of both models.
    """

    name: str
    samples: int
    original: Measurement
    result: Measurement
    ap50: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FoundAgainRecord:
    """The objects of one class that the original finds.

    Attributes:
        name: the class.
        objects: the number of its objects in the test samples.
        found: the number of those that the result finds too.
    """

    name: str
    objects: int
    found: int


@dataclass(frozen=True)
class ConfusionRecord:
    """Counts of test samples by true class (row) and predicted class (column), of both models."""

    original: tuple[tuple[int, ...], ...]
    result: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RightAnswersRecord:
    """Which test samples both models answer correctly.

    Attributes:
        samples: the number of test samples.
        original: a bit for each sample, as hexadecimal digits; the first sample is the highest bit of the first byte.
        result: the same for the result.
    """

    samples: int
    original: str
    result: str


@dataclass(frozen=True)
class ComparisonRecord:
    """The comparison of result and original.

    Attributes:
        measurements: drops, ratios, agreement.
        per_class: the quality for each class, if the task has classes.
        confusion: how often classes are taken for others.
        outputs: how close each output is.
        found_again: for detectors without labels: the objects of the original that the result finds, by class.
        right: which samples are answered correctly, for tasks whose answers are right or wrong.
    """

    measurements: Measurements
    per_class: tuple[ClassRecord, ...] = ()
    confusion: ConfusionRecord | None = None
    outputs: tuple[OutputComparisonRecord, ...] = ()
    found_again: tuple[FoundAgainRecord, ...] = ()
    right: RightAnswersRecord | None = None


@dataclass(frozen=True)
class PictureRecord:
    """A picture of a sample with an answer drawn into it.

    Attributes:
        shows: the answer: "label", the correct one, "original" or "result".
        file: the name of the file in the folder EXAMPLES of the run.
        sha256: its digest.
        text: the answer in words.
    """

    shows: str
    file: str
    sha256: str
    text: str


@dataclass(frozen=True)
class ExampleRecord:
    """A test sample with the answers of both models.

    Attributes:
        sample: its index in the test split.
        name: its name, such as the path of its file.
        kind: why it was chosen: a large difference between both models, or one near the median.
        difference: the difference in words.
        pictures: the label, if there is one, then the answers.
    """

    sample: int
    name: str
    kind: ExampleKind
    difference: str
    pictures: tuple[PictureRecord, ...]


@dataclass(frozen=True)
class ExamplesRecord:
    """Test samples with the answers of original and result.

    Attributes:
        note: what is drawn.
        samples: the number of test samples from which they were chosen.
        examples: the largest difference first, then typical ones.
    """

    note: str
    samples: int
    examples: tuple[ExampleRecord, ...]


@dataclass(frozen=True)
class AdviceRecord:
    """A change that reduces the latency, and the predicted ms that it saves."""

    what: str
    saves_ms: float


@dataclass(frozen=True)
class HostLatencyRecord:
    """The latency of the result on the host that was chosen.

    Attributes:
        host: the name of the host.
        value: the median in ms; None if `provenance` is "missing".
        low: lower end of the interval in which measurements are expected.
        high: its upper end.
        provenance: measured on this machine, predicted, or missing.
        note: how the value was obtained; the reason if it is missing.
        parts: the ms of each part of a prediction, such as `compute_ms`.
        streamed_bytes: parameters that are sent at every inference.
        advice: changes that reduce it, the most effective first.
    """

    host: str
    value: float | None
    low: float | None
    high: float | None
    provenance: How
    note: str
    parts: Mapping[str, float] = field(default_factory=dict)
    streamed_bytes: int = 0
    advice: tuple[AdviceRecord, ...] = ()

    @property
    def measurement(self) -> Measurement:
        """The value as a measurement."""
        return Measurement(self.value, "ms", self.provenance, self.low, self.high, self.note)


@dataclass(frozen=True)
class LatencyRecord:
    """The time of each inference on this host in ms, of both models, and the conditions."""

    conditions: Mapping[str, Any]
    original: tuple[float, ...]
    result: tuple[float, ...]


@dataclass(frozen=True)
class OperatorRecord:
    """An operator of the compressed model, and where it runs."""

    index: int
    op: str
    placement: str
    macs: int
    version: int | None = None
    output: str = ""
    status: str = ""
    reason: str = ""
    advice: str = ""

    @property
    def on_tpu(self) -> bool:
        """Whether the Edge TPU runs it."""
        return self.placement == "tpu"

    @property
    def processor(self) -> str:
        """The processor that runs it."""
        return PROCESSORS.get(self.placement, "unknown")


@dataclass(frozen=True)
class ExpectedLatency:
    """The predicted latency on one kind of host with its interval, and the time on its CPU alone."""

    summary: str
    latency_ms: float
    low_ms: float
    high_ms: float
    cpu_alone_ms: float


@dataclass(frozen=True)
class PlacementRecord:
    """Where the operators of the compressed model run (`compress.targets.edgetpu.check`).

    Attributes:
        summary: one line about it.
        ops: every operator in the order of execution.
        macs: the multiply-accumulates by processor.
        compiled: whether the vendor's compiler ran; otherwise the placement is predicted.
        reason: the reason why it did not run.
        how_to_compile: instructions for the user.
        compiles: whether the model compiles; None if that is unknown.
        failure: the reason why it does not compile.
        expected_latency: the predicted latency by host.
        lookup_table: rows and width of the table in which the CPU looks up the model's input; None without one.
    """

    summary: str
    ops: tuple[OperatorRecord, ...]
    macs: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False
    reason: str = ""
    how_to_compile: str = ""
    compiles: bool | None = None
    failure: str | None = None
    expected_latency: Mapping[str, ExpectedLatency] = field(default_factory=dict)
    schema_version: int | None = None
    subgraphs: int | None = None
    cached_bytes: int | None = None
    streamed_bytes: int | None = None
    report_on_chip_bytes: int | None = None
    report_off_chip_bytes: int | None = None
    activation_bytes: int | None = None
    risk: str | None = None
    blockers: tuple[Any, ...] = ()
    lookup_table: tuple[int, ...] | None = None

    @property
    def origin(self) -> How:
        """Whether the placement was read from a compiled file, or is predicted."""
        return "measured" if self.compiled and self.compiles is not False else "predicted"


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
        device: its name.
        board: its board or processor.
        python: the version of Python.
        runtime: the TFLite runtime.
        model: the model that was measured, and on which processor.
        measurements: the measurements.
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
    """The record of a run.

    Attributes:
        name: the name of the pipeline.
        status: "ok", "over budget", "not usable", "failed" or "interrupted".
        verdict: whether the result can be used; None for a run that did not get so far.
        error: what ended the run, or why its result is not acceptable.
        coralline: the version of Coralline.
        seed: the seed of the run.
        seconds: the time of the run.
        finished: the end of the run, ISO 8601.
        target: the target.
        metrics: the metrics of the task, the most important one first.
        pipeline: the content of the pipeline file.
        data: the data set; None if the run did not get so far, as for all that follow.
        stages: the stages, in order.
        models: original and result.
        degeneracy: whether their outputs depend on the input.
        comparison: their comparison.
        latency: the latency of the result on the host of `measure.host`.
        cpu_latency: the times of both on this machine's CPU.
        placement: where the operators of the result run.
        sensitivity: the sensitivity of the layers to pruning; None if it was not measured.
        budget: the limits that were set.
        outputs: the files for the user, by name.
        environment: the machine and the tools.
        devices: the measurements of devices.
        examples: test samples with the answers of both models; None for tasks whose answers are not drawn.
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
