"""The requests that `serve` accepts: paths, methods, the token, limits and parameters. It uses no sockets."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

from deploy.protocol import RequestError, RequestHead, parse_integer

PATHS = {"/v1/predict": "POST", "/v1/model": "GET", "/metrics": "GET", "/healthz": "GET", "/readyz": "GET"}
OPEN_PATHS = ("/healthz", "/readyz")
"""The paths that need no token: they disclose nothing."""
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
    """

    queue: int = 64
    body_bytes: int = 16 << 20
    held_bytes: int = 64 << 20
    sample_bytes: int = 512 << 20
    connections: int = 256
    timeout_s: float = 10.0
    idle_s: float = 60.0
    token: str = ""


class Admission:
    """The check of a request head, before the body is received.

    Args:
        settings: the limits and the token.
    """

    def __init__(self, settings: ServiceLimits) -> None:
        self._settings = settings
        self._token = hashlib.sha256(settings.token.encode()).digest()

    def check(self, head: RequestHead, stopping: bool) -> None:
        """Check whether a request is accepted.

        Args:
            head: the head of the request.
            stopping: whether the service is being stopped.

        Raises:
            RequestError: the request is not accepted.
        """
        if head.path not in OPEN_PATHS and not self._authorized(head):
            raise RequestError(401, "the token is missing or wrong", close=True, headers={"WWW-Authenticate": "Bearer"})
        if stopping:
            raise RequestError(503, "the service is being stopped", "ask again later", close=True)
        allowed = _allowed_method(head)
        limit = self._settings.body_bytes if allowed == "POST" else 0
        if head.length > limit:
            raise RequestError(413, "the body has %d bytes; at most %d" % (head.length, limit), "send less", close=True)

    def _authorized(self, head: RequestHead) -> bool:
        """Return whether a request has the token, or none is needed."""
        if not self._settings.token:
            return True
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._token) and scheme.lower() == "bearer"


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
