"""A small model with a placement, and its page."""

from __future__ import annotations

from typing import Any

import tiny

from compress.model.tflite import graph
from compress.report import operator_graph
from compress.report.operator_graph import GraphSubject
from compress.report.record import OperatorRecord


def classifier() -> graph.Graph:
    return graph.parse(tiny.classifier())


def placed(model: graph.Graph, *placements: str, **more: Any) -> list[OperatorRecord]:
    """Return the operators of a model with placements; the last placement is used for all other operators."""
    kinds = [*placements, *[placements[-1]] * len(model.operators)]
    return [
        OperatorRecord(operator.index, operator.name, kind, 1000, output=f"output {operator.index}", **more)
        for operator, kind in zip(model.operators, kinds, strict=False)
    ]


def example_page() -> str:
    model = classifier()
    operators = placed(model, "tpu", "cpu", status="Operation not supported", reason="It has 3 dimensions.")
    return operator_graph.page(model, operators, GraphSubject("example", "edgetpu", "1 of 2 operators"))
