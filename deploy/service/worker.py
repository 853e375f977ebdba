"""The model and its queue, with two threads: one decodes and prepares samples, the other runs the model.

A sample may be a file in a form, as `curl -F file=@photo.jpg` and browsers send it: multipart/form-data with one part.
The parser of forms is strict: the boundary is in the header and at both ends of the body, and there is exactly one
part, which has a file name. Parameters belong into the query. Source: RFC 7578, RFC 2046 (5.1.1).

The runtime releases Python's lock while the model runs, so the next sample is prepared at the same time.
"""

from __future__ import annotations

import collections
import queue
import re
import threading
import time
from typing import Any, Callable, Deque, Mapping, Optional, Sequence, Set

from deploy.contract.decoding import AS_THEY_ARE, Decoding
from deploy.contract.errors import DeviceError, ImageError, UnexpectedError
from deploy.contract.preprocessing import MOST_BYTES
from deploy.contract.recording import Bytes
from deploy.runner.images import decode_body, refuse_type_of_text
from deploy.service.metrics import FailureLog

FORM = "application/x-www-form-urlencoded"
"""The Content-Type of `curl -d` and of `curl --data-binary`, which sends files as they are."""
STUCK_S = 60.0
"""The service is unhealthy if an inference takes longer: the Edge TPU was unplugged, or hangs."""

MAX_PART_HEAD_BYTES = 4096
"""Chosen: the head of a part from curl or a browser has some hundred bytes."""
_TYPE = re.compile(r"multipart/form-data;\s*boundary=(?:\"([^\"]{1,70})\"|([^\s;,\"]{1,70}))\s*\Z", re.IGNORECASE)
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]\Z")
_DISPOSITION = re.compile(rb"\AContent-Disposition:[ \t]*form-data;[^\r\n]*;[ \t]*filename\*?=", re.IGNORECASE)
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}:[\t\x20-\x7e\x80-\xff]*\Z")
HINT = "send the file alone, with curl --data-binary @FILE; parameters belong into the query"


class CancelledError(DeviceError):
    """The work for a request was stopped, because its client is gone or its time limit has passed."""

    kind = "cancelled"


class Job:
    """One sample in the queue or in the model.

    Args:
        body: the body that the client sent.
        headers: the headers of the request, by their names in lower case.
        is_gone: a function that returns whether the client has disconnected.

    Attributes:
        shape: the shape of raw values, see `images.decode_body`.
        dtype: the dtype of raw values, see `images.decode_body`.
        content_type: the Content-Type of the body.
        finished: set when the job is answered, has failed or is cancelled.
        cancelled: whether nobody waits for the answer.
        answer: the model's answer; None before.
        error: the reason why the job failed.
        entered: the time of `time.monotonic` when the job entered the queue.
        started: the time when the model started; 0 before.
        ended: the time when the job was done; 0 before.
    """

    __slots__ = (
        "answer",
        "body",
        "cancelled",
        "content_type",
        "dtype",
        "ended",
        "entered",
        "error",
        "finished",
        "is_gone",
        "sample_shape",
        "shape",
        "started",
        "tensors",
    )

    def __init__(self, body: Bytes, headers: Mapping[str, str], is_gone: Callable[[], bool]) -> None:
        self.body = body
        self.shape = headers.get("x-shape", "")
        self.dtype = headers.get("x-dtype", "")
        self.content_type = headers.get("content-type", "")
        self.is_gone = is_gone
        self.finished = threading.Event()
        self.tensors: Any = None
        self.sample_shape: Sequence[int] = ()
        self.answer: Any = None
        self.error: Optional[DeviceError] = None
        self.cancelled = False
        self.entered = time.monotonic()
        self.started = 0.0
        self.ended = 0.0

    def check(self) -> None:
        """End the preparation of a sample that nobody waits for any more.

        Raises:
            CancelledError: the client is gone, or its time limit has passed.
        """
        if self.cancelled:
            raise CancelledError("nobody waits for the answer")


class Worker:
    """The queue and its two threads. No exception ends a thread: it is the error of its job alone.

    Args:
        model: a `Model`, or an object with the same `prepare` and `answer`.
        limit: the largest number of waiting jobs.
        decoding: how images and WAV files are decoded.
        failures: the log of unexpected exceptions.
        sample_bytes: the most memory for a step of preprocessing.

    Attributes:
        failed: whether the last inference failed on the device, not because of its image.
    """

    def __init__(
        self,
        model: Any,
        limit: int,
        decoding: Decoding = AS_THEY_ARE,
        failures: Optional[FailureLog] = None,
        sample_bytes: int = MOST_BYTES,
    ) -> None:
        self._model = model
        self._jobs: Set[Job] = set()
        self._decoding = decoding
        self._failures = failures or FailureLog()
        self._queue: Deque[Job] = collections.deque()
        self._limit = limit
        self._sample_bytes = sample_bytes
        self._closing = False
        self._changed = threading.Condition()
        self._prepared: Any = queue.Queue(1)  # of jobs; None ends the model's thread
        self._since: Optional[float] = None
        self.failed = False
        self._threads = [
            threading.Thread(target=self._preparing, name="preparing", daemon=True),
            threading.Thread(target=self._answering, name="answering", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the queue has no room."""
        return len(self._queue) >= self._limit

    @property
    def healthy(self) -> bool:
        """Whether both threads run, and no inference has taken longer than `STUCK_S`."""
        since = self._since
        stuck = since is not None and time.monotonic() - since > STUCK_S
        return not stuck and all(thread.is_alive() for thread in self._threads)

    def offer(self, job: Job) -> bool:
        """Add a job to the queue; return False if the queue is full or closed."""
        with self._changed:
            if self.full or self._closing:
                return False
            self._queue.append(job)
            self._jobs.add(job)
            self._changed.notify()
        return True

    def cancel(self, job: Job) -> None:
        """Cancel a job, and release its place in the queue and its body."""
        with self._changed:
            job.cancelled = True
            job.body = b""
            if job in self._queue:
                self._queue.remove(job)
            self._jobs.discard(job)
        job.finished.set()

    def cancel_gone(self) -> None:
        """Cancel the jobs whose clients have disconnected."""
        with self._changed:
            gone = [job for job in self._jobs if job.is_gone()]
        for job in gone:
            self.cancel(job)

    def close(self, timeout_s: float) -> bool:
        """End both threads after the waiting jobs; return whether they ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _preparing(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    break
                job = self._queue.popleft()
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
            job.tensors = None
            self._end(job)

    def _end(self, job: Job) -> None:
        job.ended = time.monotonic()
        with self._changed:
            self._jobs.discard(job)
        job.finished.set()

    def _prepare(self, job: Job) -> None:
        sample = self._decoded(job)
        job.body = b""
        job.tensors = self._model.prepare(sample, job.check, self._sample_bytes)
        job.sample_shape = getattr(sample, "shape", ())  # several inputs are a list

    def _decoded(self, job: Job) -> Any:
        """Return the sample in a request."""
        if self._decoding.text_bytes is not None:
            refuse_type_of_text(job.content_type)
        body = job.body
        if job.content_type.strip().lower().startswith("multipart/"):
            body = file_of(body, job.content_type)
        try:
            return decode_body(body, job.shape, job.dtype, self._decoding)
        except ImageError as error:
            if job.content_type.lower().startswith(FORM):
                raise ImageError(error.what, "send the file with curl --data-binary @FILE: -d @FILE removes line ends")
            raise

    def _answer(self, job: Job) -> None:
        self._since = job.started = time.monotonic()
        try:
            job.answer = self._model.answer(job.tensors, job.sample_shape)
        finally:
            self._since = None
            self.failed = job.answer is None

    def _guarded(self, job: Job, step: Callable[[Job], None]) -> None:
        """Run one step of a job, and store an exception as the error of the job."""
        try:
            step(job)
        except DeviceError as error:
            job.error = error
        except Exception as error:  # noqa: BLE001 - one request must not end the service
            self._failures.add(error)
            job.error = UnexpectedError(error)


def file_of(body: Bytes, content_type: str) -> Bytes:
    """Return the content of the file in a form.

    Raises:
        ImageError: the form is damaged, or has no file, several parts or other fields.
    """
    match = _TYPE.match(content_type.strip())
    boundary = (match.group(1) or match.group(2)) if match else ""
    if not _BOUNDARY.match(boundary):
        raise ImageError("the Content-Type is not multipart/form-data with a boundary", HINT)
    opening = b"--" + boundary.encode("ascii")
    closing = b"\r\n" + opening
    if not body.startswith(opening + b"\r\n"):
        raise _damaged("it does not begin with its boundary")
    start = len(opening) + 2
    head_end = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
    if head_end < 0:
        raise _damaged("the head of its part does not end")
    end = body.find(closing, head_end + 2)
    if end < 0:
        raise _damaged("it does not end with its boundary")
    rest = bytes(body[end + len(closing) : end + len(closing) + 4])
    if rest[:2] == b"\r\n":
        raise ImageError("the form has several parts, and one file is allowed", HINT)
    if rest not in (b"--", b"--\r\n") or len(body) > end + len(closing) + 4:
        raise _damaged("it does not end with its boundary")
    lines = bytes(body[start:head_end]).split(b"\r\n")
    if not all(_LINE.match(line) for line in lines):
        raise _damaged("a header of its part is invalid")
    if sum(bool(_DISPOSITION.match(line)) for line in lines) != 1:
        raise ImageError("the form has no file", "use curl -F file=@FILE, with the @; or " + HINT)
    return body[head_end + 4 : end]


def _damaged(reason: str) -> ImageError:
    return ImageError("the form is damaged: %s" % reason, HINT)
