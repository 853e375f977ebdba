# ruff: noqa: E501 - tables of bytes
"""A corpus of hostile requests, in families, with the outcomes that are allowed for each.

`forms` returns them, `sent` sends one, and `complaint` judges the outcome. The tests send each form once;
`benchmarks/serve.py attack` sends all of them for a minute, together with slow clients and valid requests.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from data_files import chunk, riff
from data_files import form as wav_format
from pictures import encoded
from PIL import Image

from deploy.contract.bundle import array_bytes

NOTHING = 0
"""The outcome of a connection that is closed without an answer."""
HOST = b"Host: localhost\r\n"
PREDICT = b"POST /v1/predict HTTP/1.1\r\n" + HOST
GOOD = array_bytes(np.full((6, 5, 1), 77, np.uint8))
"""A valid body for a model of images with one channel."""
PATIENCE_S = 8.0
"""How long `sent` waits for the next bytes."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One hostile request.

    Attributes:
        name: its family and what it does.
        pieces: what is sent, with a pause between two of them.
        statuses: the allowed statuses of the last answer; NOTHING: no answer.
        closes: whether the service must close the connection (True), must keep it (False), or may do either (None).
        pause_s: the pause.
        ends: whether the client closes its sending direction after the last piece.
        answers: the largest allowed number of answers.
    """

    name: str
    pieces: tuple[bytes, ...]
    statuses: frozenset[int]
    closes: bool | None = None
    pause_s: float = 0.0
    ends: bool = False
    answers: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The observed outcome: the statuses in order, whether the service closed the connection, and what is wrong."""

    statuses: tuple[int, ...]
    closed: bool
    damage: str = ""


def form(name: str, *pieces: bytes, statuses: Sequence[int] = (400,), **more: object) -> Form:
    return Form(name, pieces, frozenset(statuses), **more)  # type: ignore[arg-type]


def post(body: bytes, headers: bytes = b"", query: bytes = b"") -> bytes:
    """Return a request for a prediction with correct framing."""
    line = b"POST /v1/predict%s HTTP/1.1\r\n" % query
    return line + HOST + b"Content-Length: %d\r\n" % len(body) + headers + b"\r\n" + body


def posts(
    family: str, bodies: Mapping[str, bytes], headers: bytes = b"", statuses: Sequence[int] = (400,)
) -> Iterator[Form]:
    """Yield a form for each body, by its name in the family; the service must keep the connection."""
    for name, body in bodies.items():
        yield form(f"{family}: {name}", post(body, headers), statuses=statuses, closes=False)


def forms() -> list[Form]:
    """Return all forms; their names are unique."""
    all_forms = [form for family in FAMILIES for form in family()]
    assert len({form.name for form in all_forms}) == len(all_forms)
    return all_forms


def request_lines() -> Iterator[Form]:
    lines = [
        *(b"", b" ", b"GET", b"GET ", b"GET /healthz", b"GET /healthz ", b"GET  /healthz HTTP/1.1"),
        *(b"get /healthz HTTP/1.1", b"GET\t/healthz\tHTTP/1.1"),
        *(b"GET /healthz HTTP/0.9", b"GET /healthz HTTP/1.2", b"GET /healthz HTTP/2.0", b"GET /healthz HTTP/11"),
        *(b"GET /healthz http/1.1", b"GET /healthz HTTP/1.1x", b"GET /healthz HTTP/1.1\x00", b"GET /healthz XTTP/1.1"),
        *(b"GET healthz HTTP/1.1", b"GET * HTTP/1.1", b"GET http://localhost/healthz HTTP/1.1", b"GET //\xff HTTP/1.1"),
        *(b"GET /\x00 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /a b HTTP/1.1", b"CONNECT localhost:80 HTTP/1.1"),
        *(b"PRI * HTTP/2.0", b"G\xc3\x89T / HTTP/1.1", b"GET /" + b"a" * 2001 + b" HTTP/1.1"),
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-OpenSSH_9", b"\x00" * 100, b"\xff" * 100),
        *(b"{\"jsonrpc\": \"2.0\"}", b"GET /healthz\x0bHTTP/1.1", b"GET /healthz HTTP/1.\xd9\xa1", b"GET\r/healthz HTTP/1.1"),
    ]  # fmt: skip
    for line in lines:
        if line:
            yield form(f"line: {line[:40]!r} {len(line)}", line + b"\r\n" + HOST + b"\r\n", closes=True)
    for line in (b" GET /healthz HTTP/1.1", b"GET /healthz HTTP/1.1 "):  # waitress removes blanks around the line
        yield form(f"line: {line!r}", line + b"\r\n" + HOST + b"\r\n", statuses=[200], closes=False)
    yield form("line: only empty lines", b"\r\n" * 50, statuses=[NOTHING], ends=True)
    yield form(
        "line: bare line feeds", b"GET /healthz HTTP/1.1\nHost: localhost\n\n", statuses=[NOTHING, 400], ends=True
    )
    yield form("line: of 40 kB", b"GET /" + b"a" * 40_000, statuses=[431], closes=True)
    yield form("line: of 1 MB", b"a" * 1_000_000, statuses=[431], closes=True)
    for path in (b"/", b"/v1", b"/v1/predict/", b"/v1/../metrics", b"/%2e%2e/etc/passwd", b"/healthz;x", b"//healthz",
                 b"/\\..\\x", b"/HEALTHZ", b"/v1%2Fpredict", b"/metrics%00", b"/.git/config", b"/healthz#a"):  # fmt: skip
        yield form(f"path: {path!r}", b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n", statuses=[404], closes=False)
    for method in (b"HEAD", b"PUT", b"DELETE", b"TRACE", b"OPTIONS", b"PATCH", b"BREW", b"POST"):
        length = b"Content-Length: 0\r\n" if method == b"POST" else b""
        request = method + b" /healthz HTTP/1.1\r\n" + HOST + length + b"\r\n"
        yield form(f"method: {method!r}", request, statuses=[405], closes=method == b"HEAD")


def headers() -> Iterator[Form]:
    start = b"GET /healthz HTTP/1.1\r\n" + HOST
    lines = [
        *(b"no colon", b": no name", b"space : x", b"tab\t: x", b" folded: x", b"\tfolded: x", b"a: \x00", b"a: \x01"),
        *(b"a: b\rc: d", b"a: b\nc: d", b"a\x00: b", b"(a): b", b"a\xff: b", b"\"a\": b", b"a@b: c", b"a: \x7f", b"a: \x1b[2J"),
        *(b"a b: c", b"a: b\x0b", b"[a]: b", b"a{}: b", b"\xef\xbb\xbfa: b", b"a;b: c", b"a,b: c"),
    ]  # fmt: skip
    for line in lines:
        yield form(f"header: {line[:30]!r}", start + line + b"\r\n\r\n", closes=True)
    single = (b"Content-Length: 0", b"Host: localhost", b"Authorization: Bearer x", b"X-Shape: 1", b"X-Dtype: uint8",
              b"Expect: 100-continue", b"Origin: http://localhost", b"Content-Type: a/b")  # fmt: skip
    for line in single:
        yield form(f"header twice: {line!r}", start + (line + b"\r\n") * 2 + b"\r\n", closes=True)
        name, _, value = line.partition(b":")
        twice = line + b"\r\n" + name.swapcase() + b":" + value + b"\r\n"
        yield form(f"header twice in other case: {line!r}", start + twice + b"\r\n", closes=True)
    for blank in (b" ", b"\t", b" \t"):  # a parser that tries all divisions of the blanks takes cubic time
        for end in (b"\x01", b"b"):
            line = b"a:" + blank * (14_000 // len(blank)) + end
            yield form(f"headers: 14 kB of {blank!r} {end!r}", start + line + b"\r\n\r\n", closes=True)
    yield form("headers: 65", start + b"a: b\r\n" * 65 + b"\r\n", statuses=[200], closes=False)
    yield form("headers: 5000", start + b"a: b\r\n" * 5000 + b"\r\n", statuses=[431], closes=True)
    yield form("headers: of 20 kB", start + b"a: " + b"b" * 20_000 + b"\r\n\r\n", statuses=[431], closes=True)
    yield form("headers: without end", start + b"a: b\r\n" * 10_000, statuses=[431], closes=True)
    yield form("headers: no Host", b"GET /healthz HTTP/1.1\r\n\r\n", closes=True)
    for value in (b"\xff\xfe", b"\t\t", b"<script>", b"${jndi:ldap://x}", b"../.."):
        request = start + b"X-Request-Id: " + value + b"\r\n\r\n"
        yield form(f"header value: {value!r}", request, statuses=[200], closes=False)
    for value in (b"", b"close, keep-alive", b"upgrade", b"keep-alive\r\nUpgrade: h2c", b"," * 1000):
        request = start + b"Connection: " + value + b"\r\n\r\n"
        yield form(f"connection: {value[:20]!r}", request, statuses=[200], closes=b"close" in value)
    for value in (b"", b"100", b"101-continue", b"100-continue, x", b"magic"):
        yield form(f"expect: {value!r}", start + b"Expect: " + value + b"\r\n\r\n", statuses=[417], closes=True)


def framing() -> Iterator[Form]:
    inner = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
    for value in (b"chunked", b"identity", b"Chunked", b"gzip, chunked", b"chunked, identity", b"xchunked", b"", b"\x0bchunked",
                  b"chunked\xa0", b"'chunked'", b"chunked;q=1", b"deflate"):  # fmt: skip
        for length in (b"", b"Content-Length: 5\r\n"):
            request = PREDICT + length + b"Transfer-Encoding: " + value + b"\r\n\r\n0\r\n\r\n" + inner
            yield form(f"transfer-encoding: {value!r} {length!r}", request, statuses=[400, 501], closes=True)
    for name in (b"Transfer-Encoding ", b"Transfer_Encoding", b"\x00Transfer-Encoding", b" Transfer-Encoding"):
        request = PREDICT + b"Content-Length: 5\r\n" + name + b": chunked\r\n\r\n0\r\n\r\n"
        yield form(f"transfer-encoding name: {name!r}", request, closes=None)
    huge = PREDICT + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n12345"
    yield form("content-length: 19 digits", huge, statuses=[413], closes=True)
    values = (b"+5", b"-5", b"0x5", b"5,5", b"5 5", b"5.0", b"1e1", b"", b"abc", b"5;", b"\xd9\xa5", b"\xb2", b"1_0", b"5\x00", b"''",
              b"9" * 5000, b"-0", b"0b1", b"0o7", b"NaN", b"inf", b"5\xa0", b"\xa05")  # fmt: skip
    for value in values:
        request = PREDICT + b"Content-Length: " + value + b"\r\n\r\n12345"
        yield form(f"content-length: {value[:20]!r}", request, closes=True)
    for value in (b"16777217", b"99999999999", b"999999999999999"):
        request = PREDICT + b"Content-Length: " + value + b"\r\n\r\n"
        yield form(f"content-length: {value!r}", request, statuses=[413], closes=True)
    yield form("content-length: none", PREDICT + b"\r\n" + inner, statuses=[411], closes=True)
    request = b"GET /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n12345"
    yield form("a body of GET", request, statuses=[413], closes=True)
    smuggled = post(b"", b"") + inner
    yield form("an empty body, then another request", smuggled, statuses=[200], closes=False, answers=2)


def lengths() -> Iterator[Form]:
    head = PREDICT + b"Content-Length: %d\r\n\r\n"
    for length in (len(GOOD) + 1, 1000, 1 << 20, 16 << 20):
        yield form(f"too short, then closed: {length}", head % length + GOOD, statuses=[NOTHING], ends=True)
    yield form("too long: the rest is no request", head % (len(GOOD) - 1) + GOOD + b"\r\n\r\n", closes=True, answers=2)
    yield form("too long: by an empty line", post(GOOD) + b"\r\n", statuses=[200], closes=False)
    yield form(
        "Content-Length with zeros", PREDICT + b"Content-Length: 000%d\r\n\r\n" % len(GOOD) + GOOD, statuses=[200]
    )
    yield form("no bytes at all", b"", statuses=[NOTHING], ends=True)


def encodings() -> Iterator[Form]:
    packed = zlib.compress(GOOD)
    for value in (b"gzip", b"deflate", b"br", b"x"):
        yield form(f"content-encoding: {value!r}", post(packed, b"Content-Encoding: " + value + b"\r\n"), closes=False)
    for kind in (b"application/json", b"text/html", b"image/png", b"x" * 5000, b"application/x-www-form-urlencoded"):
        yield form(f"content-type: {kind[:40]!r}", post(b"{}", b"Content-Type: " + kind + b"\r\n"), closes=False)
    for body in (b"", b"{}", b"<xml/>", b"%PDF-1.4", b"GIF89a\1\0\1\0", b"\x7fELF", b"MZ", b"\x1f\x8b\x08", b"BZh9", b"\x00" * 4096,
                 b"\x80\x04\x95", b"cos\nsystem\n(S'id'\ntR.", b"TFL3", b"....TFL3", b"\x00\x00\x00\x18ftypheic" + bytes(16),
                 b"\x00\x00\x00\x18ftypavif" + bytes(16), b"<?php", b"#!/bin/sh"):  # fmt: skip
        yield form(f"body: {body[:16]!r}", post(body), closes=False)


def queries() -> Iterator[Form]:
    tops = [
        *("", "0", "-1", "+1", "1001", "1.0", "1e3", "0x1", "1_0", "NaN", "inf", "True", "None", "9" * 18, "9" * 1900),
        *("%C2%B2", "%D9%A3", "%E2%91%A0", "%EF%BC%93", "%FF", "%00", "1%00", "%0A1", "%E0%A5%A7", "%F0%9D%9F%99", "1,2", "[1]"),
        *("1;2", "${1}", "%2B1", "%2D1", "1%20", "%", "%1", "%%31", "..", "%E2%80%8E1", "%EF%BB%BF1"),
    ]  # fmt: skip
    for top in tops:
        statuses = [200] if top == "" else [400]
        yield form(
            f"top={top[:20]}:{len(top)}", post(GOOD, query=f"?top={top}".encode()), statuses=statuses, closes=False
        )
    for query in ("?format=xml", "?format=NPZ", "?format=%00", "?format=npz", "?top=1&top=x", "?format=json&format=x"):
        yield form(f"query: {query}", post(GOOD, query=query.encode()), closes=False)
    for query in (
        "?",
        "??",
        "?&&&&",
        "?=",
        "?a=b=c",
        "?%",
        "?top",
        "?top=x&top=1",
        "?" + "a=b&" * 400,
        "?" + "%" * 900,
    ):
        yield form(f"query: {query[:20]}", post(GOOD, query=query.encode()), statuses=[200], closes=False)


def hosts() -> Iterator[Form]:
    for host in (b"attacker.example", b"localhost.attacker.example", b"127.0.0.1.attacker.example", b"", b"localhost:", b"[::1", b"a b",
                 b"localhost:99999", b"x@localhost", b"localhost/", b"localhost, x", b"0x7f000001", b"2130706433", b"\xff", b"a" * 300):  # fmt: skip
        request = b"GET /v1/model HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
        yield form(f"host: {host[:40]!r}", request, statuses=[403], closes=True)
    for origin in (b"http://attacker.example", b"null", b"file://", b"http://localhost.attacker.example", b"https://", b"javascript:1",
                   b"http://localhost:1", b"http://localhost/x"):  # fmt: skip
        headers = b"Origin: " + origin + b"\r\n"
        yield form(f"origin: {origin!r}", post(GOOD, headers), statuses=[403], closes=True)


def shapes() -> Iterator[Form]:
    body = bytes(64)
    bad = [
        *("8", "8,", ",8", "8,,8", "8x8", "8 8", "8, 8", "-8,-8", "+8,8", "8,8,8", "8.0,8", "1e1", "0x8,8", "\xb2,32", "8,8,1,1,1"),
        *("9" * 18, "9" * 5000, "999999999,999999999", "0,0", "0", "8,8,0", "65536,65536,65536,65536", "(8,8)", "[8,8]", "8;8", "nan", "64,2"),
        *("1000000000,1", "None", "*", "8,8\t", "٨,٨".encode().decode("latin-1")),
    ]  # fmt: skip
    for shape in bad:
        value = b"X-Shape: " + shape.encode("latin-1") + b"\r\n"
        allowed = [200, 400] if shape in ("8", "8,8\t", "8, 8") else [400]
        yield form(f"x-shape: {shape[:30]!r} {len(shape)}", post(body, value), statuses=allowed, closes=False)
    for dtype in ("object", "complex64", "<u1", "V8", "uint8,uint8", "__import__('os')", "UINT8"):
        headers = f"X-Shape: 8,8\r\nX-Dtype: {dtype}\r\n".encode()
        yield form(f"x-dtype: {dtype}", post(body, headers), closes=False)
    for values in (np.nan, np.inf, -np.inf, 3e38):
        content = np.full((4, 4), values, "<f4").tobytes()
        headers = b"X-Shape: 4,4\r\nX-Dtype: float32\r\n"
        statuses = [200] if values == 3e38 else [400]
        yield form(f"values: {values}", post(content, headers), statuses=statuses, closes=False)
    extreme = bytes(1 << 20)
    for shape in ("1048576,1,1", "1,1048576,1", "1,1,1048576", "1048576", "1,1,1,1048576", "1,262144,4"):
        value = b"X-Shape: " + shape.encode() + b"\r\n"
        yield form(f"x-shape of 1 MB: {shape}", post(extreme, value), statuses=[200, 400], closes=False)


def multiparts() -> Iterator[Form]:
    head = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    valid_body = b"--b\r\n" + head + GOOD + b"\r\n--b--\r\n"
    bodies = {
        "empty": b"",
        "no part": b"--b--\r\n",
        "no end": b"--b\r\n" + head + GOOD,
        "no head": b"--b\r\n\r\n" + GOOD + b"\r\n--b--",
        "endless head": b"--b\r\n" + b"a: b\r\n" * 5000,
        "two parts": b"--b\r\n" + head + GOOD + b"\r\n--b\r\n" + head + GOOD + b"\r\n--b--\r\n",
        "1000 parts": (b"--b\r\n" + head + b"x\r\n") * 1000 + b"--b--\r\n",
        "a preamble": b"x\r\n" + valid_body,
        "an epilogue": valid_body + b"GET / HTTP/1.1\r\n\r\n",
        "a field": b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n3\r\n--b--\r\n',
        "another boundary": valid_body.replace(b"--b", b"--c"),
        "line feeds": valid_body.replace(b"\r\n", b"\n"),
        "a transfer encoding": b"--b\r\nContent-Transfer-Encoding: base64\r\n" + b"\r\nAAAA\r\n--b--\r\n",
        "nested": b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--\r\n",
        "dashes": b"-" * 100_000,
        "almost boundaries": b"--b\r\n" + head + b"\r\n--" * 50_000,
    }
    kind = b"Content-Type: multipart/form-data; boundary=b\r\n"
    yield from posts("multipart", bodies, kind)
    for value in (b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; boundary=" + b"b" * 71,
                  b"multipart/form-data; boundary=\"b", b"multipart/mixed; boundary=b", b"multipart/form-data; boundary=b; boundary=c",
                  b"multipart/form-data; boundary=\xff"):  # fmt: skip
        yield form(
            f"multipart type: {value[:50]!r}", post(valid_body, b"Content-Type: " + value + b"\r\n"), closes=False
        )
    yield form("multipart: sound", post(valid_body, kind), statuses=[200], closes=False)


def slow_clients() -> Iterator[Form]:
    request = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    in_bytes = [request[index : index + 1] for index in range(len(request))]
    yield form("slow: byte for byte", *in_bytes, statuses=[200, 408], pause_s=0.005)
    yield form("slow: half a head", request[:20], statuses=[408], closes=True)
    yield form("slow: a head without its last byte", request[:-1], statuses=[408], closes=True)
    yield form(
        "slow: a header after the other", request[:-2], *[b"a: b\r\n"] * 60, statuses=[408], closes=True, pause_s=0.1
    )
    yield form("slow: half a body", PREDICT + b"Content-Length: 1000\r\n\r\nabc", statuses=[408], closes=True)
    yield form(
        "slow: no body",
        PREDICT + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n",
        statuses=[408],
        closes=True,
        answers=2,
    )
    yield form("slow: silent", b"", statuses=[NOTHING], closes=True)


def pipelines() -> Iterator[Form]:
    get = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    yield form("pipeline: 50 heads", get * 50, statuses=[200], closes=False, answers=50)
    yield form("pipeline: garbage after a request", get + b"garbage\r\n\r\n", closes=True, answers=2)
    yield form("pipeline: predictions and heads", (post(GOOD) + get) * 5, statuses=[200], closes=False, answers=10)
    yield form("pipeline: refused bodies", post(b"garbage") * 10, closes=False, answers=10)
    closing = get.replace(HOST, HOST + b"Connection: close\r\n")
    yield form("pipeline: behind a close", closing + get, statuses=[200], closes=True)
    yield form("pipeline: 1 MB behind a close", closing + bytes(1 << 20), statuses=[200], closes=True)
    yield form("pipeline: behind HEAD", get.replace(b"GET", b"HEAD") + get, statuses=[405], closes=True)
    yield form("pipeline: closed at once", post(GOOD) * 3, statuses=[NOTHING, 200], ends=True, answers=3)


def png(width: int, height: int, data: bytes | None = None, depth: int = 8, colour: int = 0, **changes: bytes) -> bytes:
    """Return a PNG file with these numbers in its header and this compressed data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = changes.get("checksum") or struct.pack(">I", zlib.crc32(name + content))
        return changes.get("length", struct.pack(">I", len(content))) + name + content + checksum

    stored = zlib.compress(bytes(100)) if data is None else data
    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, colour, 0, 0, 0)
    extra = changes.get("extra", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", stored) + chunk(b"IEND", b"")


def picture(kind: str) -> bytes:
    return encoded(Image.fromarray(np.arange(30, dtype=np.uint8).reshape(6, 5)), kind)


def pictures() -> Iterator[Form]:
    for width, height in ((0, 0), (0, 5), (1, 8388607), (8388607, 1), (65537, 1), (1, 65537), (6000, 6000), (2**31 - 1, 2**31 - 1),
                          (2**32 - 1, 1), (60000, 60000), (100000, 300)):  # fmt: skip
        yield form(f"png: {width} x {height}", post(png(width, height)), closes=False)
    bomb = zlib.compress(bytes(8 << 20), 9)
    damaged = {
        "more data than pixels": png(5, 6, bomb),
        "less data than pixels": png(50, 60, zlib.compress(bytes(10))),
        "no zlib": png(5, 6, b"garbage"),
        "wrong checksum": png(5, 6, checksum=b"\0\0\0\0"),
        "chunk of 4 GB": png(5, 6, length=b"\xff\xff\xff\xff"),
        "depth 3": png(5, 6, depth=3),
        "colour 7": png(5, 6, colour=7),
        "text bomb": png(5, 6, extra=b"\0\0\0\x10zTXta\0\0" + bomb[:12] + b"abcd"),
        "a side of 65536": png(65536, 1, zlib.compress(bytes(65537))),
    }
    yield from posts("png", damaged, statuses=[200, 400])
    for kind in ("PNG", "JPEG", "BMP", "WEBP"):
        image = picture(kind)
        noise = bytearray(image)
        for place in range(16, len(noise), 7):
            noise[place] ^= 0x55
        cuts = {f"cut at {share}": image[: max(int(len(image) * share), 3)] for share in (0.1, 0.5, 0.9)}
        yield from posts(kind, {**cuts, "noise": bytes(noise), "twice": image * 2}, statuses=[200, 400])
    jpeg = picture("JPEG")
    frame = jpeg.index(b"\xff\xc0")
    for height, width in ((65535, 65535), (0, 5), (6, 0), (65535, 1)):
        lying = jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :]
        yield form(f"jpeg: {height} x {width}", post(lying), statuses=[200, 400], closes=False)
    scans = jpeg[:-2] + jpeg[jpeg.index(b"\xff\xda") : -2] * 500 + jpeg[-2:]
    yield form("jpeg: 500 scans", post(scans), statuses=[200, 400], closes=False)
    yield form("jpeg: only markers", post(b"\xff\xd8" + b"\xff" * 100_000), closes=False)
    bitmap = picture("BMP")
    for width, height in ((2**31 - 1, 1), (-1, 5), (5, -(2**31)), (0, 0), (65537, 2)):
        lying = bitmap[:18] + struct.pack("<ii", width, height) + bitmap[26:]
        yield form(f"bmp: {width} x {height}", post(lying), closes=False)
    for width, height in ((16384, 16384), (1, 16384)):
        bits = (width - 1) | (height - 1) << 14
        lying = b"RIFF\xff\0\0\0WEBPVP8L\xff\0\0\0\x2f" + struct.pack("<I", bits) + bytes(9)
        yield form(f"webp: {width} x {height}", post(lying), closes=False)


def zipped(members: Sequence[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return stream.getvalue()


def npz_files() -> Iterator[Form]:
    one = zipped([("a.npy", GOOD)])
    files = {
        "empty": zipped([]),
        "another input": one,
        "compressed": zipped([("a.npy", GOOD)], zipfile.ZIP_DEFLATED),
        "bomb": zipped([("a.npy", bytes(16 << 20))], zipfile.ZIP_DEFLATED),
        "path": zipped([("../../a.npy", GOOD)]),
        "no npy": zipped([("a.txt", b"x")]),
        "garbage member": zipped([("a.npy", b"x")]),
        "2000 members": zipped([(f"{index}.npy", b"") for index in range(2000)]),
        "odd name": zipped([("\x1b[2J.npy", GOOD)]),
        "cut": one[:-10],
        "wrong sum": one.replace(GOOD[-8:], bytes(8)),
        "no directory": one[: one.index(b"PK\1\2")],
        "a directory of 4 GB": one[:-10] + b"\xff\xff\xff\xff" + one[-6:],
        "encrypted": one[:6] + b"\1" + one[7:],
        "signature alone": b"PK\3\4",
    }
    yield from posts("npz", files)


def npy_files() -> Iterator[Form]:
    def npy(header: bytes, body: bytes = bytes(30), version: bytes = b"\x01\x00") -> bytes:
        return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + body

    for header in (b"", b"{", b"{}", b"[]", b"x" * 60_000, b"{'descr': __import__('os').abort()}", b"{" * 5000, b"9" * 5000,
                   b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }\n", b"{'descr': '<U9', 'fortran_order': False, 'shape': (3,), }\n",
                   b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }\n", b"{'descr': '|u1', 'fortran_order': 7, 'shape': (30,), }\n",
                   b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999,), }\n", b"{'descr': '|V30', 'fortran_order': False, 'shape': (1,), }\n",
                   b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"1," * 500 + b"), }\n",
                   b"{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (30,), }\n", b"\xff" * 20):  # fmt: skip
        yield form(f"npy: {header[:50]!r} {len(header)} {header[-20:]!r}", post(npy(header)), closes=False)
    for version in (b"\x00\x00", b"\x09\x00", b"\xff\xff", b"\x02\x00"):
        yield form(f"npy: version {version!r}", post(npy(b"{}", version=version)), closes=False)
    yield form("npy: cut", post(GOOD[:-1]), closes=False)
    yield form("npy: NaN", post(array_bytes(np.full((4, 4, 1), np.nan))), closes=False)
    yield form("npy: signature alone", post(b"\x93NUMPY"), closes=False)


def sounds() -> Iterator[Form]:
    def wav(format_chunk: bytes, data: bytes = bytes(64), size: int | None = None) -> bytes:
        return riff(format_chunk, b"data" + struct.pack("<I", len(data) if size is None else size) + data)

    sound = wav_format(rate=16_000)
    files = {
        "for a model of images": wav(sound),
        "no chunks": b"RIFF\0\0\0\0WAVE",
        "no samples": wav(sound, b""),
        "data of 4 GB": wav(sound, size=2**32 - 1),
        "format cut": wav(chunk(b"fmt ", sound[8:16])),
        "0 channels": wav(wav_format(channels=0, rate=16_000)),
        "65 channels": wav(wav_format(channels=65, rate=16_000)),
        "rate 0": wav(wav_format(rate=0)),
        "12 bits": wav(wav_format(bits=12, rate=16_000, block=2)),
        "MP3": wav(wav_format(0x55, rate=16_000)),
        "NaN": wav(wav_format(3, 32, rate=16_000), np.full(16, np.nan, "<f4").tobytes()),
        "values before the format": b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd",
        "100,000 chunks": b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 100_000,
        "a chunk of 4 GB": b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\xff",
    }
    yield from posts("wav", files)


FAMILIES = (
    *(request_lines, headers, framing, lengths, encodings, queries, hosts),
    *(shapes, multiparts, slow_clients, pipelines, pictures, npz_files, npy_files, sounds),
)


# --- sending and judging --------------------------------------------------------------


def sent(address: tuple[str, int], sample: Form) -> Outcome:
    """Send a form and read the answers, until the connection ends or no further answer can come."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        try:
            for index, piece in enumerate(sample.pieces):
                if index:
                    time.sleep(sample.pause_s)
                sock.sendall(piece)
            if sample.ends:
                sock.shutdown(socket.SHUT_WR)
        except OSError:  # the service has ended the connection already; its answer can still be read
            pass
        return _received(sock, sample)


def _received(sock: socket.socket, sample: Form) -> Outcome:
    buffer = b""
    statuses: list[int] = []
    damage = ""
    closed = False
    while not closed and not damage:
        while (parsed := _answer(buffer)) is not None:
            status, damage, buffer = parsed
            if status != 100:
                statuses.append(status)
        enough = len(statuses) >= sample.answers and sample.closes is not True
        sock.settimeout(0.05 if enough else PATIENCE_S)
        try:
            received = sock.recv(65536)
        except TimeoutError:
            break
        except ConnectionResetError:
            return Outcome(tuple(statuses), True, "" if statuses else "reset without an answer")
        closed = not received
        buffer += received
    return Outcome(tuple(statuses), closed, damage or ("half an answer" if buffer else ""))


def _answer(buffer: bytes) -> tuple[int, str, bytes] | None:
    """Return the status of the first complete answer, what is wrong with it, and the bytes after it."""
    head, end, rest = buffer.partition(b"\r\n\r\n")
    if not end:
        return None
    status = re.match(rb"HTTP/1\.[01] (\d{3}) [A-Za-z ]+(?:\r\n|\Z)", head)
    if status is None:
        return 0, "the status line is invalid", rest
    if status.group(1) == b"100":
        return 100, "", rest
    length = re.search(rb"\r\nContent-Length: (\d+)(?:\r\n|\Z)", head)
    if length is None:
        return int(status.group(1)), "no Content-Length", rest
    size = int(length.group(1))
    if len(rest) < size:
        return None
    body = rest[:size]
    damage = ""
    if b"Content-Type: application/json" in head:
        try:
            json.loads(body)
        except ValueError:
            damage = "the body is not JSON"
    if b"Traceback" in body or any(byte < 32 and byte not in (9, 10, 13) for byte in body[:2000] if b"npz" not in head):
        damage = "a traceback or control characters in an answer"
    return int(status.group(1)), damage, rest[size:]


def complaint(sample: Form, outcome: Outcome) -> str:
    """Return what is wrong with an outcome; empty if it is allowed."""
    if outcome.damage:
        return outcome.damage
    if len(outcome.statuses) > sample.answers:
        return f"{len(outcome.statuses)} answers, {outcome.statuses}"
    last = outcome.statuses[-1] if outcome.statuses else NOTHING
    if last not in sample.statuses:
        return f"status {last}, allowed: {sorted(sample.statuses)}"
    if sample.closes is not None and outcome.closed != sample.closes and not sample.ends:
        return "the connection was closed" if outcome.closed else "the connection was kept"
    return ""
