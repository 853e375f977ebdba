"""The results of a target: where operators run, and the latency of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compress.core.measurement import How, Measurement
from compress.results.encoding import decode

PROCESSORS = {"tpu": "Edge TPU", "cpu": "CPU"}
"""The processors by their names in the placement of operators."""


@dataclass(frozen=True)
class OperatorPlacement:
    """An operator of a .tflite file, and where it runs.

    Attributes:
        index: the operator's index in the model.
        op: the operator's name, such as "CONV_2D".
        placement: where the operator runs, such as "tpu" or "cpu".
        macs: the operator's multiply-accumulates.
        version: the version of the operator.
        output: the name of its output tensor.
        status: the status in the words of the compiler.
        reason: the reason for the placement; "" where there is nothing to explain.
        advice: what would change the placement.
        risk: the reason why a mapped operator may stay on the CPU: no operator of its size is known to be mapped.
    """

    index: int
    op: str
    placement: str
    macs: int
    version: int | None = None
    output: str = ""
    status: str = ""
    reason: str = ""
    advice: str = ""
    risk: str = ""

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

    @property
    def measurement(self) -> Measurement:
        """The latency as a measurement."""
        return Measurement(self.latency_ms, "ms", "predicted", self.low_ms, self.high_ms)


@dataclass(frozen=True)
class PlacementRecord:
    """Where the operators of the compressed model run; the facts of the stage `compile` have more of the compiler.

    Attributes:
        ops: every operator in the order of execution.
        macs: the multiply-accumulates by processor.
        compiled: whether the vendor's compiler ran; otherwise the placement is predicted.
        reason: the reason why the compiler did not run.
        how_to_compile: instructions for the user.
        compiles: whether the model compiles; None if that is unknown.
        failure: the reason why the model does not compile.
        expected_latency: the predicted latency by host.
        lookup_table: rows and width of the table in which the CPU looks up the model's input; None without one.
    """

    summary: str
    ops: tuple[OperatorPlacement, ...]
    macs: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False
    reason: str = ""
    how_to_compile: str = ""
    compiles: bool | None = None
    failure: str | None = None
    expected_latency: Mapping[str, ExpectedLatency] = field(default_factory=dict)
    cached_bytes: int | None = None
    streamed_bytes: int | None = None
    activation_bytes: int | None = None
    lookup_table: tuple[int, ...] | None = None

    @property
    def origin(self) -> How:
        """Whether the placement was read from a compiled file, or is predicted."""
        return "measured" if self.compiled and self.compiles is not False else "predicted"

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> PlacementRecord:
        """Return the placement in the facts of a compilation, or in the result of `Target.check` as a plain map."""
        return decode(cls, {**facts, **facts.get("placement", {})})


@dataclass(frozen=True)
class LatencyAdvice:
    """A change that reduces the latency, and the predicted ms that it saves."""

    what: str
    saves_ms: float


@dataclass(frozen=True)
class HostLatencyRecord:
    """The latency of the result on the host that was chosen.

    Attributes:
        measurement: the median in ms; its note says how the value was obtained.
        parts: the ms of each part of a prediction, such as `compute_ms`.
        streamed_bytes: parameters that are sent at every inference.
        advice: changes that reduce the latency, the most effective first.
    """

    host: str
    measurement: Measurement
    parts: Mapping[str, float] = field(default_factory=dict)
    streamed_bytes: int = 0
    advice: tuple[LatencyAdvice, ...] = ()


@dataclass(frozen=True)
class LatencyRecord:
    """The time of each inference on this host in ms, of both models, and the conditions."""

    conditions: Mapping[str, Any]
    original: tuple[float, ...]
    result: tuple[float, ...]
