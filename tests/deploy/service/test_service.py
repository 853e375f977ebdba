"""The command `serve` in a separate process: sockets, the token, the unit, signals, systemd."""

from __future__ import annotations

import collections
import concurrent.futures
import configparser
import contextlib
import http.client
import json
import random
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices
import pytest

from deploy.contract import bundle
from deploy.runner.model import Model

BODY = bundle.array_bytes(devices.images(1)[0])
HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@contextlib.contextmanager
def served(*arguments: object, **more: object) -> Iterator[tuple[Any, str]]:
    """Start the service; yield the process, and the address on which it listens."""
    command = [sys.executable, "-W", "error", "-m", "deploy", "serve", *map(str, arguments), "--json"]
    process = subprocess.Popen(
        command, env=devices.environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    place, noise = None, ""
    while place is None:
        line = process.stderr.readline()
        noise += line
        assert line, noise
        place = re.match(r"runner: listening on (\S+)", line)
    try:
        yield process, place[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(place: str, path: str = "/v1/predict", body: bytes = BODY, token: str = "") -> tuple[int, Any]:
    client = http.client.HTTPConnection(place.removeprefix("http://"), timeout=20)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client.request("POST" if body else "GET", path, body or None, headers)
    answer = client.getresponse()
    content = answer.read()
    client.close()
    return answer.status, json.loads(content) if content.startswith(b"{") else content


def ended(process: Any, number: int = signal.SIGTERM) -> Any:
    process.send_signal(number)
    out, noise = process.communicate(timeout=30)
    assert process.returncode == 0, noise
    return json.loads(out)


def test_predictions_facts_and_the_summary(path: Path) -> None:
    with Model(str(path), "int8") as model:
        image = model.bundle.array("golden-input-0.npy")
        label = model(image).label
    with served(path, "--port", 0, "--role", "int8") as (process, place):
        for _ in range(3):
            status, answer = ask(place, body=bundle.array_bytes(image))
            assert (status, answer["top"][0]["label"]) == (200, label)
        assert ask(place, body=b"garbage")[0] == 400
        facts = ask(place, "/v1/model", b"")[1]
        assert (facts["name"], facts["role"], facts["labels"]) == ("tiny", "int8", devices.LABELS)
        assert facts["decoding"] == {
            "image_channels": None,
            "sound_channels": "mix",
            "sound_rate": None,
            "orientation": "exif",
            "text_bytes": None,
        }
        assert ask(place, "/readyz", b"") == (200, b"ok\n")
        summary = ended(process)
    counts = {(row["path"], row["code"]): row["count"] for row in summary["requests"]}
    assert counts[("/v1/predict", "200")] == 3
    assert counts[("/v1/predict", "400")] == 1


def test_ctrl_c_ends_it_gently_too(path: Path) -> None:
    with served(path, "--port", 0) as (process, place):
        assert ask(place)[0] == 200
        assert ended(process, signal.SIGINT)["verb"] == "serve"


def test_a_unix_socket(path: Path, tmp_path: Path) -> None:
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))  # left by a dead process
    with served(path, "--unix", place) as (process, shown):
        assert shown == f"unix:{place}"
        assert stat.S_IMODE(place.stat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(place))
            sock.sendall(b"POST /v1/predict HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
            response = b""
            while came := sock.recv(65536):
                response += came
        assert b'"top": [{"label"' in response
        second = devices.runner("serve", path, "--unix", place)
        assert (second.returncode, "another process listens" in second.stderr) == (2, True)
        ended(process)
    assert not place.exists()


def test_a_file_is_not_removed_for_a_socket(path: Path, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    done = devices.runner("serve", path, "--unix", tmp_path / "s")
    assert (done.returncode, "is not a socket" in done.stderr) == (2, True)
    assert (tmp_path / "s").read_text() == "mine"


def token(tmp_path: Path, text: str = "s" * 32, mode: int = 0o600) -> Path:
    (tmp_path / "token").write_text(text + "\n")
    (tmp_path / "token").chmod(mode)
    return tmp_path / "token"


def test_other_hosts_need_a_token(path: Path, tmp_path: Path) -> None:
    done = devices.runner("serve", path, "--host", "0.0.0.0", "--port", 0)
    assert (done.returncode, "a token is required" in done.stderr) == (2, True)
    with served(path, "--host", "0.0.0.0", "--port", 0, "--token-file", token(tmp_path)) as (process, place):
        place = place.replace("0.0.0.0", "127.0.0.1")
        assert ask(place)[0] == 401
        assert ask(place, token="s" * 31)[0] == 401
        assert ask(place, token="s" * 32)[0] == 200
        ended(process)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("s" * 32, 0o644, "; to do: chmod 600"),
        ("short", 0o600, "must contain a token"),
        ("white space in the middle of it", 0o600, "must contain a token"),
        ("", 0o600, "must contain a token"),
    ],
)
def test_tokens_that_are_none(text: str, mode: int, message: str, path: Path, tmp_path: Path) -> None:
    done = devices.runner("serve", path, "--token-file", token(tmp_path, text, mode))
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--port", "99999"], 2),
        (["--queue", "0"], 2),
        (["--host", "no.such.host.invalid", "--token-file", "/nowhere"], 2),
        (["--token-file", "/dev/null/none"], 6),
        (["--unix", "/dev/null/s"], 6),
    ],
)
def test_what_cannot_be(arguments: list[str], code: int, path: Path) -> None:
    assert devices.runner("serve", path, *arguments).returncode == code


def test_the_unit(path: Path, tmp_path: Path) -> None:
    odd = tmp_path / "50% $off"
    odd.mkdir()
    arguments = ["--port", 8081, "--unix", "/run/coralline/s", "--token-file", odd / "token"]
    done = devices.runner("serve", path, *arguments, "--print-unit")
    assert (done.returncode, done.stderr) == (0, "")
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[method-assign, assignment]
    parsed.read_string(done.stdout)
    service = parsed["Service"]
    command = [part.replace("%%", "%").replace("$$", "$") for part in shlex.split(service["ExecStart"])]
    assert command[:4] == [sys.executable, "-m", "deploy", "serve"]
    assert command[command.index("--token-file") + 1] == str(odd / "token")
    assert command[command.index("--port") + 1] == "8081"
    assert (service["Type"], service["RuntimeDirectory"]) == ("notify", "coralline")
    assert "BUNDLE" not in service["ExecStart"]


def test_systemd_is_told(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        with served(path, "--port", 0, NOTIFY_SOCKET=tmp_path / "notify") as (process, _):
            assert manager.recv(100) == b"READY=1"
            assert manager.recv(100) == b"WATCHDOG=1"
            process.send_signal(signal.SIGTERM)
            while manager.recv(100) != b"STOPPING=1":
                pass
            process.communicate(timeout=20)
            assert process.returncode == 0


def test_an_inference_that_never_comes_back(path: Path, tmp_path: Path) -> None:
    """The inference hangs. The end of the service waits for it, but not forever."""
    program = (
        "import os, sys, threading; from deploy.runner import model; from deploy.service import app; "
        "from deploy import __main__ as runner; "
        "app.GRACE_S = 0.5; "
        "model.Model.answer = lambda self, tensor, shape: threading.Event().wait(); "
        "sys.exit(runner.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "serve", str(path), "--port", "0", "--role", "int8"]
    process = subprocess.Popen(command, env=devices.environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not (match := re.match(r"runner: listening on http://(\S+):(\d+)", process.stderr.readline())):
        pass
    with socket.create_connection((match[1], int(match[2])), timeout=20) as sock:
        sock.sendall(HEAD % len(BODY) + BODY)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        _, noise = process.communicate(timeout=20)
    assert (process.returncode, "the last inference did not return" in noise) == (12, True), noise


def test_an_answer_that_is_under_way_is_sent_before_the_end(path: Path) -> None:
    with served(path, "--port", 0) as (process, place):
        host, port = place.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(HEAD % len(BODY) + BODY)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            response = b""
            while came := sock.recv(65536):
                response += came
        assert response.startswith(b"HTTP/1.1 200 OK")
        process.communicate(timeout=20)
        assert process.returncode == 0


class Ending:
    """A client that sends requests at random moments until the service has ended."""

    def __init__(self, address: Any, number: int, reconnects: bool) -> None:
        self.address, self.random, self.reconnects = address, random.Random(number), reconnects
        self.family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.sock = socket.socket(self.family)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.stopped_at = float("inf")

    def run(self) -> None:
        """Send requests until a connection is refused or closed."""
        try:
            self._connect()
            while True:
                sent_at = time.monotonic()
                answer = self._asked(self.sock)
                if not answer:  # closed without an answer: allowed only for requests after the end
                    self.outcomes["lost" if sent_at < self.stopped_at else "closed"] += 1
                    break
                self.outcomes[answer[9:12].decode()] += 1
                if b"Connection: close" in answer or self.reconnects:
                    self._connect()
                time.sleep(self.random.random() * 0.04)
        except (ConnectionRefusedError, FileNotFoundError):
            self.outcomes["refused"] += 1
        except (ConnectionResetError, BrokenPipeError):
            self.outcomes["reset"] += 1
        finally:
            self.sock.close()

    def _connect(self) -> None:
        self.sock.close()
        self.sock = socket.socket(self.family)
        self.sock.settimeout(20)
        self.sock.connect(self.address)

    def _asked(self, sock: socket.socket) -> bytes:
        path = self.random.choice([b"/healthz", b"/v1/predict"])
        if path == b"/healthz":
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        else:
            sock.sendall(HEAD % len(BODY))
            if self.random.random() < 0.5:
                time.sleep(0.005)
            sock.sendall(BODY)
        answer = b""
        while not _complete(answer):
            received = sock.recv(65536)
            if not received:
                return answer
            answer += received
        return answer


def _complete(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return bool(end) and length is not None and len(body) == int(length.group(1))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_no_connection_is_reset_at_the_end(kind: str, path: Path, tmp_path: Path) -> None:
    """60 clients keep their connections, and 20 make a new one for each request, around SIGTERM."""
    place = str(tmp_path / "s")
    with served(path, *(("--unix", place) if kind == "unix" else ("--port", 0))) as (process, url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        address: Any = place if kind == "unix" else (host, int(port))
        clients = [Ending(address, number, reconnects=number >= 60) for number in range(80)]
        with concurrent.futures.ThreadPoolExecutor(80) as pool:
            running = [pool.submit(client.run) for client in clients]
            time.sleep(0.7)
            for client in clients:
                client.stopped_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            for future in running:
                future.result()
        _, noise = process.communicate(timeout=30)
        assert process.returncode == 0, noise
    outcomes = sum((client.outcomes for client in clients), collections.Counter())
    assert outcomes["reset"] == outcomes["lost"] == 0, outcomes
    assert outcomes["200"] > 80
    assert outcomes["503"] > 0
    assert outcomes["refused"] > 0
