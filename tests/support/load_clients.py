"""Clients of `serve` that send requests, disconnect and send garbage; and the resources that the server uses.

All clients share one thread with one selector. `benchmarks/serve.py` and `benchmarks/soak.py` use them.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

GARBAGE, VANISH = 0.05, 0.05


class Client:
    """One connection that sends requests one after another."""

    def __init__(self, port: int, number: int, bodies: list[bytes], expected: list[list[Any]]) -> None:
        self.port, self.number, self.bodies, self.expected = port, number, bodies, expected
        self.random, self.turn, self.counts = np.random.default_rng(number), 0, Counter[str]()
        self.sock: socket.socket | None = None

    def send(self, selector: selectors.BaseSelector) -> None:
        """Send the next request. If the client disconnects on purpose, send another one on a new connection."""
        while True:
            if self.sock is None:
                self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(self.sock, selectors.EVENT_READ, self)
            self.turn += 1
            self.found, self.garbage = b"", bool(self.random.random() < GARBAGE)
            self.image = int(self.random.integers(len(self.bodies)))
            body = self.random.bytes(int(self.random.integers(1, 20000))) if self.garbage else self.bodies[self.image]
            head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nX-Request-Id: %d-%d\r\n\r\n"
            request = (head % (len(body), self.number, self.turn)).encode() + body
            vanishes = self.random.random() < VANISH
            part = len(request) if self.random.random() < 0.5 else int(self.random.integers(1, len(request)))
            try:
                self.sock.sendall(request[:part] if vanishes else request)
            except OSError:
                self.counts["broken"] += 1
                vanishes = True
            self.sent = time.perf_counter()
            if not vanishes:
                return
            self.counts["vanished"] += 1
            self.close(selector)

    def close(self, selector: selectors.BaseSelector) -> None:
        if self.sock is not None:
            selector.unregister(self.sock)
            self.sock.close()
            self.sock = None

    def receive(self) -> bool:
        """Receive data, and return whether the answer is complete. A complete answer is judged.

        Raises:
            OSError: the connection ended.
        """
        assert self.sock is not None
        part = self.sock.recv(65536)
        if not part:
            raise ConnectionResetError("the server closed the connection before its answer was complete")
        self.found += part
        head, _, body = self.found.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if length is None or len(body) < int(length.group(1)):
            return False
        self.latency = time.perf_counter() - self.sent
        self.counts[self.judged(int(head.split()[1]), head.decode(), json.loads(body))] += 1
        return True

    def judged(self, status: int, head: str, answer: Any) -> str:
        """Return the category in which an answer is counted."""
        if f"X-Request-Id: {self.number}-{self.turn}\r\n" not in head + "\r\n":
            return "mixed"
        if self.garbage:
            return "garbage refused" if 400 <= status < 500 else "garbage wrong"
        if status != 200:
            return f"status {status}"
        same = [[row["label"], row["score"]] for row in answer["top"]] == self.expected[self.image]
        return "good" if same else "mixed"


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answered(client: Client, selector: selectors.BaseSelector) -> bool:
    """Receive data, and return whether an answer is complete. If the server ended the connection, open another one."""
    try:
        return client.receive()
    except OSError:
        client.counts["ended by the server"] += 1
        client.close(selector)
        client.send(selector)
        return False


def listening(server: subprocess.Popen[str]) -> int:
    """Return the port of a starting server, from its output."""
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(r"listening on http://127.0.0.1:(\d+)", line):
            return int(match.group(1))
    raise RuntimeError(f"the server ended with {server.wait()}")


def total(clients: list[Client]) -> Counter[str]:
    """Return the total counts of the answers to all clients."""
    return sum((client.counts for client in clients), Counter())
