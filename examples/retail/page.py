"""The web page of the shop, for browsers on this machine.

It listens on a loopback address only. A foreign Host is refused, so that a name of another site that points to this
address (DNS rebinding) has no effect. A change needs a header that other sites cannot send, and an Origin of this page.
All sizes and times are limited. The page is three static files; input of users is always shown as text.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
from typing import Any, Callable, Dict, List, Tuple
from urllib.parse import parse_qs, urlsplit

from till import Till

from deploy.contract.errors import ArgumentError, DeviceError
from deploy.learn import learnt_file
from deploy.runner import images

MAX_BODY_BYTES = 1 << 25
MAX_PHOTOS = 20
MAX_QUERY = 1000
MAX_CONNECTIONS = 32
TIMEOUT_S = 20.0
"""All chosen: far above what the page of one shop sends."""
HEADER = "X-Shop"
FOLDER = os.path.dirname(os.path.abspath(__file__))
STATIC = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; img-src 'self' data:; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Reply = Tuple[int, str, bytes]


class PageError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status.
        what: the reason.
    """

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class Page(http.server.ThreadingHTTPServer):
    """The server of the page.

    Args:
        till: the shop.
        host: the address to listen on, one of LOOPBACK.
        port: the port; 0: any free one.
        names: further values of Host that are allowed: those of a proxy in front of this server.

    Raises:
        ArgumentError: the address is not one of this machine alone.
        OSError: the port is in use.
    """

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, till: Till, host: str = "127.0.0.1", port: int = 8000, names: Tuple[str, ...] = ()) -> None:
        if host not in LOOPBACK:
            hint = "use 127.0.0.1; from another machine: ssh -L 8000:127.0.0.1:8000 DEVICE"
            raise ArgumentError("the page listens on this machine only, not on %s" % host[:60], hint)
        self.till = till
        if host == "::1":
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)
        local_hosts = ["%s:%d" % (name, self.server_port) for name in ("127.0.0.1", "localhost", "[::1]")]
        self.hosts = frozenset(local_hosts + list(names))
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    @property
    def url(self) -> str:
        """The address of the page."""
        name = str(self.server_address[0])
        return "http://%s:%d/" % ("[%s]" % name if ":" in name else name, self.server_port)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in its own thread, if there are not too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and count it as ended."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a client that disconnects is not an error."""


class Handler(http.server.BaseHTTPRequestHandler):
    """The requests of the page."""

    protocol_version = "HTTP/1.1"
    server_version = "shop"
    sys_version = ""
    timeout = TIMEOUT_S
    server: Page

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """Answer a request that changes the products."""
        self._guarded(self._post)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the page asks for its state every second."""

    def _guarded(self, answer: Callable[[str, Dict[str, str]], Reply]) -> None:
        """Send an answer; an error becomes JSON with `error`, and ends the connection: its body may not be read."""
        try:
            self._check_host()
            path, query = self._target()
            status, kind, content = answer(path, query)
        except PageError as error:
            self.close_connection = True
            status, kind, content = _failed(error.status, str(error))
        except DeviceError as error:
            status, kind, content = _failed(400, str(error))
        except OSError as error:
            self.close_connection = True
            status, kind, content = _failed(500, "a file cannot be read or written: %s" % error)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if kind == "application/octet-stream":
            self.send_header("Content-Disposition", 'attachment; filename="products.learnt"')
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _check_host(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise PageError(403, "the Host of the request is not this page")

    def _target(self) -> Tuple[str, Dict[str, str]]:
        parts = urlsplit(self.path)
        if len(parts.query) > MAX_QUERY:
            raise PageError(414, "the query has more than %d characters" % MAX_QUERY)
        try:
            fields = parse_qs(parts.query, keep_blank_values=True, errors="strict")
        except ValueError:
            raise PageError(400, "the query is not UTF-8")
        return parts.path, {name: values[0] for name, values in fields.items()}

    def _get(self, path: str, query: Dict[str, str]) -> Reply:
        if path in STATIC:
            name, kind = STATIC[path]
            with open(os.path.join(FOLDER, name), "rb") as stream:
                return 200, kind, stream.read()
        till = self.server.till
        if path == "/state.json":
            return _json(till.state())
        if path == "/picture":
            seen = till.last()
            if seen is None:
                raise PageError(404, "there is no picture yet")
            return 200, seen.picture.content_type, seen.picture.content
        if path == "/export":
            return 200, "application/octet-stream", till.recognizer.exported()
        raise PageError(404, "there is no such page")

    def _post(self, path: str, query: Dict[str, str]) -> Reply:
        self._check_origin()
        body = self._body()
        till = self.server.till
        if path == "/learn":
            name = query.get("name", "")
            if body:
                return _json({"learnt": till.learn_from_photos(name, self._photos(body))})
            number = images.parse_integer(query.get("part", "0"), 0, 9999)
            return _json({"learnt": till.learn_from_frames(name, -1 if number is None else number)})
        if path == "/undo":
            change = till.recognizer.undo()
            till.look_again()
            return _json({"undone": change.event("undo", learnt_file.now())})
        if path == "/import":
            change = till.recognizer.imported(body)
            till.look_again()
            return _json({"imported": change.event("import", change.time)})
        raise PageError(404, "there is no such action")

    def _check_origin(self) -> None:
        """Refuse a change that another site has caused."""
        origins = self.headers.get_all("Origin") or []
        known = ["%s://%s" % (scheme, host) for scheme in ("http", "https") for host in self.server.hosts]
        if any(origin.lower() not in known for origin in origins) or self.headers.get(HEADER) != "1":
            raise PageError(403, "the request does not come from this page")

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length") or []
        if len(lengths) != 1 or self.headers.get("Transfer-Encoding") is not None:
            raise PageError(411, "the request needs one Content-Length")
        length = images.parse_integer(lengths[0], 0, 10**15 - 1)
        if length is None:
            raise PageError(400, "Content-Length is not a number")
        if length > MAX_BODY_BYTES:
            raise PageError(413, "the photos have more than %d MB: send fewer or smaller ones" % (MAX_BODY_BYTES >> 20))
        body = self.rfile.read(length)
        if len(body) != length:
            raise PageError(400, "the request is not complete")
        return body

    def _photos(self, body: bytes) -> List[Any]:
        """Return the decoded photos in a body: files one after the other, whose sizes are in X-Sizes."""
        sizes = self.headers.get("X-Sizes", "").split(",")
        if len(sizes) > MAX_PHOTOS:
            raise PageError(400, "there are %d photos; at most %d" % (len(sizes), MAX_PHOTOS))
        numbers = [images.parse_integer(size, 0, MAX_BODY_BYTES) for size in sizes]
        counts = [number for number in numbers if number is not None]
        if len(counts) != len(sizes) or sum(counts) != len(body):
            raise PageError(400, "X-Sizes are not the sizes of the photos")
        photos = []
        start = 0
        for size in counts:
            content = body[start : start + size]
            photos.append(images.decode_body(content, decoding=self.server.till.recognizer.model.bundle.decoding))
            start += size
        return photos


def _json(value: Dict[str, Any]) -> Reply:
    return 200, "application/json", json.dumps(value, allow_nan=False).encode()


def _failed(status: int, what: str) -> Reply:
    return status, "application/json", json.dumps({"error": what}).encode()


def served(page: Page) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    try:
        page.serve_forever(poll_interval=0.2)
    finally:
        page.server_close()
