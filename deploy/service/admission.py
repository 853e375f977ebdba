"""The requests that `serve` accepts: paths, methods, the token, limits and parameters. It uses no sockets."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import re
from typing import Dict, Optional, Tuple

from deploy.runner.images import parse_integer
from deploy.service.protocol import RequestError, RequestHead
from deploy.service.rates import RateLimit

PATHS = {"/v1/predict": "POST", "/v1/model": "GET", "/metrics": "GET", "/healthz": "GET", "/readyz": "GET"}
OPEN_PATHS = ("/healthz", "/readyz")
"""The paths that need no token: they disclose nothing."""
REFUSAL_S = 1.0
"""How long the answer to a wrong token is delayed."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z_](?:[0-9a-z._-]{0,252}[0-9a-z_])?)(?::([0-9]{1,5}))?\Z")
DEFAULT_TOP = "3"
MAX_TOP = 1000


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
        if address:
            self._check_host(head)
            self._check_origin(head)
        if head.path not in OPEN_PATHS:
            self._check_rate(head, address)
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

    def _check_rate(self, head: RequestHead, address: str) -> None:
        wait_s = self._rate.wait_s(address)
        if wait_s:
            what = "this client sends more than %g requests per second" % self._settings.rate
            headers = {"Retry-After": str(wait_s)}
            raise RequestError(429, what, "send fewer", close=head.length > 0, headers=headers)

    def _authorized(self, head: RequestHead) -> bool:
        """Return whether a request has the token, or none is needed."""
        if not self._settings.token:
            return True
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._token) and scheme.lower() == "bearer"


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
        raise RequestError(404, "the path does not exist", "use one of: %s" % ", ".join(PATHS), close=head.length > 0)
    allowed = PATHS[head.path]
    if head.method != allowed:
        what = "%s needs the method %s" % (head.path, allowed)
        unread = head.length > 0 or head.method == "HEAD"  # whose answers have no body
        raise RequestError(405, what, close=unread, headers={"Allow": allowed})
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
