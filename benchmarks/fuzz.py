"""Damaged and hostile files of every format: `make fuzz [SECONDS=60] [TARGET=tflite]`.

`python benchmarks/fuzz.py --mutations 100000` runs a fixed number of mutations instead, divided by the shares of the
targets, and writes benchmarks/results/fuzz.json.
tests/support/fuzz_targets.py has the targets. The read of each damaged file must end with a result or with an error
message. A failure is a crash, another exception, a result that breaks a rule of its target, more time than SECONDS, or
more memory than ROOM in addition to that of the sound file. The file of a failure is written to tests/corpus/<target>,
where tests/benchmarks/test_fuzz.py reads it from then on, unless it was made from a shared model. `--replay
TARGET:NUMBER` with the same seed runs one mutation alone, in this process.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import repository

from fuzz_targets import CORPUS, Seed, Target, damaged, targets
from inspection_text import DifferentError

RESULTS = repository.RESULTS / "fuzz.json"
SECONDS = 10
"""Limit of processor time for one file."""
WAITING = 6
"""The limit of elapsed time is SECONDS times this factor, because other processes run too."""
ROOM = 300 << 20
"""Bytes of memory, chosen: more than the 256 MiB to which compressed content may unpack."""
OUTCOMES = ("missing", "refused", "answer", "exception", "different", "memory", "died", "hang", "contained")
SOUND = ("missing", "refused", "answer", "contained")
BLOCK = 50
"""Mutations of one target that a worker makes in a row."""
MOST_KEPT, MOST_KEPT_BYTES = 20, 100_000
"""Chosen: the corpus is in git, and has to stay below a megabyte."""


class Worker:
    """The folders and the memory of one worker process."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.targets = targets()
        self.prepared: dict[tuple[str, str, str], Path] = {}
        self.needs: dict[tuple[str, Path], int] = {}

    def place(self, target: Target, seed: Seed) -> Path:
        """Return the folder of a sound file, with the other files that its read needs."""
        key = (target.name, seed.name, seed.kind)
        if key not in self.prepared:
            folder = self.folder / f"{target.name}{len(self.prepared)}"
            folder.mkdir()
            target.prepare(folder, seed)
            (folder / seed.name).parent.mkdir(parents=True, exist_ok=True)
            self.prepared[key] = folder
        return self.prepared[key]

    def one(self, target: Target, number: int) -> tuple[str, float, int]:
        """Run one mutation; return the outcome, CPU seconds, and additional bytes compared with the sound file."""
        seed, content = damaged(target, self.seed, number)
        place = self.place(target, seed)
        need = self.need(target, seed, place)
        outcome, seconds, used = self.read(target, seed, place, content, number)
        beyond = used - need
        if beyond > ROOM:
            outcome = "contained" if target.native and contained(target.name, self.seed, number) else "memory"
        return outcome, seconds, 0 if outcome == "contained" else beyond

    def need(self, target: Target, seed: Seed, place: Path) -> int:
        """Return the bytes of memory that the read of the sound file takes."""
        key = (target.name, place)
        if key not in self.needs:
            outcome, _, _ = self.read(target, seed, place, seed.content, -1)  # imports
            if outcome != "answer" and seed in target.seeds()[: target.sound]:
                raise AssertionError(f"the sound file {seed.name} of {target.name}: {outcome}")
            self.needs[key] = self.read(target, seed, place, seed.content, -1)[2]
        return self.needs[key]

    def read(self, target: Target, seed: Seed, place: Path, content: bytes, number: int) -> tuple[str, float, int]:
        """Read one file; return the outcome, the CPU seconds and the bytes of memory."""
        (place / seed.name).write_bytes(content)
        Path("/proc/self/clear_refs").write_text("5")
        idle = resident("RSS")
        # The signals of the timers end the process in any state. WAITING: to wait for a core is not a hang.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAITING * SECONDS)
        began = time.process_time()
        outcome = "answer"
        try:
            target.read(place, seed)
        except target.refusals as error:
            outcome = "refused" if str(error) or error.args else "exception"
        except Exception as error:  # noqa: BLE001 - any other exception is a finding
            outcome = "different" if isinstance(error, DifferentError) else "exception"
            (self.folder / f"{target.name}-{number}.txt").write_text(traceback.format_exc())
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return outcome, time.process_time() - began, resident("HWM") - idle


class Run:
    """The results of the mutations of a run, which its workers send through queues."""

    def __init__(self, names: list[str], seed: int, folder: Path) -> None:
        self.names, self.seed, self.folder = names, seed, folder
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self.slowest = dict.fromkeys(names, 0.0)
        self.most = dict.fromkeys(names, 0)
        self.seconds = dict.fromkeys(names, 0.0)
        self.failures: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def work(self, jobs: list[tuple[str, int, int]], results: Any, present: Any) -> None:
        """Run the blocks of one worker: (target, first number, end). `present` has the current block and number."""
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory returns to the system at once
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        worker = Worker(folder, self.seed)
        for block, (name, first, last) in enumerate(jobs):
            rows = []
            for number in range(first, last):
                present[0], present[1] = block, number
                outcome, seconds, beyond = worker.one(worker.targets[name], number)
                rows.append((name, number, outcome, seconds, beyond))
                if outcome not in SOUND:
                    text = folder / f"{name}-{number}.txt"
                    results.put([(*rows.pop(), text.read_text()[-1500:] if text.exists() else "")])
            results.put(rows)
        present[0] = len(jobs)
        results.put(None)

    def add(self, rows: list[Any]) -> None:
        """Count the results of some mutations, and show failures."""
        with self.lock:
            for name, number, outcome, seconds, beyond, *text in rows:
                self.counts[name][outcome] += 1
                self.seconds[name] += seconds
                self.slowest[name] = max(self.slowest[name], seconds)
                self.most[name] = max(self.most[name], beyond)
                if outcome not in SOUND:
                    self.failures.append({"target": name, "number": number, "outcome": outcome, "text": "".join(text)})
                    print(f"{name}:{number}: {outcome} {''.join(text)[-600:]}", flush=True)


def run_share(run: Run, jobs: list[tuple[str, int, int]], budget_s: float | None) -> None:
    """Run some jobs in one worker process; if it ends, a new one continues after the mutation that ended it."""
    end = None if budget_s is None else time.monotonic() + budget_s
    while jobs and (end is None or time.monotonic() < end):
        results: Any = multiprocessing.SimpleQueue()
        present = multiprocessing.RawArray("q", 2)
        process = multiprocessing.Process(target=run.work, args=(jobs, results, present))
        process.start()
        while process.is_alive() or results._reader.poll():
            if results._reader.poll(0.1):
                rows = results.get()
                if rows is None:
                    break
                run.add(rows)
            if end is not None and time.monotonic() > end:
                process.kill()
                process.join()
                return
        process.join()
        block, number = present[0], present[1]
        if block >= len(jobs):
            return
        name, _, last = jobs[block]
        if process.exitcode == 1:  # an exception outside of the read: its traceback is on stderr
            print(f"{name}:{number}: the target itself fails", file=sys.stderr)
            os._exit(2)
        outcome = "hang" if process.exitcode in (-signal.SIGALRM, -signal.SIGPROF) else "died"
        if outcome == "died" and targets()[name].native and contained(name, run.seed, number):
            outcome = "contained"
        run.add([(name, number, outcome, float(SECONDS) if outcome == "hang" else 0.0, 0, f"exit {process.exitcode}")])
        jobs = [(name, number + 1, last), *jobs[block + 1 :]]


def contained(name: str, seed: int, number: int) -> bool:
    """Return whether the program refuses the file with an error: it reads the file in a child process first."""
    from compress.core.errors import CorallineError
    from compress.model.importers import model_file

    sound, content = damaged(targets()[name], seed, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sound.name
        path.write_bytes(content)
        try:
            model_file.read(path)
        except CorallineError:
            return True
    return False


def blocks(names: list[str], mutations: int) -> list[tuple[str, int, int]]:
    """Return all blocks of a run; the blocks of the targets are mixed."""
    known = targets()
    total = sum(known[name].share for name in names)
    keyed_blocks = []
    for name in names:
        count = max(round(mutations * known[name].share / total), 1)
        keyed_blocks += [(at / count, name, at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]
    return [(name, first, last) for _, name, first, last in sorted(keyed_blocks)]


def resident(name: str) -> int:
    """Return the resident bytes of this process: "RSS": now; "HWM": the maximum since the last reset."""
    match = re.search(rf"Vm{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def keep(failures: list[dict[str, Any]], seed: int) -> None:
    """Write the files of failures to the corpus, unless they are large, or made of files that are not ours."""
    known = targets()
    for failure in failures[:MOST_KEPT]:
        sound, content = damaged(known[failure["target"]], seed, failure["number"])
        where = f"--seed {seed} --replay {failure['target']}:{failure['number']}"
        if sound.is_ours and len(content) < MOST_KEPT_BYTES:
            suffix = "".join(Path(sound.name).suffixes)
            path = CORPUS / failure["target"] / f"{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            where = str(path)
        print(f"{failure['target']}:{failure['number']}: {failure['outcome']}, {len(content):,} bytes: {where}")


def summary(run: Run, took_s: float) -> dict[str, Any]:
    """Return the results of a run for the file of results."""
    rows = {
        name: {
            "mutations": sum(run.counts[name].values()),
            "outcomes": dict(run.counts[name]),
            "slowest_s": round(run.slowest[name], 2),
            "most_memory_beyond_mib": round(run.most[name] / 2**20, 1),
            "mean_ms": round(1000 * run.seconds[name] / max(sum(run.counts[name].values()), 1), 2),
        }
        for name in run.names
    }
    return {
        "mutations": sum(row["mutations"] for row in rows.values()),
        "seeds": [run.seed],
        "took_s": round(took_s, 1),
        "limits": {"s": SECONDS, "bytes_beyond_the_sound_file": ROOM},
        "failures": len(run.failures),
        "targets": rows,
    }


def replay(name: str, seed: int, number: int) -> None:
    """Run one mutation in this process, so that its error is shown."""
    target = targets()[name]
    sound, content = damaged(target, seed, number)
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder), seed)
        place = worker.place(target, sound)
        (place / sound.name).write_bytes(content)
        print(f"{sound.name}, {len(content):,} bytes")
        print(target.read(place, sound))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--target", action="append", choices=sorted(targets()))
    parser.add_argument("--seed", type=int, help="a fixed one, to repeat a run (default: a new one)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replay", metavar="TARGET:NUMBER")
    options = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    if options.replay:
        name, _, number = options.replay.partition(":")
        replay(name, seed, int(number))
        return
    names = options.target or list(targets())
    jobs = blocks(names, options.mutations or 1_000_000)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        total = Run(names, seed, Path(folder))
        began = time.monotonic()
        budget_s = None if options.mutations else options.seconds or 60.0
        threads = [
            threading.Thread(target=run_share, args=(total, jobs[index :: options.workers], budget_s))
            for index in range(options.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began
    result = summary(total, took_s)
    keep(total.failures, seed)
    print(f"seed {seed}: {result['mutations']:,} mutations in {took_s:.0f} s, {len(total.failures)} failures")
    print("| target | mutations | refused | answer | failed | mean | slowest | memory beyond |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in result["targets"].items():
        outcomes = row["outcomes"]
        failed = sum(count for outcome, count in outcomes.items() if outcome not in SOUND)
        cells = (name, row["mutations"], outcomes.get("refused", 0), outcomes.get("answer", 0), failed)
        tail = f"{row['mean_ms']} ms | {row['slowest_s']} s | {row['most_memory_beyond_mib']} MiB"
        print("|", " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells), "|", tail, "|")
    if options.mutations and not options.target:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if total.failures else 0)


if __name__ == "__main__":
    main()
