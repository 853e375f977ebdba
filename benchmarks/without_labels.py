"""Pruning without labels against pruning with labels, on the groceries.

    python benchmarks/without_labels.py [--seeds N] [--work FOLDER]

For each seed a network is trained on 43 coarse classes of photos at 48x48, then pruned to half of its MACs and trained
for the same epochs: with labels; and without (`labels: none`), where the original's outputs are the targets. Accuracy
is that of the test split, on which nothing is chosen. Needs the shared files (CORALLINE_SHARED, or ../shared next to
the project). Prints the accuracies, and writes benchmarks/results/without_labels.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import compress
from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline import schema
from compress.pipeline.probes.original_outputs import output_rows

SHARED = Path(os.environ.get("CORALLINE_SHARED", Path(__file__).parent.parent.parent / "shared"))
RESULTS = Path(__file__).parent / "results" / "without_labels.json"
BUILDER = """
import keras

layers = keras.layers


def norm(x):
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def build(input_shape, classes):
    image = keras.Input(input_shape)
    x = norm(layers.Conv2D(24, 3, 2, padding="same", use_bias=False)(image))
    for filters, stride in ((48, 1), (72, 2), (72, 1), (120, 2), (120, 1), (160, 2)):
        x = norm(layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(x))
        x = norm(layers.Conv2D(filters, 1, use_bias=False)(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(classes, activation="softmax")(x))
"""
STEPS = [{"resize": {"size": [48, 48], "filter": "area"}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]
LABELS = {"table": "labels.csv", "label": "coarse_id"}
PRUNE = {"prune": {"keep_macs": 0.5, "epochs": 10, "batch_size": 32}}


def run(folder: Path, name: str, seed: int, model: dict[str, Any], labels: Any, stages: list[Any]) -> Path:
    """Run a pipeline; return the folder of its results."""
    source = {"path": str(SHARED / "data" / "grocery96.tar"), "labels": labels}
    content = {
        "schema_version": 1,
        "name": name,
        "seed": seed,
        "target": "cpu",
        "model": model,
        "data": {"source": {"folder": source}, "preprocess": STEPS},
        "stages": stages,
        "measure": {"latency": {"runs": 3}},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(content))
    return compress.run(folder / f"{name}.yaml", out=folder / "runs").folder


def accuracy(pipeline: Path, model: Path) -> float:
    """Return the accuracy of a .tflite file on the labelled test split of a pipeline."""
    data = schema.load(pipeline).data
    rows = output_rows(LoadedModel(model, reproducible=True), data.inputs("test"))
    return float((rows.argmax(axis=1) == data.labels("test")).mean())


def one_seed(work: Path, seed: int) -> dict[str, float]:
    """Return the accuracy of the original and of both pruned networks."""
    folder = work / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(BUILDER)
    augment = {"flip": True, "shift": 0.1}
    train = {"train": {"epochs": 25, "batch_size": 32, "augment": augment}}
    trained = run(folder, "trained", seed, {"builder": "net.py:build", "trust": True}, LABELS, [train])
    model = {"file": str(trained / MODEL_KERAS)}
    models = {
        "original": trained,
        "with labels": run(folder, "labelled", seed, model, LABELS, [PRUNE]),
        "without labels": run(folder, "unlabelled", seed, model, "none", [PRUNE]),
    }
    return {name: accuracy(folder / "trained.yaml", result / MODEL_TFLITE) for name, result in models.items()}


def main() -> None:
    """Run the benchmark, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/tmp/coralline-without-labels"))
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        rows.append(one_seed(options.work, seed))
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    print("mean: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    RESULTS.write_text(json.dumps({"seeds": rows, "mean": means}, indent=1) + "\n")


if __name__ == "__main__":
    main()
