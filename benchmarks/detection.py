"""Detectors at every step: `python benchmarks/detection.py [--builder NAME] [--seeds N] [--epochs N] [--cache FOLDER]`.

For each seed the command line trains a builder of models/ (`ssd_small` or `anchor_free`) from scratch on 296 photos of
playing cards (160x160), and quantizes the trained file (PTQ). `anchor_free` is also quantized with training (QAT, with
the float model as teacher), and pruned to half of its predicted compute time, trained with the original as its teacher,
and quantized. Every float model and every int8 file is measured on 67 other photos: COCO's average precision (`ap`),
and the average precision at an intersection over union of 0.5 (`ap50`). Trained models and the results of a seed are
kept in the folder --cache and reused.
Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/BUILDER.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import repository

from common import commit
from paths import ROOT, SHARED

from compress.core.artifact import MODEL_KERAS
from compress.model.importers import builder as builders

SIDE = 160
"""Chosen: half of the photos' 320 pixels."""
AUGMENT = "{shift: 0.2, zoom: 0.3}"
EPOCHS = {"ssd_small": 60, "anchor_free": 40}
LEARNING_RATES = {"ssd_small": 0.003, "anchor_free": 0.002}
TRAIN = "train: {{epochs: {epochs}, batch_size: 8, learning_rate: {rate}, warmup: 0.05, augment: " + AUGMENT + "}}"
PTQ = "quantize: {}"
QAT = "quantize: {method: qat, epochs: 6, batch_size: 8, learning_rate: 0.0002, qat: {distill: {temperature: 1}}}"
PRUNE = (
    "prune: {objective: compute, keep: 0.5, epochs: 30, batch_size: 8, learning_rate: 0.002, allocation: uniform, "
    f"augment: {AUGMENT}, distill: {{temperature: 1, weight: 0.5}}}}"
)
STAGES = {"int8, PTQ": [PTQ], "int8, QAT": [QAT], "pruned": [PRUNE], "pruned, int8": [PRUNE, PTQ]}
"""The stages after the training, by row of the results; `ssd_small` has the first row alone."""
PIPELINE = """
schema_version: 1
name: cards
seed: {seed}
target: edgetpu
data:
  source: {{coco: {{train: train.json, test: test.json}}}}
  preprocess:
    - resize: {{size: [{side}, {side}]}}
    - scale: {{from: [0, 255]}}
measure: {{latency: {{runs: 5}}}}
model: {model}
stages: [{stages}]
"""


def unpack(folder: Path) -> None:
    """Write the photos and COCO's files for the two splits of the data set."""
    script = ROOT / "calibration_data" / "cards" / "prepare.py"
    command = [sys.executable, str(script), str(SHARED / "data" / "cards320.tar"), str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run(folder: Path, seed: int, model: str, stages: list[str]) -> tuple[Path, dict[str, Any]]:
    """Run a pipeline by the command line; return the folder of its results, and its report."""
    path = folder / "cards.yaml"
    text = ", ".join(f"{{{stage}}}" for stage in stages)
    path.write_text(PIPELINE.format(seed=seed, side=SIDE, model=model, stages=text))
    command = [sys.executable, "-m", "compress", str(path), "--out", str(folder / f"runs-{seed}")]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    output = folder / f"runs-{seed}" / "cards"
    return output, json.loads((output / "report.json").read_text())


def trained(folder: Path, cache: Path, builder: str, seed: int, epochs: int) -> Path:
    """Return the trained model of a seed."""
    model = cache / f"{builder}-{seed}-{epochs}.keras"
    if not model.exists():
        stage = TRAIN.format(epochs=epochs, rate=LEARNING_RATES[builder])
        output, _ = run(folder, seed, f"{{builder: {builder}}}", [stage])
        shutil.copyfile(output / MODEL_KERAS, model)
    return model


def precision(report: dict[str, Any], model: str) -> dict[str, float]:
    """Return the average precision of the model `original` or `result` of a report."""
    measurements = report["models"][model]["measurements"]
    return {metric: measurements[metric]["value"] for metric in ("ap", "ap50")}


def measure(folder: Path, cache: Path, builder: str, seed: int, epochs: int) -> dict[str, Any]:
    """Return the average precision of all models of one seed."""
    path = cache / f"{builder}-{seed}-{epochs}-{commit()}.json"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    file = json.dumps(str(trained(folder, cache, builder, seed, epochs)))
    detector = json.dumps(builders.detector(ROOT / "models" / f"{builder}.py", (SIDE, SIDE, 3)))
    model = f"{{file: {file}, detector: {detector}}}"
    rows = STAGES if builder == "anchor_free" else {"int8, PTQ": [PTQ]}
    reports = {name: run(folder, seed, model, stages)[1] for name, stages in rows.items()}
    models = {"float": precision(reports["int8, PTQ"], "original")}
    models |= {name: precision(report, "result") for name, report in reports.items()}
    result = {"seed": seed, "models": models}
    path.write_text(json.dumps(result))
    return result


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, smallest and largest value over the seeds, and the mean and largest loss against float."""
    rows: dict[str, Any] = {name: {} for name in seeds[0]["models"]}
    for name, row in rows.items():
        for metric in ("ap", "ap50"):
            values = [seed["models"][name][metric] for seed in seeds]
            losses = [seed["models"]["float"][metric] - value for seed, value in zip(seeds, values, strict=True)]
            figures = {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
            figures |= {"mean_loss": statistics.mean(losses), "largest_loss": max(losses)}
            row[metric] = {figure: round(value, 4) for figure, value in figures.items()}
    return rows


def main() -> int:
    """Run the seeds one after the other, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builder", choices=EPOCHS, default="anchor_free")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="by default those of the published figures")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    if repository.is_missing(SHARED):
        return 0
    epochs = options.epochs or EPOCHS[options.builder]
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        cache = (options.cache or Path(name)).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        for seed in range(options.seeds):
            seeds.append(measure(Path(name), cache, options.builder, seed, epochs))
            result = {"commit": commit(), "side": SIDE, "epochs": epochs, "summary": summary(seeds), "seeds": seeds}
            (repository.RESULTS / f"{options.builder}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["summary"], indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
