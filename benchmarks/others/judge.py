"""Judge one file: `python benchmarks/others/judge.py SUBJECT_FOLDER FILE JUDGEMENT.json [--photos FOLDER]`.

A separate process for each file: one that crashes the runtime is then a result. For YOLOX, the outputs are decoded, and
the average precision on the photos is measured as benchmarks/yolox.py does.

    python benchmarks/others/judge.py SUBJECT_FOLDER --latency TIMES.json NAME=FILE ...

measures the time of several files on the CPU in turns.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

import repository  # noqa: F401 - the search path

import file_judgement
import numpy as np
from numpy.typing import NDArray
from paths import SHARED

Floats = NDArray[np.float32]
STRIDES = (8, 16, 32)
SIDE, CLASSES = 416, 80


def joined_levels(outputs: list[Floats]) -> list[Floats]:
    """Return the outputs of a YOLOX file as its model has them: one of [n, 3549, 85].

    Coralline cuts the decoding off, so its file has boxes, objectness and class logits of each stride.
    """
    by_shape = {output.shape[1:]: output for output in outputs}
    levels = [(SIDE // stride, SIDE // stride) for stride in STRIDES]
    if not all((*level, width) in by_shape for level in levels for width in (4, 1, CLASSES)):
        return outputs
    rows = []
    for level in levels:
        parts = [by_shape[(*level, width)].reshape(len(outputs[0]), -1, width) for width in (4, 1, CLASSES)]
        rows.append(np.concatenate([parts[0], *(1 / (1 + np.exp(-part)) for part in parts[1:])], axis=2))
    return [np.concatenate(rows, axis=1)]


def separate_levels(output: Floats) -> dict[tuple[int, ...], Floats]:
    """Return [n, 3549, 85] as boxes, objectness and class logits by shape, as benchmarks/yolox.py decodes them."""
    by_shape: dict[tuple[int, ...], Floats] = {}
    start = 0
    for stride in STRIDES:
        side = SIDE // stride
        level = output[:, start : start + side * side].reshape(len(output), side, side, -1)
        probabilities = np.clip(level[..., 4:], 1e-9, 1 - 1e-7).astype(np.float64)
        logits = np.log(probabilities / (1 - probabilities)).astype(np.float32)
        by_shape |= {
            (side, side, 4): level[..., :4],
            (side, side, 1): logits[..., :1],
            (side, side, CLASSES): logits[..., 1:],
        }
        start += side * side
    return by_shape


def average_precision(output: Floats, folder: Path) -> dict[str, float]:
    """Return COCO's average precision of an output [n, 3549, 85] on the validation photos of coco128."""
    import yolox

    if not (folder / "images").exists():
        with tarfile.open(SHARED / "data" / "coco128.tar") as archive:
            archive.extractall(folder, filter="data")
    split = yolox.photos(folder, "val2017", SIDE)
    detections = yolox.detections(separate_levels(output), split)
    if not detections:
        return {"ap": 0.0, "ap50": 0.0}
    return yolox.Evaluation(detections, split).precision(np.arange(len(split.inputs)))


def judge(subject: Path, file: Path, photos: Path | None) -> dict[str, Any]:
    """Return the judgement of a file."""
    about = json.loads((subject / "subject.json").read_text())
    with np.load(subject / "samples.npz") as arrays:
        samples = arrays["test"]
        labels = arrays["test_labels"] if "test_labels" in arrays.files else None
    with np.load(subject / "reference.npz") as arrays:
        expected = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
    if not about["detector"]:
        return file_judgement.judged(file, samples, expected, labels)
    judgement = {"size_bytes": file.stat().st_size, **file_judgement.types(file), **file_judgement.placement(file)}
    try:
        outputs = file_judgement.matched(expected, joined_levels(file_judgement.outputs_of(file, samples)))
    except file_judgement.NotComparableError as error:
        return {**judgement, "error": str(error)}
    judgement |= file_judgement.quality(expected, outputs, None)
    if photos is not None:
        judgement |= average_precision(outputs[0], photos)
        judgement["float_ap50"] = average_precision(expected[0], photos)["ap50"]
    return judgement


def main() -> None:
    """Judge a file, or time several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--latency", type=Path)
    parser.add_argument("--photos", type=Path)
    options = parser.parse_args()
    if options.latency is not None:
        files = {name: Path(file) for name, _, file in (argument.partition("=") for argument in options.files)}
        with np.load(options.subject / "samples.npz") as arrays:
            sample = arrays["test"][0]
        options.latency.write_text(json.dumps(file_judgement.cpu_milliseconds(files, sample)))
        return
    file, out = map(Path, options.files)
    out.write_text(json.dumps(judge(options.subject, file, options.photos), indent=1))


if __name__ == "__main__":
    main()
