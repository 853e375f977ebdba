"""A detector on tiles of large images: `python -m benchmarks.tiled_detection BUNDLE COCO128_TAR`.

COCO128 has no small objects in large photos. So several of its photos are put together: 16 photos of 480 pixels are an
image of 1920 x 1920. The bundle is a detector of COCO's 80 classes, for example the result of
`python -m compress export yolox_nano.onnx --calibrate photos`. Prints a Markdown table: the average precision, and at a
score of 0.3 the objects that are found, and the answers that only show a part of an object, or show it again.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

from deploy import Model, Tiles
from deploy.contract.average_precision import Truth, average_precision
from deploy.contract.detection import Detections
from deploy.contract.preprocessing import Array
from deploy.contract.suppression import intersections, overlaps
from deploy.runner import tiles

CLASSES = 80
LEAST_SCORE = 0.3
SIZES = ((4, 480), (2, 640))
"""Photos along each dimension of an image, and the pixels of the longer dimension of a photo."""
GRIDS = (Tiles(1, 1), Tiles(2, 2), Tiles(3, 3), Tiles(3, 3, whole=False))


def photos(archive: Path) -> list[tuple[Image.Image, Array]]:
    """Return the photos of COCO128, with rows of class, x, y, width, height; x and y are those of the middle."""
    pairs = []
    with tarfile.open(archive) as tar:
        members = {Path(member.name): member for member in tar if member.isfile()}
        labels = {path.stem: member for path, member in members.items() if path.suffix == ".txt"}
        for path, member in sorted(members.items()):
            if path.suffix == ".jpg" and "train2017" in path.parts:
                photo = Image.open(io.BytesIO(_content(tar, member))).convert("RGB")
                text = _content(tar, labels[path.stem]).decode() if path.stem in labels else ""
                pairs.append((photo, np.array(text.split(), np.float64).reshape(-1, 5)))
    return pairs


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def image_of(parts: list[tuple[Image.Image, Array]], count: int, pixels: int) -> tuple[Array, Truth]:
    """Return an image of `count` x `count` photos, and its objects."""
    side = count * pixels
    canvas = np.full((side, side, 3), 114, np.uint8)
    boxes = []
    classes = []
    for index, (photo, rows) in enumerate(parts):
        ratio = pixels / max(photo.size)
        width, height = (int(length * ratio) for length in photo.size)
        top = index // count * pixels
        left = index % count * pixels
        resized = photo.resize((width, height), Image.Resampling.BILINEAR)
        canvas[top : top + height, left : left + width] = np.asarray(resized)
        low = rows[:, 2:0:-1] - rows[:, :2:-1] / 2
        corners = np.stack([low, low + rows[:, :2:-1]], axis=1) * [height, width] + [top, left]
        boxes.append(corners.reshape(-1, 4) / side)
        classes.append(rows[:, 0].astype(np.int64))
    return canvas, (np.concatenate(boxes).astype(np.float32), np.concatenate(classes))


def counts(answer: Detections, truth: Truth) -> tuple[int, int]:
    """Return how many objects are found, and how many answers are parts or repetitions of objects."""
    boxes, classes = truth
    answer = answer.above(LEAST_SCORE)
    is_same = answer.classes[:, np.newaxis] == classes
    ious = overlaps(answer.boxes, boxes) * is_same
    areas = np.prod(answer.boxes[:, 2:] - answer.boxes[:, :2], axis=1)
    inside = ((intersections(answer.boxes, boxes) > 0.5 * areas[:, np.newaxis]) & is_same).any(axis=1)
    taken = np.zeros(len(boxes), bool)
    parts = 0
    for row, is_inside in zip(ious, inside, strict=True):
        best = int(np.where(taken, 0, row).argmax())
        if row[best] >= 0.5 and not taken[best]:
            taken[best] = True
        else:
            parts += int(is_inside)
    return int(taken.sum()), parts


def _row(name: str, answers: list[Detections], truth: list[Truth]) -> str:
    precision = average_precision(answers, truth, CLASSES)
    object_counts = [counts(answer, objects) for answer, objects in zip(answers, truth, strict=True)]
    sums = np.sum(object_counts, axis=0)
    return f"| {name} | {precision['ap']:.3f} | {precision['ap50']:.3f} | {sums[0]} | {sums[1]} |"


def _without_fragments(boxes: Array, *others: Array) -> Array:
    """Return False for each box, so that only non-maximum suppression removes boxes."""
    del others
    return np.zeros(len(boxes), bool)


def table(model: Model, pairs: list[tuple[Array, Truth]]) -> None:
    """Print the table for images with their objects."""
    truth = [objects for _, objects in pairs]
    print("| tiles | AP | AP50 | found | parts |\n|---|---|---|---|---|")
    for grid in GRIDS:
        name = f"{grid.rows} x {grid.columns}" + ("" if grid.whole else ", without the whole image")
        if grid != GRIDS[0]:
            with mock.patch.object(tiles, "_fragments", _without_fragments):
                plain = [model.tiled(image, grid) for image, _ in pairs]
            print(_row(f"{name}, non-maximum suppression alone", plain, truth), flush=True)
        print(_row(name, [model.tiled(image, grid) for image, _ in pairs], truth), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("archive", type=Path)
    arguments = parser.parse_args()
    available = photos(arguments.archive)
    with Model(arguments.bundle, role="int8") as model:
        for count, pixels in SIZES:
            groups = [available[start : start + count**2] for start in range(0, len(available), count**2)]
            pairs = [image_of(group, count, pixels) for group in groups]
            objects = sum(len(boxes) for _, (boxes, _) in pairs)
            print(f"\n{len(pairs)} images of {count * pixels} pixels, {objects} objects\n")
            table(model, pairs)


if __name__ == "__main__":
    main()
