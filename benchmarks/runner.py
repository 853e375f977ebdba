"""The overhead of the runner: `python benchmarks/runner.py [--runs N] [--starts N]`.

The benchmark runs on this interpreter and on those that CORALLINE_PYTHONS names (paths separated by colons), each with
numpy and a TFLite runtime:

- overhead: the additional CPU time of `Model.answer` and of the loop of `bench`, compared with a bare loop of
  set_tensor, invoke and get_tensor. The three run in turn, five inferences each, in one process with one thread. The
  model is the one of several whose inference takes nearest to a millisecond with this runtime. CPU time is measured, so
  that other work on the machine has little effect. The figures are the median of one inference of the bare loop, and
  the median and 95% bootstrap interval of the additional time of the others.
- start: the time of `runner.pyz run` from the start of the process to its end, and the time of the start of Python with
  the imports of numpy and the runtime alone; the fastest of several starts of each, in turn.
- the same bundle: predictions on its evaluation samples with each model, with reproducible and with default kernels.

Prints a Markdown table and writes benchmarks/results/runner.json. No result is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import repository

import devices
import tiny
from paths import ROOT

RESULTS = repository.RESULTS / "runner.json"


OVERHEAD = """
import json, sys, time
import numpy as np
from deploy import Model; from deploy.runner import benchmark

CHUNK = 5

def ways(model):
    tensors, session = model.prepare(model.bundle.array("golden-input-0.npy")), model.session
    (tensor,), (place,), (result,) = tensors, session.input_indices, session.output_indices
    put, invoke, get = session.interpreter.set_tensor, session.interpreter.invoke, session.interpreter.get_tensor

    def bare():
        for _ in range(CHUNK):
            put(place, tensor)
            invoke()
            get(result)

    def ours():
        for _ in range(CHUNK):
            model.answer(tensors)

    return {"bare": bare, "Model": ours, "bench": lambda: benchmark.timed(session, tensors, CHUNK)}

def once(way):
    before = time.thread_time()
    way()
    return (time.thread_time() - before) / CHUNK * 1e6

def nearest(paths):
    models = [Model(path, role="int8") for path in paths]
    speeds = [min(once(ways(model)["bare"]) for _ in range(5)) for model in models]
    return models[int(np.argmin(np.abs(np.log(np.array(speeds) / 1000))))]

runs = ways(nearest(sys.argv[2:]))
times = {name: [] for name in runs}
for turn in range(int(sys.argv[1])):
    for name, way in list(runs.items())[:: 1 if turn % 2 else -1]:
        times[name].append(once(way))
random, report = np.random.RandomState(0), {"bare_us": float(np.median(times["bare"]))}
for name in ("Model", "bench"):
    more = np.array(times[name]) - np.array(times["bare"])
    again = [np.median(more[random.randint(0, len(more), len(more))]) for _ in range(1000)]
    report[name] = [float(np.median(more)), *map(float, np.percentile(again, [2.5, 97.5]))]
print(json.dumps(report))
"""
FILTERS = (4, 8, 16, 64, 128, 256, 512)
"""The filters of the models; the speeds of the runtimes differ by a factor of a hundred."""
IMPORTS = "import numpy; from deploy.runner import runtime; runtime.find()"
ANSWERS = """
import hashlib, json, sys
import numpy as np
from deploy.runner import runtime
from deploy.contract import bundle
from deploy.runner.model import Model

opened = bundle.read(sys.argv[1])
samples, _ = opened.evaluation()
report = {"runtime": runtime.find().describe()}
for role in ("original", "int8"):
    for kernels in ("reproducible", "default"):
        model = Model(opened, role, kernels=kernels)
        scores = np.stack([model(sample).scores for sample in samples])
        digest = hashlib.sha256(scores.tobytes()).hexdigest()
        report[role + " " + kernels] = {"predictions": scores.argmax(axis=1).tolist(), "outputs": digest}
print(json.dumps(report))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def answer(python: str, code: str, *arguments: object) -> Any:
    """Run a program with a Python interpreter; return its output, parsed as JSON."""
    command = [python, "-c", code, *map(str, arguments)]
    return json.loads(subprocess.run(command, env=environment(), capture_output=True, check=True, text=True).stdout)


def seconds(command: list[str]) -> float:
    before = time.perf_counter()
    subprocess.run(command, env=environment(), capture_output=True, check=True)
    return time.perf_counter() - before


def start(python: str, pyz: Path, bundle: Path, starts: int) -> dict[str, float]:
    """Return the seconds of `runner.pyz run`, of the imports alone, and the difference; the fastest of all starts."""
    imports, runs = [], []
    for _ in range(starts):
        imports.append(seconds([python, "-c", IMPORTS]))
        runs.append(seconds([python, str(pyz), "run", str(bundle), "--role", "int8"]))
    return {"whole_s": min(runs), "imports_s": min(imports), "ours_s": min(runs) - min(imports)}


def alike(answers: list[dict[str, Any]], names: list[str], key: str) -> dict[str, Any]:
    """Return whether all interpreters predict the same, and groups of interpreters with bit-identical outputs."""
    groups: dict[str, list[str]] = {}
    for name, response in zip(names, answers, strict=True):
        groups.setdefault(response[key]["outputs"], []).append(name)
    predictions = {json.dumps(response[key]["predictions"]) for response in answers}
    return {"predictions": len(predictions) == 1, "outputs": list(groups.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--starts", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="runner-"))
    small, pyz = folder / "small.coralline", devices.pyz(folder / "runner.pyz")
    small.write_bytes(devices.packed(samples=300))
    sizes = []
    for filters in FILTERS:
        sizes.append(folder / f"{filters}.coralline")
        model = tiny.classifier((32, 32, 8), filters=filters)
        sizes[-1].write_bytes(devices.packed({"int8": model}, size=(32, 32, 8), samples=0))
    rows, answers = [], []
    for python in devices.pythons():
        answers.append(answer(python, ANSWERS, small))
        runtime = answers[-1]["runtime"]
        version = subprocess.run([python, "-V"], capture_output=True, check=True, text=True).stdout.split()[1]
        times = answer(python, OVERHEAD, options.runs, *sizes)
        rows.append(
            {
                "python": version,
                "runtime": f"{runtime['name']} {runtime['version']}",
                "numpy": runtime["numpy"],
                "bare_us": times["bare_us"],
                "more_us": {name: times[name] for name in ("Model", "bench")},
                "start": start(python, pyz, small, options.starts),
            }
        )
    keys = [key for key in answers[0] if key != "runtime"]
    names = [f"Python {row['python']}, {row['runtime']}" for row in rows]
    agreement = {key: alike(answers, names, key) for key in keys}
    result = {"interpreters": rows, "alike": agreement, "runs": options.runs, "starts": options.starts}
    shutil.rmtree(folder)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print("| Python, runtime, numpy | bare loop | Model | bench | start, of which ours |")
    print("|---|---|---|---|---|")
    for row in rows:
        more, first = row["more_us"], row["start"]
        cells = [f"{row['python']}, {row['runtime']}, {row['numpy']}"]
        cells.append(f"{row['bare_us']:.0f} us")
        for middle, low, high in (more["Model"], more["bench"]):
            cells.append(f"{middle:+.1f} us ({low:+.1f} to {high:+.1f}), {middle / row['bare_us']:+.1%}")
        cells.append(f"{first['whole_s']:.2f} s, {first['ours_s']:.2f} s")
        print(f"| {' | '.join(cells)} |")
    for key, comparison in agreement.items():
        print(f"{key}: predictions equal on all: {comparison['predictions']}; equal outputs: {comparison['outputs']}")


if __name__ == "__main__":
    main()
