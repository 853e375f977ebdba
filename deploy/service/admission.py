"""The requests that `serve` accepts: targets, methods, hosts, the token, rates, limits and parameters.

This module uses no sockets. `connection` calls it when the head of a request has arrived, before the body is received.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import http
import ipaddress
import json
import math
import re
import time
import uuid
from typing import Callable, Dict, Mapping, Optional, Tuple
from urllib.parse import parse_qsl

from deploy.runner.images import parse_integer

PATHS = {"/v1/predict": "POST", "/v1/model": "GET", "/metrics": "GET", "/healthz": "GET", "/readyz": "GET"}
OPEN_PATHS = ("/healthz", "/readyz")
"""The paths that need no token: they disclose nothing."""
REFUSAL_S = 1.0
"""How long the answer to a wrong token is delayed."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z_](?:[0-9a-z._-]{0,252}[0-9a-z_])?)(?::([0-9]{1,5}))?\Z")
_TARGET = re.compile(r"/[\x21-\x7e]{0,2000}\Z")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
DEFAULT_TOP = "3"
MAX_TOP = 1000
"""Chosen: as many as the classes of ImageNet."""
MAX_ADDRESSES = 4096
"""The number of addresses that are remembered. More can only be in use if each of them is rarely seen."""
BURST_S = 2.0
"""A client that was quiet may send the requests of this time at once."""


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status code.
        what: what is wrong.
        hint: what the client should do.
        close: whether the connection ends after the answer.
        headers: additional headers of the answer.
        delay_s: how long the answer is delayed.
    """

    def __init__(
        self,
        status: int,
        what: str,
        hint: str = "",
        close: bool = False,
        headers: Optional[Mapping[str, str]] = None,
        delay_s: float = 0.0,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.hint = hint
        self.close = close
        self.headers = dict(headers or {})
        self.delay_s = delay_s

    def body(self, request_id: str) -> bytes:
        """Return the body of the answer."""
        return as_json({"error": {"what": self.what, "hint": self.hint}, "request_id": request_id})


def as_json(value: object) -> bytes:
    """Return a value as the body of an answer. NaN and infinity are not valid JSON and must not be in the value."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def status_line(status: int) -> str:
    """Return a status with its reason, such as "200 OK"."""
    return "%d %s" % (status, http.HTTPStatus(status).phrase)


@dataclasses.dataclass(frozen=True)
class RequestHead:
    """The request line and the headers of a request.

    Attributes:
        method: GET, POST, ….
        target: the path with the query, as the client sent them.
        version: the version of HTTP: 1.0 or 1.1.
        headers: the headers; their names are in lower case.
        request_id: the client's X-Request-Id, or a generated one.
    """

    method: str
    target: str
    version: str
    headers: Mapping[str, str]
    request_id: str = ""

    def __post_init__(self) -> None:
        sent = self.headers.get("x-request-id", "")
        object.__setattr__(self, "request_id", sent if _REQUEST_ID.match(sent) else uuid.uuid4().hex)

    @property
    def path(self) -> str:
        """The target without the query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> Dict[str, str]:
        """The query parameters; the last one counts where a name occurs several times."""
        return dict(parse_qsl(self.target.partition("?")[2]))

    @property
    def length(self) -> int:
        """The size of the body in bytes."""
        return int(self.headers.get("content-length", "0"))


@dataclasses.dataclass(frozen=True)
class ServiceLimits:
    """The limits of a service.

    Attributes:
        queue: the largest number of waiting images.
        body_bytes: the largest body of one request.
        held_bytes: the largest total size of all bodies that are received or wait.
        sample_bytes: the most memory for a step of preprocessing. One sample is prepared at a time.
        connections: the largest number of open connections.
        timeout_s: the time limit to send a request head, to read an answer, and to wait in the queue.
        idle_s: how long a connection may stay open between requests.
        token: the token that clients send as `Authorization: Bearer …`; empty: no token is needed.
        hosts: the names of this host that a request may have in `Host`, in lower case. IP addresses are always allowed.
        origins: the pages of other sites that may use the service, such as `https://shop.example`, in lower case.
        rate: the requests per second of each client address; 0: no limit.
    """

    queue: int = 64
    body_bytes: int = 16 << 20
    held_bytes: int = 64 << 20
    sample_bytes: int = 512 << 20
    connections: int = 256
    timeout_s: float = 10.0
    idle_s: float = 60.0
    token: str = ""
    hosts: Tuple[str, ...] = ("localhost",)
    origins: Tuple[str, ...] = ()
    rate: float = 0.0


class Admission:
    """The check of a request head, before the body is received.

    Args:
        settings: the limits and the token.
    """

    def __init__(self, settings: ServiceLimits) -> None:
        self._settings = settings
        self._token = hashlib.sha256(settings.token.encode()).digest()
        self._rate = RateLimit(settings.rate)

    def check(self, head: RequestHead, stopping: bool, address: str = "") -> None:
        """Check whether a request is accepted.

        Args:
            head: the head of the request.
            stopping: whether the service is being stopped.
            address: the IP address of the client; empty: a Unix socket, which no web page can reach.

        Raises:
            RequestError: the request is not accepted.
        """
        _check_framing(head)
        if address:
            self._check_host(head)
            self._check_origin(head)
        if head.path not in OPEN_PATHS:
            self._check_rate(address)
        if head.path not in OPEN_PATHS and not self._authorized(head):
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(401, "the token is missing or wrong", close=True, headers=headers, delay_s=REFUSAL_S)
        if stopping:
            raise RequestError(503, "the service is being stopped", "ask again later", close=True)
        allowed = _allowed_method(head)
        limit = self._settings.body_bytes if allowed == "POST" else 0
        if head.length > limit:
            raise RequestError(413, "the body has %d bytes; at most %d" % (head.length, limit), "send less", close=True)

    def _check_host(self, head: RequestHead) -> None:
        """Refuse the name of another host: a web page may have pointed its own name here (DNS rebinding).

        With a token, every name is allowed: a page does not have the token, and a proxy may pass on its own name.
        """
        text = head.headers.get("host")
        if text is None or self._settings.token:  # HTTP/1.0 has no Host; browsers send it
            return
        name = host_name(text)
        if name is None or not (name in self._settings.hosts or _is_address(name)):
            hint = "use localhost or the IP address, or start the service with --allow-host NAME"
            raise RequestError(
                403, "the Host %.100s is not a name of this service" % (text or "(empty)"), hint, close=True
            )

    def _check_origin(self, head: RequestHead) -> None:
        """Refuse a request that a page of another site sends from the browser of a user."""
        origin = head.headers.get("origin", "").lower()
        if not origin or origin in self._settings.origins:
            return
        scheme, _, host = origin.partition("://")
        if scheme not in ("http", "https") or host != head.headers.get("host", "").lower():
            hint = "start the service with --allow-origin ORIGIN if the page may use it"
            raise RequestError(403, "pages of %.100s may not use this service" % origin, hint, close=True)

    def cross_origin(self, head: Optional[RequestHead]) -> Dict[str, str]:
        """Return the headers with which a browser gives the answer to a page of another site that is allowed."""
        origin = "" if head is None else head.headers.get("origin", "").lower()
        if origin not in self._settings.origins:
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def preflight(self, head: RequestHead) -> Dict[str, str]:
        """Return the headers of the answer to a browser that asks what a page may send; empty: it does not ask that."""
        headers = self.cross_origin(head) if head.method == "OPTIONS" and not head.length else {}
        if headers:
            headers["Access-Control-Allow-Methods"] = "GET, POST"
            headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type, X-Shape, X-Dtype, X-Request-Id"
        return headers

    def _check_rate(self, address: str) -> None:
        wait_s = self._rate.wait_s(address)
        if wait_s:
            what = "this client sends more than %g requests per second" % self._settings.rate
            headers = {"Retry-After": str(wait_s)}
            raise RequestError(429, what, "send fewer", headers=headers)

    def _authorized(self, head: RequestHead) -> bool:
        """Return whether a request has the token, or none is needed."""
        if not self._settings.token:
            return True
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._token) and scheme.lower() == "bearer"


class RateLimit:
    """The requests that each address may still send.

    Args:
        per_second: requests per second; 0: no limit.
        clock: the time in seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = max(per_second * BURST_S, 1.0)
        self._clock = clock
        self._buckets: collections.OrderedDict[str, Tuple[float, float]] = collections.OrderedDict()

    def wait_s(self, address: str) -> int:
        """Count a request; return 0 if it is allowed, otherwise after how many seconds the next one is.

        Args:
            address: the IP address of the client; empty: a Unix socket, which has no limit.
        """
        if not self._per_second or not address:
            return 0
        key = _network(address)
        now = self._clock()
        left, seen = self._buckets.pop(key, (self._burst, now))
        left = min(left + (now - seen) * self._per_second, self._burst)
        is_allowed = left >= 1
        self._buckets[key] = (left - 1 if is_allowed else left, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return 0 if is_allowed else math.ceil((1 - left) / self._per_second)


def _network(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the 64 bits that an IPv6 network has."""
    if ":" not in address:
        return address
    number = int(ipaddress.IPv6Address(address.partition("%")[0]))
    return "%x" % (number >> 64)


def _check_framing(head: RequestHead) -> None:
    """Refuse heads that waitress accepts and other servers on the way may read differently."""
    if head.version not in ("1.0", "1.1"):
        raise RequestError(400, "the request line is not one of HTTP/1.0 or 1.1", close=True)
    if not _TARGET.match(head.target):
        raise RequestError(400, "the target is not a path of at most 2000 printable characters", close=True)
    if head.version == "1.1" and "host" not in head.headers:
        raise RequestError(400, "the header Host is missing", close=True)
    if head.method == "POST" and "content-length" not in head.headers:
        raise RequestError(411, "the header Content-Length is missing", close=True)
    if head.headers.get("expect", "100-continue").lower() != "100-continue":
        raise RequestError(417, "only 100-continue can be expected", close=True)


def host_name(text: str) -> Optional[str]:
    """Return the name or the address in a Host header, in lower case, without the port; None if it is invalid."""
    match = _HOST.match(text.lower())
    if match is None or (match.group(2) is not None and parse_integer(match.group(2), 0, 65535) is None):
        return None
    return match.group(1).strip("[]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _allowed_method(head: RequestHead) -> str:
    """Return the method of the requested path.

    Raises:
        RequestError: the path does not exist, or the request has another method.
    """
    if head.path not in PATHS:
        raise RequestError(404, "the path does not exist", "use one of: %s" % ", ".join(PATHS))
    allowed = PATHS[head.path]
    if head.method != allowed:
        what = "%s needs the method %s" % (head.path, allowed)
        is_head = head.method == "HEAD"  # the answer to HEAD has no body, but this one has
        raise RequestError(405, what, close=is_head, headers={"Allow": allowed})
    return allowed


def requested_top(head: RequestHead) -> int:
    """Return how many classes a request asks for.

    Raises:
        RequestError: the parameter `top` is not an integer in its range.
    """
    text = head.query.get("top", DEFAULT_TOP)
    count = parse_integer(text, 1, MAX_TOP)
    if count is None:
        raise RequestError(400, "top=%s is not an integer from 1 to %d" % (text[:20], MAX_TOP))
    return count


def wants_npz(head: RequestHead) -> bool:
    """Return whether a request asks for the outputs as an .npz file instead of JSON.

    Raises:
        RequestError: the parameter `format` is neither json nor npz.
    """
    text = head.query.get("format", "json")
    if text not in ("json", "npz"):
        raise RequestError(400, "format=%s is not json or npz" % text[:20])
    return text == "npz"
