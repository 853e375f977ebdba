"""A detector from photos to int8: `python benchmarks/detection.py [--seeds N] [--epochs N] [--cache FOLDER]`.

For each seed the command line trains models/ssd_small.py from scratch on 296 photos of playing cards, quantizes it,
and measures it on 67 other photos. The result is COCO's average precision of the float model and of the int8 file,
which has boxes and scores in separate tensors. For comparison, the same network is quantized with boxes and scores
joined into one tensor, with the same method for ranges: once with logits as scores, as in ssd_small, and once with
probabilities, as in most files that were exported with one output.
Trained models are kept in the folder --cache and reused.
Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Writes benchmarks/results/detection.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import repository

import numpy as np
from paths import ROOT, SHARED

from compress.core.artifact import MODEL_KERAS
from compress.data.types import Data
from compress.learning.quantization import export
from compress.learning.quantization.calibration import calibrate
from compress.model.importers import builder
from compress.model.ir import keras_graph
from compress.model.ir.passes import fold
from compress.model.ir.tensorflow import keras
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.schema import load
from deploy.contract.average_precision import average_precision
from deploy.contract.detection import Detector

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "detection.json"
SIDE = 160
CALIBRATION = 200
TRAIN = """
model: {{builder: ssd_small}}
stages:
  - train:
      epochs: {epochs}
      batch_size: 8
      learning_rate: 0.003
      warmup: 0.05
      augment: {{shift: 0.2, zoom: 0.3}}
"""
QUANTIZE = """
model: {{file: {file}, detector: {detector}}}
stages:
  - quantize: {{}}
"""
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
"""


def unpacked(folder: Path) -> None:
    """Unpack the photos, and write COCO's files for the two splits of the data set."""
    with tarfile.open(SHARED / "data" / "cards320.tar") as archive:
        archive.extractall(folder, filter="data")
    with (folder / "boxes.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = sorted({row["class"] for row in rows})
    for split in ("train", "test"):
        split_rows = [row for row in rows if row["split"] == split]
        sizes = {row["file"]: (int(row["width"]), int(row["height"])) for row in split_rows}
        ids = {file: number for number, file in enumerate(sorted(sizes), 1)}
        content = {
            "images": [
                {"id": ids[file], "file_name": file, "width": width, "height": height}
                for file, (width, height) in sizes.items()
            ],
            "categories": [{"id": number, "name": name} for number, name in enumerate(names, 1)],
            "annotations": [
                {"id": number, "image_id": ids[row["file"]], "category_id": names.index(row["class"]) + 1, "bbox": box}
                for number, row in enumerate(split_rows, 1)
                for box in [_box(row)]
            ],
        }
        (folder / f"{split}.json").write_text(json.dumps(content))


def _box(row: dict[str, str]) -> list[float]:
    left, top, right, bottom = (float(row[side]) for side in ("xmin", "ymin", "xmax", "ymax"))
    return [left, top, right - left, bottom - top]


def ran(folder: Path, seed: int, how: str) -> tuple[Path, dict[str, Any]]:
    """Run a pipeline by the command line; return the folder of its results, and its report."""
    path = folder / "cards.yaml"
    path.write_text(PIPELINE.format(seed=seed, side=SIDE) + how)
    command = [sys.executable, "-m", "compress", str(path), "--out", str(folder / f"runs-{seed}")]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    left = folder / f"runs-{seed}" / "cards"
    return left, json.loads((left / "report.json").read_text())


def trained(folder: Path, cache: Path, seed: int, epochs: int) -> tuple[Path, dict[str, Any]]:
    """Return the model file of a seed, and facts about its training; train it if it is not in the cache."""
    model, facts_file = (cache / f"cards-{seed}-{epochs}.{kind}" for kind in ("keras", "json"))
    if not model.exists():
        left, report = ran(folder, seed, TRAIN.format(epochs=epochs))
        facts = report["stages"][1]
        facts_file.write_text(json.dumps({"seconds": facts["seconds"], "last_epoch": facts["facts"]["history"][-1]}))
        shutil.copyfile(left / MODEL_KERAS, model)
    return model, json.loads(facts_file.read_text())


def run(folder: Path, cache: Path, seed: int, epochs: int) -> dict[str, Any]:
    """Return the results of one seed: the figures of the command line, and those of the two files with one output."""
    model, training = trained(folder, cache, seed, epochs)
    detector = builder.detector(ROOT / "models" / "ssd_small.py", (SIDE, SIDE, 3))
    left, report = ran(folder, seed, QUANTIZE.format(file=json.dumps(str(model)), detector=json.dumps(detector)))
    facts = report["stages"][1]["facts"]
    precisions = {
        name: {key: report["models"][side]["measurements"][key]["value"] for key in ("ap", "ap50")}
        for name, side in (("float", "original"), ("int8", "result"))
    }
    data, method = load(folder / "cards.yaml").data, facts["ranges"].split()[0]
    joined = {
        f"int8, one tensor, scores as {scores}": one_tensor(
            left / MODEL_KERAS, data, method, scores, facts["specification"]
        )
        for scores in ("logits", "probabilities")
    }
    return {
        "seed": seed,
        "ap": precisions | joined,
        "agreement": report["comparison"]["measurements"]["agreement"]["value"],
        "per_class": report["comparison"]["per_class"],
        "ranges": method,
        "training": training,
        "size_bytes": report["models"]["result"]["measurements"]["size_bytes"]["value"],
    }


def one_tensor(path: Path, data: Data, method: str, scores: str, specification: dict[str, Any]) -> dict[str, float]:
    """Return the average precision of the int8 file of the same network with boxes and scores in one output."""
    library = keras(0)
    model = library.models.load_model(path)
    boxes, logits = model.outputs
    right = library.layers.Activation("sigmoid")(logits) if scores == "probabilities" else logits
    joined = library.Model(model.inputs[0], library.layers.Concatenate(-1, name="joined")([boxes, right]))
    net = fold.canonical(keras_graph.read(joined))
    samples = data.inputs("train")[np.random.default_rng(0).permutation(len(data.inputs("train")))[:CALIBRATION]]
    content = export.convert(net, calibrate(net, samples, method))
    detector = Detector({**specification, "scores": scores})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "joined.tflite"
        file.write_bytes(content)
        rows = LoadedModel(file, reproducible=True).scores(data.inputs("test"))
    rows = rows.reshape(len(rows), len(detector.anchors), -1)
    answers = [detector([row[:, :4], row[:, 4:]]) for row in rows]
    precision = average_precision(answers, data.objects("test"), len(data.class_names))
    return {key: precision[key] for key in ("ap", "ap50")}


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over the seeds, and the largest loss of a seed."""
    names = list(seeds[0]["ap"])
    means = {
        name: {key: round(statistics.mean(result["ap"][name][key] for result in seeds), 4) for key in ("ap", "ap50")}
        for name in names
    }
    lost = {
        name: {
            key: round(max(result["ap"]["float"][key] - result["ap"][name][key] for result in seeds), 4)
            for key in ("ap", "ap50")
        }
        for name in names[1:]
    }
    return {"mean": means, "largest_loss": lost}


def main() -> int:
    """Run the seeds one after the other, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not SHARED.exists():
        print(f"skipped: {SHARED} is not there; CORALLINE_SHARED names the folder of shared files")
        return 0
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        unpacked(Path(folder))
        cache = options.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        for seed in range(options.first, options.first + options.seeds):
            seeds.append(run(Path(folder), cache.resolve(), seed, options.epochs))
            result = {"epochs": options.epochs, "side": SIDE, **summary(seeds), "seeds": seeds}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["mean"], indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
