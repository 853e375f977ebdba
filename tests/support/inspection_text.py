"""Everything that the program reports of a .tflite file, as one text."""

from __future__ import annotations

import json
from typing import Any

from compress.errors import CorallineError
from compress.targets import load
from compress.targets.edgetpu import darwinn_package, inspection
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.estimate import estimate
from compress.tflite import graph

TARGET = load("edgetpu")
TIMES, ROOM = 10, 40 << 20
"""Memory beside that of the interpreter with everything imported: so many times the file, and so many bytes."""


class DifferentError(Exception):
    """What was written and read again gives another answer."""


def inspection_text(content: bytes) -> str:
    """The results of check, estimate and inspection as JSON; the same after writing and reading the file again."""
    parsed = graph.parse(content)
    told = _told(parsed)
    if _told(graph.parse(graph.serialize(parsed))) != told:
        raise DifferentError
    return told


def _told(parsed: graph.Graph) -> str:
    told: list[Any] = []
    if any(operator.custom and operator.name == darwinn_package.OPERATOR for operator in parsed.operators):
        try:
            found = inspection.inspect_graph(parsed)
            told += [found.to_json(), found.describe()]
        except CorallineError as error:
            told.append(str(error))
    try:
        told.append(check(parsed, TARGET).to_json())
        told.append(_expected(parsed))
    except CorallineError as error:
        if not told:
            raise
        told.append(str(error))
    return json.dumps(told, allow_nan=False)


def _expected(parsed: graph.Graph) -> Any:
    """The latency that is expected of it, or why none is."""
    try:
        found = estimate(parsed, TARGET, "usb3")
        return [found.to_json(), found.describe()]
    except CorallineError as error:
        return str(error)
