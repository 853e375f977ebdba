"""Overhead of `serve` over a bare loop: `python benchmarks/serve.py [--seconds 60] [--clients 64] [--confine]`.

The model takes at least five milliseconds on one thread. A bare loop of set_tensor, invoke and get_tensor and the
service are timed in turn, in rounds. Each round is compared with the loops before and after it: other times cannot be
compared on a machine that does other work. One server runs for all rounds. In each round, clients with open connections
send .npy bodies one after another. 1 in 20 requests has random bytes as its body. In 1 in 20 requests the client
disconnects: in the middle of the request or right after it. Every answer is compared with the answer of `Model` for
that image, and must have the id of its request. Only good answers that arrive are counted, so inferences for
disconnected clients lower the throughput of the service.

The clients are one process with one thread (`selectors`). Their requests and the expected answers are made before the
measurement. This process is bound to the last core; the server and the bare loop are not bound (with --confine they are
bound to the other cores). The bare loop runs without the clients, so the time of the clients can only lower the figure
of the service. The CPU time of the clients, and figures by CPU time (all threads of the server, per good answer), are
reported, too.

Prints the figures, and writes benchmarks/results/serve.json. No result is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
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

RESULTS = repository.RESULTS / "serve.json"


SIZE = (32, 32, 8)
FILTERS = (64, 128, 256, 512, 1024, 2048)
IMAGES = 32
WARM_S = 1.0
BARE = """
import json, sys, time
from deploy import Model
model = Model(sys.argv[1], role="int8")
session = model.session
(tensor,) = model.prepare(model.bundle.array("golden-input-0.npy"))
(place,), (result,) = session.input_indices, session.output_indices
put, invoke, get = session.interpreter.set_tensor, session.interpreter.invoke, session.interpreter.get_tensor
for _ in range(20):
    put(place, tensor), invoke(), get(result)
count, began, used = 0, time.perf_counter(), time.process_time()
until = began + float(sys.argv[2])
while time.perf_counter() < until:
    put(place, tensor)
    invoke()
    get(result)
    count += 1
taken = time.perf_counter() - began
print(json.dumps({"count": count, "seconds": taken, "cpu_s": time.process_time() - used}))
"""


def started(cores: set[int] | None, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=bind, **more)


def bare(path: Path, seconds: float, cores: set[int] | None) -> dict[str, float]:
    process = started(cores, "-c", BARE, path, seconds, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return dict(json.loads(process.communicate()[0]))


def chosen(folder: Path, at_least_s: float = 0.006) -> Path:
    """Return the smallest bundle whose model takes at least this CPU time; 6 ms, as the clock may rise later."""
    for filters in FILTERS:
        path = folder / f"{filters}.coralline"
        path.write_bytes(devices.packed({"int8": tiny.classifier(SIZE, filters=filters)}, size=SIZE, samples=0))
        loops = [bare(path, 1.0, None) for _ in range(3)]  # by CPU time, which other processes do not increase
        if min(loop["cpu_s"] / loop["count"] for loop in loops) >= at_least_s:
            break
    return path


def in_the_model_ms(port: int) -> float:
    """Return the mean time of an inference in ms, as the server measures it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        rows = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    return float(rows["coralline_model_seconds_sum"]) / float(rows["coralline_model_seconds_count"]) * 1000


def loaded(pid: int, clients: list[Client], seconds: float) -> dict[str, Any]:
    """Run the clients; return the figures after the first `WARM_S` seconds."""
    selector = selectors.DefaultSelector()
    for client in clients:
        client.send(selector)
    latencies: list[float] = []
    memory: list[int] = []
    began, warm = time.perf_counter(), None
    while (now := time.perf_counter()) < began + WARM_S + seconds:
        if warm is None and now > began + WARM_S:
            warm = (now, cpu_s(pid), time.process_time(), total(clients))
            latencies = []
        if warm and now > warm[0] + len(memory):
            memory.append(resident_bytes(pid))
        for key, _ in selector.select(0.2):
            client = key.data
            if answered(client, selector):
                latencies.append(client.latency)
                client.send(selector)
    assert warm is not None
    counts = total(clients)
    result = {
        "seconds": now - warm[0],
        "counts": dict(counts - warm[3]),
        "server_cpu_s": cpu_s(pid) - warm[1],
        "clients_cpu_s": time.process_time() - warm[2],
        "latency_ms": {str(share): float(np.percentile(latencies, share)) * 1000 for share in (50, 90, 99)},
        "memory_bytes": {"first": memory[0], "highest": max(memory), "last": memory[-1]},
    }
    waiting = [client for client in clients if client.sock is not None]
    until = time.perf_counter() + 30
    while waiting and time.perf_counter() < until:  # every waiting client must get its answer
        for key, _ in selector.select(0.2):
            if key.data.receive():
                waiting.remove(key.data)
                key.data.close(selector)
    result["lost"] = len(waiting)
    return result


def summed(loops: list[dict[str, float]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all rounds; throughput is relative to the mean of the loops before and after each round."""
    rates = [loop["count"] / loop["seconds"] for loop in loops]
    counts: Counter[str] = sum((Counter(row["counts"]) for row in rounds), Counter())
    good = [row["counts"].get("good", 0) / row["seconds"] for row in rounds]
    shares = [good[turn] / ((rates[turn] + rates[turn + 1]) / 2) for turn in range(len(rounds))]
    bare_cpu = sum(loop["cpu_s"] for loop in loops) / sum(loop["count"] for loop in loops)
    server_cpu = sum(row["server_cpu_s"] for row in rounds) / max(counts["good"], 1)
    memory = [row["memory_bytes"] for row in rounds]
    return {
        "throughput": {
            "median": float(np.median(shares)),
            "quartiles": [float(np.percentile(shares, share)) for share in (25, 75)],
            "each": shares,
        },
        "bare_per_s": rates,
        "good_per_s": good,
        "bare_cpu_ms": bare_cpu * 1000,
        "server_cpu_ms_per_answer": server_cpu * 1000,
        "counts": dict(counts),
        "mixed": counts["mixed"],
        "lost": sum(row["lost"] for row in rounds),
        "memory_bytes": {"first": memory[0]["first"], "highest": max(row["highest"] for row in memory)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--confine", action="store_true", help="server and bare loop on all cores but the last")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    others = every - {max(every)} if options.confine and len(every) > 1 else None
    path = chosen(Path(tempfile.mkdtemp(prefix="serve-")))
    opened = bundle.read(str(path))
    images = list(np.random.default_rng(5).integers(0, 256, (IMAGES, 40, 40, SIZE[2]), np.uint8))
    with Model(opened, "int8") as model:
        expected = [[list(pair) for pair in model(image).top(3)] for image in images]
    part = options.seconds / options.rounds
    loops, rounds = [bare(path, part / 2, others)], []
    arguments = ("-m", "deploy", "serve", path, "--role", "int8", "--port", 0, "--json")
    server = started(others, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    port, bodies = listening(server), [bundle.array_bytes(image) for image in images]
    for turn in range(options.rounds):
        os.sched_setaffinity(0, {max(every)})
        clients = [Client(port, 1000 * turn + number, bodies, expected) for number in range(options.clients)]
        rounds.append(loaded(server.pid, clients, part))
        os.sched_setaffinity(0, every)
        loops.append(bare(path, part / 2, others))
    model_ms = in_the_model_ms(port)
    server.send_signal(signal.SIGTERM)
    report = json.loads(server.communicate(timeout=60)[0])
    summary = {
        "clients": options.clients,
        "confined": others is not None,
        **summed(loops, rounds),
        "model_ms": model_ms,
        "exit_code": server.returncode,
        "server_told": {key: report[key] for key in ("vanished", "rejected")},
        "load_average": os.getloadavg()[0],
        "rounds": rounds,
    }
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
