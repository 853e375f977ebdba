"""The quality of the original on samples that are preprocessed in another way: it shows a wrong preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.data.preprocessed import alternatives
from compress.data.splits import spread
from compress.learning.context import Context, Need
from compress.model.tflite.interpreter import LoadedModel, version
from compress.pipeline.probes.original_outputs import output_rows
from compress.pipeline.stage import Probe
from compress.tasks import task_of

SAMPLES = 64
"""Maximum number of test samples: a wrong scale changes the quality much."""


class InputAlternatives(Probe):
    """Run the original on samples of another range, and with another order of the channels."""

    name: ClassVar[str] = "input alternatives"
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return `samples`; `original`: the first metric of the task; and `alternatives`: a list of `description`,
        `advice` and `value`. Nothing for a model with several inputs."""
        data, task, original = context.data, task_of(context.data), subjects["original"]
        specification = original.facts.get("specification")
        order = partial(task.output_order, specification=specification)
        model = LoadedModel(original.file(MODEL_TFLITE), reproducible=False, order=order)
        if len(model.input_layout.shapes) > 1:
            return {}
        indices = np.sort(spread(data.labels("test"))[:SAMPLES])
        samples = np.asarray(data.inputs("test")[indices])
        rows = output_rows(model, samples)
        facts: Facts = {"samples": len(indices), "alternatives": []}
        name = task.metrics[0].name
        for alternative in alternatives(samples):
            pair = {"original": rows, "int8": output_rows(model, alternative(samples))}
            metrics = task.packaged(pair, data, indices.tolist(), specification, version()).metrics
            facts["original"] = metrics[f"{name}_original"]
            value = metrics[f"{name}_int8"]
            facts["alternatives"].append(
                {"description": alternative.description, "advice": alternative.advice, "value": value}
            )
        return facts
