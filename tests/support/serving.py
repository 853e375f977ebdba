"""The service of the runner in a separate thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from deploy.contract import bundle
from deploy.contract.errors import EdgeTpuError
from deploy.runner.answers import Answer
from deploy.service.admission import ServiceLimits
from deploy.service.app import Server

FACTS = {"name": "tiny", "role": "int8", "device": "cpu", "sha256": "0" * 64}
BODY = bundle.array_bytes(np.zeros((2, 2), np.uint8))
Ask = tuple[int, dict[str, str], Any]


class Slow:
    """A slow model whose answer is the first value of an image; it waits while `gate` is not set."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.gate, self.seen = seconds, threading.Event(), 0
        self.gate.set()

    def prepare(self, image: Any, between: Any = None, most_bytes: int = 0) -> Any:
        return image

    def answer(self, tensor: Any, sample_shape: Any = ()) -> Answer:
        self.gate.wait(20)
        time.sleep(self.seconds)
        self.seen += 1
        value = int(tensor.ravel()[0])
        if value == 255:
            raise EdgeTpuError("the Edge TPU is gone", "plug it in", "refused")
        return Answer(np.array([value, -1.0], np.float32), [str(value), "other"])


class Service:
    """A running service, on its own port or on a socket."""

    def __init__(
        self, model: Any, facts: dict[str, Any], listener: socket.socket | None = None, **settings: Any
    ) -> None:
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = Server(model, facts, [listener], ServiceLimits(**settings))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Ask:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            client.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            return read(client.getresponse())
        finally:
            client.close()

    def predict(self, value: int) -> Ask:
        return self.ask("POST", "/v1/predict", bundle.array_bytes(np.full((2, 2), value, np.uint8)))

    def metric(self, line: str) -> float:
        text = self.ask("GET", "/metrics")[2]
        return float(next(row for row in text.splitlines() if row.startswith(f"{line} ")).split()[1])


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.01)


def read(answer: http.client.HTTPResponse) -> Ask:
    content = answer.read()
    kind = answer.headers["Content-Type"]
    readers = {"application/json": json.loads, "application/x-npz": bytes}
    return answer.status, dict(answer.headers), readers.get(kind, bytes.decode)(content)


@contextlib.contextmanager
def serving(model: Any, facts: dict[str, Any] = FACTS, **settings: Any) -> Iterator[Service]:
    service = Service(model, facts, **settings)
    try:
        yield service
    finally:
        if hasattr(model, "gate"):
            model.gate.set()
        service.server.stop()
        service.thread.join(30)
        assert not service.thread.is_alive()


def raw(service: Service, *pieces: bytes) -> bytes:
    """Send bytes; return everything that the service sends until it closes the connection."""
    with service.connect() as sock:
        for piece in pieces:
            sock.sendall(piece)
        response = b""
        while came := sock.recv(65536):
            response += came
    return response
