"""The metrics of `serve`, and its log of unexpected exceptions."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Tuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of a histogram of times: from an inference on an Edge TPU to the default time limit."""
LOG_INTERVAL_S = 60.0
"""The shortest time between two log entries of one origin."""
Origin = Tuple[str, str, int]
"""The type of an exception, and the file and line that raised it."""


class FailureLog:
    """A counter and a log of unexpected exceptions. All threads of the service share one.

    Each origin is logged with its traceback once in `interval_s`. The entry also says how many exceptions
    of this origin were not logged since the entry before.

    Args:
        interval_s: the shortest time between two entries of one origin.

    Attributes:
        count: all exceptions, logged or not.
        counted: a function that is called for each exception.
    """

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        self.count = 0
        self.counted: Callable[[], None] = lambda: None
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next: Dict[Origin, float] = {}
        self._skipped: Dict[Origin, int] = {}

    def add(self, error: BaseException) -> None:
        """Count an exception, and log it unless its origin was logged a short time ago."""
        origin = _origin(error)
        now = time.monotonic()
        with self._lock:
            self.count += 1
            self.counted()
            if now < self._next.get(origin, now):
                self._skipped[origin] = self._skipped.get(origin, 0) + 1
                return
            self._next[origin] = now + self._interval_s
            skipped = self._skipped.pop(origin, 0)
        _log(error, skipped)


def _origin(error: BaseException) -> Origin:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__, "", 0
    return type(error).__name__, frames[-1].filename, int(frames[-1].lineno or 0)


def _log(error: BaseException, skipped: int) -> None:
    lines: List[str] = ["runner: unexpected error, please report it"]
    if skipped:
        lines[0] += " (%d more since the last report)" % skipped
    lines[0] += "\n"
    lines += traceback.format_exception(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError, ValueError):  # standard error is closed, or its disk is full
        sys.stderr.write("".join(lines))
        sys.stderr.flush()


class ServiceMetrics:
    """All metrics of the service, in a registry of their own.

    Args:
        server: the `Server`, whose queue, connections and failures are measured when the metrics are read.

    Attributes:
        requests: answered requests by path and status.
        rejected: refused connections and requests by cause.
        vanished: clients that disconnected before their answer.
    """

    def __init__(self, server: Any) -> None:
        self._failures = server.failures
        self._registry = registry = CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        prometheus_client.ProcessCollector(registry=registry)

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter("coralline_" + name, description, labels, registry=registry)

        def gauge(name: str, description: str, read: Any) -> None:
            Gauge("coralline_" + name, description, registry=registry).set_function(read)

        def histogram(name: str, description: str) -> Histogram:
            return Histogram("coralline_" + name, description, registry=registry, buckets=SECONDS)

        self.requests = counter("requests", "Answered requests by path and status.", "path", "code")
        self.rejected = counter("rejected", "Refused connections and requests, by cause.", "cause")
        self.vanished = counter("vanished", "Clients that disconnected before their answer.")
        self._model = histogram("model_seconds", "Time in the model.")
        self._queue = histogram("queue_seconds", "Time from the complete request to the start of the model.")
        gauge("queue_length", "Waiting samples.", lambda: server.worker.waiting)
        gauge("queue_limit", "Largest number of waiting samples.", lambda: server.settings.queue)
        gauge("connections", "Open connections.", lambda: len(server.channels))
        gauge("held_bytes", "Bytes of the bodies that are received or wait.", lambda: server.held)
        gauge("healthy", "1 if the process can work, else 0.", lambda: server.worker.healthy)
        failed = counter("unexpected_errors", "Unexpected errors in the service.")
        server.failures.counted = failed.inc
        names = [name for name in ("name", "role", "device", "sha256") if name in server.facts]
        info = Gauge("coralline_model_info", "The model that is served.", names, registry=registry)
        info.labels(**{name: str(server.facts[name]) for name in names}).set(1)

    def took(self, job: Any) -> None:
        """Record the times of a job that reached the model."""
        if job.started:
            self._queue.observe(job.started - job.entered)
            self._model.observe(job.ended - job.started)

    def text(self) -> bytes:
        """Return the metrics as text in Prometheus' format, for /metrics."""
        return bytes(prometheus_client.generate_latest(self._registry))

    def summary(self) -> Dict[str, Any]:
        """Return the totals as a plain map."""
        rows = [(labels["path"], labels["code"], count) for labels, count in _samples(self.requests)]
        return {
            "requests": [{"path": path, "code": code, "count": int(count)} for path, code, count in sorted(rows)],
            "vanished": _total(self.vanished),
            "rejected": _total(self.rejected),
            "unexpected_errors": self._failures.count,
        }


def _samples(counter: Counter) -> List[Tuple[Dict[str, str], float]]:
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]


def _total(counter: Counter) -> int:
    return int(sum(value for _, value in _samples(counter)))
