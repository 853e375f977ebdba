"""One client connection of `serve`: its bytes, its phase and its deadline.

A connection buffers at most one request head (16 KiB) and what has arrived of one body.
Nothing is read from a connection while its answer is computed, which holds back clients that pipeline requests.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Any, Optional

from deploy.service import protocol
from deploy.service.protocol import RequestError, RequestHead

READ = "read"
"""Phase: receives a request head, or is idle before one."""
BODY = "body"
"""Phase: receives a body."""
DELAY = "delay"
"""Phase: waits until a delayed refusal is sent."""
WAIT = "wait"
"""Phase: waits for the model."""
WRITE = "write"
"""Phase: sends a response."""
DRAIN = "drain"
"""Phase: the service has closed its direction, and discards what the client still sends. If the socket were closed at
once, TCP would reset the connection, and the client could lose the response."""
MIN_BYTES_PER_S = 16 * 1024
"""Clients that send a body more slowly are disconnected."""
DRAIN_S = 2.0
CLOSING_READS = 64
READ_BYTES = 1 << 18
"""How much of a body is read before other sockets have their turn."""
LAST_CALL_S = 0.5
"""When the service ends: how long a connection may still begin a request, which is answered with 503."""


class ClientGoneError(Exception):
    """The client has closed the connection, or the connection failed."""


class Connection:
    """One client connection.

    Args:
        sock: an accepted, non-blocking socket.
        address: the IP address of the client; empty: a Unix socket.
        now: the time of `time.monotonic`.
        timeout_s: the time limit to receive a head, and to send a response.
        idle_s: how long the connection may stay open between requests.

    Attributes:
        phase: one of the constants of this module.
        deadline: the time of `time.monotonic` at which the phase must have ended.
        head: the head of the current request.
        body: what has arrived of the body of the current request.
        job: the job in the queue that the client waits for.
        held: the bytes that are counted for the body.
        events: the `selectors` events that the socket is registered for.
    """

    def __init__(self, sock: socket.socket, address: str, now: float, timeout_s: float, idle_s: float) -> None:
        self.sock = sock
        self.address = address
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._buffer = bytearray()
        self._out = memoryview(b"")
        self.events = 0
        self.deadline = 0.0
        self.begin(now)

    def last_call(self, now: float) -> None:
        """Let the connection begin a request for `LAST_CALL_S`, and not longer."""
        self._idle_s = LAST_CALL_S
        if self.idle:
            self.deadline = min(self.deadline, now + LAST_CALL_S)

    def begin(self, now: float) -> None:
        """Get ready for the next request."""
        self.phase = READ
        self.deadline = now + (self._timeout_s if self._buffer else self._idle_s)
        self.head: Optional[RequestHead] = None
        self.body = bytearray()
        self.held = 0
        self.job: Any = None
        self._keep = False
        self._pipelined = False

    @property
    def needed_events(self) -> int:
        """The `selectors` events of the phase; 0 if the next request arrived before the response was sent."""
        if self.phase == WRITE:
            return selectors.EVENT_WRITE
        return 0 if self.phase == DELAY or (self.phase == WAIT and self._pipelined) else selectors.EVENT_READ

    @property
    def idle(self) -> bool:
        """Whether the connection is between two requests."""
        return self.phase == READ and not self._buffer

    @property
    def body_complete(self) -> bool:
        """Whether the whole body is received."""
        return self.head is not None and len(self.body) == self.head.length

    def receive(self, now: float) -> None:
        """Read the bytes that have arrived.

        Raises:
            ClientGoneError: the client has closed the connection.
        """
        try:
            count = self._receive(now)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raise ClientGoneError
        if not count:
            raise ClientGoneError

    def _receive(self, now: float) -> int:
        if self.phase == BODY:
            assert self.head is not None
            received = self.sock.recv(min(self.head.length - len(self.body), READ_BYTES))
            self.body += received
            return len(received)
        if self.phase == WAIT:
            self._pipelined = True
            return len(self.sock.recv(1, socket.MSG_PEEK))
        received = self.sock.recv(protocol.MAX_HEAD_BYTES)
        if self.phase == READ:
            if not self._buffer and received:
                self.deadline = now + self._timeout_s
            self._buffer += received
        return len(received)

    def next_head(self) -> Optional[RequestHead]:
        """Return the head of the next request, or None if it is incomplete.

        Raises:
            RequestError: the head is invalid.
        """
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: empty lines before a request are ignored
            del self._buffer[:2]
        end = self._buffer.find(protocol.END)
        if end > protocol.MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > protocol.MAX_HEAD_BYTES):
            raise RequestError(431, "the head has more than %d bytes" % protocol.MAX_HEAD_BYTES, close=True)
        if end < 0:
            return None
        raw = bytes(self._buffer[:end])
        del self._buffer[: end + len(protocol.END)]
        self.head = protocol.head(raw)
        return self.head

    def expect_body(self, now: float) -> None:
        """Get ready for the body that the head announces."""
        assert self.head is not None
        length = self.head.length
        self.phase = BODY
        self.deadline = now + self._timeout_s + length / MIN_BYTES_PER_S
        self.body = self._buffer[:length]
        del self._buffer[:length]
        if self.head.expects and len(self.body) < length:
            with contextlib.suppress(OSError):  # the next `receive` reports it
                self.sock.send(protocol.CONTINUE)

    def delay(self, content: bytes, until: float) -> None:
        """Keep a response, after which the connection ends, until a time of `time.monotonic`."""
        self.phase = DELAY
        self.deadline = until
        self._out = memoryview(content)

    def end_delay(self, now: float) -> None:
        """Get ready to send the delayed response."""
        self.respond(bytes(self._out), False, now)

    def respond(self, content: bytes, keep: bool, now: float) -> None:
        """Get ready to send a response."""
        self.phase = WRITE
        self.deadline = now + self._timeout_s
        self._out = memoryview(content)
        self._keep = keep
        self.job = None
        self.body = bytearray()

    def send(self, now: float) -> bool:
        """Send as much as the socket takes; return whether the next request may begin.

        Raises:
            ClientGoneError: the client has closed the connection.
        """
        try:
            self._out = self._out[self.sock.send(self._out) :]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            raise ClientGoneError
        if self._out:
            return False
        if self._keep:
            self.begin(now)
            return True
        self.finish(now)
        return False

    def finish(self, now: float) -> None:
        """Close the service's direction, and wait until the client closes its own.

        Raises:
            ClientGoneError: the client has closed the connection.
        """
        self.phase = DRAIN
        self.deadline = now + DRAIN_S
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            raise ClientGoneError

    def close(self) -> None:
        """Close the socket. What has arrived is read first: TCP resets a connection that has unread bytes."""
        with contextlib.suppress(OSError):
            for _ in range(CLOSING_READS):
                if not self.sock.recv(protocol.MAX_HEAD_BYTES):
                    break
        self.sock.close()
