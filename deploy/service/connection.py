"""The connections of `serve`: waitress' parser and channel, with limits that waitress does not have.

waitress closes connections that are silent. These classes also limit the time of a request and of an answer, the
memory of all bodies, and how often a token can be tried; they refuse a request before its body is received; and they
close a connection without a reset, which could cost the client the answer. `app.Server` decides, these classes act.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import socket
import struct
import sys
import time
from typing import Any, Dict, List, Optional

from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError, TransferEncodingNotImplemented
from waitress.server import BaseWSGIServer
from waitress.task import ErrorTask, Task, WSGITask

from deploy.service.admission import RequestError, RequestHead, status_line

MAX_HEAD_BYTES = 16 * 1024
"""Chosen; nginx accepts four buffers of 8 KiB by default."""
MIN_BYTES_PER_S = 16 * 1024
"""Clients that send a body more slowly are disconnected."""
DRAIN_S = 2.0
"""How long the service reads what a client still sends after the answer. If the socket were closed at once, TCP would
reset the connection, and the client could lose the answer."""
_SINGLE = re.compile(
    rb"\r\n(content-length|transfer-encoding|content-type|expect|host|origin|authorization|x-shape|x-dtype):",
    re.IGNORECASE,
)
"""The headers that frame a request or allow it. waitress joins headers of one name; two servers could read them
differently."""
_INVALID = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r\n[ \t]|[ \t]{100}")
"""A control character, a line that continues the line before, or a hundred blanks. waitress' own expression takes
quadratic time for blanks in a header: 6 s for 14 kB, measured with waitress 3.0.2."""
SO_ATTACH_FILTER = 26
"""Of include/uapi/asm-generic/socket.h in Linux; Python's module `socket` does not have it."""
_FILTER = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone is the first packet of a new connection
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # let every other packet through
)
"""A classic BPF program (Linux: Documentation/networking/filter.rst): code, jump if true, jump if false, value."""


class Request(HTTPRequestParser):  # type: ignore[misc]
    """The parser of one request. It refuses what is ambiguous, and asks the server before it receives the body.

    Args:
        server: the `app.Server`.
        address: the IP address of the client; empty: a Unix socket.
        adj: the settings of waitress.

    Attributes:
        head: the request line and the headers; None before.
        delayed: an error that is answered at `deadline`; what arrives until then is discarded.
        deadline: the time of `time.monotonic` at which the request must have been received.
    """

    head: Optional[RequestHead] = None
    delayed: Optional[RequestError] = None
    error: Any  # of waitress: None, one of its errors, or a RequestError
    completed: bool
    body_bytes_received: int
    version = "1.1"  # of the answer, if the request is refused before its version is known

    def __init__(self, server: Any, address: str, adj: Any) -> None:
        super().__init__(adj)
        self._server = server
        self._address = address
        self.deadline = time.monotonic() + server.settings.timeout_s

    def received(self, data: bytes) -> int:
        """Parse bytes; return how many belong to this request."""
        if self.delayed is not None:
            return len(data)
        consumed = int(super().received(data))
        if self.headers_finished and self.head is None and not self.empty and self.error is None:
            headers = {name.lower().replace("_", "-"): value for name, value in self.headers.items()}
            self.head = RequestHead(self.command, self.request_uri, self.version, headers)
            self.deadline += self.content_length / MIN_BYTES_PER_S
            try:
                self._server.admit(self.head, self._address)
            except RequestError as error:
                self._refuse(error)
            except Exception as error:  # noqa: BLE001 - a bug costs this request alone
                self._refuse(self._server.unexpected(error))
        if self.error is not None:
            self.expect_continue = False  # waitress would answer 100 Continue, and wait for the body
        return consumed

    def _refuse(self, error: RequestError) -> None:
        error.close = error.close or not self.completed  # the body would be read as the next request
        if error.delay_s:
            self.delayed = error
            self.deadline = time.monotonic() + error.delay_s
            self.expect_continue = False
        else:
            self.error = error
        self.completed = not error.delay_s

    def parse_header(self, header_plus: bytes) -> None:
        """Parse a head.

        Raises:
            ParsingError: the head is invalid or ambiguous.
            TransferEncodingNotImplemented: the body has no length.
        """
        names = [name.lower() for name in _SINGLE.findall(header_plus)]
        if len(names) != len(set(names)):
            raise ParsingError("a header occurs twice")
        if _INVALID.search(header_plus):
            raise ParsingError("a header is folded, or has control characters or a hundred blanks")
        if b"transfer-encoding" in names:
            raise TransferEncodingNotImplemented("Transfer-Encoding is not supported; send Content-Length")
        try:
            super().parse_header(header_plus)
        except ValueError:  # of an address in the request line, or of a number with thousands of digits
            raise ParsingError("the request line or a number is invalid")


class _Answer(Task):  # type: ignore[misc]
    """The part that all answers have in common."""

    def build_response_header(self) -> bytes:
        """Return the status line and the headers."""
        server, head = self.channel.owner, self.request.head
        options = {option.strip().lower() for option in self.request.headers.get("CONNECTION", "").split(",")}
        if server.stopping or "close" in options:
            self.set_close_on_finish()
        common = {"X-Request-Id": "-" if head is None else head.request_id, "Cache-Control": "no-store"}
        self.response_headers.extend({**common, **server.cross_origin(head)}.items())
        return bytes(super().build_response_header())

    def finish(self) -> None:
        """Send what is left of the answer, and count the answer."""
        super().finish()
        self.channel.owner.answered(self.request.head, self.status[:3])


class Reply(_Answer, WSGITask):  # type: ignore[misc]
    """The answer of the application."""

    def get_environment(self) -> Dict[str, Any]:
        """Return the environment of WSGI, with the head of the request."""
        return {**super().get_environment(), "coralline.head": self.request.head}


class RefusedAnswer(_Answer, ErrorTask):  # type: ignore[misc]
    """The answer to a request that the parser, the admission or a limit refuses."""

    def execute(self) -> None:
        """Write the error as JSON."""
        error, head = self.request.error, self.request.head
        if not isinstance(error, RequestError):  # one of waitress
            error = RequestError(error.code, error.body, close=True)
        if error.close:
            self.set_close_on_finish()
        body = error.body("-" if head is None else head.request_id)
        self.status = status_line(error.status)
        self.response_headers.extend({"Content-Type": "application/json", **error.headers}.items())
        self.content_length = len(body)
        self.write(body)


class Channel(HTTPChannel):  # type: ignore[misc]
    """One client connection.

    Attributes:
        owner: the `app.Server`.
    """

    task_class = Reply
    error_task_class = RefusedAnswer
    request: Optional[Request]  # of waitress: the request that is being received
    requests: List[Request]  # of waitress: the requests that wait for their answers

    def __init__(self, server: Any, sock: socket.socket, addr: Any, adj: Any, map: Any = None) -> None:
        self.owner = server.owner
        address = "" if server.family == getattr(socket, "AF_UNIX", None) else str(addr[0])
        self.parser_class = functools.partial(Request, self.owner, address)
        self._drains_until = 0.0
        self._sends_until = 0.0
        self._stopped_at = 0.0
        super().__init__(server, sock, addr, adj, map)

    @property
    def idle(self) -> bool:
        """Whether the connection is between two requests."""
        return self.request is None and not (self.requests or self.total_outbufs_len or self._drains_until)

    @property
    def can_make_room(self) -> bool:
        """Whether the connection may be closed for a new one: it is idle, or waits for a refusal."""
        request = self.request
        return self.idle or bool(self._drains_until) or (request is not None and request.delayed is not None)

    @property
    def held(self) -> int:
        """The bytes of the bodies that are received or wait."""
        request = self.request
        requests = list(self.requests) if request is None else [*self.requests, request]
        return sum(int(each.body_bytes_received) for each in requests)

    def stopped_at(self, now: float) -> float:
        """Return when this connection first learnt that the service is being stopped: now, if it did not know yet."""
        self._stopped_at = self._stopped_at or now
        return self._stopped_at

    def received(self, data: bytes) -> bool:
        """Take bytes that have arrived."""
        if self._drains_until:
            return False
        result = bool(super().received(data))
        if self.request is not None and self.request.body_bytes_received:
            self.owner.limit_memory()
        return result

    def service(self) -> None:
        """Answer a request. An exception in waitress or in `RefusedAnswer` ends the connection."""
        try:
            super().service()
        except Exception as error:  # noqa: BLE001 - the other connections go on
            self.owner.failures.add(error)
            self.requests = []
            self.will_close = True
            self.server.pull_trigger()

    def refuse(self, error: RequestError) -> None:
        """End the request that is being received with an error, and then the connection."""
        with self.requests_lock:
            request, self.request = self.request, None
            if request is None:
                return
            request.close()  # releases the memory of the body
            request.body_bytes_received = 0
            error.close, request.error, request.completed = True, error, True
            self.requests.append(request)
            is_first = len(self.requests) == 1
        if is_first:
            self.server.add_task(self)

    def expire(self, now: float) -> None:
        """End the request, the answer or the connection, if its time limit has passed."""
        request = self.request
        if self._drains_until:
            if now > self._drains_until:
                self.drop()
        elif self.total_outbufs_len:
            self._sends_until = self._sends_until or now + self.owner.settings.timeout_s
            if now > self._sends_until:
                self.owner.metrics.rejected.labels(cause="too slow").inc()
                self.drop()
        else:
            self._sends_until = 0.0
            if request is not None and not self.requests and now > request.deadline:
                late = RequestError(408, "the request was not received in time", "send the request faster")
                self.refuse(request.delayed or late)

    def end(self) -> None:
        """Close the service's direction, and wait until the client closes the connection."""
        self._drains_until = time.monotonic() + DRAIN_S
        self.will_close = self.close_when_flushed = False
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once."""
        super().handle_close()

    def handle_close(self) -> None:
        """Close the connection. If the service ends it, the service's direction is closed first."""
        if self.will_close and self.connected and not self._drains_until:
            self.end()
            return
        if self.connected and not self._drains_until and (self.requests or self.held):
            self.owner.metrics.vanished.inc()
        self.drop()

    def handle_error(self) -> None:
        """Count and log an unexpected exception, and close the connection."""
        error = sys.exc_info()[1]
        if error is not None:
            self.owner.failures.add(error)
        self.drop()


def end_listening(listener: BaseWSGIServer) -> None:
    """Accept the connections that wait, and close the socket. waitress' trigger stays, which open channels use."""
    count = -1
    while count != len(listener.active_channels):
        count = len(listener.active_channels)
        listener.handle_accept()
    listener.del_channel()
    listener.socket.close()


def keep_out(listener: socket.socket) -> bool:
    """Keep new connections out of a listener, and leave those that have begun.

    The kernel resets every connection in the queue of a listener that is closed. So new connections are kept out first,
    those in the queue are accepted, and then the listener is closed. A client that connects over TCP repeats its first
    packet after a second, and is then refused.

    Returns:
        Whether the system can do that. If not, a connection that is made while the listener is closed is reset.
    """
    if listener.family == getattr(socket, "AF_UNIX", None):
        with contextlib.suppress(OSError):
            os.unlink(listener.getsockname())
        return True
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in _FILTER))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_FILTER), ctypes.addressof(program))
        )
    except OSError:
        return False
    return True
