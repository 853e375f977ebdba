"""`serve` under load: `python benchmarks/serve.py throughput|soak|attack [--seconds N] [--clients N] [--slow N]`.

One server, and clients that send images over open connections, one after another. Every answer is compared with the
answer of `Model` for that image, and must have the id of its request. Except under attack, 1 in 20 requests has random
bytes as its body, and in 1 in 20 requests the client disconnects: in the middle of the request or right after it.

- throughput: the overhead over a bare loop of set_tensor, invoke and get_tensor, for a model that takes at least five
  milliseconds on one thread. The loop and the service are timed in turn, and each round is compared with the loops
  before and after it: other times cannot be compared on a machine that does other work. Only good answers that arrive
  are counted, so inferences for disconnected clients lower the throughput. The clients are one process with one thread,
  bound to the last core; with --confine the server and the loop are bound to the other cores.
- soak: images of several sizes for a long time, with slow clients. At regular intervals the memory (RSS), the open
  files and the threads of the server are read. The exit code is 1 if an answer was wrong, a client got no answer, or
  the server failed. Growth of memory is not checked: the table shows the first, the middle and the last interval.
- attack: a few clients alone and during an attack, in turn. The attackers are a separate process: slow clients, and one
  client that sends the corpus of tests/support/request_corpus.py again and again, and checks the outcomes.

A slow client sends one byte of a head or of a body from time to time, and connects again when the service closes the
connection. Writes benchmarks/results/serve.json, soak.json or hostile_requests.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import repository

import devices
import numpy as np
import request_corpus
import tiny
from numpy.typing import NDArray
from paths import ROOT

from deploy.contract import bundle
from deploy.runner.model import Model

RESULTS = {"throughput": "serve", "soak": "soak", "attack": "hostile_requests"}
"""The name of the file of results of each measurement."""
SIDE, CHANNELS = 32, 8
THROUGHPUT_FILTERS = (64, 128, 256, 512, 1024, 2048)
"""The widths of the networks from which `of_6_ms` chooses."""
SOAK_SIDES = (8, 32, 40, 64, 120, 240)
ATTACK_FILTERS = 512
"""Chosen so that an inference takes some milliseconds: long enough to be disturbed."""
ATTACKED_CLIENTS = 4
"""Chosen: so few that they do not wait for each other, and the latency is that of the attack."""
GARBAGE = VANISH = 0.05
"""Chosen: often enough to occur thousands of times in an hour."""
WARM_S = 1.0
PATIENCE_S = 30.0
"""How long clients wait for their last answers."""
PAUSE_S = 0.02
"""Seconds between two requests of a client under attack, and between two requests of the corpus."""
BYTE_S = 0.25
"""Seconds in which a slow client sends one byte."""
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
Cores = set[int] | None


class Requests:
    """Images of a bundle's model as bodies of requests, with the expected answers."""

    def __init__(self, path: Path, sides: Sequence[int], channels: int = CHANNELS) -> None:
        chance = np.random.default_rng(5)
        images = [chance.integers(0, 256, (side, side, channels), np.uint8) for side in sides]
        self.bodies = [bundle.array_bytes(image) for image in images]
        with Model(bundle.read(str(path)), "int8") as model:
            self.expected = [[list(pair) for pair in model(image).top(3)] for image in images]


class Client:
    """One connection that sends requests one after another; all clients can share one thread with one selector."""

    def __init__(self, port: int, number: int, requests: Requests, *, sound: bool = False) -> None:
        self.port, self.number, self.requests, self.sound = port, number, requests, sound
        self.random, self.turn, self.counts = np.random.default_rng(number), 0, Counter[str]()
        self.sock: socket.socket | None = None

    def send(self, selector: selectors.BaseSelector) -> None:
        """Send the next request. If the client disconnects on purpose, send another one on a new connection."""
        while True:
            if self.sock is None:
                self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(self.sock, selectors.EVENT_READ, self)
            self.turn += 1
            self.received = b""
            self.garbage = not self.sound and bool(self.random.random() < GARBAGE)
            self.image = int(self.random.integers(len(self.requests.bodies)))
            body = self.requests.bodies[self.image]
            if self.garbage:
                body = self.random.bytes(int(self.random.integers(1, 20000)))
            head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nX-Request-Id: %d-%d\r\n\r\n"
            request = (head % (len(body), self.number, self.turn)).encode() + body
            vanishes = not self.sound and bool(self.random.random() < VANISH)
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
        """Close the connection."""
        if self.sock is not None:
            selector.unregister(self.sock)
            self.sock.close()
            self.sock = None

    def answered(self, selector: selectors.BaseSelector) -> bool:
        """Receive data, and return whether an answer is complete; judge it. Connect again if the server disconnects."""
        assert self.sock is not None
        try:
            part = self.sock.recv(65536)
        except OSError:
            part = b""
        if not part:
            self.counts["ended by the server"] += 1
            self.close(selector)
            self.send(selector)
            return False
        self.received += part
        head, _, body = self.received.partition(b"\r\n\r\n")
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
        if status == 503:  # there are more requests than the service admits
            return "status 503"
        if self.garbage:
            return "garbage refused" if 400 <= status < 500 else "garbage wrong"
        if status != 200:
            return f"status {status}"
        predictions = [[row["label"], row["score"]] for row in answer["top"]]
        return "good" if predictions == self.requests.expected[self.image] else "mixed"


class Slow:
    """A slow client, which sends one byte of a request in BYTE_S seconds."""

    def __init__(self, port: int, number: int) -> None:
        head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
        self.content = head + b"a: b\r\n" * 1000
        if number % 2:
            head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000000\r\n\r\n"
            self.content = head + bytes(5000)
        self.address = ("127.0.0.1", port)
        self.sock: socket.socket | None = None
        self.next_s = 0.0
        self.cut_off = 0

    def step(self) -> None:
        """Send a byte if it is time for the next one."""
        if time.monotonic() < self.next_s:
            return
        self.next_s = time.monotonic() + BYTE_S
        try:
            if self.sock is None:
                self.sock, self.place = socket.create_connection(self.address, timeout=10), 0
            self.sock.sendall(self.content[self.place : self.place + 1])
            self.place += 1
            self.sock.setblocking(False)
            self.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.cut_off += 1  # the service answered or closed the connection
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class Server:
    """A running service, its port, and what it uses; after the block of `running`, its exit code and its report."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.exit_code: int | None = None
        self.report: dict[str, Any] = {}
        while not (match := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")
            time.sleep(0.1)
        self.port = int(match.group(1))

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def used(self) -> dict[str, int]:
        """Return the resident bytes now and at their maximum, and the open files and threads."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        rss, peak = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        files = len(os.listdir(folder / "fd"))
        return {"rss_bytes": rss, "peak_bytes": peak, "files": files, "threads": int(status["Threads"])}


def started(cores: Cores, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=bind, **more)


@contextmanager
def running(path: Path, cores: Cores = None) -> Iterator[Server]:
    """Yield a service of a bundle, which ends with the block."""
    arguments = ("-m", "deploy", "serve", path, "--role", "int8", "--port", 0, "--json")
    report, log = path.with_name("report.json"), path.with_name("log.txt")
    with report.open("w") as stdout, log.open("w") as stderr:  # files: a full pipe would stop the server
        server = Server(started(cores, *arguments, stdout=stdout, stderr=stderr), log)
        try:
            yield server
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.exit_code = server.process.wait(60)
    server.report = json.loads(report.read_text())


def packed(folder: Path, filters: int, channels: int = CHANNELS) -> Path:
    """Write a bundle whose model has a convolution with this number of filters."""
    path, size = folder / f"{filters}.coralline", (SIDE, SIDE, channels)
    path.write_bytes(devices.packed({"int8": tiny.classifier(size, filters=filters)}, size=size, samples=0))
    return path


def loaded(
    server: Server, clients: list[Client], seconds: float, interval_s: float, slow: Sequence[Slow] = ()
) -> list[dict[str, Any]]:
    """Run the clients, and return the figures of each interval; the last one ends when all clients have answers."""
    selector = selectors.DefaultSelector()
    for client in clients:
        client.send(selector)
    rows: list[dict[str, Any]] = []
    latencies: list[float] = []
    began = last = now = time.perf_counter()
    before, server_s, own_s = total(clients), server.cpu_s(), time.process_time()

    def end_interval() -> None:
        nonlocal last, before, server_s, own_s
        counts, cpu = total(clients), {"server_cpu_s": server.cpu_s() - server_s}
        cpu["clients_cpu_s"] = time.process_time() - own_s
        row = {"at_s": now - began, "seconds": now - last, "counts": dict(counts - before)}
        rows.append({**row, **cpu, **server.used(), "latency_ms": percentiles_ms(latencies)})
        latencies.clear()
        last, before, server_s, own_s = now, counts, server.cpu_s(), time.process_time()

    while selector.get_map() and now < began + seconds + PATIENCE_S:
        for dripping in slow:
            dripping.step()
        for key, _ in selector.select(0.2):
            client = key.data
            if client.answered(selector):
                latencies.append(client.latency)
                client.send(selector) if now < began + seconds else client.close(selector)
        now = time.perf_counter()
        if now >= last + interval_s and latencies and now < began + seconds:
            end_interval()
    for key in [*selector.get_map().values()]:
        key.data.counts["lost"] += 1
        key.data.close(selector)
    end_interval()
    return rows


def total(clients: Sequence[Client]) -> Counter[str]:
    """Return the counts of the answers to all clients."""
    return sum((client.counts for client in clients), Counter())


def percentiles_ms(seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(seconds, share)) * 1000 for share in (50, 90, 99)} if len(seconds) else {}


def bare(path: Path, seconds: float, cores: Cores) -> dict[str, float]:
    process = started(cores, "-c", BARE, path, seconds, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return dict(json.loads(process.communicate()[0]))


def of_6_ms(folder: Path) -> Path:
    """Return the smallest bundle whose model takes at least 6 ms of CPU time: 5 ms if the clock rises later."""
    for filters in THROUGHPUT_FILTERS:
        path = packed(folder, filters)
        loops = [bare(path, 1.0, None) for _ in range(3)]  # by CPU time, which other processes do not increase
        if min(loop["cpu_s"] / loop["count"] for loop in loops) >= 0.006:
            break
    return path


def in_the_model_ms(port: int) -> float:
    """Return the mean time of an inference in ms, as the server measures it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        rows = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    return float(rows["coralline_model_seconds_sum"]) / float(rows["coralline_model_seconds_count"]) * 1000


def throughput(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the good answers per second, relative to the mean of the bare loops before and after each round."""
    every = os.sched_getaffinity(0)
    others = every - {max(every)} if options.confine and len(every) > 1 else None
    path = of_6_ms(folder)
    requests = Requests(path, [40] * 32)
    part = (options.seconds or 60.0) / options.rounds
    loops, rounds = [bare(path, part / 2, others)], []
    with running(path, others) as server:
        for turn in range(options.rounds):
            os.sched_setaffinity(0, {max(every)})
            clients = [Client(server.port, 1000 * turn + number, requests) for number in range(options.clients)]
            loaded(server, clients, WARM_S, WARM_S)
            rounds += loaded(server, clients, part, part)[-1:]
            os.sched_setaffinity(0, every)
            loops.append(bare(path, part / 2, others))
        model_ms = in_the_model_ms(server.port)
    bare_rates = [loop["count"] / loop["seconds"] for loop in loops]
    rates = [row["counts"].get("good", 0) / row["seconds"] for row in rounds]
    shares = [rate / ((bare_rates[turn] + bare_rates[turn + 1]) / 2) for turn, rate in enumerate(rates)]
    counts = summed(row["counts"] for row in rounds)
    return {
        "clients": options.clients,
        "confined": others is not None,
        "throughput": {
            "median": float(np.median(shares)),
            "quartiles": [float(np.percentile(shares, share)) for share in (25, 75)],
            "each": shares,
        },
        "bare_per_s": bare_rates,
        "good_per_s": rates,
        "bare_cpu_ms": sum(loop["cpu_s"] for loop in loops) / sum(loop["count"] for loop in loops) * 1000,
        "server_cpu_ms_per_answer": sum(row["server_cpu_s"] for row in rounds) / max(counts["good"], 1) * 1000,
        "counts": dict(counts),
        "memory_bytes": {"first": rounds[0]["rss_bytes"], "highest": rounds[-1]["peak_bytes"]},
        "model_ms": model_ms,
        "exit_code": server.exit_code,
        "server_told": {key: server.report[key] for key in ("vanished", "rejected")},
        "rounds": rounds,
    }


def summed(counts: Any) -> Counter[str]:
    return sum(map(Counter, counts), Counter())


def soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load the service for a long time; print a table of the first, the middle and the last interval."""
    path = packed(folder, 64)
    requests = Requests(path, [side for side in SOAK_SIDES for _ in range(5)])
    seconds = options.seconds or 3600.0
    with running(path) as server:
        clients = [Client(server.port, number, requests) for number in range(options.clients)]
        slow = [Slow(server.port, number) for number in range(options.slow or 8)]
        rows = loaded(server, clients, seconds, max(seconds / 60, 5.0), slow)
        for client in slow:
            client.close()
        time.sleep(PATIENCE_S)
        rest = server.used()
    counts = total(clients)
    print("minute  RSS MB  files  threads  p50 ms  p99 ms  answers")
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        latency = row["latency_ms"]
        print(
            f"{row['at_s'] / 60:6.1f}  {row['rss_bytes'] / 1e6:6.1f}  {row['files']:5}  {row['threads']:7}"
            f"  {latency['p50']:6.1f}  {latency['p99']:6.1f}  {row['counts'].get('good', 0):7}"
        )
    return {
        "minutes": seconds / 60,
        "clients": options.clients,
        "slow_cut_off": sum(client.cut_off for client in slow),
        "counts": dict(counts),
        "wrong": {name: counts[name] for name in ("mixed", "garbage wrong", "lost") if counts[name]},
        "after_the_load": rest,
        "exit_code": server.exit_code,
        "server_told": {key: server.report[key] for key in ("vanished", "rejected")},
        "server_stderr_lines": len(server.log.read_text().splitlines()),
        "intervals": rows,
    }


def attack(port: int, seconds: float, slow: int, results: Any) -> None:
    """Attack a service, and put the counts and the complaints into a queue, after the word "ready"."""
    address = ("127.0.0.1", port)
    quick = [form for form in request_corpus.forms() if not form.name.startswith("slow: ")]
    results.put("ready")
    ending = time.monotonic() + seconds
    complaints, counts = Counter[str](), Counter[str]()

    def send_corpus() -> None:
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

    sender = threading.Thread(target=send_corpus)
    sender.start()
    clients = [Slow(port, number) for number in range(slow)]
    while time.monotonic() < ending:
        for client in clients:
            client.step()
            time.sleep(BYTE_S / slow)
    sender.join()
    counts["slow cut off"] = sum(client.cut_off for client in clients)
    results.put((counts, complaints))


def ask(client: Client, ending: threading.Event, latencies: list[float]) -> None:
    """Send the requests of one client with pauses, until the end."""
    selector = selectors.DefaultSelector()
    while not ending.is_set():
        client.send(selector)
        while not client.answered(selector):
            pass
        latencies.append(client.latency)
        time.sleep(PAUSE_S)
    client.close(selector)


def phase(server: Server, requests: Requests, seconds: float, slow: int) -> dict[str, Any]:
    """Measure the sound clients for some time; with `slow` clients, under attack."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    attacker = context.Process(target=attack, args=(server.port, seconds + 2, slow, results))
    if slow:
        attacker.start()
        results.get()
        time.sleep(1.0)
    clients = [Client(server.port, number, requests, sound=True) for number in range(ATTACKED_CLIENTS)]
    ending, latencies, memory = threading.Event(), list[float](), []
    threads = [threading.Thread(target=ask, args=(client, ending, latencies)) for client in clients]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.5)
        memory.append(server.used()["rss_bytes"])
    ending.set()
    for thread in threads:
        thread.join()
    counts, complaints = results.get() if slow else (Counter(), Counter())
    row = {"counts": total(clients), "latencies_s": latencies, "memory_bytes": memory, **server.used()}
    return {**row, "attack": counts, "complaints": complaints}


def attacked(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the clients alone and during an attack, in turn."""
    path = packed(folder, ATTACK_FILTERS, channels=1)  # the images of the corpus have one channel
    requests = Requests(path, [40] * 32, channels=1)
    seconds, slow = options.seconds or 60.0, options.slow or 200
    with running(path) as server:
        phase(server, requests, 2.0, 0)  # warm up
        part = seconds / options.rounds
        rounds = [[phase(server, requests, part, count) for count in (0, slow)] for _ in range(options.rounds)]
    result: dict[str, Any] = {"forms": len(request_corpus.forms()), "slow_clients": slow, "seconds_of_attack": seconds}
    phases = dict(zip(("alone", "attacked"), zip(*rounds, strict=True), strict=True))
    for name, rows in phases.items():
        result[name] = {
            "latency_ms": percentiles_ms(np.concatenate([row["latencies_s"] for row in rows])),
            "counts": dict(summed(row["counts"] for row in rows)),
            "memory_bytes": [max(row["memory_bytes"]) for row in rows],
            "peak_bytes": max(row["peak_bytes"] for row in rows),
        }
    return {
        **result,
        "attack": dict(summed(row["attack"] for row in phases["attacked"])),
        "complaints": dict(summed(row["complaints"] for row in phases["attacked"])),
        "p99_ratio": result["attacked"]["latency_ms"]["p99"] / result["alone"]["latency_ms"]["p99"],
        "exit_code": server.exit_code,
        "unexpected_errors": server.report["unexpected_errors"],
        "log": server.log.read_text()[-2000:],
    }


MEASUREMENTS = {"throughput": throughput, "soak": soak, "attack": attacked}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--seconds", type=float, help="of load or attack, in all rounds together (60; soak: 3600)")
    parser.add_argument("--rounds", type=int, default=20, help="of throughput and attack")
    parser.add_argument("--clients", type=int, help="of throughput (64) and soak (48: with the slow ones, none waits)")
    parser.add_argument("--slow", type=int, help="slow clients of soak (8) and attack (200)")
    parser.add_argument("--confine", action="store_true", help="throughput: server and loop on all cores but the last")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.clients = options.clients or (48 if options.measurement == "soak" else 64)
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        result = MEASUREMENTS[options.measurement](Path(folder), options)
    result["load_average"] = os.getloadavg()[0]
    text = json.dumps(result, indent=1)
    (options.out or repository.RESULTS / f"{RESULTS[options.measurement]}.json").write_text(text + "\n")
    if options.measurement == "soak":
        print({name: value for name, value in result.items() if name != "intervals"})
        return 1 if result["wrong"] or result["exit_code"] else 0
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
