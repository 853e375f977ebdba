"""Third-party models through the whole pipeline: `python benchmarks/imported.py [--models A,B] [--show]`.

Each file is imported, pruned to 70% of its multiply-accumulates, distilled with the original as its teacher, quantized
and checked. Labelled data for these models are not available. The labels are the classes that the float model predicts
for photos (grocery96), so "accuracy" is the agreement of the smaller model with the original. Needs the shared files
(CORALLINE_SHARED, or ../shared next to the project). Prints a table, and writes benchmarks/results/imported.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_subjects as subjects
from paths import SHARED

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "imported.json"
MODELS: dict[str, tuple[str, int, bool, tuple[int, int], int]] = {
    "vww_96": ("keras/vww_96.h5", 96, True, (0, 1), 2),
    "mini_xception": ("keras/fer2013_mini_XCEPTION.102-0.66.hdf5", 64, False, (-1, 1), 7),
    "mobilenet_v2_0.35": ("onnx/stm_mobilenet_v2_0.35_128_tfs_channel_first.onnx", 128, True, (-1, 1), 5),
}
"""File, height and width of its images, whether they are in colour, range of the inputs, number of classes."""
PIPELINE = """
schema_version: 1
name: imported
model: {{file: {file}}}
data:
  source: {{npz: {{file: photos.npz, split: split, classes: [{classes}]}}}}
  preprocess: [{{scale: {{from: [0, 255], to: [{low}, {high}]}}}}]
stages: [prune: {{keep_macs: 0.7, epochs: 2}}, distill: {{epochs: 4}}, quantize: {{}}, compile: {{}}]
"""


def photographs(folder: Path, side: int, colour: bool, classes: list[int] | None = None) -> None:
    """Write the photos for a model to photos.npz, with their classes; without classes all labels are 0."""
    images, labels, splits = [], [], []
    for split, (photos, _) in subjects.photos(side, colour=colour).items():
        images.append(np.rint(photos * 255).astype(np.uint8))
        splits += [split] * len(photos)
    x = np.concatenate(images)
    labels = classes or [0] * len(x)
    np.savez(folder / "photos.npz", x=x, y=np.array(labels, np.int64), split=np.array(splits))


def said(folder: Path, file: Path, limits: tuple[int, int]) -> list[int]:
    """Return the class that the imported model predicts for each photo."""
    from compress.model.importers import model_file

    model = model_file.load(model_file.read(file)).model
    with np.load(folder / "photos.npz") as arrays:
        x = arrays["x"].astype(np.float32) / 255 * (limits[1] - limits[0]) + limits[0]
    return [int(label) for label in model.predict(x, verbose=0).argmax(axis=1)]


def one(name: str) -> dict[str, Any]:
    """Run the pipeline of one model, and return the figures of its report."""
    file, side, colour, limits, classes = MODELS[name]
    path = SHARED / "models" / file
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        photographs(folder, side, colour)
        photographs(folder, side, colour, said(folder, path, limits))
        names = ", ".join(f"c{index}" for index in range(classes))
        values = {"file": json.dumps(str(path)), "classes": names, "low": limits[0], "high": limits[1]}
        (folder / "imported.yaml").write_text(PIPELINE.format(**values))
        command = [sys.executable, "-m", "compress", "imported.yaml", "--json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"exit": done.returncode, "error": done.stderr[-2000:]}
        record = json.loads(done.stdout)
    figures = {side: record["models"][side]["measurements"] for side in ("original", "result")}
    return {
        "exit": 0,
        "stages": [stage["stage"] for stage in record["stages"]],
        "macs_on_cpu": record["placement"]["macs"]["cpu"],
        **{
            name: {side: values[name]["value"] for side, values in figures.items()}
            for name in ("accuracy", "macs", "size_bytes")
        },
    }


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each model."""
    lines = [
        "| model | stages | agrees with what it was | MACs | bytes | MACs on the CPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        if row["exit"]:
            lines.append(f"| {name} | failed with exit code {row['exit']} | | | | |")
            continue
        pairs = {key: row[key] for key in ("accuracy", "macs", "size_bytes")}
        shown = [
            f"{pair['original']:{form}} -> {pair['result']:{form}}"
            for pair, form in zip(pairs.values(), (".3f", ",", ","), strict=True)
        ]
        lines.append(f"| {name} | {', '.join(row['stages'])} | {' | '.join(shown)} | {row['macs_on_cpu']:,} |")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen models, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split(":", 1)[0])
    parser.add_argument("--models", default=",".join(MODELS), help="some of " + ", ".join(MODELS))
    options = subjects.asked(parser)
    if options is None:
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if options.show else options.models.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = one(name)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
