"""The operators of a model as a graph with their placement: a page, and a file for Model Explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts
from compress.learning.context import Context, Need
from compress.model.tflite.graph import Graph, read
from compress.pipeline.stage import Probe
from compress.report import node_data, operator_graph
from compress.report.json_values import decode
from compress.report.node_data import NODE_DATA_FILE
from compress.report.operator_graph import GRAPH_FILE, GraphSubject
from compress.report.record import PlacementRecord


def graph_page(graph: Graph, placement: PlacementRecord, name: str, target: str) -> str:
    """Return graph.html.

    Args:
        graph: the model.
        placement: where its operators run.
        name: the name of the model, for the title.
        target: the name of the target.
    """
    subject = GraphSubject(name, target, placement.summary, placement.failure, placement.origin)
    return operator_graph.page(graph, placement.ops, subject)


def graph_node_data(graph: Graph, placement: PlacementRecord) -> str:
    """Return the placement for Model Explorer."""
    return node_data.node_data(graph, placement.ops, placement.origin)


def placement_of(facts: Mapping[str, Any]) -> PlacementRecord:
    """Return the placement in the result of `Target.check`, or in the facts of a compilation."""
    return decode(PlacementRecord, {**facts, **facts.get("placement", {})})


class OperatorGraph(Probe):
    """Draw the operators of a model, coloured by where they run."""

    name: ClassVar[str] = "operator graph"
    version: ClassVar[int] = 1
    needs: ClassVar[frozenset[Need]] = frozenset({"target", "name"})

    def run(self, subjects: Mapping[str, Artifact], context: Context) -> Facts:
        """Write GRAPH_FILE and NODE_DATA_FILE. A compiled model has its actual placement, others the predicted one."""
        (model,) = subjects.values()
        graph = read(model.file(MODEL_TFLITE))
        placement = placement_of(model.facts) if "placement" in model.facts else None
        if placement is None or [op.op for op in placement.ops] != [op.name for op in graph.operators]:
            placement = placement_of(context.target.check(graph).to_json())
        page = graph_page(graph, placement, context.name, context.target.name)
        (context.folder / GRAPH_FILE).write_text(page, encoding="utf-8")
        (context.folder / NODE_DATA_FILE).write_text(graph_node_data(graph, placement), encoding="utf-8")
        return {}
