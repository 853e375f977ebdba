"""A bundle as a service: HTTP/JSON over TCP or a Unix socket, one model, a bounded queue.

::

    POST /v1/predict?top=3   a .npy array, raw numbers (X-Shape, X-Dtype), JPEG, PNG, WAV; for several inputs .npz;
                             a text, if the model takes texts; or one of these in a form. The answer has labels and
                             scores, objects, or the values of the outputs, of which format=npz gives all
    GET  /v1/model           which bundle and model this is
    GET  /metrics            for Prometheus
    GET  /healthz            200 while the process can work; otherwise restart it
    GET  /readyz             200 while it accepts requests; otherwise send them to another host

One thread handles all sockets (`selectors`), one prepares samples and one runs the model (`worker`). One thread for
each connection would cost more CPU time, because its threads compete for Python's lock with the thread that runs the
model, and slow clients would occupy threads. Here a client costs a few hundred bytes and its body, and
`ServiceLimits.held_bytes` limits the memory of all bodies together.

If the queue is full, a request gets 503 with Retry-After, and its connection stays open. A client that closes its
connection, even for sending alone, is not answered. At the end, no connection is reset: what waits is answered, what
arrives later gets 503, and each connection is closed when the client has read its answer.

An unexpected exception costs the request that caused it and no other: the client gets 500, or loses its connection
if part of an answer was sent already. The exception is counted and logged (`failures`).
"""

from __future__ import annotations

import collections
import contextlib
import math
import selectors
import socket
import time
from typing import Any, Callable, Deque, Dict, List, Set, Tuple

from deploy.contract.decoding import Decoding
from deploy.contract.errors import ImageError, UnexpectedError
from deploy.runner.answers import to_json, to_npz
from deploy.service import connection, listening, protocol
from deploy.service.admission import PATHS, Admission, ServiceLimits, requested_top, wants_npz
from deploy.service.connection import ClientGoneError, Connection
from deploy.service.failures import FailureLog
from deploy.service.metrics import ServiceMetrics
from deploy.service.protocol import RequestError, RequestHead
from deploy.service.worker import Job, Worker

TICK_S = 0.25
GRACE_S = 30.0
ACCEPT_BATCH = 32
"""How many connections are accepted before other sockets have their turn."""


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
        self._alive = alive
        self.failures = FailureLog()
        self.metrics = ServiceMetrics(facts, settings.queue, self.failures)
        self._sockets = sockets
        self._listeners = list(sockets)
        self._last_call = math.inf
        self._clients: Set[Connection] = set()
        self._done: Deque[Job] = collections.deque()
        self._held = 0
        self._stopping = False
        self.ended = False
        self._admission = Admission(settings)
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        for readable in [*sockets, self._wake_reader]:
            readable.setblocking(False)
            self._selector.register(readable, selectors.EVENT_READ)
        decoding = Decoding(**facts.get("decoding", {}))
        self.worker = Worker(model, settings.queue, self._finished, decoding, self.failures, settings.sample_bytes)

    def run(self) -> None:
        """Serve until `stop`; then finish the waiting requests, for at most `GRACE_S`."""
        deadline = math.inf
        tick = 0.0
        while self._clients or self._listeners or not self._stopping:
            for key, mask in self._selector.select(TICK_S):
                self._event(key, mask)
            self._answer_finished()
            now = time.monotonic()
            if now >= tick:
                self._expire(now)
                self._contain(self._alive, self.worker.healthy)
                tick = now + TICK_S
            if self._stopping and deadline == math.inf:
                deadline = now + GRACE_S
                self._refuse_new(now)
            if now > self._last_call:
                self._contain(self._close_listeners)
            if now > deadline:
                break
        for client in list(self._clients):
            self._contain(self._drop, client)
        self.ended = self.worker.close(1.0)
        self._selector.close()
        for sock in [*self._sockets, self._wake_reader, self._wake_writer]:
            sock.close()

    def stop(self) -> None:
        """End `run` gently. Any thread and a signal handler may call it."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the loop is already awake, or the service has ended
            self._wake_writer.send(b"!")

    def _finished(self, job: Job) -> None:
        """Pass a job from the worker's threads to the loop."""
        self._done.append(job)
        self._wake()

    def _refuse_new(self, now: float) -> None:
        """Keep new connections out; answer requests that are on their way with 503 until the last call is over."""
        kept_out = [listening.keep_out(sock) for sock in self._listeners]
        self._last_call = now + connection.LAST_CALL_S if all(kept_out) else -math.inf
        refusal = RequestError(503, "the service is being stopped", "ask again later", close=True)
        for client in list(self._clients):
            client.last_call(now)
            if client.phase in (connection.READ, connection.BODY) and not client.idle:
                self._contain_for(client, self._refuse, client, refusal)

    def _close_listeners(self) -> None:
        """Accept the connections that wait, and close the listeners."""
        for sock in self._listeners:
            while self._accept(sock) == ACCEPT_BATCH:
                pass
            self._selector.unregister(sock)
            sock.close()
        self._listeners = []

    # --- unexpected exceptions --------------------------------------------------------

    def _contain(self, step: Callable[..., object], *arguments: Any) -> None:
        """Run a step that concerns no client; count and log an unexpected exception."""
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - the loop must not end
            self.failures.add(error)

    def _contain_for(self, client: Connection, step: Callable[..., None], *arguments: Any) -> None:
        """Run a step of one client. An unexpected exception ends its request and its connection alone."""
        try:
            step(*arguments)
        except ClientGoneError:
            self._contain(self._vanished, client)
        except Exception as error:  # noqa: BLE001 - the loop must not end
            self.failures.add(error)
            self._contain(self._fail, client, UnexpectedError(error))

    def _fail(self, client: Connection, error: UnexpectedError) -> None:
        """Answer 500 and end the connection. A client that was being answered already is dropped."""
        if client.phase in (connection.WRITE, connection.DRAIN):
            self._drop(client)
            return
        try:
            self._refuse(client, RequestError(500, error.what, error.hint, close=True))
        except Exception:
            self._drop(client)
            raise

    # --- sockets ----------------------------------------------------------------------

    def _event(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.data in self._clients:
            self._contain_for(key.data, self._serve, key.data, mask)
        elif key.fileobj is self._wake_reader:
            self._contain(self._clear_wake)
        elif key.fileobj in self._listeners:
            self._contain(self._accept, key.fileobj)

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._wake_reader.recv(4096)

    def _serve(self, client: Connection, mask: int) -> None:
        now = time.monotonic()
        if mask & selectors.EVENT_READ:
            self._read(client, now)
        if mask & selectors.EVENT_WRITE and client.phase == connection.WRITE and client.send(now):
            self._advance(client, now)
        self._watch(client)

    def _accept(self, listener: socket.socket) -> int:
        """Accept connections that wait; return how many: `ACCEPT_BATCH` at most."""
        for count in range(ACCEPT_BATCH):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return count
            except OSError as error:  # no free file descriptor, or the client is gone
                self.metrics.rejected("accept: %s" % (error.strerror or "failed"))
                self._make_room()
                time.sleep(0.01)  # the listener stays readable: do not spin
                return count
            if len(self._clients) >= self.settings.connections and not self._make_room():
                self.metrics.rejected("connections")
                sock.close()
                continue
            peer = "" if sock.family == socket.AF_UNIX else str(address[0])
            client = Connection(sock, peer, time.monotonic(), self.settings.timeout_s, self.settings.idle_s)
            self._clients.add(client)
            if self._stopping:
                client.last_call(time.monotonic())
            self._contain_for(client, self._open, client)
        return ACCEPT_BATCH

    def _open(self, client: Connection) -> None:
        """Configure the socket of a new client, and watch it.

        Raises:
            ClientGoneError: the client has closed the connection already.
        """
        try:
            client.sock.setblocking(False)
            if client.sock.family != socket.AF_UNIX:
                client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            raise ClientGoneError
        self._watch(client)

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; return False if none is idle, or waits for a refusal."""
        idle = [client for client in self._clients if client.idle or client.phase == connection.DELAY]
        if not idle:
            return False
        self._drop(min(idle, key=lambda client: client.deadline))
        return True

    def _watch(self, client: Connection) -> None:
        """Register the client with the selector for the events that its phase needs."""
        if client not in self._clients:
            return
        events = client.needed_events
        if events == client.events:
            return
        if not client.events:
            self._selector.register(client.sock, events, client)
        elif not events:
            self._selector.unregister(client.sock)
        else:
            self._selector.modify(client.sock, events, client)
        client.events = events

    def _drop(self, client: Connection) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):  # it is not registered
            self._selector.unregister(client.sock)
        client.close()
        self._release(client)

    def _release(self, client: Connection) -> None:
        self._held -= client.held
        client.held = 0
        if client.job is not None:
            self.worker.cancel(client.job)

    def _vanished(self, client: Connection) -> None:
        if client.phase in (connection.WAIT, connection.WRITE, connection.BODY):
            self.metrics.vanished.add()
        self._drop(client)

    def _expire(self, now: float) -> None:
        """Time out the clients whose deadline has passed."""
        for client in list(self._clients):
            if client.deadline < now:
                self._contain_for(client, self._time_out, client)

    def _time_out(self, client: Connection) -> None:
        if client.phase == connection.WAIT:
            what = "the model did not answer within %g s" % self.settings.timeout_s
            self._refuse(client, RequestError(504, what, "try again later", headers={"Retry-After": "1"}))
        elif client.phase == connection.BODY or (client.phase == connection.READ and not client.idle):
            what = "the request was not received in time"
            self._refuse(client, RequestError(408, what, "send the request faster", close=True))
        elif client.phase == connection.DELAY:
            client.end_delay(time.monotonic())
            self._watch(client)
        elif client.phase == connection.READ:
            self.metrics.rejected("idle")
            client.finish(time.monotonic())
            self._watch(client)
        else:
            if client.phase == connection.WRITE:
                self.metrics.rejected("too slow")
            self._drop(client)

    # --- requests ---------------------------------------------------------------------

    def _read(self, client: Connection, now: float) -> None:
        client.receive(now)
        if client.phase == connection.READ:
            self._advance(client, now)
        elif client.phase == connection.BODY:
            self._hold(client)
            if client.phase == connection.BODY and client.body_complete:
                self._respond(client, now)

    def _advance(self, client: Connection, now: float) -> None:
        """Start the next request if its head is complete."""
        try:
            head = client.next_head()
            if head is None:
                return
            preflight = self._admission.preflight(head)
            if preflight:
                keep = self._keeps(client)
                content = protocol.response(200, b"", head.request_id, keep, "text/plain", preflight)
                self._send(client, 200, content, keep)
                return
            self._admission.check(head, self._stopping, client.address)
        except RequestError as refusal:
            self._refuse(client, refusal)
            return
        client.expect_body(now)
        self._hold(client)
        if client.phase == connection.BODY and client.body_complete:
            self._respond(client, now)

    def _hold(self, client: Connection) -> None:
        """Count what has arrived of a body. If all bodies together are too large, refuse the largest incomplete one."""
        self._held += len(client.body) - client.held
        client.held = len(client.body)
        while self._held > self.settings.held_bytes:
            receiving = [candidate for candidate in self._clients if candidate.phase == connection.BODY]
            self.metrics.rejected("memory")
            what = "the bodies of all requests together have more than %d bytes" % self.settings.held_bytes
            refusal = RequestError(503, what, "try again later", close=True, headers={"Retry-After": "1"})
            self._refuse(max(receiving, key=lambda candidate: candidate.held), refusal)

    def _respond(self, client: Connection, now: float) -> None:
        """Answer a complete request, or put its image into the queue."""
        head = client.head
        assert head is not None
        if head.path == "/v1/predict":
            try:
                self._enqueue(client, head, now)
            except RequestError as refusal:
                self._refuse(client, refusal)
            return
        status, content_type, body = self._fact(head.path)
        self._answer(client, status, body, content_type)

    def _fact(self, path: str) -> Tuple[int, str, bytes]:
        """Return status, content type and body for a path that needs no inference."""
        if path == "/v1/model":
            return 200, protocol.JSON, protocol.as_json(self.facts)
        if path == "/metrics":
            return 200, self.metrics.content_type, self.metrics.text(self.worker, len(self._clients), self._held)
        ready = self.worker.healthy and (path == "/healthz" or not (self._stopping or self.worker.failed))
        return (200, "text/plain", b"ok\n") if ready else (503, "text/plain", b"no\n")

    def _enqueue(self, client: Connection, head: RequestHead, now: float) -> None:
        requested_top(head)  # a wrong number is refused before the inference
        if wants_npz(head) and self.facts.get("answers") in ("class", "objects"):
            raise RequestError(400, "format=npz is for models whose answer is arrays", "leave it out")
        job = Job(client.body, head.headers, client)
        if not self.worker.offer(job):
            self.metrics.rejected("queue")
            what = "the queue is full: %d samples are waiting" % self.settings.queue
            raise RequestError(503, what, "try again later", headers={"Retry-After": "1"})
        client.job = job
        client.body = bytearray()
        client.phase = connection.WAIT
        client.deadline = now + self.settings.timeout_s

    def _answer_finished(self) -> None:
        while self._done:
            job = self._done.popleft()
            client: Connection = job.owner
            if not job.cancelled and client.job is job:
                self._contain_for(client, self._answer_job, client, job)

    def _answer_job(self, client: Connection, job: Job) -> None:
        self.metrics.took(job)
        head = client.head
        assert head is not None
        if job.error is not None:
            status = 400 if isinstance(job.error, ImageError) else 500
            unexpected = isinstance(job.error, UnexpectedError)
            self._refuse(client, RequestError(status, job.error.what, job.error.hint, close=unexpected))
            return
        if wants_npz(head):
            self._answer(client, 200, to_npz(job.answer), protocol.NPZ)
            return
        self._answer(client, 200, protocol.as_json(self._prediction(job, head)))

    def _prediction(self, job: Job, head: RequestHead) -> Dict[str, Any]:
        return {
            "request_id": head.request_id,
            "bundle": self.facts["name"],
            "role": self.facts["role"],
            **to_json(job.answer, requested_top(head)),
            "queue_ms": round((job.started - job.entered) * 1000, 3),
            "model_ms": round((job.ended - job.started) * 1000, 3),
        }

    def _refuse(self, client: Connection, refusal: RequestError) -> None:
        request_id = client.head.request_id if client.head else "-"
        keep = self._keeps(client) and not refusal.close
        headers = self._admission.cross_origin(client.head)
        content = protocol.error_response(refusal, request_id, keep, headers)
        self._send(client, refusal.status, content, keep, 0.0 if self._stopping else refusal.delay_s)

    def _answer(self, client: Connection, status: int, body: bytes, content_type: str = protocol.JSON) -> None:
        head = client.head
        assert head is not None
        keep = self._keeps(client)
        headers = self._admission.cross_origin(head)
        content = protocol.response(status, body, head.request_id, keep, content_type, headers)
        self._send(client, status, content, keep)

    def _keeps(self, client: Connection) -> bool:
        """Return whether the connection may stay open after an answer."""
        return client.head is not None and client.head.keep and not self._stopping

    def _send(self, client: Connection, status: int, content: bytes, keep: bool, delay_s: float = 0.0) -> None:
        known = client.head is not None and client.head.path in PATHS
        self.metrics.requests.add(code=str(status), path=client.head.path if known and client.head else "other")
        self._release(client)
        if delay_s:
            client.delay(content, time.monotonic() + delay_s)
        else:
            client.respond(content, keep, time.monotonic())
        self._watch(client)
