"""One client of `serve`: its bytes, the phase it is in, and when its time is up.

A connection holds at most one head (16 KiB) and one body, which is counted before it is read. While
its answer is made, nothing is read from it: that holds clients back that send one request after another.
Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Any, Optional

from deploy import protocol
from deploy.protocol import RequestError, RequestHead

READ, BODY, WAIT, WRITE, DRAIN = "read", "body", "wait", "write", "drain"
"""Phases: reads a head (or idles before one), a body; waits for the model; sends an answer; reads away
what a refused client still sends, because closing at once would tear the answer out of its hands."""
MIN_BYTES_PER_S = 16 * 1024
"""Slower clients are cut off."""
DRAIN_S = 1.0


class ClientGoneError(Exception):
    """The client has closed the connection, or it broke."""


class Connection:
    """One client.

    Args:
        sock: accepted and non-blocking.
        now: time, of `time.monotonic`.
        timeout_s: for a head, and for an answer to be taken.
        idle_s: how long it may stay open between requests.

    Attributes:
        phase: see the constants of this module.
        deadline: when its time is up.
        head: of the request that it is in.
        body: of the same; as long as it should become.
        job: what it waits for.
        held: bytes that are counted for its body.
        events: of `selectors`: what it is watched for now.
    """

    def __init__(self, sock: socket.socket, now: float, timeout_s: float, idle_s: float) -> None:
        self.sock, self._timeout_s, self._idle_s = sock, timeout_s, idle_s
        self._buffer = bytearray()
        self._out = memoryview(b"")
        self.events = 0
        self.begin(now)

    def begin(self, now: float) -> None:
        """Goes on to the next request."""
        self.phase, self.deadline = READ, now + (self._timeout_s if self._buffer else self._idle_s)
        self.head: Optional[RequestHead] = None
        self.body, self._filled, self.held = bytearray(), 0, 0
        self.job: Any = None
        self._keep = self._ahead = False

    @property
    def wants(self) -> int:
        """What it should be watched for, of `selectors`; 0 while its next request has come before its answer."""
        if self.phase == WRITE:
            return selectors.EVENT_WRITE
        return 0 if self.phase == WAIT and self._ahead else selectors.EVENT_READ

    @property
    def clean(self) -> bool:
        """Whether it idles between requests."""
        return self.phase == READ and not self._buffer

    def receive(self, now: float) -> None:
        """Takes in what has come.

        Raises:
            GoneError: there is nothing, and never will be.
        """
        try:
            if self.phase == BODY:
                count = self.sock.recv_into(memoryview(self.body)[self._filled :])
                self._filled += count
            elif self.phase == WAIT:
                count = len(self.sock.recv(1, socket.MSG_PEEK))
                self._ahead = True
            else:
                came = self.sock.recv(protocol.MAX_HEAD_BYTES)
                count = len(came)
                if self.phase == READ:
                    if not self._buffer and count:
                        self.deadline = now + self._timeout_s
                    self._buffer += came
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raise ClientGoneError
        if not count:
            raise ClientGoneError

    def request(self) -> Optional[RequestHead]:
        """The head of the next request, as soon as it is there.

        Raises:
            RefusedError: it is none.
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
        """Gets ready for the body that the head announced."""
        assert self.head is not None
        length = self.head.length
        self.phase, self.deadline = BODY, now + self._timeout_s + length / MIN_BYTES_PER_S
        self.body = bytearray(length)
        self._filled = min(length, len(self._buffer))
        self.body[: self._filled] = self._buffer[: self._filled]
        del self._buffer[: self._filled]
        if self.head.expects and self._filled < length:
            with contextlib.suppress(OSError):  # it will be seen when the body is read
                self.sock.send(protocol.CONTINUE)

    @property
    def whole(self) -> bool:
        """Whether the body is there."""
        return self._filled == len(self.body)

    def answer(self, content: bytes, keep: bool, now: float) -> None:
        """Gets ready to send an answer."""
        self.phase, self.deadline = WRITE, now + self._timeout_s
        self._out, self._keep, self.job, self.body = memoryview(content), keep, None, bytearray()

    def send(self, now: float) -> bool:
        """Sends what can be sent; whether the next request may come.

        Raises:
            GoneError: the client does not take it any more.
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
        self.phase, self.deadline = DRAIN, now + DRAIN_S
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            raise ClientGoneError
        return False

    def close(self) -> None:
        """Lets go of it."""
        self.sock.close()
