"""Time of decoding a detector's outputs in numpy, with non-maximum suppression, on one core.

`python -m benchmarks.detector_decoding` prints the milliseconds for 2,100 locations (an input of 320 x 320 with strides
of 8, 16 and 32) and 80 classes, by box code and by the number of scores above the threshold. The times are the shortest
and the median of several runs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from deploy.contract.detection import Detector

CELLS = (40, 20, 10)
CLASSES = 80
REPEATS = 200
CODES: dict[str, dict[str, Any]] = {
    "dfl": {"code": "dfl", "bins": 16},
    "yolox with objectness": {"code": "yolox"},
    "ssd": {"code": "ssd"},
}
LIKELY = (20, 300, 2_000)
"""The numbers of scores above the threshold."""


def outputs_of(detector: Detector, likely: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return random outputs with some scores above the threshold, several of them near each other.

    Args:
        detector: the detector.
        likely: the number of scores.
        random: the source of the numbers.
    """
    outputs = []
    for count, width in detector.output_sizes(CLASSES):
        outputs.append(random.normal(0, 1, (count, width)).astype(np.float32))
    for entry, output in zip(detector.specification["tensors"], outputs, strict=True):
        if entry["part"] == "scores":
            output[:] = -9
            rows = random.integers(0, len(output), likely)
            output[rows, random.integers(0, 3, likely)] = random.uniform(-3, 4, likely)
        elif entry["part"] == "objectness":
            output[:] = np.where(random.random(output.shape) < likely / len(output), 4, -9)
    return outputs


def milliseconds(detector: Detector, outputs: list[np.ndarray]) -> tuple[float, float]:
    """Return the shortest and the median time of a call, in milliseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        detector(outputs)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), float(np.median(times))


def main() -> None:
    """Print the times."""
    random = np.random.default_rng(0)
    print("| code | scores above the threshold | found | least ms | median ms |\n|---|---|---|---|---|")
    for name, settings in CODES.items():
        boxes = {"boxes": [[0.2, 0.2]]} if settings["code"] == "ssd" else {}
        parts = ["boxes", "scores"] + (["objectness"] if "objectness" in name else [])
        detector = Detector(
            {
                **settings,
                "maps": [{"cells": [side, side], **boxes} for side in CELLS],
                "tensors": [{"part": part} for part in parts],
            }
        )
        for likely in LIKELY:
            outputs = outputs_of(detector, likely, random)
            least, median = milliseconds(detector, outputs)
            print(f"| {name} | {likely:,} | {len(detector(outputs))} | {least:.2f} | {median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
