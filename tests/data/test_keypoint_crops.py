"""COCO's keypoints as samples with one object each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from pictures import turned
from PIL import Image

from compress.core.errors import DataError
from compress.data.sources.coco import Coco
from compress.data.sources.object_crops import KeypointCrops

POINTS = [40.0, 20.0, 2, 56.0, 44.0, 1, 0, 0, 0]
"""x, y and visibility in a photo of 96 x 64 pixels, of an object from (32, 16) to (64, 48)."""
NAMES = ["nose", "left_eye", "right_eye"]


def annotated(folder: Path, change: Callable[[Any], Any] = lambda content: None, photos: int = 1) -> Coco:
    for index in range(photos):
        picture = np.zeros((64, 96, 3), np.uint8)
        picture[20, 40], picture[44, 56] = (255, 0, 0), (0, 255, 0)
        Image.fromarray(picture).save(folder / f"{index}.png")
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 96, "height": 64} for i in range(photos)],
        "annotations": [
            {"id": 2 * i + j, "image_id": i, "category_id": 1, "bbox": [32, 16, 32, 32], "keypoints": POINTS}
            for i in range(photos)
            for j in range(2)
        ],
        "categories": [{"id": 1, "name": "person", "keypoints": NAMES, "skeleton": []}],
    }
    change(content)
    (folder / "all.json").write_text(json.dumps(content))
    return Coco(file=str(folder / "all.json"), keypoints=KeypointCrops(margin=0.25))


def test_an_object_is_cropped_with_a_margin(tmp_path: Path) -> None:
    source = annotated(tmp_path)
    assert source.task_name() == "keypoints"
    samples = source.load()
    assert samples.points is not None
    assert samples.class_names == tuple(NAMES)
    crop = samples.read(0)
    assert crop.shape == (48, 48, 3)  # from (24, 8) to (72, 56) in the photo
    np.testing.assert_allclose(samples.points[0], [[16 / 48, 12 / 48, 2], [32 / 48, 36 / 48, 1], [0, 0, 0]], atol=1e-6)
    assert crop[12, 16].tolist() == [255, 0, 0]
    assert crop[36, 32].tolist() == [0, 255, 0]


def test_keypoints_are_moved_by_preprocessing(tmp_path: Path) -> None:
    source = annotated(tmp_path, lambda content: content["annotations"][0].update(bbox=[32, 16, 32, 16]), 9)
    steps = [{"resize": {"size": [64, 64], "filter": "nearest", "fit": "letterbox"}}]
    data = dataset(source, *steps)
    assert data.task == "keypoints"
    for split in ("train", "validation", "test"):
        points, inputs = data.targets(split), data.inputs(split)  # type: ignore[arg-type]
        assert not points[points[..., 2] == 0].any()
        for row, sample in zip(points, inputs, strict=True):
            for colour, (x, y, seen) in enumerate(row[:2]):
                if seen:
                    shown = sample[int(y * 64) - 1 : int(y * 64) + 3, int(x * 64) - 1 : int(x * 64) + 3]
                    assert shown[..., colour].max() == 255
    assert len(data.targets("train")) + len(data.targets("validation")) + len(data.targets("test")) == 18


def test_a_crop_makes_points_outside_invisible(tmp_path: Path) -> None:
    data = dataset(annotated(tmp_path, photos=6), {"crop": {"size": [24, 24]}})
    np.testing.assert_allclose(data.targets("train")[0], [[4 / 24, 0, 2], [20 / 24, 1, 1], [0, 0, 0]], atol=1e-6)
    data = dataset(annotated(tmp_path, photos=6), {"crop": {"size": [20, 24]}})
    assert not data.targets("train")[0].any()


def test_objects_of_one_photo_are_in_one_split(tmp_path: Path) -> None:
    source = annotated(tmp_path, photos=12)
    data = dataset(source)
    places = [
        {source.load().describe(int(index)).partition(",")[0] for index in indices}
        for indices in data._indices.values()
    ]
    assert sum(map(len, places)) == len(set.union(*places)) == 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_keypoints_rotate_with_their_photo(tmp_path: Path, orientation: int) -> None:
    source = annotated(tmp_path)
    Image.open(tmp_path / "0.png").copy().save(tmp_path / "0.png", exif=turned(orientation))
    samples = source.load()
    assert samples.points is not None
    crop = samples.read(0)
    for colour, (x, y, _) in enumerate(samples.points[0, :2]):
        rows, columns = np.nonzero(crop[..., colour] == 255)
        assert abs(rows[0] + 0.5 - y * crop.shape[0]) <= 0.5
        assert abs(columns[0] + 0.5 - x * crop.shape[1]) <= 0.5


def test_objects_without_keypoints_and_crowds_are_left_out(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["annotations"][0].update(keypoints=9 * [0])
        content["annotations"].append({**content["annotations"][1], "id": 9, "iscrowd": 1})

    samples = annotated(tmp_path, change).load()
    assert len(samples.labels) == 1
    assert samples.notes == ("1 of 2 objects have fewer than 1 marked keypoints, and were left out",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["categories"][0].pop("keypoints"), r"has no category with keypoints; use a file person_keypoints"),
        (lambda c: c["categories"][0].update(keypoints="nose"), r"categories\[0\]: keypoints is not a list of names"),
        (lambda c: c["annotations"][0].update(keypoints=POINTS[:8]), r"annotations\[0\]: keypoints is .*9 numbers"),
        (lambda c: c["annotations"][0].update(keypoints=[*POINTS[:8], "x"]), "'x' is not a number"),
        (lambda c: c["annotations"][0].update(keypoints={}), "keypoints is '{}'"),
        (lambda c: [annotation.pop("keypoints") for annotation in c["annotations"]], "no object has keypoints"),
        (lambda c: c["annotations"][0].update(bbox=[32, 16, 320, 32]), "is outside of the image"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        annotated(tmp_path, change).load()
