"""The service of the runner in a thread of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from deploy.admission import ServiceLimits
from deploy.contract import bundle
from deploy.serve import Server

FACTS = {"name": "tiny", "role": "int8", "device": "cpu", "sha256": "0" * 64}
Ask = tuple[int, dict[str, str], Any]


class Service:
    """A server in a thread of its own."""

    def __init__(self, model: Any, facts: dict[str, Any], **settings: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
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
