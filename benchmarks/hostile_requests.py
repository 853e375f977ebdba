"""Effect of hostile clients on the other clients of `serve`: `python benchmarks/hostile_requests.py [--seconds 60]`.

One service with its default limits. A few sound (well-behaved) clients send images one after the other, and every
answer is compared with that of `Model`. The service has these clients alone and with an attack, in turn. The attackers
are slow clients, which send one byte of a head or of a body from time to time and connect again when the service closes
the connection, and one client that sends the corpus of `tests/support/request_corpus.py` again and again and checks the
outcomes. The attackers run in a separate process.

Both phases are parts of one run: results of separate runs cannot be compared on a machine that does other work. Prints
the figures, and writes benchmarks/results/hostile_requests.json. No result is checked against a limit.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import repository

import devices
import numpy as np
import request_corpus
import tiny
from paths import ROOT

from deploy.contract import bundle
from deploy.runner.model import Model

RESULTS = repository.RESULTS / "hostile_requests.json"
SIZE = (32, 32, 1)
FILTERS = 512
IMAGES = 32
SOUND = 4
"""The number of sound clients."""
PAUSE_S = 0.02
"""Seconds between two requests of a sound client, and between two requests of the corpus."""
BYTE_S = 0.25
"""Seconds in which a slow client sends one byte."""


class Sound(threading.Thread):
    """A sound client, which keeps its connection and compares every answer."""

    def __init__(self, port: int, number: int, bodies: list[bytes], expected: list[Any]) -> None:
        super().__init__(daemon=True)
        self.client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.random, self.number = np.random.default_rng(number), number
        self.bodies, self.expected = bodies, expected
        self.latencies_ms: list[float] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.ending = threading.Event()

    def run(self) -> None:
        """Send requests until `ending` is set."""
        turn = 0
        while not self.ending.is_set():
            turn += 1
            index = int(self.random.integers(len(self.bodies)))
            request_id = f"{self.number}-{turn}"
            began = time.perf_counter()
            try:
                self.client.request("POST", "/v1/predict", self.bodies[index], {"X-Request-Id": request_id})
                answer = self.client.getresponse()
                content = json.loads(answer.read())
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[type(error).__name__] += 1
                self.client.close()
                continue
            self.latencies_ms.append((time.perf_counter() - began) * 1000)
            if answer.headers["X-Request-Id"] != request_id or content.get("request_id") != request_id:
                self.outcomes["mixed"] += 1
            elif answer.status != 200:
                self.outcomes[f"status {answer.status}"] += 1
            else:
                predictions = [[row["label"], row["score"]] for row in content["top"]]
                self.outcomes["right" if predictions == self.expected[index] else "mixed"] += 1
            time.sleep(PAUSE_S)
        self.client.close()


class Slow:
    """A slow client, which sends one byte of a request from time to time."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
        self.content = head + b"a: b\r\n" * 1000
        if number % 2:
            self.content = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n" + bytes(
                5000
            )
        self.address = address
        self.sock: socket.socket | None = None

    def step(self) -> int:
        """Connect if necessary, and send a byte; return 1 if the service closed the connection, otherwise 0."""
        try:
            if self.sock is None:
                self.sock, self.place = socket.create_connection(self.address, timeout=10), 0
            self.sock.sendall(self.content[self.place : self.place + 1])
            self.place += 1
            self.sock.setblocking(False)
            try:
                self.sock.recv(65536)
            except BlockingIOError:
                return 0
        except OSError:
            pass
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        return 1


def attack(port: int, seconds: float, slow: int) -> None:
    """Attack a service, and print the counts and complaints as JSON."""
    address = ("127.0.0.1", port)
    quick = [form for form in request_corpus.forms() if not form.name.startswith("slow: ")]
    print("ready", flush=True)
    ending = time.monotonic() + seconds
    complaints: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()

    def corpus() -> None:
        while True:
            for form in quick:
                if time.monotonic() > ending:
                    return
                try:
                    outcome = request_corpus.sent(address, form)
                except OSError as error:
                    complaints[f"{form.name}: {type(error).__name__}"] += 1
                    continue
                counts["forms"] += 1
                wrong = request_corpus.complaint(form, outcome)
                if wrong and outcome.statuses != (503,):  # the queue is full
                    complaints[f"{form.name}: {wrong}"] += 1
                time.sleep(PAUSE_S)

    sender = threading.Thread(target=corpus)
    sender.start()
    clients = [Slow(address, number) for number in range(slow)]
    while time.monotonic() < ending:
        for client in clients:
            counts["slow cut off"] += client.step()
            time.sleep(BYTE_S / max(slow, 1))
    sender.join()
    print(json.dumps({"counts": counts, "complaints": complaints}))


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def phase(server: Any, port: int, seconds: float, slow: int, sound: tuple[list[bytes], list[Any]]) -> dict[str, Any]:
    """Measure the sound clients for some time; with `slow` clients, under attack."""
    attacker = None
    if slow:
        command = [sys.executable, __file__, "--attack", str(port), "--seconds", str(seconds + 2), "--slow", str(slow)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        attacker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert attacker.stdout is not None
        attacker.stdout.readline()  # until the attacker prints that it is ready
        time.sleep(1.0)
    clients = [Sound(port, number, *sound) for number in range(SOUND)]
    for client in clients:
        client.start()
    memory = []
    ending = time.monotonic() + seconds
    while time.monotonic() < ending:
        time.sleep(0.5)
        memory.append(resident_bytes(server.pid))
    for client in clients:
        client.ending.set()
    for client in clients:
        client.join()
    outcomes = sum((client.outcomes for client in clients), collections.Counter())
    latencies = [value for client in clients for value in client.latencies_ms]
    result = {
        "attacked": attacker is not None,
        "outcomes": dict(outcomes),
        "latencies_ms": latencies,
        "memory_bytes": memory,
        "peak_bytes": resident_bytes(server.pid, "VmHWM"),
    }
    if attacker is not None:
        result["attack"] = json.loads(attacker.communicate(timeout=60)[0])
    return result


def summed(phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all quiet phases and of all phases with an attack."""
    result: dict[str, Any] = {}
    for name, attacked in (("alone", False), ("attacked", True)):
        rows = [row for row in phases if row["attacked"] == attacked]
        latencies = np.concatenate([row["latencies_ms"] for row in rows])
        result[name] = {
            "latency_ms": {str(share): float(np.percentile(latencies, share)) for share in (50, 90, 99)},
            "outcomes": dict(sum((collections.Counter(row["outcomes"]) for row in rows), collections.Counter())),
            "memory_bytes": [max(row["memory_bytes"]) for row in rows],
            "peak_bytes": max(row["peak_bytes"] for row in rows),
        }
    attacks = [row["attack"] for row in phases if row["attacked"]]
    result["forms_sent"] = sum(attack_result["counts"].get("forms", 0) for attack_result in attacks)
    result["slow_cut_off"] = sum(attack_result["counts"].get("slow cut off", 0) for attack_result in attacks)
    result["complaints"] = dict(
        sum((collections.Counter(attack_result["complaints"]) for attack_result in attacks), collections.Counter())
    )
    result["p99_ratio"] = result["attacked"]["latency_ms"]["99"] / result["alone"]["latency_ms"]["99"]
    result["memory_growth_bytes"] = result["attacked"]["memory_bytes"][-1] - result["attacked"]["memory_bytes"][0]
    result["mixed"] = sum(result[name]["outcomes"].get("mixed", 0) for name in ("alone", "attacked"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of attack, in all rounds together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.seconds, options.slow)
        return
    path = Path(tempfile.mkdtemp(prefix="hostile-")) / "tiny.coralline"
    path.write_bytes(devices.packed({"int8": tiny.classifier(SIZE, filters=FILTERS)}, size=SIZE, samples=0))
    images = list(np.random.default_rng(5).integers(0, 256, (IMAGES, 40, 40, SIZE[2]), np.uint8))
    with Model(bundle.read(str(path)), "int8") as model:
        expected = [[list(pair) for pair in model(image).top(3)] for image in images]
    sound = ([bundle.array_bytes(image) for image in images], expected)
    command = [sys.executable, "-m", "deploy", "serve", str(path), "--role", "int8", "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    listening = None
    while listening is None:
        listening = re.search(r"listening on http://127.0.0.1:(\d+)", server.stderr.readline())
    port = int(listening.group(1))
    part = options.seconds / options.rounds
    phase(server, port, 2.0, 0, sound)  # warm up
    phases = [phase(server, port, part, slow, sound) for _ in range(options.rounds) for slow in (0, options.slow)]
    server.send_signal(signal.SIGTERM)
    output, noise = server.communicate(timeout=60)
    summary = json.loads(output)
    summary = {
        "forms": len(request_corpus.forms()),
        "slow_clients": options.slow,
        "seconds_of_attack": options.seconds,
        **summed(phases),
        "exit_code": server.returncode,
        "unexpected_errors": summary["unexpected_errors"],
        "log": noise[-2000:],
        "load_average": os.getloadavg()[0],
    }
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
