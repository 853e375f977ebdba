"""Latency: predicted for a host, or measured on this machine.

All subjects are measured in turn, one inference each, so that noise hits them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from compress.core.artifact import MODEL_COMPILED, MODEL_TFLITE, Artifact, Facts
from compress.core.errors import ModelError, PipelineError
from compress.core.measurement import Measurement, missing
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.model.tflite.graph import read
from compress.model.tflite.interpreter import LoadedModel, version
from compress.pipeline.stage import Probe, host
from compress.targets.base import Target, hardware_costs

WARMUP = 20
"""Inferences before the timed ones; chosen: the first ones allocate memory and raise the clock of the CPU."""
RUNS = Phase("", unit="run")
PERCENTILES = {"latency_ms": 50, "latency_p90_ms": 90, "latency_p99_ms": 99}


class Latency(Probe):
    """Time of one inference with the TFLite runtime's default kernels: input set, invoke, output read."""

    name: ClassVar[str] = "latency"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    runs: Annotated[int, Field(ge=1)]
    """Timed inferences of each model."""
    threads: Annotated[int, Field(ge=1)]
    """Threads of the runtime."""

    def environment(self) -> dict[str, str]:
        """Versions and the machine: a time measured elsewhere is not valid here."""
        return {**super().environment(), **host()}

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """For each subject its percentiles and `times_ms`; and the `conditions`."""
        sample = context.data.inputs("validation")[0]
        models = {
            name: LoadedModel(artifact.file(MODEL_TFLITE), reproducible=False, threads=self.threads)
            for name, artifact in subjects.items()
        }
        tensors = {name: model.feed(sample) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        context.progress.plan(RUNS)
        with context.progress.phase(RUNS):
            for turn in range(-WARMUP, self.runs):
                context.progress.update(max(turn, 0), self.runs)
                for name, model in models.items():
                    duration_ms = model.duration_ms(tensors[name])
                    if turn >= 0:
                        times[name].append(duration_ms)
        conditions = {
            "runtime": f"{version()}, default kernels",
            "threads": self.threads,
            "runs": self.runs,
            "warmup": WARMUP,
            "order": "the models in turn",
            **host(),
        }
        return {"conditions": conditions, **{name: self._summary(values) for name, values in times.items()}}

    def _summary(self, values: list[float]) -> dict[str, Any]:
        note = f"{self.threads} thread{'s' if self.threads > 1 else ''}, {self.runs} runs after {WARMUP} of warm-up"
        measured: dict[str, Any] = {
            name: Measurement(float(np.percentile(values, share)), "ms", "measured", note=note).to_json()
            for name, share in PERCENTILES.items()
        }
        return {**measured, "times_ms": [round(value, 5) for value in values]}


def predict(artifact: Artifact, target: Target, host: str | None) -> Facts:
    """Return the predicted latency of a model on a host, as `estimate` writes it; `missing` has the reason for none.

    Args:
        artifact: the model; with a compiled file, the streamed parameters are read from it.
        target: the target.
        host: one of the target's hosts; None for the default host.
    """
    if not target.cost.hosts:
        return {"host": "", "missing": f"no latency is predicted for the target {target.name}"}
    name = target.cost.host(host)
    costs = hardware_costs(target)
    compiled = artifact.file(MODEL_COMPILED) if MODEL_COMPILED in artifact.files else None
    try:
        graph = read(artifact.file(MODEL_TFLITE))
        try:
            return costs.estimate(graph, name, None, compiled).to_json()
        except ModelError:  # a compiled file without an operator on the Edge TPU has no parameters to read
            return costs.estimate(graph, name, None).to_json()
    except (ModelError, PipelineError) as error:  # a target may have hosts, and no prediction
        return {"host": name, "missing": str(error)}


def unmeasured(subjects: Iterable[str], reason: str) -> Facts:
    """Return the facts of `Latency.run` where the runtime refuses a model."""
    values = {name: missing("ms", reason).to_json() for name in PERCENTILES}
    return {"conditions": {}, **{name: {**values, "times_ms": []} for name in subjects}}
