"""All results that the program reports about a .tflite file, as one text."""

from __future__ import annotations

import json
from typing import Any

from compress.core.errors import CorallineError
from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu import inspection
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.estimate import estimate
from darwinn import package

TARGET = load("edgetpu")
TIMES, ROOM = 10, 40 << 20
"""Limit of memory in addition to the interpreter with all imports: TIMES the size of the file plus ROOM bytes."""


class DifferentError(Exception):
    """Results that must be equal differ, such as those before and after a file is written and read again."""


def inspection_text(content: bytes) -> str:
    """Return results of check, estimate and inspection as JSON. Writing and reading the file must not change them."""
    parsed = graph.parse(content)
    text = _reports(parsed)
    if _reports(graph.parse(graph.serialize(parsed))) != text:
        raise DifferentError
    return text


def _reports(parsed: graph.Graph) -> str:
    reports: list[Any] = []
    if any(operator.custom and operator.name == package.OPERATOR for operator in parsed.operators):
        try:
            inspected = inspection.inspect_graph(parsed)
            reports += [inspected.to_json(), inspected.describe()]
        except CorallineError as error:
            reports.append(str(error))
    try:
        reports.append(check(parsed, TARGET).to_json())
        reports.append(_expected(parsed))
    except CorallineError as error:
        if not reports:
            raise
        reports.append(str(error))
    return json.dumps(reports, allow_nan=False)


def _expected(parsed: graph.Graph) -> Any:
    """Return the estimated latency, or the reason why there is none."""
    try:
        prediction = estimate(parsed, TARGET, "usb3")
        return [prediction.to_json(), prediction.describe()]
    except CorallineError as error:
        return str(error)
