"""SIGKILL at random moments, each followed by a resumed run: `python benchmarks/kill.py [--demo 20] [--light 180]`.

`--demo` sets the number of kills in the shipped pipeline, which resumes each time. `--light` sets the number of kills
in a pipeline without TensorFlow (a .tflite file, compile, package), with a new store each time. After every kill the
benchmark checks the store, and after every resumed run it verifies the outputs. Writes benchmarks/results/kill.json.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import repository

import numpy as np
from paths import ROOT
from sklearn.datasets import load_digits

from compress.pipeline.store import Store
from deploy.contract import bundle

RESULTS = repository.RESULTS / "kill.json"
LIGHT = """
schema_version: 1
name: light
model: {file: model.tflite}
data:
  source: {npz: {file: digits.npz}}
  preprocess: [{resize: {size: [32, 32]}}, {scale: {from: [0, 16], to: [0, 1]}}]
stages: [compile, package]
measure: {latency: {runs: 50}}
"""


def start(pipeline: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "compress", str(pipeline), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


def finish(pipeline: Path, out: Path) -> float:
    """Runs to the end; gives the seconds it took."""
    began = time.monotonic()
    process = start(pipeline, out)
    _, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"a resume failed with {process.returncode}:\n{errors.decode()}")
    return time.monotonic() - began


def kill(pipeline: Path, out: Path, after: float) -> bool:
    """Starts a run and kills it after some seconds; False if it had ended before."""
    process = start(pipeline, out)
    try:
        process.wait(after)
        ended = True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        ended = False
    process.communicate()
    return not ended


def inspect(out: Path, name: str) -> int:
    """Everything that could be taken for a result must be one. Gives the number of artifacts."""
    store = Store(out / ".store")
    artifacts = list((out / ".store" / "artifacts").glob("*"))
    for folder in artifacts:
        if store._open(folder.name) is None:
            sys.exit(f"{folder} is not complete")
    for key in (out / ".store" / "keys").glob("[!.]*"):
        if store.find(key.name) is None:
            sys.exit(f"{key} names nothing")
    if (out / name / "report.json").exists():
        json.loads((out / name / "report.json").read_text())
    if (out / name / f"{name}.coralline").exists():
        bundle.read(str(out / name / f"{name}.coralline"))
    return len(artifacts)


def outputs(out: Path, name: str) -> tuple[bytes, bytes]:
    """The final model and bundle."""
    return (out / name / "model.tflite").read_bytes(), (out / name / f"{name}.coralline").read_bytes()


def demo(kills: int, folder: Path, chance: random.Random) -> dict[str, object]:
    """Kills in the shipped pipeline, until there were enough; then it runs to the end."""
    pipeline, progress = ROOT / "pipeline.yaml", []
    undisturbed, rounds, done = finish(pipeline, folder / "whole"), 0, 0
    reference = outputs(folder / "whole", "digits")
    while done < kills:
        out = folder / f"demo{rounds}"
        rounds += 1
        while done < kills and kill(pipeline, out, chance.uniform(0, undisturbed)):
            done += 1
            progress.append(inspect(out, "digits"))
            print(f"demo kill {done}: {progress[-1]} artifacts", file=sys.stderr)
        finish(pipeline, out)
        inspect(out, "digits")
        if outputs(out, "digits") != reference:
            sys.exit("the outputs differ from those of an undisturbed run")
    return {"kills": done, "runs_completed": rounds, "undisturbed_s": undisturbed, "artifacts_at_kill": progress}


def light(kills: int, folder: Path, chance: random.Random) -> dict[str, object]:
    """Kills in a pipeline of light stages, a new store each time."""
    digits = load_digits()
    np.savez(folder / "digits.npz", x=digits.images.astype(np.float32), y=digits.target)
    (folder / "model.tflite").write_bytes((folder / "whole" / "digits" / "model.tflite").read_bytes())
    pipeline = folder / "light.yaml"
    pipeline.write_text(LIGHT)
    undisturbed = finish(pipeline, folder / "light")
    reference = outputs(folder / "light", "light")
    done, progress = 0, []
    while done < kills:
        out = folder / f"light{done}"
        if not kill(pipeline, out, chance.uniform(0, undisturbed)):
            continue
        done += 1
        progress.append(inspect(out, "light") if (out / ".store").exists() else 0)
        finish(pipeline, out)
        inspect(out, "light")
        if outputs(out, "light") != reference:
            sys.exit("the outputs differ from those of an undisturbed run")
    counts = {str(artifacts): count for artifacts, count in sorted(Counter(progress).items())}
    return {"kills": done, "undisturbed_s": undisturbed, "kills_by_artifacts_done": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=int, default=20)
    parser.add_argument("--light", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result = {"demo": demo(options.demo, folder, chance), "light": light(options.light, folder, chance)}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.demo + options.light} SIGKILLs, each followed by a resume: everything verified")


if __name__ == "__main__":
    main()
