"""Every task on real data, trained small, then pruned to half, distilled and quantized.

    python benchmarks/every_task.py [--only NAME] [--work FOLDER]

Autoencoder: windows of two temperature series (nab_temperature), anomalies by the error. Segmenter: three classes of
coco128 at 64x64. Regression: the temperature three hours ahead. Multi-label: which digits are in a picture of two of
scikit-learn's digits. Prints the metrics of the float model and of the int8 file, and writes
benchmarks/results/every_task.json.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import compress

SHARED = Path(os.environ.get("CORALLINE_SHARED", Path(__file__).parent.parent.parent / "shared"))
RESULTS = Path(__file__).parent / "results" / "every_task.json"
WINDOW = 64
AHEAD = 36
"""Five-minute steps of the forecast: three hours."""
SIDE = 64
PERSON = 1
"""The category of persons in the masks of coco128."""
BUILDERS = """
import keras

layers = keras.layers


def block(x, filters, stride=1):
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def autoencoder(input_shape, classes):
    series = keras.Input(input_shape)
    x = layers.Dense(48, activation="relu")(series)
    x = layers.Dense(12, activation="relu")(x)
    x = layers.Dense(48, activation="relu")(x)
    return keras.Model(series, layers.Dense(input_shape[0])(x))


def forecast(input_shape, classes):
    series = keras.Input(input_shape)
    x = layers.Dense(64, activation="relu")(series)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(series, layers.Dense(classes)(x))


def unet(input_shape, classes):
    image = keras.Input(input_shape)
    one = block(image, 16)
    two = block(block(one, 32, 2), 32)
    three = block(block(two, 48, 2), 48)
    up = block(layers.Concatenate()([layers.UpSampling2D(2)(three), two]), 32)
    up = block(layers.Concatenate()([layers.UpSampling2D(2)(up), one]), 16)
    return keras.Model(image, layers.Conv2D(classes, 1)(up))


def labels(input_shape, classes):
    image = keras.Input(input_shape)
    x = block(block(block(image, 24), 32, 2), 48, 2)
    return keras.Model(image, layers.Dense(classes, activation="sigmoid")(layers.Flatten()(x)))
"""


@dataclass(frozen=True)
class Subject:
    """A task with real data.

    Attributes:
        name: its name.
        task: of data.task; "" for the source's own.
        builder: the function of BUILDERS.
        arrays: returns the arrays of the .npz file.
        source: further settings of the source.
        preprocess: the preprocessing steps.
        epochs: of the first training.
    """

    name: str
    task: str
    builder: str
    arrays: Callable[[], dict[str, NDArray[Any]]]
    source: dict[str, Any]
    preprocess: list[Any]
    epochs: int = 20


def windows(step: int) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.float32]]:
    """Return windows of the machine's temperature, whether an anomaly window overlaps, and the value AHEAD of each."""
    with np.load(SHARED / "data" / "nab_temperature.npz") as file:
        values, anomalies = file["machine_value"], file["machine_anomaly_window"]
    values = ((values - values.mean()) / values.std()).astype(np.float32)
    starts = np.arange(0, len(values) - WINDOW - AHEAD, step)
    x = np.stack([values[start : start + WINDOW] for start in starts])
    y = np.array([anomalies[start : start + WINDOW].max() for start in starts])
    return x, y, values[starts + WINDOW + AHEAD - 1]


def anomalies() -> dict[str, NDArray[Any]]:
    """Return windows and whether they are anomalous: all anomalous ones are test samples, and no two splits overlap."""
    x, y, _ = windows(8)
    gap = WINDOW // 8
    arrays = by_time({"x": x, "y": y.astype(int), "near": np.convolve(y, np.ones(2 * gap + 1), "same") > 0}, gap)
    anomalous = arrays["y"] == 1
    arrays["split"] = np.where(anomalous, "test", arrays["split"])
    kept = anomalous | ~arrays.pop("near")
    return {name: values[kept] for name, values in arrays.items()}


def future() -> dict[str, NDArray[Any]]:
    """Return windows and the temperature three hours later."""
    x, _, ahead = windows(8)
    return by_time({"x": x, "y": ahead[:, np.newaxis]}, (WINDOW + AHEAD) // 8 + 1)


def by_time(arrays: dict[str, NDArray[Any]], gap: int) -> dict[str, NDArray[Any]]:
    """Return the arrays with a split: blocks of 200 windows, of which validation and test have a part each.

    The last `gap` windows before another split overlap it, and are left out.
    """
    place = np.arange(len(arrays["x"])) % 200
    split = np.where(place < 130, "train", np.where(place < 160, "validation", "test"))
    overlaps = np.any([(place >= edge - gap) & (place < edge) for edge in (130, 160, 200)], axis=0)
    return {name: values[~overlaps] for name, values in {**arrays, "split": split}.items()}


def masks() -> dict[str, NDArray[Any]]:
    """Return photos and masks of coco128, with the classes 0: other, 1: person, 2: another object."""
    from PIL import Image

    images, labels, splits = [], [], []
    with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
        names = set(archive.getnames())
        for name in sorted(names):
            if "semantic_segmentation/masks/" not in name or not name.endswith(".png"):
                continue
            photo = name.replace("semantic_segmentation/masks/", "images/").replace(".png", ".jpg")
            if photo not in names:
                continue
            stored = archive.extractfile(photo), archive.extractfile(name)
            assert stored[0] is not None
            assert stored[1] is not None
            image = Image.open(io.BytesIO(stored[0].read())).convert("RGB").resize((SIDE, SIDE))
            mask = np.asarray(Image.open(io.BytesIO(stored[1].read())).resize((SIDE, SIDE), Image.Resampling.NEAREST))
            images.append(np.asarray(image))
            labels.append(np.where(mask == PERSON, 1, np.where((mask > 1) & (mask <= 80), 2, 0)))
            splits.append("train" if "train2017" in name else "test")
    kept = [place for place, split in enumerate(splits) if split == "train"][::6]
    for place in kept:
        splits[place] = "validation"
    return {"x": np.stack(images), "y": np.stack(labels).astype(np.uint8), "split": np.array(splits)}


def pairs() -> dict[str, NDArray[Any]]:
    """Return pictures of two digits side by side, and 1 for each digit that is in it."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    random = np.random.default_rng(0)
    split = np.where(np.arange(len(digits.target)) % 5 == 0, "test", "train")  # the digits of test are never in train
    images, labels, splits = [], [], []
    for part, count in (("train", 2400), ("validation", 300), ("test", 600)):
        members = np.flatnonzero(split == ("test" if part == "test" else "train"))
        chosen = random.choice(members, (count, 2))
        images.append(np.concatenate([digits.images[chosen[:, 0]], digits.images[chosen[:, 1]]], axis=2))
        both = np.zeros((count, 10), np.uint8)
        both[np.arange(count)[:, np.newaxis], digits.target[chosen]] = 1
        labels.append(both)
        splits += [part] * count
    return {"x": np.concatenate(images).astype(np.float32), "y": np.concatenate(labels), "split": np.array(splits)}


SUBJECTS = (
    Subject("autoencoder", "reconstruction", "autoencoder", anomalies, {"classes": ["normal", "anomaly"]}, [], 40),
    Subject("regression", "", "forecast", future, {"targets": ["ahead"]}, [], 30),
    Subject(
        "segmentation",
        "segmentation",
        "unet",
        masks,
        {"classes": ["other", "person", "object"]},
        [{"scale": {"from": [0, 255], "to": [0, 1]}}],
        40,
    ),
    Subject(
        "multi-label",
        "multi_label",
        "labels",
        pairs,
        {"classes": list("0123456789")},
        [{"scale": {"from": [0, 16], "to": [0, 1]}}],
        12,
    ),
)


def pipeline(subject: Subject) -> dict[str, Any]:
    """Return the pipeline as plain values."""
    data: dict[str, Any] = {
        "source": {"npz": {"file": "data.npz", "split": "split", **subject.source}},
        "preprocess": subject.preprocess,
    }
    if subject.task:
        data["task"] = subject.task
    return {
        "schema_version": 1,
        "name": subject.name,
        "model": {"builder": f"builders.py:{subject.builder}", "trust": True},
        "data": data,
        "stages": [
            {"train": {"epochs": subject.epochs, "batch_size": 32, "early_stopping": 8}},
            {"prune": {"keep_macs": 0.5, "epochs": 6}},
            {"distill": {"epochs": 8}},
            {"quantize": {}},
            {"compile": {}},
            {"package": {}},
        ],
        "measure": {"latency": {"runs": 20}},
    }


def run(subject: Subject, work: Path) -> dict[str, Any]:
    """Return the result of one subject."""
    folder = work / subject.name
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", **subject.arrays())  # type: ignore[arg-type]
    (folder / "builders.py").write_text(BUILDERS)
    (folder / "p.yaml").write_text(json.dumps(pipeline(subject)))
    result = compress.run(folder / "p.yaml", out=folder / "runs")
    record = result.record
    rows = {}
    for metric in record.metrics:
        before, after = result.original[metric.name], result.result[metric.name]
        rows[metric.name] = {"float": before.value, "int8": after.value}
    macs = (result.original["macs"].value, result.result["macs"].value)
    verdict = record.verdict
    assert verdict is not None
    placement = record.placement
    return {
        "name": subject.name,
        "metrics": rows,
        "macs": macs,
        "placement": None if placement is None else placement.summary,
        "verdict": verdict.level,
        "reasons": list(verdict.reasons),
    }


def main() -> None:
    """Run the benchmark, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=Path, default=Path("/tmp/coralline-tasks"))
    options = parser.parse_args()
    rows = []
    for subject in SUBJECTS:
        if options.only not in subject.name:
            continue
        rows.append(run(subject, options.work))
        metrics = ", ".join(
            f"{name} {values['float'] or float('nan'):.3f} -> {values['int8'] or float('nan'):.3f}"
            for name, values in rows[-1]["metrics"].items()
        )
        before, after = rows[-1]["macs"]
        print(f"{subject.name}: {metrics}; MACs {before:,.0f} -> {after:,.0f}; {rows[-1]['placement']}", flush=True)
        print(f"  {rows[-1]['verdict']}: {'; '.join(rows[-1]['reasons'])[:400]}", flush=True)
    if not options.only:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
