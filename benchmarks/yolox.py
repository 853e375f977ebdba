"""A detector in 8 bits, without labels: `python benchmarks/yolox.py [--sizes 416,320] [--networks silu,relu]`.

YOLOX-nano (COCO) is read from its .onnx file with `detector: auto` and quantized by several tools from 100 training
photos of coco128 without their labels; our search also compares its candidates on others of the 128. All tools get the
model without its decoding, so every output has its own scale. "silu" is the network as it is. "relu" has ReLUs in
place of SiLU: `replace_activations` trains it with the original as its teacher, on the same photos without labels, at
224 x 224. This takes 20 minutes or more; the trained model is kept in the folder --cache and reused.

The result is COCO's mean average precision on the 128 validation photos of coco128, by pycocotools, with 95% intervals
from a bootstrap over photos. All tools get the same resamples, so that differences have intervals too. The same is
measured with the objects of the float network as labels: 128 photos are too few to show small losses otherwise. At
416 pixels, quantization-aware training with the float network as teacher is compared too; 24 of the photos decide
whether it is kept. Photos are read, and boxes are decoded, by code of this file, not by Coralline's. Needs the shared
files (CORALLINE_SHARED, or ../shared next to the project) and ai-edge-quantizer, which is left out if it is not
installed. Writes benchmarks/results/yolox.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import repository

import numpy as np
from common import commit
from numpy.typing import NDArray
from paths import ROOT, SHARED
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from quantization_tools import CONVERTER, EDGE_QUANTIZER, by_edge_quantizer, converted

import compress
from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE
from compress.learning.quantization import export
from compress.model.detectors.detector_model import detector_model
from compress.model.tflite import graph, macs
from compress.model.tflite.interpreter import LoadedModel

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

RESULTS = repository.RESULTS / "yolox.json"
FILE = SHARED / "models" / "onnx" / "yolox_nano.onnx"
SIZES = (416, 320)
CALIBRATION, FEWER = 100, 64
"""Photos for the ranges; fewer where some of them decide whether the training is kept."""
PHOTOS, PHOTOS_OF_QAT = "photos", "photos_qat"
SPLITS = {
    PHOTOS: {0: "validation", 16: "test"},
    PHOTOS_OF_QAT: dict.fromkeys((0, 4, 8, 16, 20, 24), "validation") | dict.fromkeys((2, 18), "test"),
}
"""Folders of photos: the split of each photo by its number modulo 32; all others are for training."""
STRIDES = (8, 16, 32)
CLASSES = 80
"""The number of classes of COCO, with which the network was trained."""
BORDER = 114
"""The value of the border of letterboxed photos, as in the training of YOLOX."""
LEAST_SCORE, OVERLAP, MOST = 0.001, 0.65, 100
"""Settings of YOLOX's own evaluation."""
FOUND = 0.3
"""Score from which an object of the float network counts as a label, as in the task `unlabelled_detection`."""
CANDIDATES = 3000
"""Chosen: boxes of a photo that are compared; the best MOST are kept."""
FLOAT = "float"
CORALLINE, WITHOUT_GATES, TRAINED = "coralline", "coralline, separate_gates: off", "coralline, QAT"
SILU, RELU = "silu", "relu"
HEALING_SIZE = 224
"""Size of the photos in the training with ReLUs; its result is used at all sizes."""
HEAL = """replace_activations:
      by: relu
      gradual: 0.4
      epochs: 200
      batch_size: 8
      temperature: 1
      weight: 1
      augment: {zoom: 0.5, shift: 0.2, flip: true}"""
QUANTIZE = "quantize: {{calibration_samples: {samples}, separate_gates: {gates}}}"
TRAIN = """quantize:
      calibration_samples: {samples}
      method: qat
      epochs: 10
      batch_size: 8
      learning_rate: 0.00002
      qat: {{ranges: learned, distill: {{temperature: 1, weight: 1}}}}"""
"""Without labels: the float model is the only teacher."""
PIPELINE = """schema_version: 1
name: {name}
seed: 0
target: edgetpu
model: {{file: {file}, detector: yolox}}
data:
  task: unlabelled_detection
  source: {{folder: {{path: {photos}, labels: none}}}}
  preprocess:
    - resize: {{size: [{size}, {size}], fit: letterbox, align: top_left, fill: {border}}}
    - colour: {{to: bgr}}
stages:
  - {stages}
measure: {{latency: {{runs: 5}}}}
"""
Floats = NDArray[np.float32]
Boxes = NDArray[np.float64]


@dataclass(frozen=True)
class Photos:
    """The photos of a split.

    Attributes:
        inputs: BGR, 0 to 255, letterboxed [n, size, size, 3].
        scales: the factor of each photo [n].
        classes: the class of each object, by photo.
        boxes: left, top, right and bottom of each object in pixels of the photo, by photo.
    """

    inputs: Floats
    scales: NDArray[np.float64]
    classes: Sequence[NDArray[np.int64]]
    boxes: Sequence[Boxes]


def photos(folder: Path, split: str, side: int) -> Photos:
    """Read the photos of a split, with their objects, for an input of `side` x `side` pixels."""
    inputs, scales, classes, boxes = [], [], [], []
    for path in sorted((folder / "images" / split).glob("*.jpg")):
        image = Image.open(path).convert("RGB")
        scale = min(side / image.width, side / image.height)
        size = int(image.width * scale), int(image.height * scale)
        canvas = np.full((side, side, 3), BORDER, np.float32)
        canvas[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR))[..., ::-1]
        label = folder / "object_detection" / "labels" / split / f"{path.stem}.txt"
        lines = label.read_text().split("\n") if label.exists() else []
        rows = np.array([line.split() for line in lines if line.strip()], np.float64).reshape(-1, 5)
        centres, sizes = (rows[:, part] * (image.width, image.height) for part in (slice(1, 3), slice(3, 5)))
        inputs.append(canvas)
        scales.append(scale)
        classes.append(rows[:, 0].astype(np.int64))
        boxes.append(np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1))
    return Photos(np.stack(inputs), np.array(scales), classes, boxes)


def split_photos(folder: Path) -> None:
    """Put the 128 training photos into the splits of each of SPLITS."""
    for number, path in enumerate(sorted((folder / "images" / "train2017").glob("*.jpg"))):
        for name, splits in SPLITS.items():
            target = folder / name / splits.get(number % 32, "train")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


def ran(folder: Path, name: str, file: Path, size: int, stage: str, photos: str = PHOTOS) -> Path:
    """Run a pipeline of one stage as a user does; return the folder with its results."""
    values = {"name": name, "file": json.dumps(str(file)), "photos": json.dumps(str(folder / photos))}
    path = folder / f"{name}.yaml"
    path.write_text(PIPELINE.format(**values, size=size, border=BORDER, stages=stage))
    command = [sys.executable, "-m", "compress", str(path), "--out", str(folder / "runs")]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
    if done.returncode not in (0, 7):  # 7: not usable, in the verdict; the figures show it
        raise SystemExit(f"{path}: exit code {done.returncode}")
    return folder / "runs" / name


def healed(folder: Path) -> Path:
    """Return the file of the network with ReLUs, trained without labels."""
    path = folder / f"yolox_nano_relu_{HEALING_SIZE}.keras"
    if not path.exists():
        shutil.copyfile(ran(folder, "heal", FILE, HEALING_SIZE, HEAL) / MODEL_KERAS, path)
    return path


def without_decoding(file: Path, size: int) -> Any:
    """Return a network as a Keras model with boxes, objectness and class logits of each stride as outputs."""
    detector = detector_model(compress.load_model(str(file)), "yolox", size=(size, size))
    assert detector is not None
    return detector.model


def ours(
    folder: Path, name: str, file: Path, size: int, stage: str, photos: str = PHOTOS
) -> tuple[bytes, dict[str, Any]]:
    """Return our file, and the record of the search and of the training."""
    output = ran(folder, name, file, size, stage, photos)
    report = json.loads((output / "report.json").read_text())
    facts = next(stage["facts"] for stage in report["stages"] if stage["stage"] == "quantize")
    kept = ("kept", "ranges", "tried", "separated_gates", "warnings", "history", "validation_ap")
    return (output / MODEL_TFLITE).read_bytes(), {name: facts[name] for name in kept if name in facts}


def file_outputs(content: bytes, inputs: Floats) -> dict[tuple[int, ...], Floats]:
    """Return the outputs of a file by shape, which identifies each of them; tools order them differently."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        model = LoadedModel(path, reproducible=True)
        rows = model.scores(inputs)
    return {values.shape[1:]: values for values in model.output_layout.split(rows)}


def decoded(outputs: dict[tuple[int, ...], Floats], photo: int, size: int) -> tuple[Boxes, Boxes]:
    """Return boxes [n, 4] in pixels of the input, and scores [n, classes], of one photo."""
    boxes, scores = [], []
    for stride in STRIDES:
        side = size // stride
        codes, objectness, logits = (
            outputs[side, side, width][photo].reshape(side * side, width).astype(np.float64)
            for width in (4, 1, CLASSES)
        )
        rows, columns = np.divmod(np.arange(side * side), side)
        centres = (codes[:, :2] + np.stack([columns, rows], 1)) * stride
        sizes = np.exp(np.minimum(codes[:, 2:], 20)) * stride
        boxes.append(np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1))
        scores.append(1 / (1 + np.exp(-objectness)) / (1 + np.exp(-logits)))
    return np.concatenate(boxes), np.concatenate(scores)


def detections(outputs: dict[tuple[int, ...], Floats], split: Photos) -> list[dict[str, Any]]:
    """Return the detected objects of all photos in COCO's format."""
    objects = []
    for photo, scale in enumerate(split.scales):
        boxes, scores = decoded(outputs, photo, split.inputs.shape[1])
        anchors, labels = np.nonzero(scores > LEAST_SCORE)
        chosen = np.argsort(-scores[anchors, labels], kind="stable")[:CANDIDATES]
        boxes, values, labels = boxes[anchors[chosen]] / scale, scores[anchors, labels][chosen], labels[chosen]
        for kept in _without_duplicates(boxes, values, labels):
            box = _coco_box(boxes[kept])
            entry = {"image_id": photo, "category_id": int(labels[kept]), "bbox": box, "score": float(values[kept])}
            objects.append(entry)
    return objects


def as_labels(found: list[dict[str, Any]], split: Photos) -> Photos:
    """Return photos with objects that were found with a score of at least FOUND as their labels."""
    classes, boxes = [], []
    for photo in range(len(split.inputs)):
        sure = [entry for entry in found if entry["image_id"] == photo and entry["score"] >= FOUND]
        corners = np.array([entry["bbox"] for entry in sure], np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        classes.append(np.array([entry["category_id"] for entry in sure], np.int64))
        boxes.append(corners)
    return replace(split, classes=classes, boxes=boxes)


def _coco_box(box: Boxes) -> list[float]:
    left, top, right, bottom = box.tolist()
    return [left, top, right - left, bottom - top]


def _without_duplicates(boxes: Boxes, scores: Boxes, labels: NDArray[np.int64]) -> list[int]:
    """Return the boxes that non-maximum suppression keeps, class by class; boxes are in the order of their scores."""
    boxes = boxes + labels[:, np.newaxis] * 1e5
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    waiting = np.arange(len(scores))
    kept: list[int] = []
    while len(waiting) and len(kept) < MOST:
        best, waiting = int(waiting[0]), waiting[1:]
        kept.append(best)
        low = np.maximum(boxes[best, :2], boxes[waiting, :2])
        high = np.minimum(boxes[best, 2:], boxes[waiting, 2:])
        shared = np.maximum(high - low, 0).prod(axis=1)
        waiting = waiting[shared / (areas[best] + areas[waiting] - shared) <= OVERLAP]
    return kept


class Evaluation:
    """COCO's average precision of one tool, of all photos or of resampled ones."""

    def __init__(self, predictions: list[dict[str, Any]], split: Photos) -> None:
        annotations: list[dict[str, Any]] = []
        for photo, (boxes, labels) in enumerate(zip(split.boxes, split.classes, strict=True)):
            for box, label in zip(boxes, labels, strict=True):
                coco_box = _coco_box(box)
                entry = {"image_id": photo, "category_id": int(label), "bbox": coco_box, "iscrowd": 0}
                annotations.append(entry | {"id": len(annotations) + 1, "area": coco_box[2] * coco_box[3]})
        with contextlib.redirect_stdout(io.StringIO()):  # it prints progress
            truth = COCO()
            truth.dataset = {
                "images": [{"id": photo} for photo in range(len(split.inputs))],
                "categories": [{"id": label} for label in range(CLASSES)],
                "annotations": annotations,
            }
            truth.createIndex()
            self._judge = COCOeval(truth, truth.loadRes(predictions), "bbox")
            parameters = self._judge.params
            parameters.areaRng, parameters.areaRngLbl, parameters.maxDets = [[0.0, 1e10]], ["all"], [MOST]
            self._judge.evaluate()
        self._by_photo = np.array(self._judge.evalImgs, object).reshape(CLASSES, -1)

    def precision(self, chosen: NDArray[np.int64]) -> dict[str, float]:
        """Return the mean average precision of some photos, of which some may occur several times."""
        self._judge.evalImgs = self._by_photo[:, chosen].ravel().tolist()
        with contextlib.redirect_stdout(io.StringIO()):
            self._judge.accumulate()
        precision = self._judge.eval["precision"]  # [overlaps, recalls, classes, areas, numbers]; -1: no objects
        at_half = precision[:1]
        return {"ap": float(precision[precision > -1].mean()), "ap50": float(at_half[at_half > -1].mean())}


def measured(evaluations: dict[str, Evaluation], count: int, resamples: int) -> dict[str, Any]:
    """Return by tool the average precision and its loss against the float model, with intervals."""
    generator = np.random.default_rng(0)
    draws = [generator.integers(0, count, count) for _ in range(resamples)]
    exact = {name: evaluation.precision(np.arange(count)) for name, evaluation in evaluations.items()}
    drawn = {name: [evaluation.precision(draw) for draw in draws] for name, evaluation in evaluations.items()}
    summary: dict[str, Any] = {}
    for name, values in exact.items():
        summary[name] = {}
        for metric, value in values.items():
            sampled = np.array([draw[metric] for draw in drawn[name]])
            lost = np.array([draw[metric] for draw in drawn["float"]]) - sampled
            summary[name][metric] = {
                "value": round(value, 4),
                "interval": _interval(sampled),
                "loss": round(exact["float"][metric] - value, 4),
                "loss_interval": _interval(lost),
            }
    return summary


def _interval(values: NDArray[np.float64]) -> list[float]:
    return [round(float(value), 4) for value in np.percentile(values, (2.5, 97.5))]


def timed(make: Callable[[], tuple[bytes, dict[str, Any]]]) -> tuple[bytes, dict[str, Any]]:
    """Return a file, and facts about it and how it was made."""
    started = time.perf_counter()
    content, facts = make()
    seconds = round(time.perf_counter() - started)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        placed = compress.check(path).to_json()["ops"]
    return content, {
        **facts,
        "seconds": seconds,
        "size_bytes": len(content),
        "macs": macs.total_macs(graph.parse(content)),
        "mapped": sum(op["placement"] == "tpu" for op in placed),
        "operators": len(placed),
        "float_operators": sorted(set(export.float_operators(content).values())),
    }


def files(folder: Path, name: str, file: Path, size: int, samples: Floats) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Return the int8 file of each tool, and facts about how it was made."""
    model = without_decoding(file, size)
    found = QUANTIZE.format(samples=CALIBRATION, gates="auto")
    quantized_files = {CORALLINE: timed(lambda: ours(folder, f"{name}-{size}", file, size, found))}
    if name == SILU and size == SIZES[0]:
        joint, trained = QUANTIZE.format(samples=CALIBRATION, gates='"off"'), TRAIN.format(samples=FEWER)
        quantized_files[WITHOUT_GATES] = timed(lambda: ours(folder, f"{name}-{size}-joint", file, size, joint))
        quantized_files[TRAINED] = timed(lambda: ours(folder, f"{name}-{size}-qat", file, size, trained, PHOTOS_OF_QAT))
    quantized_files[CONVERTER] = timed(lambda: (converted(model, samples, dense_per_tensor=True), {}))
    try:
        quantized_files[EDGE_QUANTIZER] = timed(lambda: (by_edge_quantizer(model, samples, dense_per_tensor=False), {}))
    except ImportError:
        print("ai-edge-quantizer is not installed: left out", file=sys.stderr)
    return quantized_files


def compared(folder: Path, name: str, file: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the average precision of a network in float and as each tool's int8 file, and facts about the files.

    The average precision is measured with the labels (`ap`), and with the objects of the float network as labels
    (`found_again`).
    """
    training, validation = (photos(folder, split, size) for split in ("train2017", "val2017"))
    quantized_files = files(folder, name, file, size, training.inputs[:CALIBRATION])
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for tool, (content, _) in quantized_files.items():
            label = tool.split(":")[0].replace(", ", "_")
            (options.keep / f"{name}_{size}_{label}.tflite").write_bytes(content)
    floats = without_decoding(file, size).predict(validation.inputs, batch_size=8, verbose=0)
    outputs = {FLOAT: {values.shape[1:]: values for values in floats}}
    outputs |= {tool: file_outputs(content, validation.inputs) for tool, (content, _) in quantized_files.items()}
    found = {tool: detections(tool_outputs, validation) for tool, tool_outputs in outputs.items()}
    again = as_labels(found[FLOAT], validation)
    summary, found_again = (
        measured(
            {tool: Evaluation(boxes, truth) for tool, boxes in found.items()}, len(truth.inputs), options.resamples
        )
        for truth in (validation, again)
    )
    for tool, values in summary.items():
        cells = [f"{metric} {value['value']:.3f} {value['interval']}" for metric, value in values.items()]
        cells.append(f"found again {found_again[tool]['ap']['value']:.3f}")
        print(f"{name} {size} {tool:32} {'  '.join(cells)}", flush=True)
    made = {tool: facts for tool, (_, facts) in quantized_files.items()}
    return {"commit": commit(), "ap": summary, "found_again": found_again, "made": made}


def main() -> int:
    """Make the files, measure them, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--networks", default=f"{SILU},{RELU}")
    parser.add_argument("--resamples", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="a folder for the .tflite files")
    parser.add_argument("--cache", type=Path, help="a folder for results of stages, which are reused")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if repository.is_missing(SHARED):
        return 0
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = (options.cache or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
            archive.extractall(folder, filter="data")
        split_photos(folder)
        for network in options.networks.split(","):
            file = FILE if network == SILU else healed(folder)
            for size in map(int, options.sizes.split(",")):
                key = f"{network}, {size} x {size}"
                results[key] = compared(folder, network, file, size, options) | {"resamples": options.resamples}
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
