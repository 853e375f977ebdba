"""The placement of operators for Model Explorer, which colours the nodes of a .tflite file with it.

The format is that of custom node data in ai-edge-model-explorer 0.1.34: a node is found by the name of one of its
output tensors, or by its identifier, which is the index of the operator in its reader of .tflite files.
"""

from __future__ import annotations

import json
from collections import Counter

from compress.model.tflite.graph import Graph
from compress.report.blocks import joined
from compress.report.wording import MAX_PROSE, shorten
from compress.results.placement import OperatorPlacement, PlacementRecord

NODE_DATA_FILE = "model_explorer.json"
"""The name of the file in the folder of a run."""
COLOURS = {"tpu": "#9fd8de", "cpu": "#f2b766"}
UNKNOWN = "#d0d5db"


def node_data(graph: Graph, placement: PlacementRecord) -> str:
    """Return the content of the file for a model and the placement of its operators."""
    used = Counter(tensor.name for tensor in graph.tensors)
    results = {}
    for operator, source in zip(placement.ops, graph.operators, strict=True):
        names = [tensor.name for tensor in graph.output_tensors(source) if tensor.name and used[tensor.name] == 1]
        key = names[0] if names else str(operator.index)
        results[key] = {"value": _value(operator), "bgColor": COLOURS.get(operator.placement, UNKNOWN)}
    content = {
        "name": f"Placement ({placement.origin})",
        "results": results,
        "showExpandedSummaryOnGroupNode": True,
        "hideInAggregatedStatsTable": True,  # sums and means of numbers
        "hideInChildrenStatsTable": True,
    }
    return json.dumps(content, indent=1) + "\n"


def _value(operator: OperatorPlacement) -> str:
    """Return the processor, and the reason if it is not the accelerator."""
    if operator.on_tpu:
        return operator.processor
    return joined(": ", operator.processor, shorten(joined(" ", operator.status, operator.reason), MAX_PROSE))
