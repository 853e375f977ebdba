"""The report's section on what devices have measured."""

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
    "accuracy": "Accuracy",
    "memory_bytes": "Memory",
}
MAX_DEVICES = 100


def rows(record: Plain, cell: Callable[[Plain | None, str], Any]) -> list[dict[str, Any]]:
    """A row for each device, with texts and, in the order of COLUMNS, cells; empty where nothing was measured.

    Args:
        record: the run record, with its strings cleaned.
        cell: makes a cell of a measurement and its name.
    """
    found = []
    for device in (record.get("devices") or [])[:MAX_DEVICES]:
        taken, golden = device.get("measurements") or {}, device.get("golden") or {}
        found.append(
            {
                "name": words.shorten(words.scalar(device.get("device")), 100),
                "what": [words.shorten(words.scalar(device.get(key)), 100) for key in ("board", "model", "runtime")],
                "cells": [cell(taken.get(name), name) for name in COLUMNS],
                "golden": words.shorten(", ".join(f"{role} {verdict}" for role, verdict in golden.items()), 200),
                "doubts": [words.shorten(words.scalar(each), 300) for each in device.get("doubts") or []],
            }
        )
    return found
