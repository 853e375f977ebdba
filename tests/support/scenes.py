"""Small images with blocks and rings to detect, written in the format of Pascal VOC or of COCO."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("block", "ring")
Box = tuple[int, int, int, int]
"""xmin, ymin, xmax, ymax in pixels."""


def scene(random: np.random.Generator, side: int = 64) -> tuple[NDArray[np.uint8], list[tuple[str, Box]]]:
    """Return a noisy grey image as RGB, and its objects: one or two that do not overlap."""
    picture = random.integers(60, 100, (side, side, 3)).astype(np.uint8)
    objects: list[tuple[str, Box]] = []
    for _ in range(int(random.integers(1, 3))):
        size = int(random.integers(side // 4, side // 2))
        left, top = (int(random.integers(0, side - size)) for _ in range(2))
        box = (left, top, left + size, top + size)
        if any(max(box[0], b[0]) < min(box[2], b[2]) and max(box[1], b[1]) < min(box[3], b[3]) for _, b in objects):
            continue
        name = CLASSES[int(random.integers(2))]
        part = picture[top : top + size, left : left + size]
        part[...] = 230
        if name == "ring":
            part[size // 4 : -(size // 4), size // 4 : -(size // 4)] = 20
        objects.append((name, box))
    return picture, objects


def scenes(count: int, seed: int = 0) -> list[tuple[NDArray[np.uint8], list[tuple[str, Box]]]]:
    random = np.random.default_rng(seed)
    return [scene(random) for _ in range(count)]


def annotation(name: str, objects: Sequence[tuple[str, Box]], size: tuple[int, int] = (64, 64)) -> str:
    """Return the XML file of one image."""
    rows = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox>"
        "</object>\n"
        for label, (a, b, c, d) in objects
    )
    return (
        f"<annotation>\n<filename>{name}</filename>\n"
        f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>\n{rows}</annotation>\n"
    )


def as_voc(folder: Path, count: int = 12, seed: int = 0) -> Path:
    """Write images with XML files: Annotations/ and JPEGImages/ with lists of the splits."""
    (folder / "Annotations").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for index, (picture, objects) in enumerate(scenes(count, seed)):
        Image.fromarray(picture).save(folder / "JPEGImages" / f"{index:04}.png")
        (folder / "Annotations" / f"{index:04}.xml").write_text(annotation(f"{index:04}.png", objects))
        lists["test" if index % 4 == 0 else "val" if index % 6 == 1 else "train"].append(f"{index:04}")
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    for name, stems in lists.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(stems) + "\n")
    return folder


def coco(pictures: Sequence[tuple[str, Sequence[tuple[str, Box]]]]) -> dict[str, Any]:
    """Return the content of a COCO file: ids of categories have gaps, those of images begin at 7."""
    ids = {"block": 3, "ring": 17}
    rows = [
        {
            "image_id": 7 + index,
            "category_id": ids[label],
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "iscrowd": 0,
        }
        for index, (_, objects) in enumerate(pictures)
        for label, box in objects
    ]
    return {
        "images": [{"id": 7 + i, "file_name": name, "width": 64, "height": 64} for i, (name, _) in enumerate(pictures)],
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
        "annotations": [{"id": index, **row} for index, row in enumerate(rows)],
    }


def as_coco(folder: Path, counts: Sequence[int] = (8, 4)) -> Path:
    """Write images with COCO's files: train.json and test.json, with these numbers of images."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = scenes(sum(counts))
    for split, start, count in (("train", 0, counts[0]), ("test", counts[0], counts[1])):
        named = []
        for index in range(start, start + count):
            picture, objects = samples[index]
            Image.fromarray(picture).save(folder / f"{index:04}.png")
            named.append((f"{index:04}.png", objects))
        (folder / f"{split}.json").write_text(json.dumps(coco(named)))
    return folder


def pipeline(folder: Path, counts: Sequence[int], model: Any, stages: Sequence[Any], **more: Any) -> Path:
    """Write a pipeline file and its scenes (64 x 64 RGB from 0 to 1) below `folder`; return the path of the file."""
    as_coco(folder / "data", counts)
    content = {
        "schema_version": 1,
        "name": "found",
        "model": model,
        "data": {
            "source": {"coco": {"train": "data/train.json", "test": "data/test.json"}},
            "preprocess": [{"resize": {"size": [64, 64]}}, {"scale": {"from": [0, 255]}}],
        },
        "stages": stages,
        **more,
    }
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(content))
    return path
