"""A search of many processes: `python benchmarks/scale.py [--workers 64] [--trials 2000] [--storages journal ...]`.

Processes ask for tiny trials of one study and report their results, as `search --join` does, but without training. The
storages are tested one after the other: a journal file, a separate PostgreSQL server, and Optuna's gRPC proxy in front
of such a server. Meanwhile processes are killed (SIGKILL) at random moments and replaced, and the server is stopped as
in a crash and started again, twice. Every process writes each result that the storage has confirmed to its own file.
The figures are

- lost: confirmed results that are not in the storage, or are different there
- counted twice: trials whose result was confirmed to two processes
- still running: trials without a result whose process is dead

`--speed` measures trials per hour with 1 and 4 processes instead, for trials that wait (0.5 s) and that compute
(0.5 s of CPU). Prints JSON, and writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import repository

import postgresql
from paths import ROOT

from compress.core.errors import PipelineError
from compress.pipeline.search.space import Range, Space
from compress.pipeline.search.study import SearchStudy
from compress.pipeline.yaml_file import Document
from compress.report.search_record import TrialRecord

RESULTS = repository.RESULTS / "scale.json"
STORAGES = ("journal", "postgresql", "proxy")
SPACE = Space(Document(Path(), {"x": 0.5, "stages": []}, {}), (Range("x", ("x",), 0.0, 1.0),))
GOALS: Any = SimpleNamespace(objectives=(SimpleNamespace(name="accuracy", higher_is_better=True),))
KILLS_PER_S = 0.5
RESTARTS = 2


class RandomStudy(SearchStudy):
    """A study whose values are random: the time of the storage is measured, not that of the sampler."""

    def sampler(self, seed: int) -> Any:
        """Return a sampler of random values."""
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)


def study(location: str) -> SearchStudy:
    where: str | Path = location if "://" in location else Path(location)
    return RandomStudy(SPACE, GOALS, "scale", {}, 0, where)


def work(location: str, trials: int, confirmed: str, kind: str) -> None:
    """Run trials until enough are complete; write a line for each result that the storage has confirmed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        shared = study(location)
    except PipelineError:  # the server is being started; another process takes the place of this one
        return
    with Path(confirmed).open("a") as stream:
        while True:
            began = time.perf_counter()
            counted = [known_trial for known_trial in shared.look()[0] if known_trial.status in ("complete", "running")]
            if len([known_trial for known_trial in counted if known_trial.status == "complete"]) >= trials:
                return
            if len(counted) >= trials:
                time.sleep(0.2)
                continue
            trial, _ = shared.ask()
            work_began = time.perf_counter()
            with shared.leased(trial):
                perform(kind)
            done = time.perf_counter()
            value = random.random()
            record = TrialRecord(trial.number, "complete", values={"accuracy": value}, reason=f"{os.getpid()}")
            if shared.tell(trial, record):
                overhead_ms = 1000 * (work_began - began + time.perf_counter() - done)
                stream.write(json.dumps({"number": trial.number, "value": value, "overhead_ms": overhead_ms}) + "\n")
                stream.flush()


def perform(kind: str) -> None:
    """Run a trial: it does nothing, waits, or computes, depending on `kind`."""
    if kind == "waits":
        time.sleep(0.5)
    elif kind == "computes":
        end = time.process_time() + 0.5
        while time.process_time() < end:
            sum(range(1000))


@contextmanager
def serving(name: str) -> Iterator[tuple[str, postgresql.Server | None]]:
    """Start a storage; yield its location, and the PostgreSQL server behind it."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        if name == "journal":
            yield folder, None
            return
        with postgresql.serving() as server:
            url = server.new_database()
            if name == "postgresql":
                yield url, server
                return
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "compress", "search-proxy", url, "--port", str(port)]
            with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as proxy:
                try:
                    yield f"grpc://localhost:{port}", server
                finally:
                    proxy.kill()


def attacked(name: str, workers: int, trials: int) -> dict[str, Any]:
    """Run a search while its processes are killed and its server is restarted; return the figures."""
    chance = random.Random(0)
    folder = Path(tempfile.mkdtemp(prefix="scale-confirmed-"))
    kills, restarts, began = 0, 0, time.monotonic()
    with serving(name) as (location, server):
        shared = study(location)  # its tables exist before the processes begin
        running: list[Any] = []
        number = 0
        next_kill = time.monotonic() + 20
        while True:
            running = [worker for worker in running if worker.is_alive()]
            complete = sum(record.status == "complete" for record in shared.records())
            if complete >= trials:
                break
            while len(running) < workers and complete < trials:
                process = multiprocessing.Process(target=work, args=(location, trials, str(folder / f"{number}"), ""))
                process.start()
                running.append(process)
                number += 1
            if time.monotonic() > next_kill and complete < 0.95 * trials:
                victim = chance.choice(running)
                victim.kill()
                kills += 1
                next_kill = time.monotonic() + chance.expovariate(KILLS_PER_S)
            if server is not None and restarts < RESTARTS and complete > (restarts + 1) * trials / (RESTARTS + 1):
                server.stop("immediate")
                time.sleep(3)
                server.start()
                restarts += 1
            time.sleep(0.1)
        for worker in running:
            worker.join(timeout=120)
        deadline = time.monotonic() + 120
        while any(record.status == "running" for record in shared.records()) and time.monotonic() < deadline:
            shared.look()
            time.sleep(1)
        stored = {record.number: record for record in shared.records()}
        shared.close()
    rows = [
        json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines() if line.endswith("}")
    ]
    shutil.rmtree(folder)
    numbers = [row["number"] for row in rows]
    complete_numbers = {number for number, record in stored.items() if record.status == "complete"}
    lost = [row for row in rows if row["number"] not in complete_numbers
            or stored[row["number"]].values["accuracy"] != row["value"]]  # fmt: skip
    overheads = sorted(row["overhead_ms"] for row in rows)
    return {
        "storage": name,
        "workers": workers,
        "complete": len(complete_numbers),
        "confirmed results": len(rows),
        "lost": len(lost),
        "counted twice": len(numbers) - len(set(numbers)),
        "killed processes": kills,
        "restarts of the server": restarts,
        "interrupted trials": sum(record.status == "interrupted" for record in stored.values()),
        "still running": sum(record.status == "running" for record in stored.values()),
        "overhead per trial, ms, median": round(statistics.median(overheads), 1),
        "overhead per trial, ms, 95%": round(overheads[int(0.95 * len(overheads))], 1),
        "s": round(time.monotonic() - began, 1),
    }


def speed(name: str, kind: str, workers: int, trials: int) -> float:
    """Return the trials per hour, from the start of the processes to the end of the last one."""
    with serving(name) as (location, _), tempfile.TemporaryDirectory() as folder:
        study(location).close()
        arguments = [(location, trials, str(Path(folder) / str(number)), kind) for number in range(workers)]
        processes = [multiprocessing.Process(target=work, args=worker_arguments) for worker_arguments in arguments]
        began = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return 3600 * trials / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=STORAGES)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.speed:
        for kind in ("waits", "computes"):
            one, four = (speed("postgresql", kind, count, 40 * count) for count in (1, 4))
            results[f"speed, trials that {kind}"] = {"1": round(one), "4": round(four), "ratio": round(four / one, 2)}
    else:
        for name in options.storages:
            results[name] = attacked(name, options.workers, options.trials)
            print(json.dumps(results[name], indent=1), flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
