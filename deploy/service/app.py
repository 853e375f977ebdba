"""A bundle as a service: HTTP/JSON over TCP or a Unix socket, one model, a bounded queue.

::

    POST /v1/predict?top=3   a .npy array, raw numbers (X-Shape, X-Dtype), JPEG, PNG, WAV; for several inputs .npz;
                             a text, if the model takes texts; or one of these in a form. The answer has labels and
                             scores, objects, or the values of the outputs, of which format=npz gives all
    GET  /v1/model           which bundle and model this is
    GET  /metrics            for Prometheus
    GET  /healthz            200 while the process can work; otherwise restart it
    GET  /readyz             200 while it accepts requests; otherwise send them to another host

waitress runs the sockets in one thread and the requests in others, one for each request that can wait in the queue.
Two more threads prepare samples and run the model (`worker`).

If the queue is full, a request gets 503 with Retry-After, and its connection stays open. A client that closes its
connection, even for sending alone, is not answered. At the end, no connection is reset: what waits is answered, what
arrives later gets 503, and each connection is closed when the client has read its answer.

An unexpected exception costs the request that caused it and no other: the client gets 500. The exception is counted
and logged (`metrics.FailureLog`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from waitress import wasyncore
from waitress.server import BaseWSGIServer, create_server

from deploy.contract.decoding import Decoding
from deploy.contract.errors import ImageError, UnexpectedError
from deploy.runner.answers import to_json, to_npz
from deploy.service import connection
from deploy.service.admission import (
    PATHS,
    Admission,
    RequestError,
    RequestHead,
    ServiceLimits,
    as_json,
    requested_top,
    status_line,
    wants_npz,
)
from deploy.service.connection import Channel
from deploy.service.metrics import CONTENT_TYPE, FailureLog, ServiceMetrics
from deploy.service.worker import Job, Worker

TICK_S = 0.25
"""Chosen: how late the service may notice that a time limit has passed."""
GRACE_S = 30.0
"""Less than TimeoutStopSec of the systemd unit (`serve.UNIT`), after which systemd kills the process."""
LAST_CALL_S = 0.5
"""When the service ends: how long a connection may still begin a request, which is answered with 503."""
IN_WORK = 3
"""Requests outside the queue that wait for the model: one is prepared, one is ready, one is in the model."""
OTHER_THREADS = 4
"""Threads for requests that do not wait for the model, such as /healthz."""
RECEIVED_BYTES = 1 << 18
"""How much is read from a socket before other sockets have their turn."""


class AnswerContent(NamedTuple):
    """The content of an answer."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200
    headers: Dict[str, str] = {}


class Server:
    """The HTTP service.

    Args:
        model: a `Model`, or an object with the same `prepare` and `answer`.
        facts: the answer to /v1/model; its `name` and `role` are in every answer.
        sockets: the listening sockets.
        settings: the limits.
        alive: a function that is called every `TICK_S` with whether the service is healthy.

    Attributes:
        ended: whether both threads of the worker ended after `run`; False if an inference never returned.
        failures: the log of unexpected exceptions.
        metrics: the counters for /metrics.
        stopping: whether the service is being stopped.
        worker: the queue and its threads.
    """

    def __init__(
        self,
        model: Any,
        facts: Dict[str, Any],
        sockets: List[socket.socket],
        settings: ServiceLimits,
        alive: Callable[[bool], None] = lambda healthy: None,
    ) -> None:
        self.facts = facts
        self.settings = settings
        self.failures = FailureLog()
        self.stopping = False
        self.ended = False
        self._alive = alive
        self._stop_asked = False
        self._admission = Admission(settings)
        decoding = Decoding(**facts.get("decoding", {}))
        self.worker = Worker(model, settings.queue, decoding, self.failures, settings.sample_bytes)
        self.metrics = ServiceMetrics(self)
        self._map: Dict[int, Any] = {}
        create_server(
            self.application,
            map=self._map,
            sockets=sockets,
            threads=min(settings.queue + IN_WORK, settings.connections) + OTHER_THREADS,
            connection_limit=settings.connections + 2 * len(sockets) + 1,  # `_make_room` closes the one too many
            channel_timeout=math.ceil(settings.idle_s),
            cleanup_interval=1,
            channel_request_lookahead=1,  # so that a client that disconnects is noticed while its request waits
            max_request_header_size=connection.MAX_HEAD_BYTES,
            max_request_body_size=1 << 62,  # `Admission` limits bodies
            inbuf_overflow=settings.body_bytes + 1,  # no temporary files: `limit_memory` limits memory
            recv_bytes=RECEIVED_BYTES,
            expose_tracebacks=False,
            log_socket_errors=False,
            clear_untrusted_proxy_headers=True,
            ident="",
        )
        self._listeners = [entry for entry in self._map.values() if isinstance(entry, BaseWSGIServer)]
        for listener in self._listeners:
            listener.owner = self
            listener.channel_class = Channel
        # waitress' log of exceptions goes to ours. Its other lines report full queues, which /metrics shows.
        logger = logging.getLogger("waitress")
        logger.handlers = [_ToFailureLog(self.failures)]
        logger.propagate = False

    # --- the loop ---------------------------------------------------------------------

    @property
    def channels(self) -> List[Channel]:
        """The open connections."""
        return [entry for entry in list(self._map.values()) if isinstance(entry, Channel)]

    @property
    def held(self) -> int:
        """The bytes of the bodies that are received or wait."""
        return sum(channel.held for channel in self.channels)

    def run(self) -> None:
        """Serve until `stop`; then finish the waiting requests, for at most `GRACE_S`."""
        tick, last_call, deadline = 0.0, math.inf, math.inf
        listening = list(self._listeners)
        while listening or self.channels:
            wasyncore.loop(TICK_S, use_poll=True, map=self._map, count=1)
            now = time.monotonic()
            self._contain(self._make_room)
            if now >= tick:
                self._contain(self._expire, now)
                self._contain(self._alive, self.worker.healthy)
                tick = now + TICK_S
            if self._stop_asked and not self.stopping:
                last_call, deadline = now + self._refuse_new(), now + GRACE_S
            if now > last_call:
                for listener in listening:
                    connection.end_listening(listener)
                listening, last_call = [], math.inf
            if now > deadline:
                break
        self._end()

    def _end(self) -> None:
        self.ended = self.worker.close(1.0)
        self._listeners[0].task_dispatcher.shutdown(timeout=1)
        for channel in self.channels:
            channel.drop()
        for listener in self._listeners:
            listener.close()

    def stop(self) -> None:
        """End `run` gently. Any thread and a signal handler may call it."""
        self._stop_asked = True
        with contextlib.suppress(OSError):  # the service has ended
            self._listeners[0].pull_trigger()

    def _refuse_new(self) -> float:
        """Keep new connections out; return for how many seconds those that have begun are accepted."""
        self.stopping = True
        kept_out = [connection.keep_out(listener.socket) for listener in self._listeners]
        for channel in self.channels:
            channel.refuse(RequestError(503, "the service is being stopped", "ask again later"))
        return LAST_CALL_S if all(kept_out) else 0.0

    def _make_room(self) -> None:
        """If there is a connection too many, close the one that has been idle longest."""
        if len(self.channels) <= self.settings.connections:
            return
        idle = [channel for channel in self.channels if channel.can_make_room]
        if idle:
            self.metrics.rejected.labels(cause="connections").inc()
            min(idle, key=lambda channel: channel.last_activity).drop()

    def _expire(self, now: float) -> None:
        self.worker.cancel_gone()
        for channel in self.channels:
            self._contain(channel.expire, now)
            if self.stopping and channel.idle and now - channel.stopped_at(now) > LAST_CALL_S:
                self._contain(channel.end)

    def limit_memory(self) -> None:
        """Refuse the largest incomplete body if all bodies together are too large."""
        while self.held > self.settings.held_bytes:
            receiving = [channel for channel in self.channels if channel.request is not None]
            if not receiving:
                return
            self.metrics.rejected.labels(cause="memory").inc()
            what = "the bodies of all requests together have more than %d bytes" % self.settings.held_bytes
            largest = max(receiving, key=lambda channel: channel.held)
            largest.refuse(RequestError(503, what, "try again later", headers={"Retry-After": "1"}))

    def _contain(self, step: Callable[..., object], *arguments: Any) -> None:
        """Run a step of the loop; count and log an unexpected exception."""
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - the loop must not end
            self.failures.add(error)

    # --- what connections ask ---------------------------------------------------------

    def admit(self, head: RequestHead, address: str) -> None:
        """Check a head before the body is received.

        Raises:
            RequestError: the request is refused.
        """
        if self._admission.preflight(head):
            return
        try:
            self._admission.check(head, self.stopping, address)
        except RequestError as error:
            error.delay_s = 0.0 if self.stopping else error.delay_s
            raise

    def cross_origin(self, head: Optional[RequestHead]) -> Dict[str, str]:
        """Return the headers for a page of another site that is allowed."""
        return self._admission.cross_origin(head)

    def answered(self, head: Optional[RequestHead], status: str) -> None:
        """Count an answer."""
        path = "other" if head is None or head.path not in PATHS else head.path
        self.metrics.requests.labels(path=path, code=status).inc()

    def unexpected(self, error: Exception) -> RequestError:
        """Count and log a bug; return the answer to its request."""
        self.failures.add(error)
        hidden = UnexpectedError(error)
        return RequestError(500, hidden.what, hidden.hint)

    # --- the application --------------------------------------------------------------

    def application(self, environ: Dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request (PEP 3333)."""
        head: RequestHead = environ["coralline.head"]
        try:
            content = self._content(head, environ)
        except RequestError as error:
            content = AnswerContent(error.body(head.request_id), status=error.status, headers=error.headers)
        except Exception as error:  # noqa: BLE001 - a bug costs this request alone
            content = AnswerContent(self.unexpected(error).body(head.request_id), status=500)
        length = str(len(content.body))
        headers = {"Content-Type": content.content_type, "Content-Length": length, **content.headers}
        start_response(status_line(content.status), list(headers.items()))
        return [content.body]

    def _content(self, head: RequestHead, environ: Dict[str, Any]) -> AnswerContent:
        preflight = self._admission.preflight(head)
        if preflight:
            return AnswerContent(b"", "text/plain", headers=preflight)
        if head.path == "/v1/predict":
            return self._predict(head, environ)
        if head.path == "/v1/model":
            return AnswerContent(as_json(self.facts))
        if head.path == "/metrics":
            return AnswerContent(self.metrics.text(), CONTENT_TYPE)
        ready = self.worker.healthy and (head.path == "/healthz" or not (self.stopping or self.worker.failed))
        return AnswerContent(b"ok\n", "text/plain") if ready else AnswerContent(b"no\n", "text/plain", 503)

    def _predict(self, head: RequestHead, environ: Dict[str, Any]) -> AnswerContent:
        top = requested_top(head)  # a wrong number is refused before the inference
        if wants_npz(head) and self.facts.get("answers") in ("class", "objects"):
            raise RequestError(400, "format=npz is for models whose answer is arrays", "leave it out")
        job = Job(environ["wsgi.input"].read(), head.headers, environ["waitress.client_disconnected"])
        if not self.worker.offer(job):
            self.metrics.rejected.labels(cause="queue").inc()
            what = "the queue is full: %d samples are waiting" % self.settings.queue
            raise RequestError(503, what, "try again later", headers={"Retry-After": "1"})
        if not job.finished.wait(self.settings.timeout_s):
            self.worker.cancel(job)
            what = "the model did not answer within %g s" % self.settings.timeout_s
            raise RequestError(504, what, "try again later", headers={"Retry-After": "1"})
        self.metrics.took(job)
        if job.cancelled:  # nobody reads this answer
            raise RequestError(503, "the client has disconnected")
        if job.error is not None:
            raise RequestError(400 if isinstance(job.error, ImageError) else 500, job.error.what, job.error.hint)
        if wants_npz(head):
            return AnswerContent(to_npz(job.answer), "application/x-npz")
        return AnswerContent(as_json(self._prediction(job, head, top)))

    def _prediction(self, job: Job, head: RequestHead, top: int) -> Dict[str, Any]:
        return {
            "request_id": head.request_id,
            "bundle": self.facts["name"],
            "role": self.facts["role"],
            **to_json(job.answer, top),
            "queue_ms": round((job.started - job.entered) * 1000, 3),
            "model_ms": round((job.ended - job.started) * 1000, 3),
        }


class _ToFailureLog(logging.Handler):
    """A handler that passes on the exceptions in a log, and nothing else."""

    def __init__(self, failures: FailureLog) -> None:
        super().__init__()
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        """Count and log the exception of a record."""
        if record.exc_info and record.exc_info[1] is not None:
            self._failures.add(record.exc_info[1])
