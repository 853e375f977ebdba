"""The metrics of `serve`, for /metrics.

Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Optional

from deploy import metrics
from deploy.failures import FailureLog
from deploy.metrics import Counter, Histogram


class Figures:
    """All metrics. Only the thread of the sockets uses them.

    Args:
        facts: the answer to /v1/model.
        queue: the largest number of waiting images.
        failures: the counter of unexpected exceptions.

    Attributes:
        requests: the number of answers, by path and status.
        vanished: the number of clients that disconnected before their answer.
    """

    content_type = metrics.CONTENT_TYPE

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
        counted = [self.requests, self._rejected, self.vanished, self._failed, self._model, self._queue]
        self._families = counted + [self._waiting, self._limit, self._clients, self._held, self._healthy]
        self._families += [self._memory, started, info]

    def rejected(self, cause: str) -> None:
        """Count a refused connection or request."""
        self._rejected.add(cause=cause)

    def took(self, job: Any) -> None:
        """Record the times of a job that reached the model."""
        if job.started:
            self._queue.observe(job.started - job.entered)
            self._model.observe(job.ended - job.started)

    def text(self, worker: Any, clients: int, held: int) -> bytes:
        """Return the answer to /metrics."""
        self._waiting.set(worker.waiting)
        self._clients.set(clients)
        self._held.set(held)
        self._failed.set(self._failures.count)
        self._healthy.set(int(worker.healthy))
        memory = _resident_bytes()
        if memory is not None:
            self._memory.set(memory)
        return metrics.text(self._families)

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
