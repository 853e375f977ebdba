"""The anchor-free detector at every step: `python benchmarks/anchor_free.py [--seeds N] [--epochs N] [--cache FOLDER]`.

For each seed the command line trains models/anchor_free.py from scratch on 296 photos of playing cards (160x160), and
then, from the trained file: quantizes it after training (PTQ); quantizes it with training (QAT, with the float model as
teacher); and prunes channels until half of the predicted compute time is left, trains the pruned model with the
original as its teacher, and quantizes it. Every float model and every int8 file is measured on 67 other photos: COCO's
average precision (`ap`) and that at IoU 0.5 (`ap50`). Trained models and the results of a seed are kept in the folder
--cache and reused.
Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/anchor_free.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import repository

import detection
from paths import ROOT, SHARED

from compress.core.artifact import MODEL_KERAS
from compress.model.importers import builder

RESULTS = repository.RESULTS / "anchor_free.json"
BUILDER = "anchor_free"
TRAIN = """
model: {{builder: anchor_free}}
stages:
  - train: {{epochs: {epochs}, batch_size: 8, learning_rate: 0.002, warmup: 0.05, augment: {augment}}}
"""
AUGMENT = "{shift: 0.2, zoom: 0.3}"
PTQ = "quantize: {}"
QAT = "quantize: {method: qat, epochs: 6, batch_size: 8, learning_rate: 0.0002, qat: {distill: {temperature: 1}}}"
PRUNE = """prune:
      objective: compute
      keep: 0.5
      epochs: {epochs}
      batch_size: 8
      learning_rate: 0.002
      allocation: uniform
      augment: {augment}
      distill: {{temperature: 1, weight: 0.5}}"""
FROM_FILE = """
model: {{file: {file}, detector: {detector}}}
stages:
{stages}
"""


@dataclass(frozen=True)
class Accuracy:
    """The average precision of a model on the test split.

    Attributes:
        ap: COCO's mean average precision.
        ap50: that at an intersection over union of 0.5.
    """

    ap: float
    ap50: float


def trained(folder: Path, cache: Path, seed: int, epochs: int) -> Path:
    """Return the trained model of a seed."""
    model = cache / f"{BUILDER}-{seed}-{epochs}.keras"
    if not model.exists():
        output, _ = detection.ran(folder, seed, TRAIN.format(epochs=epochs, augment=AUGMENT))
        shutil.copyfile(output / MODEL_KERAS, model)
    return model


def run(folder: Path, model: Path, seed: int, stages: list[str]) -> dict[str, Any]:
    """Run stages on a trained model; return the report."""
    specification = builder.detector(ROOT / "models" / f"{BUILDER}.py", (detection.SIDE, detection.SIDE, 3))
    lines = "\n".join(f"  - {stage}" for stage in stages)
    _, report = detection.ran(
        folder,
        seed,
        FROM_FILE.format(file=json.dumps(str(model)), detector=json.dumps(specification), stages=lines),
    )
    return report


def accuracy(report: dict[str, Any], model: str) -> Accuracy:
    """Return the accuracy of the model `original` or `result` of a report."""
    measurements = report["models"][model]["measurements"]
    return Accuracy(measurements["ap"]["value"], measurements["ap50"]["value"])


def stage_facts(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the facts of a stage."""
    facts: dict[str, Any] = next(stage["facts"] for stage in report["stages"] if stage["stage"] == name)
    return facts


def measure(folder: Path, cache: Path, seed: int, epochs: int, pruning_epochs: int) -> dict[str, Any]:
    """Return the accuracy of all models of one seed."""
    path = cache / f"{BUILDER}-{seed}-{epochs}-{pruning_epochs}.json"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    model = trained(folder, cache, seed, epochs)
    prune = PRUNE.format(epochs=pruning_epochs, augment=AUGMENT)
    reports = {
        "int8, PTQ": run(folder, model, seed, [PTQ]),
        "int8, QAT": run(folder, model, seed, [QAT]),
        "pruned": run(folder, model, seed, [prune]),
        "pruned, int8": run(folder, model, seed, [prune, PTQ]),
    }
    models = {"float": accuracy(reports["int8, PTQ"], "original")}
    models |= {name: accuracy(report, "result") for name, report in reports.items()}
    result = {
        "seed": seed,
        "models": {name: vars(precision) for name, precision in models.items()},
        "qat_kept": stage_facts(reports["int8, QAT"], "quantize")["kept"] == "qat",
        "pruning": stage_facts(reports["pruned"], "prune")["steps"][-1]["cost"],
        "seconds": {
            name: round(sum(stage["seconds"] for stage in report["stages"])) for name, report in reports.items()
        },
    }
    path.write_text(json.dumps(result))
    return result


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, smallest and largest value over the seeds, and the mean and largest loss against float."""
    rows: dict[str, Any] = {}
    for name in seeds[0]["models"]:
        rows[name] = {}
        for metric in ("ap", "ap50"):
            values = [seed["models"][name][metric] for seed in seeds]
            losses = [seed["models"]["float"][metric] - value for seed, value in zip(seeds, values, strict=True)]
            rows[name][metric] = {
                "mean": round(statistics.mean(values), 4),
                "lowest": round(min(values), 4),
                "highest": round(max(values), 4),
                "mean_loss": round(statistics.mean(losses), 4),
                "largest_loss": round(max(losses), 4),
            }
    return rows


def main() -> int:
    """Run the seeds one after the other, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--pruning-epochs", type=int, default=30)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not SHARED.exists():
        print(f"skipped: {SHARED} does not exist; CORALLINE_SHARED names the folder of shared files")
        return 0
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        detection.unpacked(folder)
        cache = (options.cache or folder).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        for seed in range(options.first, options.first + options.seeds):
            seeds.append(measure(folder, cache, seed, options.epochs, options.pruning_epochs))
            result = {
                "side": detection.SIDE,
                "epochs": options.epochs,
                "pruning_epochs": options.pruning_epochs,
                "summary": summary(seeds),
                "seeds": seeds,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["summary"], indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
