"""Faults of disks, systems and people: `python benchmarks/faults.py [--cases 1000] [--jobs 2] [--only NAME]`.

Commands that write files (a run, a training, `export`, `legalize`, `header`, `init`, `results`, `learn`, `deploy`,
`trust add`) get a fault at one of their file operations. They are killed there or in the middle of a write; the disk is
full, broken or read-only; a permission is missing; the reply of a network file system is lost; the clock changes by 20
years; the power is cut (the possible content of the disk is built from a record of the operations); two commands run at
once; files belong to another user. After the fault, each file must have its old or its new content, no command may use
a half-written file as a result, an error must be a message with a documented exit code, and the same command without a
fault must succeed.

`--only deploy` or `--only "deploy/power cut"` selects cases; `--case "deploy/power cut/17"` repeats one, and prints its
messages. Writes benchmarks/results/faults.json with the counts and every failure. The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import repository

import fault_injection
from fault_cases import Bench, Case, Verdict, plan

RESULTS = repository.RESULTS / "faults.json"


def judged(cases: list[Case], prepared: Bench, folder: Path, jobs: int) -> list[Verdict]:
    """Judge cases, `jobs` at a time."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    verdicts: list[Verdict] = []

    def work(number: int) -> None:
        bench = Bench(folder / f"bench{number}", prepared)
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                bench.close()
                return
            verdict = bench.judge(case)
            verdicts.append(verdict)
            remark = "; ".join(verdict.wrong) or "right"
            print(f"{len(verdicts)}/{len(cases)} {case}: {verdict.state}, {verdict.code}: {remark}", file=sys.stderr)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def counts(verdicts: list[Verdict]) -> dict[str, dict[str, dict[str, int]]]:
    """Count the states by subject and fault; `wrong` is the number of failures among them."""
    table: dict[str, dict[str, Counter[str]]] = {}
    for verdict in verdicts:
        cell = table.setdefault(verdict.case.subject, {}).setdefault(verdict.case.fault, Counter())
        cell[verdict.state if verdict.state in ("old", "new", "partly new", "removed") else "neither"] += 1
        cell["wrong"] += bool(verdict.wrong)
    return {subject: {fault: dict(cell) for fault, cell in row.items()} for subject, row in table.items()}


def show(verdict: Verdict) -> None:
    """Print the verdict on one case."""
    print(f"{verdict.case}: {verdict.state}, exit code {verdict.code}\n{verdict.errors}")
    print("\n".join(verdict.wrong) or "right")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if reason := fault_injection.missing():
        sys.exit(reason)
    began, folder = time.monotonic(), fault_injection.temporary()
    try:
        prepared = Bench(folder / "prepared")
        if options.case:
            cases = [Case.parse(text) for text in options.case]
            for case in cases:
                prepared.subject(case.subject)
        else:
            cases = plan(prepared, options.cases, options.only)
        prepared.close()
        verdicts = judged(cases, prepared, folder, options.jobs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.case:
        for verdict in verdicts:
            show(verdict)
        return int(any(verdict.wrong for verdict in verdicts))
    failures = [
        {
            "case": str(verdict.case),
            "wrong": [message.replace(str(folder), "") for message in verdict.wrong],
            "errors": verdict.errors[-2000:].replace(str(folder), ""),
        }
        for verdict in verdicts
        if verdict.wrong
    ]
    result: dict[str, Any] = {
        "schema_version": 1,
        "cases": len(verdicts),
        "wrong": len(failures),
        "counts": counts(verdicts),
        "failures": failures,
        "seconds": round(time.monotonic() - began),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(verdicts)} cases, {len(failures)} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
