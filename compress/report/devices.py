"""The report's sections on devices: their measurements, and the predicted latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compress import report as words
from compress.report import Plain

COLUMNS = {
    "latency_ms": "Median",
    "latency_p90_ms": "p90",
    "latency_p99_ms": "p99",
    "first_inference_ms": "First",
    "accuracy": "Accuracy, AP",
    "memory_bytes": "Memory",
}
MAX_DEVICES = 100


def rows(record: Plain, cell: Callable[[Plain | None, str], Any]) -> list[dict[str, Any]]:
    """Return a row for each device with texts and, in the order of COLUMNS, cells; empty if nothing was measured.

    Args:
        record: the run record, with its strings cleaned.
        cell: makes a cell of a measurement and its name.
    """
    result = []
    for device in (record.get("devices") or [])[:MAX_DEVICES]:
        taken, golden = device.get("measurements") or {}, device.get("golden") or {}
        taken = {"accuracy": taken.get("ap"), **taken}
        result.append(
            {
                "name": words.shorten(words.scalar(device.get("device")), 100),
                "what": [words.shorten(words.scalar(device.get(key)), 100) for key in ("board", "model", "runtime")],
                "cells": [cell(taken.get(name), name) for name in COLUMNS],
                "golden": words.shorten(", ".join(f"{role} {verdict}" for role, verdict in golden.items()), 200),
                "doubts": [words.shorten(words.scalar(doubt), 300) for doubt in device.get("doubts") or []],
            }
        )
    return result


def expected(record: Plain) -> list[tuple[str, str, str, str]]:
    """Return rows of host, latency, interval and time on its CPU alone, all predicted; empty without a prediction."""
    result = []
    for host, prediction in ((record.get("placement") or {}).get("expected_latency") or {}).items():
        names = ("latency_ms", "low_ms", "high_ms", "cpu_alone_ms")
        time, low, high, alone = (words.number(prediction[name], "ms") for name in names)
        what = words.shorten(words.scalar(prediction.get("summary") or host), 100)
        result.append((what, time, f"{low} to {high}", alone))
    return result


def why_not_compiled(placement: Plain) -> str:
    """Return the reason why the model was not compiled, as the beginning of a sentence."""
    reason = str(placement.get("reason") or "not compiled: reason not recorded")
    return reason[0].upper() + reason[1:]


def is_compiled(placement: Plain) -> bool:
    """Return if the placement was read from a compiled file, and so was measured."""
    return bool(placement.get("compiled")) and placement.get("compiles") is not False
