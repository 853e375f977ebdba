"""Quality of models on a split, by the metrics of the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import ClassVar, Literal

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.core.progress import Phase
from compress.learning.context import Context, Need
from compress.model.tflite.interpreter import LoadedModel, version
from compress.pipeline.probes.examples import examples
from compress.pipeline.probes.input_values import input_range
from compress.pipeline.probes.original_outputs import output_rows
from compress.pipeline.probes.output_fidelity import compare_outputs
from compress.pipeline.stage import Probe
from compress.tasks import task_of
from compress.tasks.base import ModelOutputs


class Evaluation(Probe):
    """Run models on a split, and measure their outputs by the metrics of the task."""

    name: ClassVar[str] = "evaluation"
    version: ClassVar[int] = 7
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)

    split: Literal["validation", "test"]
    """The split that is measured on; `test` only for the final comparison."""
    labels: tuple[str, ...] = ()
    """Names of the classes for data without labels."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the facts of `Task.evaluate`; and for two models `outputs`: how close each output is, `input_range` of
        the first, `class_names`, and `examples`: samples whose pictures are in the folder."""
        task = task_of(context.data)
        samples = context.data.inputs(self.split)
        models, layouts, ranges = {}, [], []
        steps: list[float | None] = []
        parts = {name: Phase(f"{name} model" if len(subjects) > 1 else "", unit="sample") for name in subjects}
        metrics = Phase("metrics", 0.2)
        context.progress.plan(*parts.values(), metrics)
        for name, artifact in subjects.items():
            specification = artifact.facts.get("specification")
            order = partial(task.output_order, specification=specification)
            model = LoadedModel(artifact.file(MODEL_TFLITE), reproducible=True, order=order)
            with context.progress.phase(parts[name]):
                rows = output_rows(model, samples, context.progress)
            models[name] = ModelOutputs(rows, model.floating, specification)
            layouts.append(model.output_layout)
            steps = [tensor.scale for tensor in model.output_tensors]
            if len(model.input_tensors) == 1:
                # Samples that are looked up are numbers of rows, whose values are in the table.
                ranges.append(input_range(model.input_tensors[0], samples) if model.lookup is None else None)
        note = f"{self.split} split, {version()}, default kernels without a delegate"
        with context.progress.phase(metrics):
            facts = task.evaluate(models, context.data, self.split, note)
        if len(models) == 2 and ranges:
            facts["input_range"] = ranges[0]
        if len(models) == 2 and layouts[0].sizes == layouts[1].sizes:
            expected, actual = (model.rows for model in models.values())
            specification = next(iter(models.values())).specification
            compared = compare_outputs(layouts[0], expected, actual, specification, steps)
            facts["outputs"] = [asdict(row) for row in compared]
        if len(models) == 2:
            facts["class_names"] = list(self.labels)
            illustrator = task.illustrator(models, context.data, self.split, self.labels)
            facts["examples"] = examples(illustrator, context.data, self.split, context.folder)
        return facts
