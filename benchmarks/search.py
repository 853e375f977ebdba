"""The search: `python benchmarks/search.py [--trials N] [--seeds N]`.

Two analytical problems like a search, without training: error and latency of five settings with a limit of the latency,
and of the widths and depths of a network. The figure is the hypervolume of the front after some trials: the share that
the front dominates of the rectangle between the reference (error 1, 8 ms) and the ideal (error 0, 0 ms). Each sampler
of `search` is compared with random values; GPSampler needs torch.

Then processes that run trials of one search are killed with SIGKILL at random and replaced. No result may be lost, and
none counted twice.

Writes benchmarks/results/search.json, and prints it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import repository

import numpy as np
import optuna

from compress.core.measurement import Metric
from compress.pipeline.search import study as studies
from compress.pipeline.search.goals import LATENCY, Goals
from compress.pipeline.search.space import Choices, Dimension, Range, Space
from compress.pipeline.yaml_file import Document
from compress.results.search import TrialRecord

RESULTS = repository.RESULTS / "search.json"
LIMIT_MS = 8.0
"""Chosen: the reference of the hypervolume."""
Values = Mapping[str, Any]
Problem = Callable[[Values, np.random.Generator], tuple[float, float, float]]
"""Returns error, latency in ms and the excess of a limit from settings and noise."""


def few_settings(values: Values, noise: np.random.Generator) -> tuple[float, float, float]:
    """Return the result of five settings, like width, pruning, training: the latency is limited to 5 ms."""
    width, keep, kind = values["width"], values["keep"], values["kind"]
    latency = width**1.5 * keep * 4 + 0.5 + (0.3 if kind == "b" else 0)
    error = 0.05 + 0.35 * np.exp(-3 * width * keep) + 0.1 * (np.log10(values["rate"]) + 2.5) ** 2
    error += 0.004 * (values["temperature"] - 4) ** 2 + {"a": 0.03, "b": 0.0, "c": 0.08}[kind]
    return float(error + 0.1 * max(0.0, 0.5 - keep) ** 2 + noise.normal(0, 0.004)), float(latency), latency - 5


def many_widths(values: Values, noise: np.random.Generator) -> tuple[float, float, float]:
    """Return the result of the widths of four stages, the depths of two, and the learning rate; nothing is limited."""
    widths = [values[f"width{i}"] for i in range(4)]
    first, second = values["depth0"], values["depth1"]
    cost = sum(width * width * weight for width, weight in zip(widths, (0.02, 0.015, 0.012, 0.01), strict=True))
    capacity = sum(share * np.log(width) for width, share in zip(widths, (0.2, 0.5, 0.9, 0.4), strict=True))
    capacity += 0.5 * first**0.5 + 0.3 * second**0.5
    error = 0.15 + 0.6 * np.exp(-0.7 * capacity) + 0.08 * (np.log10(values["rate"]) + 2.6) ** 2
    return float(error + noise.normal(0, 0.01)), float(0.4 + cost * (0.6 + 0.2 * first + 0.1 * second) / 3), 0.0


def _space(*dimensions: Dimension) -> Space:
    return Space(Document(Path(), {"stages": []}, {}), dimensions)


PROBLEMS: Mapping[str, tuple[Problem, Space]] = {
    "few settings": (
        few_settings,
        _space(
            Range("width", ("width",), 0.2, 1.5),
            Range("keep", ("keep",), 0.3, 0.9),
            Range("temperature", ("temperature",), 1.0, 8.0),
            Range("rate", ("rate",), 1e-4, 1e-1, log=True),
            Choices("kind", ("kind",), ("a", "b", "c")),
        ),
    ),
    "many widths": (
        many_widths,
        _space(
            *(Range(f"width{i}", (f"width{i}",), 1, 8, integer=True) for i in range(4)),
            *(Range(f"depth{i}", (f"depth{i}",), 1, 3, integer=True) for i in range(2)),
            Range("rate", ("rate",), 1e-3, 1e-2, log=True),
        ),
    ),
}
SAMPLERS = ("random", "TPESampler", *(["GPSampler"] if importlib.util.find_spec("torch") else []))


def searched(problem: Problem, space: Space, name: str, seed: int, trials: int) -> float:
    """Return the hypervolume of one search."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    noise = np.random.default_rng(seed)
    points = []
    for number in range(trials):  # as `SearchStudy`: a new sampler for each trial
        chosen = (seed * 1_000_003 + number) % 2**32
        study.sampler = optuna.samplers.RandomSampler(chosen) if name == "random" else studies.new_sampler(chosen, name)
        trial = study.ask()
        error, latency, excess = problem(space.suggest(trial), noise)
        trial.set_constraint("limit", excess)
        study.tell(trial, [error, latency])
        points += [(error, latency)] if excess <= 0 else []
    return float(optuna._hypervolume.compute_hypervolume(np.array(points), np.array([1.0, LIMIT_MS])) / LIMIT_MS)


def compared(trials: int, seeds: int) -> dict[str, Any]:
    """Return the hypervolumes of each sampler on each problem."""
    results: dict[str, Any] = {"trials": trials, "problems": {}}
    for name, (problem, space) in PROBLEMS.items():
        rows = results["problems"][name] = {}
        for sampler in SAMPLERS:
            began = time.process_time()
            values = [round(searched(problem, space, sampler, seed, trials), 5) for seed in range(seeds)]
            took = (time.process_time() - began) / seeds / trials
            rows[sampler] = {"mean": round(statistics.mean(values), 5), "values": values, "s_per_trial": round(took, 4)}
            print(f"{name}: {sampler}: {rows[sampler]['mean']}", file=sys.stderr, flush=True)
    return results


def open_study(url: str, *, joins: bool) -> studies.SearchStudy:
    """Return the search that processes share, with short heartbeats."""
    studies.HEARTBEAT_S, studies.GRACE_S = 1, 4
    accuracy = Metric("accuracy", "Accuracy", "fraction", "accuracy_drop")
    space = PROBLEMS["few settings"][1]
    return studies.SearchStudy(space, Goals((accuracy, LATENCY), (), "", accuracy), "kill", {}, 0, url, joins=joins)


def work(url: str, log: Path) -> None:
    """Run trials until this process is killed, and log each result right before it is stored."""
    study, noise = open_study(url, joins=True), np.random.default_rng(0)

    def run(number: int, values: dict[str, Any]) -> TrialRecord:
        time.sleep(random.uniform(0.2, 1.0))
        error, latency, _ = few_settings(values, noise)
        return TrialRecord(number, "complete", values, {"accuracy": 1 - error, "latency_ms": latency})

    while True:
        record = study.run_trial(run)
        if record is not None:
            with log.open("a") as stream:  # the result counts: nobody may lose it
                stream.write(f"{record.number}\n")


def killed(trials: int, processes: int) -> dict[str, int]:
    """Kill processes at random until there are enough trials; return what was lost and counted twice."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        url = f"sqlite:///{folder}/search.db"
        study = open_study(url, joins=False)
        command = [sys.executable, __file__, "--work", url, str(log)]
        workers = [subprocess.Popen(command) for _ in range(processes)]
        kills = 0
        complete: list[TrialRecord] = []
        while len(complete) < trials:
            begun = len(study.records())
            while len(study.records()) < begun + processes:  # the kills hit processes that run trials
                time.sleep(random.uniform(0.1, 0.5))
            complete = [record for record in study.records() if record.status == "complete"]
            index = random.randrange(processes)
            os.kill(workers[index].pid, signal.SIGKILL)
            workers[index].wait()
            workers[index] = subprocess.Popen(command)
            kills += 1
        for worker in workers:
            worker.kill()
            worker.wait()
        records = study.records()
        complete = [record for record in records if record.status == "complete"]
        lost = {int(line) for line in log.read_text().split()} - {record.number for record in complete}
        twice = len(complete) - len({json.dumps(record.settings, sort_keys=True) for record in complete})
        again = sum(record.status == "interrupted" for record in records)
        return {"trials": len(complete), "kills": kills, "run again": again, "lost": len(lost), "counted twice": twice}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", nargs=2, metavar=("URL", "LOG"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")  # Optuna's, about experimental features
    if options.work:
        work(options.work[0], Path(options.work[1]))
    results = {"samplers": compared(options.trials, options.seeds), "kills": killed(options.trials, 4)}
    text = json.dumps(results, indent=1) + "\n"
    RESULTS.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
