"""Damaged and hostile .tflite files: `python benchmarks/hostile.py [--mutations 100000] [--seed 0] [--workers 2]`.

Real models (CORALLINE_SHARED, or ../shared beside the project; small ones more often than large ones) are
damaged in every way of mutations.py. Each damaged file is read, checked, inspected, written, and read again:
that must give an error in words or an answer, the same from what was written; where only weights were touched,
the answer of the sound model. A crash, another exception, more than SECONDS, or more memory than 10 times the
file and ROOM is a failure; its file is kept, and `--replay <number>` with the same seed runs it alone.
Writes benchmarks/results/hostile.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import repository

from inspection_text import ROOM, TIMES, DifferentError, inspection_text
from mutations import MUTATORS, Model, mutate
from paths import SHARED

from compress.errors import CorallineError

RESULTS = repository.RESULTS / "hostile.json"
KINDS = tuple(MUTATORS)
SECONDS = 5
OUTCOMES = ("missing", "error", "answer", "exception", "different", "memory", "died")


class Run:
    """All mutations of one seed, and in shared memory what became of each."""

    def __init__(self, models: list[Model], seed: int, mutations: int, folder: Path) -> None:
        self.models, self.seed, self.mutations, self.folder = models, seed, mutations, folder
        self.weights = [1 / (len(model.content) + 50_000) for model in models]
        self.outcomes = multiprocessing.RawArray("b", mutations)
        self.seconds = multiprocessing.RawArray("f", mutations)
        self.beyond = multiprocessing.RawArray("f", mutations)  # memory beyond TIMES the file
        self.known: dict[str, str] = {}

    def make(self, number: int) -> tuple[Model, bytes]:
        """A damaged file, and the sound one that it was made of."""
        dice = random.Random(f"{self.seed}:{number}")
        (model,) = dice.choices(self.models, self.weights)
        return model, mutate(KINDS[number % len(KINDS)], model, dice)

    def one(self, number: int, idle: int) -> str:
        """The outcome of one, by name."""
        model, content = self.make(number)
        expected = self.sound(model) if KINDS[number % len(KINDS)] == "bits of weights" else ""
        Path("/proc/self/clear_refs").write_text("5")
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # its signal ends the process, whatever it does
        began = time.perf_counter()
        outcome = "answer"
        try:
            found = inspection_text(content)
            outcome = "answer" if expected in ("", found) else "different"
        except CorallineError as error:
            outcome = "error" if not expected and str(error) else "different"
        except Exception as error:  # noqa: BLE001 - any other exception is what is looked for
            outcome = "different" if isinstance(error, DifferentError) else "exception"
            (self.folder / f"{number}.txt").write_text(traceback.format_exc())
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.seconds[number] = time.perf_counter() - began
        self.beyond[number] = resident("HWM") - idle - TIMES * len(content)
        return "memory" if self.beyond[number] > ROOM else outcome

    def sound(self, model: Model) -> str:
        """The answer of an undamaged model."""
        if model.name not in self.known:
            self.known[model.name] = inspection_text(model.content)
        return self.known[model.name]

    def work(self, first: int, step: int) -> None:
        """One worker: every so many-th mutation."""
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once, and is not counted again
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for model in self.models[:3]:
            self.sound(model)
        idle = resident("RSS")
        for number in range(first, self.mutations, step):
            if self.outcomes[number] == 0:
                self.outcomes[number] = OUTCOMES.index("died")
                self.outcomes[number] = OUTCOMES.index(self.one(number, idle))

    def all(self, workers: int) -> None:
        """Everything; a worker that dies is begun again behind what it died of."""
        running = {first: self._started(first, workers) for first in range(workers)}
        while running:
            for first, process in list(running.items()):
                process.join(0.2)
                if process.exitcode == 0:
                    del running[first]
                elif process.exitcode is not None:
                    running[first] = self._started(first, workers)

    def _started(self, first: int, step: int) -> multiprocessing.Process:
        process = multiprocessing.Process(target=self.work, args=(first, step))
        process.start()
        return process


def resident(name: str) -> int:
    """Resident bytes of this process: "RSS" now, "HWM" at most since it was last reset."""
    found = re.search(rf"Vm{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def models() -> list[Model]:
    paths = sorted(SHARED.glob("**/*.tflite"), key=lambda path: path.stat().st_size)
    found = [Model(str(path.relative_to(SHARED)), path.read_bytes()) for path in paths]
    for model in found:  # here, so that no worker does it, and is measured with it
        assert model.structure
        assert model.weights is not None
    return found


def summary(run: Run, seconds: float) -> dict[str, Any]:
    """What is stored: outcomes by kind, and the largest of everything."""
    names = [OUTCOMES[outcome] for outcome in run.outcomes]
    by_kind = {kind: dict(Counter(names[place :: len(KINDS)])) for place, kind in enumerate(KINDS)}
    slowest = max(range(run.mutations), key=lambda number: run.seconds[number])
    largest = max(range(run.mutations), key=lambda number: run.beyond[number])
    return {
        "mutations": run.mutations,
        "seed": run.seed,
        "models": len(run.models),
        "outcomes": dict(Counter(names)),
        "by_kind": by_kind,
        "slowest": {"number": slowest, "s": round(run.seconds[slowest], 4)},
        "most_memory": {"number": largest, f"bytes_beyond_{TIMES}_times_the_file": int(run.beyond[largest])},
        "memory_bound": f"{TIMES} times the file and {ROOM} bytes",
        "took_s": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replay", type=int)
    options = parser.parse_args()
    sound = models()
    if not sound:
        sys.exit(f"{SHARED} has no models; CORALLINE_SHARED names the folder of shared files")
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    count = options.mutations if options.replay is None else options.replay + 1
    run = Run(sound, options.seed, count, folder)
    if options.replay is not None:
        model, content = run.make(options.replay)
        print(f"{model.name}, {KINDS[options.replay % len(KINDS)]}, {len(content)} bytes")
        print(inspection_text(content)[:2000])
        return
    began = time.monotonic()
    run.all(options.workers)
    seconds = time.monotonic() - began
    result = summary(run, seconds)
    failed = [number for number, outcome in enumerate(run.outcomes) if OUTCOMES[outcome] not in ("error", "answer")]
    for number in failed[:1000]:
        (folder / f"{number}.tflite").write_bytes(run.make(number)[1])
        print(f"{number}: {OUTCOMES[run.outcomes[number]]}, {KINDS[number % len(KINDS)]}, {folder}/{number}.tflite")
    if not failed:
        folder.rmdir()
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("| mutations | error | answer | failed | slowest | memory beyond 10x the file | took |")
    print("|---|---|---|---|---|---|---|")
    counts, most = result["outcomes"], max(run.beyond) / 2**20
    row = (count, counts.get("error", 0), counts.get("answer", 0), len(failed))
    print("|", *(f"{each:,} |" for each in row), f"{max(run.seconds):.2f} s | {most:.1f} MiB | {seconds:.0f} s |")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
