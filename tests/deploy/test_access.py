"""Access to the service: names of this host, pages of other sites, rates, tokens. And files in HTML forms."""

from __future__ import annotations

import email.message
import shutil
import socket
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from serving import BODY, Slow, raw, serving

from deploy.contract.errors import ImageError
from deploy.service import worker
from deploy.service.admission import MAX_ADDRESSES, RateLimit, host_name


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:9", 200),
        ("192.168.7.7", 200),
        ("[::1]:8080", 200),
        ("shop.example", 200),
        ("attacker.example:8080", 403),
        ("1.2.3", 403),
    ],
)
def test_a_name_of_another_host_is_refused(host: str, status: int) -> None:
    with serving(Slow(), hosts=("localhost", "shop.example")) as service:
        for path in ("/healthz", "/v1/model", "/metrics"):
            answer = service.ask("GET", path, Host=host)
            assert answer[0] == status
        if status == 403:
            assert "--allow-host" in service.ask("POST", "/v1/predict", BODY, Host=host)[2]["error"]["hint"]


def test_host_names() -> None:
    assert host_name("Shop.Example:80") == "shop.example"
    assert host_name("[fe80::1]:1") == "fe80::1"
    for text in ("", ":80", "a b", "a/b", "a..", "-a", "[::1]x", "a:1:2", "\xe9", "a" * 300):
        assert host_name(text) is None, text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8080", 200),
        ("https://localhost:8080", 200),
        ("http://shop.example", 200),
        ("https://shop.example", 403),
        ("http://localhost", 403),
        ("null", 403),
        ("chrome-extension://abcdef", 403),
    ],
)
def test_pages_of_other_sites_are_refused(origin: str, status: int) -> None:
    with serving(Slow(), origins=("http://shop.example",)) as service:
        answer = service.ask("POST", "/v1/predict", BODY, Host="localhost:8080", Origin=origin)
        assert answer[0] == status
        if status == 403:
            assert "--allow-origin" in answer[2]["error"]["hint"]
        allowed = answer[1].get("Access-Control-Allow-Origin")
        assert allowed == (origin if origin == "http://shop.example" else None)
        preflight = service.ask("OPTIONS", "/v1/predict", Host="localhost:8080", Origin=origin)
        assert preflight[0] == {"http://shop.example": 200}.get(origin, 405 if status == 200 else 403)
        assert ("Access-Control-Allow-Methods" in preflight[1]) == (origin == "http://shop.example")


def test_a_wrong_token_of_an_allowed_page_can_be_read() -> None:
    with serving(Slow(), token="t" * 20, origins=("http://shop.example",)) as service:
        status, headers, _ = service.ask("GET", "/v1/model", Origin="http://shop.example")
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, "http://shop.example")


def test_with_a_token_every_name_is_allowed() -> None:
    with serving(Slow(), token="t" * 20) as service:
        token = f"Bearer {'t' * 20}"
        assert service.ask("GET", "/v1/model", Host="board.local", Authorization=token)[0] == 200
        foreign = service.ask("GET", "/v1/model", Host="board.local", Authorization=token, Origin="http://a.example")
        assert foreign[0] == 403


def test_without_a_host_as_old_programs() -> None:
    with serving(Slow()) as service:
        assert raw(service, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")


def test_rates() -> None:
    now = 0.0
    limit = RateLimit(2.0, lambda: now)
    assert [limit.wait_s("10.0.0.1") for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    assert limit.wait_s("10.0.0.2") == 0
    now = 0.5
    assert [limit.wait_s("10.0.0.1") for _ in range(2)] == [0, 1]
    assert limit.wait_s("") == 0
    slow = RateLimit(0.1, lambda: now)
    assert [slow.wait_s("2001:db8::1"), slow.wait_s("2001:db8::2"), slow.wait_s("2001:db8:0:1::1")] == [0, 10, 0]
    for number in range(MAX_ADDRESSES + 10):
        slow.wait_s(f"10.1.{number >> 8}.{number & 255}")
    assert len(slow._buckets) == MAX_ADDRESSES
    assert all(RateLimit(0.0).wait_s("10.0.0.1") == 0 for _ in range(1000))


def test_too_many_requests_of_one_client() -> None:
    with serving(Slow(), rate=0.5) as service:
        answers = [service.ask("POST", "/v1/predict", BODY) for _ in range(3)]
        assert [answer[0] for answer in answers] == [200, 429, 429]
        assert 0 < int(answers[-1][1]["Retry-After"]) <= 2
        assert service.ask("GET", "/healthz")[0] == 200  # not limited, for monitoring


def test_a_wrong_token_is_answered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Slow(), token="t" * 20, connections=2) as service:
        waiting = service.connect()
        waiting.sendall(b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n\r\n")
        waiting.settimeout(0.3)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        waiting.settimeout(10)
        assert waiting.recv(65536).startswith(b"HTTP/1.1 401")
        waiting.close()
        guesses = [service.connect() for _ in range(2)]
        for guess in guesses:
            guess.sendall(b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer no\r\n\r\n")
        assert service.ask("GET", "/healthz")[0] == 200  # connections with a wrong token are closed for others
        for guess in guesses:
            guess.close()


# --- forms ---------------------------------------------------------------------------


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"xyz") -> bytes:
    inner = b"".join(b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + body + b"\r\n" for head, body in parts)
    return inner + b"--" + boundary + b"--\r\n"


FILE = b'Content-Disposition: form-data; name="file"; filename="a.npy"\r\nContent-Type: application/octet-stream'
KIND = "multipart/form-data; boundary=xyz"


def test_a_file_in_a_form() -> None:
    with serving(Slow()) as service:
        body = form((FILE, BODY))
        for content in (body, body[:-2]):
            answer = service.ask("POST", "/v1/predict?top=1", content, Content_Type=KIND)
            assert (answer[0], answer[2]["top"][0]["label"]) == (200, "0")
        raw_values = form((FILE, bytes([9, 0, 0, 0])))
        answer = service.ask("POST", "/v1/predict", raw_values, Content_Type=KIND, X_Shape="2,2")
        assert answer[2]["top"][0]["label"] == "9"


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (form((FILE, b"a"), (FILE, b"b")), KIND, "several parts"),
        (form((b'Content-Disposition: form-data; name="file"', b"a")), KIND, "no file"),
        (form((FILE + b"\r\nContent-Disposition: form-data; name=a; filename=b", b"a")), KIND, "no file"),
        (form((b"no colon", b"a")), KIND, "invalid"),
        (form((FILE, b"a"))[:-4], KIND, "does not end"),
        (b"--xyz\r\n" + b"a: b\r\n" * 5000 + b"\r\n", KIND, "does not end"),
        (b"preamble\r\n" + form((FILE, b"a")), KIND, "does not begin"),
        (form((FILE, b"a")), "multipart/mixed; boundary=xyz", "boundary"),
        (form((FILE, b"a")), 'multipart/form-data; boundary="xy\x00z"', "boundary"),
    ],
)
def test_forms_that_are_refused(body: bytes, kind: str, says: str) -> None:
    with pytest.raises(ImageError, match=says) as caught:
        worker.file_of(body, kind)
    assert "--data-binary" in caught.value.hint


def test_the_boundary_is_found_at_a_line_alone() -> None:
    content = b"a--xyz--\r\n--xy\r\n-\r--xyz\n\r\n\r\n"
    assert worker.file_of(form((FILE, content)), KIND) == content


def test_forms_of_the_standard_library() -> None:
    """Every boundary that `email` makes is understood."""
    message = email.message.EmailMessage()
    message.add_header("Content-Disposition", "form-data", name="file", filename="ä b.npy")
    message.set_payload("abc")
    multipart_message = email.message.EmailMessage()
    multipart_message.set_type("multipart/form-data")
    multipart_message.attach(message)
    text = multipart_message.as_bytes(policy=multipart_message.policy.clone(linesep="\r\n"))
    kind = str(multipart_message["Content-Type"]).replace("\n", "")
    body = text.partition(b"\r\n\r\n")[2]
    assert worker.file_of(body, kind) == b"abc"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(tmp_path: Path) -> None:
    (tmp_path / "image.npy").write_bytes(BODY)
    (tmp_path / "photo.bin").write_bytes(b"\x93NUMPY\x01\x00\r\n" + BODY)
    with serving(Slow()) as service:
        url = f"http://127.0.0.1:{service.port}/v1/predict?top=1"

        def curl(*options: str) -> str:
            command = ["curl", "--silent", "--noproxy", "*", *options, url]
            return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

        assert '"label": "0"' in curl("-F", "file=@image.npy")
        assert '"label": "0"' in curl("--data-binary", "@image.npy")
        assert "--data-binary" in curl("-d", "@photo.bin")
        assert "--data-binary" in curl("-F", "file=@image.npy", "-F", "other=@image.npy")
        assert "curl -F file=@FILE" in curl("-F", "file=image.npy")


def test_values_of_a_query_as_a_form_get_a_hint() -> None:
    with serving(Slow()) as service:
        body = urllib.parse.urlencode({"file": "a.jpg"}).encode()
        kind = "application/x-www-form-urlencoded"
        answer: Any = service.ask("POST", "/v1/predict", body, Content_Type=kind)
        assert (answer[0], "--data-binary" in answer[2]["error"]["hint"]) == (400, True)


def test_unix_sockets_are_exempt(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with serving(Slow(), listener=listener, rate=0.001):
            for _ in range(3):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(tmp_path / "s"))
                    client.sendall(b"GET /v1/model HTTP/1.1\r\nHost: anything\r\nOrigin: http://a.example\r\n\r\n")
                    assert client.recv(65536).startswith(b"HTTP/1.1 200")
