"""Transfer learning: `python benchmarks/transfer.py [--only operators,norms,sizes,kernels]`.

operators: every operator of the shared quantized files against its float form, in steps of its output.
norms: a quantized MobileNetV1 0.25 with a new head on scikit-learn's digits, with and without restored batch norms.
sizes: a linear classifier on the features of a quantized MobileNetV1 1.0, for photos of 96 pixels at several sizes.
kernels: time of a training step of MobileNetV1 at 128 pixels, with and without TensorFlow's oneDNN kernels, in
processes that alternate.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/transfer.json.
The accuracy of the grocery classifiers is measured by benchmarks/recipes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_subjects as subjects
from paths import EDGETPU, ROOT
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import compress
from compress.core.errors import ModelError
from compress.core.files import write_atomically
from compress.model.importers import model_file
from compress.model.importers.tflite import tflite_file
from compress.model.ir import keras_graph
from compress.model.ir.passes import cut_head
from compress.model.tflite import comparison, dequantization, graph

RESULTS = repository.RESULTS / "transfer.json"
PAIRS = EDGETPU / "pairs"
NARROW = PAIRS / "mobilenet_v1_0.25_128_quant" / "model.tflite"
WIDE = PAIRS / "mobilenet_v1_1.0_224_quant_embedding_extractor" / "model.tflite"
SEEDS = (0, 1, 2)
SIZES = (96, 128, 160)
REPEATS = 3
DIGITS = """
schema_version: 1
name: digits
seed: {seed}
model: {{file: {file}, head: {{restore_batch_norms: {norms}}}}}
data:
  source: {{digits: {{}}}}
  preprocess:
    - resize: {{size: [32, 32], filter: bilinear}}
    - colour: {{from: grey, to: rgb}}
    - scale: {{from: [0, 16], to: [-1, 1]}}
stages:
  - train: {{epochs: 6, label_smoothing: 0.1, augment: {{shift: 0.1, mixup: 0.2}}}}
  - quantize: {{}}
"""
STEP = """
import importlib.util, sys, time
import numpy as np
from compress.model.ir.tensorflow import keras
library = keras(0)
spec = importlib.util.spec_from_file_location("builder", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.build((128, 128, 3), 43)
names = [layer.name for layer in model.layers]
for layer in model.layers[: names.index("block4_depthwise")]:
    layer.trainable = False
model.compile("adam", loss="sparse_categorical_crossentropy", jit_compile=False)
x, y = np.random.default_rng(0).random((32, 128, 128, 3), np.float32), np.arange(32)
model.train_on_batch(x, y)
times = []
for _ in range(8):
    start = time.perf_counter()
    model.train_on_batch(x, y)
    times.append(time.perf_counter() - start)
print(min(times))
"""


def operators() -> dict[str, Any]:
    """Return the largest and the mean difference of each file's operators, or why the file is refused."""
    results: dict[str, Any] = {}
    for path in sorted(PAIRS.glob("*/model.tflite")):
        original = graph.read(path)
        try:
            both = dequantization.dequantize(original)
            feed = comparison.random_feed(original, np.random.default_rng(0))
            differences = dequantization.operator_differences(both, [feed])
        except ModelError as error:
            results[path.parent.name] = {"refused": error.what}
            continue
        results[path.parent.name] = {
            "operators": len(differences),
            "largest_steps": round(max(difference.largest for difference in differences), 3),
            "mean_steps": round(float(np.mean([difference.mean for difference in differences])), 3),
            "without_layers": len(tflite_file.in_float(tflite_file.read(path)).problems),
        }
    largest = max(row["largest_steps"] for row in results.values() if "operators" in row)
    return {"files": results, "compared": sum("operators" in row for row in results.values()), "largest_steps": largest}


def norms() -> dict[str, Any]:
    """Return the test accuracy of float and int8 for each seed, with and without restored batch norms."""
    results: dict[str, Any] = {}
    for restored in (False, True):
        rows = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "pipeline.yaml"
                path.write_text(DIGITS.format(seed=seed, file=NARROW, norms=str(restored).lower()))
                result = compress.run(path, out=Path(folder) / "runs")
                rows.append([result.original["accuracy"].value, result.result["accuracy"].value])
        results["restored" if restored else "without"] = {
            "float": [row[0] for row in rows],
            "int8": [row[1] for row in rows],
            "float_mean": float(np.mean([row[0] for row in rows])),
        }
    return results


def sizes() -> dict[str, Any]:
    """Return the test accuracy of a linear classifier on frozen features, by the size of the images."""
    model = model_file.load(model_file.read(WIDE)).model
    features = cut_head.without_head(keras_graph.read(model))
    accuracies = {}
    for side in SIZES:
        backbone = keras_graph.build(keras_graph.with_input_size(features, (side, side, 3)))
        vectors: dict[str, Any] = {}
        for split, (photos, labels) in subjects.photos(side).items():
            batches = np.array_split(photos * 2 - 1, -(-len(photos) // 64))
            maps = [np.asarray(backbone(batch, training=False)).mean(axis=(1, 2)) for batch in batches]
            vectors[split] = (np.concatenate(maps), labels)
        scaler = StandardScaler().fit(vectors["train"][0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of iterations
            fitted = LogisticRegression(C=0.03, max_iter=300).fit(
                scaler.transform(vectors["train"][0]), vectors["train"][1]
            )
        accuracies[str(side)] = float(fitted.score(scaler.transform(vectors["test"][0]), vectors["test"][1]))
    return accuracies


def kernels() -> dict[str, Any]:
    """Return the shortest step of each process in seconds, with and without oneDNN, and the ratios."""
    durations: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(REPEATS):
        for setting, times in durations.items():
            environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": setting, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", STEP, str(ROOT / "models" / "mobilenet_v1.py")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            times.append(float(done.stdout.split()[-1]))
    ratios = [slow / fast for slow, fast in zip(durations["0"], durations["1"], strict=True)]
    return {"without_s": durations["0"], "with_s": durations["1"], "ratios": [round(ratio, 2) for ratio in ratios]}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "operators": operators,
    "norms": norms,
    "sizes": sizes,
    "kernels": kernels,
}


def main() -> None:
    """Measure the chosen parts, and keep the results of the others."""
    parser = argparse.ArgumentParser(description="Measure transfer learning.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts of: {', '.join(PARTS)}")
    chosen = parser.parse_args().only.split(",")
    if not PAIRS.exists():
        print(f"skipped: {PAIRS} is not there; CORALLINE_SHARED names the folder of shared files")
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen:
        results[name] = PARTS[name]()
        print(json.dumps({name: results[name]}, indent=1))
        write_atomically(RESULTS, (json.dumps(results, indent=1, sort_keys=True) + "\n").encode())


if __name__ == "__main__":
    main()
