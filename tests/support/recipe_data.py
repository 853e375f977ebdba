"""Small data in the public format of each recipe's data set, and models in place of the recipes' own."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import data_files
import numpy as np
import tiny
from paths import ROOT
from PIL import Image

PREPARED = {
    "gestures": ("gestures", "data/gestures.npz"),
    "text": ("verses", "data/verses.csv"),
    "spoken_digits": ("spoken_digits", "data/spoken_digits"),
    "temperature": ("temperature", "data/temperature.npz"),
    "person": ("coco128", "data/person"),
    "cards": ("cards", "data/cards"),
    "custom_detector": ("coco128", "data/road", "--boxes"),
    "groceries_coarse": ("groceries", "data/groceries"),
    "groceries_search": ("groceries", "data/groceries"),
    "groceries_from_tflite": ("groceries", "data/groceries"),
    "groceries_fine_from_tflite": ("groceries", "data/groceries"),
    "keras_file": ("coco128", "data/photos", "--unsorted"),
    "onnx_file": ("coco128", "data/photos", "--unsorted"),
    "quantized_tflite_file": ("coco128", "data/photos", "--unsorted"),
}
"""The folder in calibration_data/ of each recipe, its target, and options of its prepare.py."""
MODELS = ("vww_96.h5", "yolox_nano.onnx", "model.h5", "model.onnx")
"""Files that only a run reads, not a dry run."""
TFLITE_MODELS = ("model.tflite", "mobilenet_v1_1.0_224_quant_embedding_extractor.tflite")


def prepare(script: str, source: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the program that prepares a data set."""
    command = [sys.executable, ROOT / "calibration_data" / script / "prepare.py", source, target, *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def models(folder: Path) -> None:
    """Write files in place of the recipes' models; those that a dry run reads are real."""
    folder.mkdir()
    for name in MODELS:
        (folder / name).write_bytes(b"")
    for name in TFLITE_MODELS:
        (folder / name).write_bytes(tiny.classifier())


def photo(path: Path, side: int = 24) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(path.name)).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(path)


def table(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)


def gestures(folder: Path) -> None:
    """Write ten strokes of each of ten digits. The first x of a stroke is its number divided by 100."""
    for digit in range(10):
        strokes = []
        for number in range(10):
            points = [{"x": number / 100, "y": 0.1}] * (30 + number)
            strokes.append({"index": number, "label": str(digit), "strokePoints": points})
        (folder / f"petewarden_{digit}.json").write_text(json.dumps({"strokes": strokes}))


def verses(folder: Path) -> None:
    """Write pythonbible with ten chapters of each kind of book, with three verses each; one verse has no words."""
    firsts = (1, 6, 18, 23, 40, 45)
    numbers = [
        book * 10**6 + chapter * 1000 + verse for book in firsts for chapter in range(1, 11) for verse in (1, 2, 3)
    ]
    texts = {number: f"verse {number} of {number // 10**6}" for number in numbers} | {numbers[0]: " "}
    (folder / "pythonbible").mkdir()
    code = f"""TEXTS = {{**{texts}, 66001001: "a revelation"}}
class Version:
    AMERICAN_STANDARD = 0
class verses:
    VERSE_IDS = tuple(TEXTS)
def get_verse_text(number, version):
    return TEXTS[number]
"""
    (folder / "pythonbible" / "__init__.py").write_text(code)


def spoken_digits(folder: Path) -> None:
    """Write twelve recordings of each digit by each of six speakers."""
    (folder / "recordings").mkdir()
    for speaker in ("george", "jackson", "lucas", "nicolas", "theo", "yweweler"):
        for digit in range(10):
            for number in range(12):
                path = folder / "recordings" / f"{digit}_{speaker}_{number}.wav"
                path.write_bytes(data_files.sound(np.arange(400 + number)))


def temperature(folder: Path) -> None:
    """Write series with the length, the steps and the anomaly windows of the real ones, and with a gap."""
    anomalies = {"ambient": ((3540, 3903), (5999, 6362)), "machine": ((2126, 2693), (16057, 16624))}
    windows = {}
    for name, (count, minutes) in {"ambient": (7267, 60), "machine": (22695, 5)}.items():
        file = f"{name}_temperature_system_failure.csv"
        steps = np.arange(count) * minutes + np.where(np.arange(count) > count * 0.8, 60 * 24 * 7, 0)
        times = [str(np.datetime64("2013-12-01T00:00:00") + np.timedelta64(step, "m")) for step in steps.tolist()]
        rows = [(time.replace("T", " "), 70 + index % 24) for index, time in enumerate(times)]
        table(folder / "data" / "realKnownCause" / file, ("timestamp", "value"), rows)
        ends = [(f"{rows[a][0]}.000000", f"{rows[b - 1][0]}.000000") for a, b in anomalies[name]]
        windows[f"realKnownCause/{file}"] = ends
    (folder / "labels").mkdir()
    (folder / "labels" / "combined_windows.json").write_text(json.dumps(windows))


def coco128(folder: Path) -> None:
    """Write photos with a large person, with a small one, with another object, and without a text file."""
    labels = {"large": "0 0.5 0.5 0.5 0.5", "small": "0 0.5 0.5 0.05 0.05", "other": "45 0.5 0.5 0.9 0.9"}
    for split in ("train2017", "val2017"):
        for number in range(4):
            for kind in (*labels, "none"):
                photo(folder / "images" / split / f"{kind}{number}.jpg")
            for kind, line in labels.items():
                path = folder / "object_detection" / "labels" / split / f"{kind}{number}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{line}\n")


def cards(folder: Path) -> None:
    """Write photos with two boxes each."""
    header = ("filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax")
    for split, count in (("train", 12), ("test", 4)):
        rows = []
        for number in range(count):
            photo(folder / "images" / split / f"cam{number}.jpg")
            rows += [(f"cam{number}.jpg", 24, 24, name, 2, 3, 12, 20) for name in ("king", "ace")]
        table(folder / "images" / f"{split}_labels.csv", header, rows)


def groceries(folder: Path) -> None:
    """Write photos of three products in two coarse classes."""
    dataset = folder / "dataset"
    names = (("Golden-Delicious", 0, "Apple", 0), ("Pink-Lady", 1, "Apple", 0), ("Milk", 2, "Milk", 1))
    header = ("Class Name (str)", "Class ID (int)", "Coarse Class Name (str)", "Coarse Class ID (int)")
    table(dataset / "classes.csv", header, names)
    for split, count in (("train", 6), ("val", 2), ("test", 3)):
        lines = []
        for name, fine, _, coarse in names:
            for number in range(count):
                file = f"{split}/{name}/{number}.jpg"
                photo(dataset / file)
                lines.append(f"{file}, {fine}, {coarse}\n")
        (dataset / f"{split}.txt").write_text("".join(lines))


WRITERS = {
    "gestures": gestures,
    "verses": verses,
    "spoken_digits": spoken_digits,
    "temperature": temperature,
    "coco128": coco128,
    "cards": cards,
    "groceries": groceries,
}
"""The function that writes the public format, by the folder in calibration_data/."""
