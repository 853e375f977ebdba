"""The part of HTTP/1.1 that `serve` supports: it parses request heads and formats answers. It uses no sockets.

The parser refuses what two parsers could read differently: Content-Length must be ASCII digits and unique,
Transfer-Encoding and folded headers are refused, every line ends with CRLF, and no header that affects
framing or access may occur twice.
Source: RFC 9110 and 9112.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from typing import Any, Dict, Mapping, Optional
from urllib.parse import parse_qsl

from deploy.runner.images import parse_integer

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 64
MAX_LENGTH = 10**15 - 1
"""The largest Content-Length that is parsed; `ServiceLimits.body_bytes` limits the body."""
END = b"\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = "application/json"
NPZ = "application/x-npz"
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]{0,2000}) HTTP/1\.([01])\Z")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):([\t\x20-\x7e\x80-\xff]*)\Z")
"""Name and value of a header. Its spaces are removed after the match: to match them too takes cubic time for a line of
spaces with an invalid character at the end."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_SINGLE = (
    *("content-length", "transfer-encoding", "content-type", "expect", "host", "origin", "authorization"),
    *("x-shape", "x-dtype"),
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status code.
        what: what is wrong.
        hint: what the client should do.
        close: whether the connection ends after the answer, because the start of the next request is unknown.
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


@dataclasses.dataclass(frozen=True)
class RequestHead:
    """The request line and the headers of a request.

    Attributes:
        method: GET, POST, ….
        path: the path without the query.
        query: the query parameters; the last one counts where a name occurs several times.
        headers: the headers; their names are in lower case.
        length: the size of the body in bytes.
        keep: whether the connection stays open for another request.
        request_id: the client's X-Request-Id, or a generated one.
    """

    method: str
    path: str
    query: Dict[str, str]
    headers: Dict[str, str]
    length: int
    keep: bool
    request_id: str

    @property
    def expects(self) -> bool:
        """Whether the client waits for "100 Continue" before it sends the body."""
        return self.headers.get("expect", "").lower() == "100-continue"


def head(raw: bytes) -> RequestHead:
    """Parse a request head, without the empty line at its end.

    Raises:
        RequestError: the head is invalid, ambiguous or not supported.
    """
    lines = raw.split(b"\r\n")
    request = _REQUEST.match(lines[0])
    if request is None:
        raise RequestError(400, "the request line is not one of HTTP/1.0 or 1.1", close=True)
    method = request.group(1).decode()
    path, _, query = request.group(2).decode().partition("?")
    version_1_1 = request.group(3) == b"1"
    headers = _headers(lines[1:])
    if version_1_1 and "host" not in headers:
        raise RequestError(400, "the header Host is missing", close=True)
    length = _body_length(method, headers)
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise RequestError(417, "only 100-continue can be expected", close=True)
    options = {part.strip().lower() for part in headers.get("connection", "").split(",")}
    keep = "close" not in options if version_1_1 else "keep-alive" in options
    request_id = headers.get("x-request-id", "")
    if not _REQUEST_ID.match(request_id):
        request_id = uuid.uuid4().hex
    return RequestHead(method, path, dict(parse_qsl(query)), headers, length, keep, request_id)


def _body_length(method: str, headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise RequestError(501, "Transfer-Encoding is not supported", "send Content-Length", close=True)
    if method == "POST" and "content-length" not in headers:
        raise RequestError(411, "the header Content-Length is missing", close=True)
    length = parse_integer(headers.get("content-length", "0"), 0, MAX_LENGTH)
    if length is None:
        raise RequestError(400, "Content-Length is not an integer in ASCII digits", close=True)
    return length


def _headers(lines: Any) -> Dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise RequestError(431, "more than %d headers" % MAX_HEADERS, close=True)
    headers: Dict[str, str] = {}
    for line in lines:
        match = _HEADER.match(line)
        if match is None:
            raise RequestError(400, "a header line is invalid", close=True)
        name = match.group(1).decode().lower()
        if name in headers and name in _SINGLE:
            raise RequestError(400, "the header %s occurs twice" % name, close=True)
        headers[name] = match.group(2).strip(b" \t").decode("latin-1")
    return headers


def response(
    status: int,
    body: bytes,
    request_id: str,
    keep: bool,
    content_type: str = JSON,
    headers: Optional[Mapping[str, str]] = None,
) -> bytes:
    """Return the bytes of a response: its head and its body."""
    lines = ["HTTP/1.1 %d %s" % (status, _REASONS[status])]
    fields = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Connection": "keep-alive" if keep else "close",
        "X-Request-Id": request_id,
        "Cache-Control": "no-store",
    }
    fields.update(headers or {})
    lines += ["%s: %s" % pair for pair in fields.items()]
    return "\r\n".join(lines).encode("latin-1") + END + body


def as_json(value: Any) -> bytes:
    """Return a value as the body of a response. NaN and infinity are not valid JSON and must not be in it."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def error_response(error: RequestError, request_id: str, keep: bool, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of the response to a request that is refused."""
    body = {"error": {"what": error.what, "hint": error.hint}, "request_id": request_id}
    return response(error.status, as_json(body), request_id, keep, headers={**headers, **error.headers})
