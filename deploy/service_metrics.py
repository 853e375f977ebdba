"""What `serve` counts and measures, for /metrics.

Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Optional

from deploy import metrics
from deploy.metrics import Counter, Histogram


class Figures:
    """All of it. Used by the thread of the sockets alone.

    Args:
        facts: the answer to /v1/model.
        queue: images that wait at most.

    Attributes:
        requests: answers, by path and status.
        vanished: clients that went away before their answer.
    """

    content_type = metrics.CONTENT_TYPE

    def __init__(self, facts: Dict[str, Any], queue: int) -> None:
        self.requests = Counter("coralline_requests_total", "Answered requests by path and status.")
        self.vanished = Counter("coralline_vanished_total", "Clients that went away before they had their answer.")
        self.vanished.add(0)
        self._rejected = Counter("coralline_rejected_total", "What was turned away, by cause.")
        self._model = Histogram("coralline_model_seconds", "Time in the model.")
        self._queue = Histogram("coralline_queue_seconds", "Time from the whole request to the start of the model.")
        self._waiting = Counter("coralline_queue_length", "Images that wait.", "gauge")
        self._limit = Counter("coralline_queue_limit", "Images that wait at most.", "gauge")
        self._limit.set(queue)
        self._clients = Counter("coralline_connections", "Open connections.", "gauge")
        self._held = Counter("coralline_held_bytes", "Bodies that are received or wait.", "gauge")
        self._healthy = Counter("coralline_healthy", "1 while the process can work.", "gauge")
        self._memory = Counter("process_resident_memory_bytes", "Resident memory size in bytes.", "gauge")
        started = Counter("process_start_time_seconds", "Start time since the epoch in seconds.", "gauge")
        started.set(round(time.time(), 3))
        info = Counter("coralline_model_info", "Which model this is.", "gauge")
        names = ("name", "role", "device", "sha256")
        info.set(1, **{name: str(facts[name]) for name in names if name in facts})
        counted = [self.requests, self._rejected, self.vanished, self._model, self._queue]
        self._families = counted + [self._waiting, self._limit, self._clients, self._held, self._healthy]
        self._families += [self._memory, started, info]

    def rejected(self, cause: str) -> None:
        """Counts what was turned away."""
        self._rejected.add(cause=cause)

    def took(self, job: Any) -> None:
        """Takes in the times of a job that reached the model."""
        if job.started:
            self._queue.observe(job.started - job.entered)
            self._model.observe(job.ended - job.started)

    def text(self, worker: Any, clients: int, held: int) -> bytes:
        """The answer to a scrape."""
        self._waiting.set(worker.waiting)
        self._clients.set(clients)
        self._held.set(held)
        self._healthy.set(int(worker.healthy))
        memory = _resident_bytes()
        if memory is not None:
            self._memory.set(memory)
        return metrics.text(self._families)

    def summary(self) -> Dict[str, Any]:
        """What was answered in all, as a plain map."""
        rows = [dict(labels, count=count) for labels, count in sorted(self.requests.values.items())]
        return {"requests": rows, "vanished": int(self.vanished.total()), "rejected": int(self._rejected.total())}


def _resident_bytes() -> Optional[int]:
    try:
        with open("/proc/self/status", "rb") as stream:
            for line in stream:
                if line.startswith(b"VmRSS:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
