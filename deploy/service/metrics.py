"""The metrics of `serve`: counters, gauges and histograms in Prometheus' text format, version 0.0.4.

Only the thread of the sockets uses them, so nothing here is thread-safe.
Source: "Exposition formats" in the documentation of Prometheus.
"""

from __future__ import annotations

import bisect
import math
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from deploy.service.failures import FailureLog

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of a histogram of times."""
Labels = Tuple[Tuple[str, str], ...]


class Counter:
    """A counter or a gauge, with one value for each set of labels.

    Args:
        name: the metric name, with its unit.
        description: the HELP text.
        kind: `counter` or `gauge`.
    """

    def __init__(self, name: str, description: str, kind: str = "counter") -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.values: Dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Increase the counter."""
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, value: float, **labels: str) -> None:
        """Set the gauge."""
        self.values[tuple(sorted(labels.items()))] = value

    def total(self) -> float:
        """Return the sum over all labels."""
        return sum(self.values.values())

    def lines(self) -> Iterable[str]:
        """Yield the lines of this metric."""
        yield from _head(self.name, self.description, self.kind)
        for labels, value in sorted(self.values.items()):
            yield "%s%s %s" % (self.name, _labels(dict(labels)), _number(value))


class Histogram:
    """A histogram with cumulative buckets.

    Args:
        name: the metric name, with its unit.
        description: the HELP text.
        bounds: the upper bounds of the buckets, ascending; the bucket of infinity is added.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name = name
        self.description = description
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> Iterable[str]:
        """Yield the lines of this metric."""
        yield from _head(self.name, self.description, "histogram")
        total = 0
        for bound, count in zip(self.bounds + (math.inf,), self.counts):
            total += count
            yield '%s_bucket{le="%s"} %d' % (self.name, _number(bound), total)
        yield "%s_sum %s" % (self.name, _number(self.sum))
        yield "%s_count %d" % (self.name, total)


def _head(name: str, description: str, kind: str) -> Iterable[str]:
    yield "# HELP %s %s" % (name, description.replace("\\", r"\\").replace("\n", r"\n"))
    yield "# TYPE %s %s" % (name, kind)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = []
    for name, value in labels.items():
        escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        pairs.append('%s="%s"' % (name, escaped))
    return "{%s}" % ",".join(pairs)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "%d" % value if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


class ServiceMetrics:
    """All metrics of the service.

    Args:
        facts: the answer to /v1/model.
        queue: the largest number of waiting samples.
        failures: the counter of unexpected exceptions.

    Attributes:
        requests: answered requests by path and status.
        vanished: clients that disconnected before their answer.
    """

    content_type = CONTENT_TYPE

    def __init__(self, facts: Dict[str, Any], queue: int, failures: FailureLog) -> None:
        self._failures = failures
        self.requests = Counter("coralline_requests_total", "Answered requests by path and status.")
        self.vanished = Counter("coralline_vanished_total", "Clients that disconnected before their answer.")
        self.vanished.add(0)
        self._rejected = Counter("coralline_rejected_total", "Refused connections and requests, by cause.")
        self._failed = Counter("coralline_unexpected_errors_total", "Unexpected errors in the service.")
        self._model = Histogram("coralline_model_seconds", "Time in the model.")
        self._queue = Histogram("coralline_queue_seconds", "Time from the complete request to the start of the model.")
        self._waiting = Counter("coralline_queue_length", "Waiting images.", "gauge")
        self._limit = Counter("coralline_queue_limit", "Largest number of waiting images.", "gauge")
        self._limit.set(queue)
        self._clients = Counter("coralline_connections", "Open connections.", "gauge")
        self._held = Counter("coralline_held_bytes", "Bytes of the bodies that are received or wait.", "gauge")
        self._healthy = Counter("coralline_healthy", "1 if the process can work, else 0.", "gauge")
        self._memory = Counter("process_resident_memory_bytes", "Resident memory size in bytes.", "gauge")
        started = Counter("process_start_time_seconds", "Start time since the epoch in seconds.", "gauge")
        started.set(round(time.time(), 3))
        info = Counter("coralline_model_info", "The model that is served.", "gauge")
        names = ("name", "role", "device", "sha256")
        info.set(1, **{name: str(facts[name]) for name in names if name in facts})
        self._all: List[Union[Counter, Histogram]] = [self.requests, self._rejected, self.vanished, self._failed]
        self._all += [self._model, self._queue, self._waiting, self._limit, self._clients, self._held, self._healthy]
        self._all += [self._memory, started, info]

    def rejected(self, cause: str) -> None:
        """Count a refused connection or request."""
        self._rejected.add(cause=cause)

    def took(self, job: Any) -> None:
        """Record the times of a job that reached the model."""
        if job.started:
            self._queue.observe(job.started - job.entered)
            self._model.observe(job.ended - job.started)

    def text(self, worker: Any, clients: int, held_bytes: int) -> bytes:
        """Return the metrics as text in Prometheus' format, for /metrics."""
        self._waiting.set(worker.waiting)
        self._clients.set(clients)
        self._held.set(held_bytes)
        self._failed.set(self._failures.count)
        self._healthy.set(int(worker.healthy))
        memory = _resident_bytes()
        if memory is not None:
            self._memory.set(memory)
        lines: List[str] = []
        for metric in self._all:
            lines.extend(metric.lines())
        return ("\n".join(lines) + "\n").encode()

    def summary(self) -> Dict[str, Any]:
        """Return the totals as a plain map."""
        return {
            "requests": [dict(labels, count=count) for labels, count in sorted(self.requests.values.items())],
            "vanished": int(self.vanished.total()),
            "rejected": int(self._rejected.total()),
            "unexpected_errors": self._failures.count,
        }


def _resident_bytes() -> Optional[int]:
    try:
        with open("/proc/self/status", "rb") as stream:
            for line in stream:
                if line.startswith(b"VmRSS:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
