"""A file in a form, as `curl -F file=@photo.jpg` and browsers send it: multipart/form-data with one part.

The parser is strict. A boundary is in the header and at both ends of the body, and there is exactly one part, which
has a file name. Parameters belong into the query. Source: RFC 7578, RFC 2046 (5.1.1).
"""

from __future__ import annotations

import re
from typing import Union

from deploy.contract.errors import ImageError

Bytes = Union[bytes, bytearray]
MAX_HEAD_BYTES = 4096
_TYPE = re.compile(r"multipart/form-data;\s*boundary=(?:\"([^\"]{1,70})\"|([^\s;,\"]{1,70}))\s*\Z", re.IGNORECASE)
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]\Z")
_DISPOSITION = re.compile(rb"\AContent-Disposition:[ \t]*form-data;[^\r\n]*;[ \t]*filename\*?=", re.IGNORECASE)
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}:[\t\x20-\x7e\x80-\xff]*\Z")
HINT = "send the file alone, with curl --data-binary @FILE; parameters belong into the query"


def is_form(content_type: str) -> bool:
    """Return whether a request has a form with files."""
    return content_type.strip().lower().startswith("multipart/")


def file_of(body: Bytes, content_type: str) -> Bytes:
    """Return the content of the file in a form.

    Raises:
        ImageError: the form is damaged, or has no file, several parts or other fields.
    """
    match = _TYPE.match(content_type.strip())
    boundary = (match.group(1) or match.group(2)) if match else ""
    if not _BOUNDARY.match(boundary):
        raise ImageError("the Content-Type is not multipart/form-data with a boundary", HINT)
    opening = b"--" + boundary.encode("ascii")
    closing = b"\r\n" + opening
    if not body.startswith(opening + b"\r\n"):
        raise _damaged("it does not begin with its boundary")
    start = len(opening) + 2
    head_end = body.find(b"\r\n\r\n", start, start + MAX_HEAD_BYTES)
    if head_end < 0:
        raise _damaged("the head of its part does not end")
    end = body.find(closing, head_end + 2)
    if end < 0:
        raise _damaged("it does not end with its boundary")
    rest = bytes(body[end + len(closing) : end + len(closing) + 4])
    if rest[:2] == b"\r\n":
        raise ImageError("the form has several parts, and one file is allowed", HINT)
    if rest not in (b"--", b"--\r\n") or len(body) > end + len(closing) + 4:
        raise _damaged("it does not end with its boundary")
    lines = bytes(body[start:head_end]).split(b"\r\n")
    if not all(_LINE.match(line) for line in lines):
        raise _damaged("a header of its part is invalid")
    if sum(bool(_DISPOSITION.match(line)) for line in lines) != 1:
        raise ImageError("the form has no file", "use curl -F file=@FILE, with the @; or " + HINT)
    return body[head_end + 4 : end]


def _damaged(reason: str) -> ImageError:
    return ImageError("the form is damaged: %s" % reason, HINT)
