"""Quality of models on a split, by the metrics of the task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.artifact import MODEL_TFLITE, Artifact, Facts
from compress.data.rows import blocks
from compress.stage import Context, Need, Probe
from compress.tasks import task_of
from compress.tasks.base import ModelOutputs
from compress.tflite.interpreter import LoadedModel, version

BATCH = 256
"""Samples whose outputs are in memory at once, where the task does not keep them."""


class Evaluation(Probe):
    """Run models on a split, and measure their outputs by the metrics of the task."""

    name: ClassVar[str] = "evaluation"
    version: ClassVar[int] = 1
    needs: ClassVar[frozenset[Need]] = frozenset({"data"})
    tools: ClassVar[tuple[str, ...]] = ("ai-edge-litert", "pycocotools")

    split: Literal["validation", "test"]
    """The split that is measured on; `test` only for the final comparison."""

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Return the facts of `Task.evaluate`."""
        samples, models = context.data.inputs(self.split), {}
        for done, (name, artifact) in enumerate(subjects.items()):
            model = LoadedModel(artifact.file(MODEL_TFLITE), reproducible=True)
            floating = bool(np.issubdtype(model.output["dtype"], np.floating))
            rows = self._rows(model, samples, context, (done, len(subjects)))
            models[name] = ModelOutputs(rows, floating, artifact.facts.get("detector"))
        note = f"{self.split} split, {version()}, default kernels without a delegate"
        return task_of(context.data).evaluate(models, context.data, self.split, note)

    def _rows(
        self, model: LoadedModel, samples: NDArray[np.float32], context: Context, progress: tuple[int, int]
    ) -> Iterator[NDArray[Any]]:
        """Run the model when outputs are asked for."""
        context.progress.update(*progress)
        for block in blocks(samples):
            for start in range(0, len(block), BATCH):
                yield model.scores(block[start : start + BATCH])
