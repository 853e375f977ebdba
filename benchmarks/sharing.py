"""Waiting times of `python -m compress assign` against a simulation, event by event: `python benchmarks/sharing.py`.

For mixes of two to four models, with and without parameters that are sent again, at four utilizations: the mean and the
95th percentile of the waiting time by the queue of `several.queueing`, and of 400,000 simulated requests; and the mean
without the covariance of waiting and service times. Writes benchmarks/results/sharing.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import repository

import numpy as np
import queue_simulation

from compress.targets.edgetpu.several import sharing
from compress.targets.edgetpu.several.queueing import Queue
from compress.targets.edgetpu.several.sharing import Load, Service
from compress.tflite.graph import Graph

RESULTS = repository.RESULTS / "sharing.json"
MIXES: dict[str, tuple[list[float], list[float], list[float]]] = {
    "equal": ([1, 1], [3, 3], [2, 2]),
    "short and long": ([3, 1], [2, 9], [4, 2]),
    "often and rare": ([10, 1], [3, 3], [8, 16]),
    "three": ([5, 2, 1], [1, 4, 12], [1, 6, 14]),
    "four": ([8, 4, 2, 1], [1.5, 2, 5, 10], [4, 6, 8, 10]),
}
"""Relative rates, service times in ms, and times in ms to send the parameters again."""
UTILIZATIONS = (0.3, 0.5, 0.7, 0.85)
REQUESTS = 400_000
EMPTY = Graph((), (), (), (), 1, None)
"""A model without content: the queue only needs the times of models."""


def row(name: str, utilization: float, *, reloads: bool) -> dict[str, Any]:
    """Return predicted and simulated waiting times of one mix."""
    weights, times, again = MIXES[name]
    reload_ms = [float(reload_time) if reloads else 0.0 for reload_time in again]
    services = [Service(float(time), 0.0, 0, 0, 0) for time in times]
    models = tuple(range(len(times)))

    def queue(factor: float) -> Queue:
        loads = [Load(str(index), EMPTY, weight * factor) for index, weight in enumerate(weights)]
        return sharing.shared(models, loads, services, reload_ms).queue

    factor = utilization / queue(1.0).utilization
    predicted = queue(factor)
    waits = queue_simulation.waits_ms([weight * factor for weight in weights], times, reload_ms, REQUESTS)
    independent = replace(predicted, covariance_ms2=0.0)
    mean_ms, p95_ms = float(waits.mean()), float(np.quantile(waits, 0.95))
    return {
        "mix": name,
        "utilization": utilization,
        "reloads": reloads,
        "mean_ms": [predicted.mean_wait_ms, mean_ms],
        "p95_ms": [predicted.wait_ms(), p95_ms],
        "mean_error": predicted.mean_wait_ms / mean_ms - 1,
        "p95_error": predicted.wait_ms() / p95_ms - 1,
        "independent_mean_error": independent.mean_wait_ms / mean_ms - 1,
    }


def main() -> None:
    rows = [
        row(name, utilization, reloads=reloads)
        for name in MIXES
        for utilization in UTILIZATIONS
        for reloads in (False, True)
    ]
    summary: dict[str, Any] = {"rows": len(rows)}
    for figure in ("mean_error", "p95_error", "independent_mean_error"):
        errors = np.abs([mix_row[figure] for mix_row in rows])
        summary[figure] = {"median": float(np.median(errors)), "largest": float(errors.max())}
    print(json.dumps(summary, indent=1))
    RESULTS.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
