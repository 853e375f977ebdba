"""One model and the queue before it: two threads, one that decodes and prepares images, one that owns the model.

While the model runs, the runtime has let go of Python's lock, so the next image is prepared meanwhile:
the model waits for nothing but the hand-over. Nothing here knows of sockets.
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from typing import Any, Callable, Deque, Optional

from deploy.contract.decoding import AS_THEY_ARE, Decoding
from deploy.contract.errors import DeviceError
from deploy.images import Bytes, decoded

STUCK_S = 60.0
"""An inference that takes longer than this never ends: the Edge TPU was pulled out, or hangs."""


class Job:
    """One image on its way.

    Args:
        body: what the client sent.
        shape, dtype: of raw numbers, see `images.decoded`.
        owner: whoever waits for it.

    Attributes:
        cancelled: nobody waits any more.
        answer: what the model said; None as long as it did not.
        error: why there is no answer.
        entered, started, ended: times of `time.monotonic`: in the queue, in the model, done.
    """

    __slots__ = (
        "answer",
        "body",
        "cancelled",
        "dtype",
        "ended",
        "entered",
        "error",
        "owner",
        "shape",
        "started",
        "tensor",
    )

    def __init__(self, body: Bytes, shape: str, dtype: str, owner: Any) -> None:
        self.body, self.shape, self.dtype, self.owner = body, shape, dtype, owner
        self.tensor: Any = None
        self.answer: Any = None
        self.error: Optional[DeviceError] = None
        self.cancelled = False
        self.entered, self.started, self.ended = time.monotonic(), 0.0, 0.0


class Worker:
    """The queue and its two threads.

    Args:
        model: `Model`, or whatever has its `prepare` and `answer`.
        limit: how many jobs wait at most.
        done: is called with each job when it is answered, has failed or was found cancelled; by another thread.
        decoding: what becomes of images and WAV files.

    Attributes:
        waiting: jobs that wait now.
        failed: the last inference failed on the device, not because of its image.
    """

    def __init__(self, model: Any, limit: int, done: Callable[[Job], None], decoding: Decoding = AS_THEY_ARE) -> None:
        self._model, self._done, self._decoding = model, done, decoding
        self._given: Deque[Job] = collections.deque()
        self._limit, self._closing = limit, False
        self._changed = threading.Condition()
        self._prepared: Any = queue.Queue(1)  # of jobs; None ends the thread that takes from it
        self._since: Optional[float] = None
        self.failed = False
        self._threads = [
            threading.Thread(target=each, name=each.__name__.strip("_"), daemon=True)
            for each in (self._preparing, self._answering)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._given)

    @property
    def full(self) -> bool:
        """Whether no further job is taken."""
        return len(self._given) >= self._limit

    @property
    def healthy(self) -> bool:
        """Whether both threads work, and no inference has begun too long ago."""
        since = self._since
        stuck = since is not None and time.monotonic() - since > STUCK_S
        return not stuck and all(thread.is_alive() for thread in self._threads)

    def offer(self, job: Job) -> bool:
        """Takes a job, unless the queue is full."""
        with self._changed:
            if self.full or self._closing:
                return False
            self._given.append(job)
            self._changed.notify()
        return True

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more: its place in the queue and its body are free again."""
        with self._changed:
            job.cancelled, job.body = True, b""
            if job in self._given:
                self._given.remove(job)

    def close(self, timeout_s: float) -> bool:
        """Ends both threads after what waits is done; whether they ended in time."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _preparing(self) -> None:
        while True:
            with self._changed:
                while not self._given and not self._closing:
                    self._changed.wait()
                if not self._given:
                    break
                job = self._given.popleft()
            if not job.cancelled:
                self._guarded(job, self._prepare)
            job.body = b""
            if job.cancelled or job.error is not None:
                self._end(job)
            else:
                self._prepared.put(job)
        self._prepared.put(None)

    def _answering(self) -> None:
        while True:
            job = self._prepared.get()
            if job is None:
                return
            if not job.cancelled:
                self._guarded(job, self._answer)
            job.tensor = None
            self._end(job)

    def _end(self, job: Job) -> None:
        job.ended = time.monotonic()
        self._done(job)

    def _prepare(self, job: Job) -> None:
        job.tensor = self._model.prepare(decoded(job.body, job.shape, job.dtype, self._decoding))

    def _answer(self, job: Job) -> None:
        self._since = job.started = time.monotonic()
        try:
            job.answer = self._model.answer(job.tensor)
        finally:
            self._since, self.failed = None, job.answer is None

    @staticmethod
    def _guarded(job: Job, step: Callable[[Job], None]) -> None:
        """One step of a job; what it raises is the job's error and never the thread's end."""
        try:
            step(job)
        except DeviceError as error:
            job.error = error
        except Exception as error:  # noqa: BLE001 - one bad image must not end the service
            job.error = DeviceError("%s: %s" % (type(error).__name__, error), "please report it")
