"""`serve` for a long time under mixed load: `python benchmarks/soak.py [--minutes 60] [--clients 48]`.

One server, and clients that send images of several sizes over open connections, one after another. 1 in 20 requests
has random bytes as its body. In 1 in 20 requests the client disconnects: in the middle of the request or right after
it. Some clients are slow: they send a part of a request, and then nothing for seconds. Every answer is compared with
the answer of `Model` for that image, and must have the id of its request. At regular intervals the memory (RSS), the
open files and the threads of the server are read, and the latencies since the last interval are summarized.

Prints a table, and writes benchmarks/results/soak.json. The exit code is 1 if an answer was wrong, a client got no
answer, or the server failed. Growth of memory is not checked: the table shows the first, the middle and the last
interval.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import repository

import devices
import numpy as np
import tiny
from load_clients import Client, answered, cpu_s, listening, resident_bytes, total
from paths import ROOT

from deploy.contract import bundle
from deploy.runner.model import Model

RESULTS = repository.RESULTS / "soak.json"
SIZE = (32, 32, 8)
SIDES = (8, 32, 40, 64, 120, 240)
SLOW_S = 4.0


class SlowClients:
    """Connections that send a part of a request, and are closed after some seconds."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._open: list[tuple[float, socket.socket]] = []
        self.given_up = 0

    def turn(self) -> None:
        """Close connections older than SLOW_S, and open new ones in their place."""
        now = time.monotonic()
        for began, sock in list(self._open):
            if now - began > SLOW_S:
                sock.close()
                self._open.remove((began, sock))
                self.given_up += 1
        while len(self._open) < self._count:
            sock = socket.create_connection(("127.0.0.1", self._port), timeout=30)
            sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" + bytes(100))
            self._open.append((now, sock))

    def close(self) -> None:
        """Close all connections."""
        for _, sock in self._open:
            sock.close()


def images(path: Path) -> tuple[list[bytes], list[list[Any]]]:
    """Return the bodies of requests, and the expected answer to each."""
    chance = np.random.default_rng(5)
    arrays = [chance.integers(0, 256, (side, side, SIZE[2]), np.uint8) for side in SIDES for _ in range(5)]
    with Model(bundle.read(str(path)), "int8") as model:
        expected = [[list(pair) for pair in model(image).top(3)] for image in arrays]
    return [bundle.array_bytes(image) for image in arrays], expected


def used(pid: int) -> dict[str, int]:
    """Return the resident bytes, open files and threads of the server now."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    threads = next(int(line.split()[1]) for line in status if line.startswith("Threads"))
    return {"rss_bytes": resident_bytes(pid), "files": len(os.listdir(f"/proc/{pid}/fd")), "threads": threads}


def sampled(pid: int, seconds: float, latencies: list[float], counts: Counter[str], cpu: float) -> dict[str, Any]:
    """Return the figures of one interval."""
    shares = {f"p{share}": round(float(np.percentile(latencies, share)) * 1000, 2) for share in (50, 90, 99)}
    return {
        "at_s": round(seconds),
        **used(pid),
        "latency_ms": {**shares, "highest": round(max(latencies) * 1000, 2)},
        "counts": dict(counts),
        "server_cpu_s": round(cpu, 2),
    }


def loaded(pid: int, clients: list[Client], slow: SlowClients, seconds: float, interval: float) -> list[dict[str, Any]]:
    """Run the clients, and return the figures of each interval."""
    selector = selectors.DefaultSelector()
    for client in clients:
        client.send(selector)
    began = last = time.perf_counter()
    latencies: list[float] = []
    before, cpu, rows = Counter[str](), cpu_s(pid), []
    while (now := time.perf_counter()) < began + seconds:
        slow.turn()
        if now >= last + interval and latencies:
            counts = total(clients)
            rows.append(sampled(pid, now - began, latencies, counts - before, cpu_s(pid) - cpu))
            last, latencies, before, cpu = now, [], counts, cpu_s(pid)
        for key, _ in selector.select(0.2):
            client = key.data
            if answered(client, selector):
                latencies.append(client.latency)
                client.send(selector)
    waiting = [client for client in clients if client.sock is not None]
    until = time.perf_counter() + 30
    while waiting and time.perf_counter() < until:
        for key, _ in selector.select(0.2):
            if answered(key.data, selector):
                waiting.remove(key.data)
                key.data.close(selector)
    for client in waiting:
        client.counts["lost"] += 1
        client.close(selector)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the first, the middle and the last interval, and the maxima, as a table."""
    chosen = [rows[0], rows[len(rows) // 2], rows[-1]]
    lines = ["minute  RSS MB  files  threads  p50 ms  p99 ms  answers"]
    for row in chosen:
        latency = row["latency_ms"]
        lines.append(
            f"{row['at_s'] / 60:6.1f}  {row['rss_bytes'] / 1e6:6.1f}  {row['files']:5}  {row['threads']:7}"
            f"  {latency['p50']:6.1f}  {latency['p99']:6.1f}  {row['counts'].get('good', 0):7}"
        )
    highest = max(row["rss_bytes"] for row in rows) / 1e6
    lines.append(f"highest RSS {highest:.1f} MB, most files {max(row['files'] for row in rows)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--slow", type=int, default=8, help="connections that send a part of a request")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="soak-")) / "soak.coralline"
    path.write_bytes(devices.packed({"int8": tiny.classifier(SIZE, filters=64)}, size=SIZE, samples=0))
    bodies, expected = images(path)
    command = [sys.executable, "-m", "deploy", "serve", str(path), "--role", "int8", "--port", "0", "--json"]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, text=True, stdout=log, stderr=pipe)
        port = listening(server)
        assert server.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=errors.extend, args=(server.stderr,))  # a full pipe would stop the server
        reader.start()
        clients = [Client(port, number, bodies, expected) for number in range(options.clients)]
        slow = SlowClients(port, options.slow)
        seconds = options.minutes * 60
        rows = loaded(server.pid, clients, slow, seconds, max(seconds / 60, 5.0))
        slow.close()
        time.sleep(SLOW_S)
        rest = used(server.pid)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        reader.join()
        log.seek(0)
        reported = json.loads(log.read())
    counts = total(clients)
    wrong = {name: count for name, count in counts.items() if name in ("mixed", "garbage wrong", "lost")}
    result = {
        "schema_version": 1,
        "minutes": options.minutes,
        "clients": options.clients,
        "slow_clients_given_up": slow.given_up,
        "counts": dict(counts),
        "wrong": wrong,
        "after_the_load": rest,
        "exit_code": server.returncode,
        "server_reported": {key: reported[key] for key in ("vanished", "rejected")},
        "server_stderr_lines": len(errors),
        "load_average": os.getloadavg()[0],
        "intervals": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(f"{dict(counts)}\nafter the load: {rest}; exit code {server.returncode}")
    return 1 if wrong or server.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
