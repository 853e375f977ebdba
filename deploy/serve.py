"""A bundle as a service: HTTP/JSON over TCP or a Unix socket, one model, a bounded queue.

::

    POST /v1/predict?top=3   a .npy array, raw numbers (X-Shape, X-Dtype), JPEG, PNG, WAV; labels and scores
    GET  /v1/model           which bundle and model this is
    GET  /metrics            for Prometheus
    GET  /healthz            200 while the process can work: otherwise restart it
    GET  /readyz             200 while it takes requests: otherwise send them elsewhere

One thread has all sockets (`selectors`), two more prepare images and run the model (`worker`). A thread
for each connection would be shorter, and worse on a small board: a slow or vanished client would hold a
stack, and sixty threads that parse would take Python's lock from the one that hands images to the
Edge TPU. Here a client costs a few hundred bytes and the body that it was granted, and what all bodies
take together is bounded (`Settings.held_bytes`).

Who comes when the queue is full is sent away with 503 and Retry-After, and keeps its connection. Who closes its
connection, also for sending alone, is gone: its image is not answered.
Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import hmac
import selectors
import socket
import sys
import time
import traceback
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Set

from deploy import connection, protocol
from deploy.connection import Connection, GoneError
from deploy.contract.decoding import Decoding
from deploy.contract.errors import ImageError
from deploy.protocol import Head, RefusedError
from deploy.service_metrics import Figures
from deploy.worker import Job, Worker

_PATHS = {"/v1/predict": "POST", "/v1/model": "GET", "/metrics": "GET", "/healthz": "GET", "/readyz": "GET"}
_OPEN = ("/healthz", "/readyz")
"""Answered without a token: they tell nothing."""
TICK_S = 0.25
GRACE_S = 30.0
MAX_TOP = 1000
LOG_EVERY_S = 1.0
"""Internal errors are logged at most this often."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a service allows.

    Attributes:
        queue: images that wait at most.
        body_bytes: of one request.
        held_bytes: of all bodies together that are received or wait.
        connections: at the same time.
        timeout_s: for a request head, for an answer to be taken, and for an image in the queue.
        idle_s: how long a connection may stay open between requests.
        token: who has to send it, as `Authorization: Bearer …`; empty: nobody.
    """

    queue: int = 64
    body_bytes: int = 16 << 20
    held_bytes: int = 64 << 20
    connections: int = 256
    timeout_s: float = 10.0
    idle_s: float = 60.0
    token: str = ""


class Server:
    """The service.

    Args:
        model: `Model`, or whatever has its `prepare` and `answer`.
        facts: the answer to /v1/model; `name` and `role` are told in every answer.
        sockets: listening.
        settings: what it allows.
        alive: is called every `TICK_S`, with whether it is healthy.

    Attributes:
        ended: after `run`: the model is free. Otherwise an inference never came back.
    """

    def __init__(
        self,
        model: Any,
        facts: Dict[str, Any],
        sockets: List[socket.socket],
        settings: Settings,
        alive: Callable[[bool], None] = lambda healthy: None,
    ) -> None:
        self.facts, self.settings, self._alive = facts, settings, alive
        self.figures = Figures(facts, settings.queue)
        self._sockets = sockets
        self._clients: Set[Connection] = set()
        self._done: Deque[Job] = collections.deque()
        self._held = 0
        self._logged = float("-inf")
        self._stopping = self.ended = False
        self._token = hashlib.sha256(settings.token.encode()).digest()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        for each in (self._bell, self._ringer):
            each.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for each in sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self.worker = Worker(model, settings.queue, self._finished, Decoding(**facts.get("decoding", {})))

    def run(self) -> None:
        """Serves until `stop`; then finishes what waits, at most `GRACE_S` long."""
        until, tick = float("inf"), 0.0
        while self._clients or not self._stopping:
            for key, mask in self._selector.select(TICK_S):
                self._event(key, mask)
            self._answer_finished()
            now = time.monotonic()
            if now >= tick:
                self._expire(now)
                self._alive(self.worker.healthy)
                tick = now + TICK_S
            if self._stopping and until == float("inf"):
                until = now + GRACE_S
                self._refuse_new()
            if now > until:
                break
        for client in list(self._clients):
            self._drop(client)
        self.ended = self.worker.close(1.0)
        self._selector.close()
        for each in self._sockets + [self._bell, self._ringer]:
            each.close()

    def stop(self) -> None:
        """Ends `run` gently. May be called by any thread, and by a signal handler."""
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or the service has ended
            self._ringer.send(b"!")

    def _finished(self, job: Job) -> None:
        """Called by the worker's threads."""
        self._done.append(job)
        self._ring()

    def _refuse_new(self) -> None:
        for each in self._sockets:
            self._selector.unregister(each)
            each.close()
        for client in list(self._clients):
            if client.clean:
                self._drop(client)
            elif client.phase in (connection.READ, connection.BODY):
                self._refuse(client, RefusedError(503, "the service is being stopped", "ask again later", close=True))

    # --- sockets ----------------------------------------------------------------------

    def _event(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.data is None:
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            elif not self._stopping:
                self._accept(key.fileobj)
            return
        client, now = key.data, time.monotonic()
        if client not in self._clients:
            return
        with self._isolated(client):
            if mask & selectors.EVENT_READ:
                self._read(client, now)
            if mask & selectors.EVENT_WRITE and client.phase == connection.WRITE and client.send(now):
                self._advance(client, now)
            self._watch(client)

    @contextlib.contextmanager
    def _isolated(self, client: Connection) -> Iterator[None]:
        """Work for one client; whatever it raises ends that client's request and nothing else."""
        try:
            yield
        except GoneError:
            self._vanished(client)
        except Exception as error:  # noqa: BLE001 - one request must not end the service for all others
            self._failed(client, error)

    def _failed(self, client: Connection, error: Exception) -> None:
        """Answers a request that met an error of ours with 500 and closes its connection."""
        self.figures.rejected("internal")
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
        if client not in self._clients:
            return
        if client.phase in (connection.WRITE, connection.DRAIN):  # a part of an answer may have been sent
            self._drop(client)
            return
        try:
            what = "%s while the request was handled" % type(error).__name__
            self._refuse(client, RefusedError(500, what, "please report it", close=True))
        except Exception:  # noqa: BLE001 - the answer may meet the same error
            self._drop(client)

    def _accept(self, listener: Any) -> None:
        for _ in range(32):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # no more file descriptors, or gone already
                self.figures.rejected("accept: %s" % (error.strerror or "failed"))
                self._make_room()
                time.sleep(0.01)  # the listener stays readable: do not spin
                return
            if len(self._clients) >= self.settings.connections and not self._make_room():
                self.figures.rejected("connections")
                sock.close()
                continue
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = Connection(sock, time.monotonic(), self.settings.timeout_s, self.settings.idle_s)
            self._clients.add(client)
            self._watch(client)

    def _make_room(self) -> bool:
        """Closes the connection that has idled longest, if one idles."""
        idle = [client for client in self._clients if client.clean]
        if not idle:
            return False
        self._drop(min(idle, key=lambda client: client.deadline))
        return True

    def _watch(self, client: Connection) -> None:
        """Has the selector watch for what the client's phase needs."""
        if client not in self._clients:
            return
        wanted = client.wants
        if wanted == client.events:
            return
        if not client.events:
            self._selector.register(client.sock, wanted, client)
        elif not wanted:
            self._selector.unregister(client.sock)
        else:
            self._selector.modify(client.sock, wanted, client)
        client.events = wanted

    def _drop(self, client: Connection) -> None:
        self._clients.discard(client)
        self._release(client)
        if client.events:
            self._selector.unregister(client.sock)
        client.close()

    def _release(self, client: Connection) -> None:
        self._held -= client.held
        client.held = 0
        if client.job is not None:
            self.worker.cancel(client.job)

    def _vanished(self, client: Connection) -> None:
        if client.phase in (connection.WAIT, connection.WRITE, connection.BODY):
            self.figures.vanished.add()
        self._drop(client)

    def _expire(self, now: float) -> None:
        """Ends what takes too long."""
        for client in [each for each in self._clients if each.deadline < now]:
            with self._isolated(client):
                self._expire_client(client)

    def _expire_client(self, client: Connection) -> None:
        """Ends one client whose time is up."""
        if client.phase == connection.WAIT:
            what = "there was no answer within %g s" % self.settings.timeout_s
            self._refuse(client, RefusedError(504, what, "ask again", headers={"Retry-After": "1"}))
        elif client.phase == connection.BODY or (client.phase == connection.READ and not client.clean):
            self._refuse(client, RefusedError(408, "the request took too long to come", "send it at once", close=True))
        else:
            self.figures.rejected("too slow" if client.phase == connection.WRITE else "idle")
            self._drop(client)

    # --- requests ---------------------------------------------------------------------

    def _read(self, client: Connection, now: float) -> None:
        client.receive(now)
        if client.phase == connection.READ:
            self._advance(client, now)
        elif client.phase == connection.BODY and client.whole:
            self._respond(client, now)

    def _advance(self, client: Connection, now: float) -> None:
        """Takes the next request up, if its head is there."""
        try:
            head = client.request()
            if head is None:
                return
            self._admit(head)
        except RefusedError as refusal:
            self._refuse(client, refusal)
            return
        self._held += head.length
        client.held = head.length
        client.expect_body(now)
        if client.whole:
            self._respond(client, now)

    def _admit(self, head: Head) -> None:
        """Whether the body of a request may come.

        Raises:
            RefusedError: it may not.
        """
        given = head.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given[2].strip().encode("latin-1")).digest()
        good = hmac.compare_digest(digest, self._token) and given[0].lower() == "bearer"
        if self.settings.token and head.path not in _OPEN and not good:
            raise RefusedError(401, "the token is missing or wrong", close=True, headers={"WWW-Authenticate": "Bearer"})
        if self._stopping:
            raise RefusedError(503, "the service is being stopped", "ask again later", close=True)
        if head.path not in _PATHS:
            raise RefusedError(
                404, "there is no such path", "use one of: %s" % ", ".join(_PATHS), close=head.length > 0
            )
        allowed = _PATHS[head.path]
        if head.method != allowed:
            refused = "%s takes %s" % (head.path, allowed)
            unread = head.length > 0 or head.method == "HEAD"  # whose answers have no body
            raise RefusedError(405, refused, close=unread, headers={"Allow": allowed})
        limit = self.settings.body_bytes if allowed == "POST" else 0
        if head.length > limit:
            raise RefusedError(413, "the body has %d bytes; at most %d" % (head.length, limit), "send less", close=True)
        if self._held + head.length > self.settings.held_bytes:
            self.figures.rejected("memory")
            raise RefusedError(503, "too much is being received", "ask again", close=True, headers={"Retry-After": "1"})

    def _respond(self, client: Connection, now: float) -> None:
        """Does what a whole request asks for."""
        head = client.head
        assert head is not None
        if head.path == "/v1/predict":
            try:
                self._enqueue(client, head, now)
            except RefusedError as refusal:
                self._refuse(client, refusal)
            return
        status, kind, body = 200, protocol.JSON, b""
        if head.path == "/v1/model":
            body = protocol.as_json(self.facts)
        elif head.path == "/metrics":
            kind = self.figures.content_type
            body = self.figures.text(self.worker, len(self._clients), self._held)
        else:
            ready = self.worker.healthy and (head.path == "/healthz" or not (self._stopping or self.worker.failed))
            status, kind, body = (200, "text/plain", b"ok\n") if ready else (503, "text/plain", b"no\n")
        self._answer(client, status, protocol.answer(status, body, head.request_id, head.keep, kind))

    def _enqueue(self, client: Connection, head: Head, now: float) -> None:
        if _top(head) is None:
            raise RefusedError(400, "top=%s is not a number from 1 to %d" % (head.query["top"][:20], MAX_TOP))
        job = Job(client.body, head.headers.get("x-shape", ""), head.headers.get("x-dtype", ""), client)
        if not self.worker.offer(job):
            self.figures.rejected("queue")
            raise RefusedError(
                503, "%d images wait already" % self.settings.queue, "ask again", headers={"Retry-After": "1"}
            )
        client.job, client.body = job, bytearray()
        client.phase, client.deadline = connection.WAIT, now + self.settings.timeout_s

    def _answer_finished(self) -> None:
        while self._done:
            job = self._done.popleft()
            client: Connection = job.owner
            if not job.cancelled and client.job is job:
                with self._isolated(client):
                    self._answer_job(client, job)

    def _answer_job(self, client: Connection, job: Job) -> None:
        """Answers the request of a finished job."""
        self.figures.took(job)
        head = client.head
        assert head is not None
        if job.error is not None:
            status = 400 if isinstance(job.error, ImageError) else 500
            self._refuse(client, RefusedError(status, job.error.what, job.error.todo))
        else:
            body = protocol.as_json(self._told(job, head))
            self._answer(client, 200, protocol.answer(200, body, head.request_id, head.keep))

    def _told(self, job: Job, head: Head) -> Dict[str, Any]:
        return {
            "request_id": head.request_id,
            "bundle": self.facts["name"],
            "role": self.facts["role"],
            "top": job.answer.rows(_top(head) or 1),
            "queue_ms": round((job.started - job.entered) * 1000, 3),
            "model_ms": round((job.ended - job.started) * 1000, 3),
        }

    def _refuse(self, client: Connection, refusal: RefusedError) -> None:
        head = client.head
        request_id, keep = (head.request_id, head.keep) if head else ("-", False)
        self._answer(client, refusal.status, protocol.refusal(refusal, request_id, keep), refusal.close)

    def _answer(self, client: Connection, status: int, content: bytes, close: bool = False) -> None:
        known = client.head is not None and client.head.path in _PATHS
        self.figures.requests.add(code=str(status), path=client.head.path if known and client.head else "other")
        self._release(client)
        keep = client.head is not None and client.head.keep and not close
        client.answer(content, keep, time.monotonic())
        self._watch(client)


def _top(head: Head) -> Optional[int]:
    """Return how many classes a request asks for; None if that is not a number from 1 to `MAX_TOP`."""
    return protocol.number(head.query.get("top", "3"), MAX_TOP) or None
