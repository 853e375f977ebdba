"""The placement of a model's operators as a file for Model Explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.learning.context import Context, Need
from compress.model.tflite.graph import read
from compress.pipeline.stage import Probe
from compress.report.placement import NODE_DATA_FILE, node_data
from compress.results.placement import PlacementRecord


class OperatorGraph(Probe):
    """Write where the operators of a model run, for Model Explorer."""

    name: ClassVar[str] = "operator graph"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Need]] = frozenset({"target"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Write NODE_DATA_FILE. A compiled model has its actual placement, others the predicted one."""
        (model,) = subjects.values()
        graph = read(model.file(MODEL_TFLITE))
        placement = PlacementRecord.from_facts(model.facts) if "placement" in model.facts else None
        if placement is None or [op.op for op in placement.ops] != [op.name for op in graph.operators]:
            placement = PlacementRecord.from_facts(context.target.check(graph).to_json())
        (context.folder / NODE_DATA_FILE).write_text(node_data(graph, placement), encoding="utf-8")
        return {}
