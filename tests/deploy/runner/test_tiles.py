"""Detectors on the tiles of a large photo."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from detector_files import small

from deploy import Model, Tiles
from deploy.contract import bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.image_geometry import AffineMap
from deploy.runner.tiles import Area, detect, merged, parsed

SIDE = 64
STRETCH = [{"resize": {"size": [SIDE, SIDE]}}, {"scale": {"from": [0, 255], "to": [0, 1]}}]
LETTERBOX = [{"resize": {"size": [SIDE, SIDE], "fit": "letterbox", "fill": 0}}, STRETCH[1]]
SPECIFICATION = {"overlap": 0.5, "most": 100, "class_agnostic": False}
Detect = Callable[[np.ndarray], Detections]


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Squares of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3))
    return np.kron(colours, np.ones((16, 16, 1)))[:height, :width].astype(np.uint8)


def found(*rows: tuple[float, ...], classes: tuple[int, ...] = ()) -> Detections:
    """Detections from rows of score, ymin, xmin, ymax, xmax."""
    table = np.array(rows, np.float32).reshape(-1, 5)
    numbers = np.array(classes or (0,) * len(table), np.int64)
    return Detections(table[:, 1:], numbers, table[:, 0], ["a", "b", "c"])


def blobs(size: int = 1) -> Detect:
    """Return a detector that finds each colour except black in an image: the box around its pixels."""

    def detector(image: np.ndarray) -> Detections:
        height, width = image.shape[:2]
        rows = []
        classes = []
        for colour in np.unique(image.reshape(height, width, -1)[..., 0]):
            if colour:
                y, x = np.nonzero(image.reshape(height, width, -1)[..., 0] == colour)
                if len(y) >= size:
                    box = (y.min() / height, x.min() / width, (y.max() + 1) / height, (x.max() + 1) / width)
                    rows.append((0.9, *box))
                    classes.append(int(colour) % 3)
        return found(*rows, classes=tuple(classes))

    return detector


@pytest.mark.parametrize("length", [33, 64, 100, 101, 997, 4032])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5])
def test_tiles_cover_the_photo_and_overlap(length: int, count: int, overlap: float) -> None:
    areas = Tiles(count, 1, overlap, whole=False).areas(length, 50)
    rows = [(area.top, area.top + area.height) for area in areas]
    assert rows[0][0] == 0
    assert rows[-1][1] == length
    assert len({area.height for area in areas}) == 1
    for (start, end), (following, _) in itertools.pairwise(rows):
        assert following > start
        assert end - following >= overlap * (end - start) - 1
    assert len(areas) == count or areas[0].height == 32


def test_the_whole_photo_is_a_tile_once() -> None:
    assert Tiles(1, 2, 0).areas(100, 200) == [Area(0, 0, 100, 200), Area(0, 0, 100, 100), Area(0, 100, 100, 100)]
    assert Tiles(1, 1).areas(100, 200) == [Area(0, 0, 100, 200)]
    assert Tiles(3, 2).areas(1, 1) == [Area(0, 0, 1, 1)]
    assert len(Tiles(3, 1, whole=False).areas(40, 40)) == 2  # tiles have at least 32 pixels


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((0, 2), "rows of tiles is 0"),
        ((2, 2.0), "columns of tiles is 2.0"),
        ((True, 2), "rows of tiles is True"),
        ((100, 100), "100 x 100 tiles are 10000; allowed: 1 to 256"),
        ((2, 2, 1.0), "the overlap of tiles is 1.0; allowed: 0 to 0.9"),
        ((2, 2, float("nan")), "the overlap of tiles is nan"),
        ((2, 2, -0.1), "the overlap"),
        ((2, 2, 0.2, True, 0), "most of tiles is 0"),
    ],
)
def test_settings_out_of_range(arguments: tuple[Any, ...], part: str) -> None:
    with pytest.raises(ArgumentError, match=part):
        Tiles(*arguments)


def test_tiles_from_text() -> None:
    assert parsed("2x3") == Tiles(2, 3, 0.2)
    assert parsed("1x1", 0.5) == Tiles(1, 1, 0.5)
    for text in ("2", "2x", "x3", "0x3", "-1x3", "2X3", "2x3x4", "2x3\n", ""):
        with pytest.raises(ArgumentError, match="not a number of tiles"):
            parsed(text)


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
@pytest.mark.parametrize("size", [(200, 300), (201, 307), (97, 500)])
def test_objects_are_found_once_and_where_they_are(size: tuple[int, int], channels: tuple[int, ...]) -> None:
    """One object in a tile, one on the edge of two tiles, one in the middle of all, and one larger than a tile."""
    image = np.zeros(size + channels, np.uint8)
    height, width = size
    boxes = [(5, 5, 15, 15), (20, width // 3 - 6, 30, width // 3 + 6), (height // 2 - 8, width // 2 - 8, 56, 0)]
    boxes[2] = (height // 2 - 8, width // 2 - 8, height // 2 + 8, width // 2 + 8)
    boxes.append((height - 30, 10, height - 2, width - 10))
    for colour, (top, left, bottom, right) in enumerate(boxes, 1):
        image[top:bottom, left:right] = 3 * colour  # all have the same class
    answer = detect(blobs(), image, Tiles(2, 3, 0.25), SPECIFICATION)
    pixels = np.rint(answer.boxes * [height, width, height, width]).astype(int)
    assert sorted(map(tuple, pixels.tolist())) == sorted(boxes)
    assert answer.labels == ["a", "b", "c"]


def test_a_fragment_is_removed_whatever_its_score_unless_the_other_box_is_unsure() -> None:
    complete = (0.6, 0.1, 0.1, 0.3, 0.9)
    fragment = (0.9, 0.1, 0.1, 0.3, 0.3)
    both = found(complete, fragment)
    assert merged(both, np.array([False, True]), 0.5, 100).scores.tolist() == [np.float32(0.6)]
    assert len(merged(both, np.array([False, False]), 0.5, 100)) == 2  # a separate object
    unsure = found((0.3, *complete[1:]), fragment)
    assert len(merged(unsure, np.array([False, True]), 0.5, 100)) == 2
    other = found(complete, fragment, classes=(0, 1))
    assert len(merged(other, np.array([False, True]), 0.5, 100)) == 2
    assert len(merged(other, np.array([False, True]), 0.5, 100, class_agnostic=True)) == 1


def test_of_two_fragments_the_larger_one_remains() -> None:
    both = found((0.9, 0.1, 0.1, 0.3, 0.3), (0.8, 0.1, 0.1, 0.3, 0.6))
    assert merged(both, np.array([True, True]), 0.5, 100).scores.tolist() == [np.float32(0.8)]
    equal = found((0.9, 0.1, 0.1, 0.3, 0.3), (0.8, 0.1, 0.1, 0.3, 0.3))
    assert merged(equal, np.array([True, True]), 0.5, 100).scores.tolist() == [np.float32(0.9)]


def test_a_complete_object_in_front_of_a_fragment_remains() -> None:
    both = found((0.9, 0.1, 0.1, 0.3, 0.6), (0.5, 0.15, 0.2, 0.25, 0.25))
    assert len(merged(both, np.array([True, False]), 0.5, 100)) == 2


def test_many_boxes() -> None:
    """There are more boxes than are compared at once: the best ones are kept."""
    random = np.random.default_rng(0)
    corner = random.uniform(0, 0.9, (6000, 2))
    rows = np.concatenate([random.uniform(0.1, 1, (6000, 1)), corner, corner + 0.01], axis=1)
    many = found(*map(tuple, rows.tolist()))
    result = merged(many, random.random(6000) < 0.5, 0.5, 300)
    assert len(result) == 300
    assert (np.diff(result.scores) <= 0).all()
    assert len(merged(found(), np.zeros(0, bool), 0.5, 100)) == 0


def test_the_largest_number_of_objects_counts_for_each_tile() -> None:
    image = np.zeros((100, 200), np.uint8)
    for number in range(40):
        image[10 * (number // 4), 45 * (number % 4) + 5] = number + 1
    few = {**SPECIFICATION, "most": 7}
    grid = Tiles(2, 2, whole=False)
    assert len(detect(blobs(), image, grid, few)) == 28  # the stand-in for the detector finds all of them
    assert len(detect(blobs(), image, Tiles(2, 2, most=3), few)) == 3
    assert len(detect(blobs(), image, grid, SPECIFICATION)) == 40


def test_keypoints_move_with_their_boxes() -> None:
    def detector(tile: np.ndarray) -> Detections:
        height, width = tile.shape[:2]
        y, x = np.argwhere(tile[..., 0] == 9)[0] if (tile == 9).any() else (0, 0)
        points = np.array([[[(y + 0.5) / height, (x + 0.5) / width, 0.7]]], np.float32)
        box = np.array([[(y - 3) / height, (x - 3) / width, (y + 4) / height, (x + 4) / width]], np.float32)
        kept = slice(0, int((tile == 9).any()))
        return Detections(box[kept], np.zeros(1, np.int64)[kept], np.ones(1, np.float32)[kept], ["x"], points[kept])

    image = np.zeros((101, 203, 3), np.uint8)
    image[77, 31] = 9
    answer = detect(detector, image, Tiles(2, 3), SPECIFICATION)
    assert answer.keypoints is not None
    np.testing.assert_allclose(answer.keypoints, [[[77.5 / 101, 31.5 / 203, 0.7]]], rtol=1e-5)
    nothing = detect(detector, np.zeros_like(image), Tiles(2, 3), SPECIFICATION)
    assert nothing.keypoints is not None
    assert nothing.keypoints.shape == (0, 1, 3)
    assert nothing.top() == []


def test_the_edge_of_a_cropped_tile_is_inside_the_tile() -> None:
    """Preprocessing takes the left half of each image: an object that ends at the edge of this half is a fragment."""
    left_half = AffineMap((1.0, 2.0), (0.0, 0.0))

    def detector(tile: np.ndarray) -> Detections:
        half = blobs()(tile[:, : tile.shape[1] // 2])
        return found(*[(0.9, box[0], box[1] / 2, box[2], box[3] / 2) for box in half.boxes])

    image = np.zeros((40, 200), np.uint8)
    image[10:30, 45:95] = 3
    grid = Tiles(1, 2, 0)
    assert len(detect(detector, image, grid, SPECIFICATION, lambda height, width: left_half)) == 1
    assert len(detect(detector, image, grid, SPECIFICATION)) == 2


@pytest.mark.parametrize("steps", [STRETCH, LETTERBOX], ids=["stretch", "letterbox"])
@pytest.mark.parametrize("grid", [Tiles(1, 1), Tiles(2, 3), Tiles(3, 2, 0.35, whole=False)])
def test_a_bundle_answers_as_its_tiles_do(steps: list[Any], grid: Tiles) -> None:
    image = photo(131, 97)
    with Model(bundle.Bundle(small(SIDE, steps, least_score=0.3))) as model:
        answer = model.tiled(image, grid)
        areas = grid.areas(131, 97)
        separate = [model(image[top : top + height, left : left + width]) for top, left, height, width in areas]
        assert 10 < len(answer) <= sum(map(len, separate))
        assert len(answer) < sum(map(len, separate)) or len(areas) == 1
        rows = np.concatenate([tile_answer.scores for tile_answer in separate])
        corners = [
            tile_answer.boxes.reshape(-1, 2, 2) * [area.height, area.width] + [area.top, area.left]
            for area, tile_answer in zip(areas, separate, strict=True)
        ]
        expected = (np.concatenate(corners) / [131, 97]).reshape(-1, 4)
        for score, box in zip(answer.scores, answer.boxes, strict=True):
            assert np.abs(expected[rows == score] - box).max(axis=1).min() < 1e-6
        assert [row.label for row in answer.top()] == ["abc"[index] for index in answer.classes]


@pytest.mark.parametrize("python", devices.pythons())
def test_the_runner_on_every_interpreter(python: str, tmp_path: Path) -> None:
    (tmp_path / "d.coralline").write_bytes(small(SIDE, LETTERBOX))
    image = photo(131, 197)
    np.save(tmp_path / "photo.npy", image)
    options = ["--tiles", "2x3", "--tile-overlap", "0.3", "--top", "1000", "--json"]
    done = devices.runner("run", tmp_path / "d.coralline", tmp_path / "photo.npy", *options, python=python)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["answers"]
    with Model(tmp_path / "d.coralline") as model:
        expected = model.tiled(image, Tiles(2, 3, 0.3)).rows()
    assert len(expected) > 20
    # Kernels of other runtimes round differently: objects near the threshold of suppression may change.
    actual = {(detection["label"], *detection["box"]) for detection in row["top"]}
    assert sum((detection["label"], *detection["box"]) in actual for detection in expected) >= 0.8 * len(expected)


def test_a_grey_detector_takes_photos_without_channels() -> None:
    """A photo [height, width] is a grey one: the model needs a step for its three channels."""
    steps = [{"colour": {"from": "grey", "to": "rgb"}}, *STRETCH]
    with Model(bundle.Bundle(small(SIDE, steps))) as model:
        grey = photo(100, 120)[..., 0]
        first = model.tiled(grey, Tiles(2, 2))
        second = model.tiled(grey[..., np.newaxis], Tiles(2, 2))
        np.testing.assert_array_equal(first.boxes, second.boxes)
        assert len(first)


def test_images_that_cannot_be_used() -> None:
    with Model(bundle.Bundle(small(SIDE, [{"crop": {"size": [SIDE, SIDE]}}, STRETCH[1]]))) as model:
        with pytest.raises(ImageError, match="the tile of 47 x 56 pixels: the sample cannot be preprocessed"):
            model.tiled(photo(83, 100), Tiles(2, 2, whole=False))
        for wrong in (np.zeros(10, np.uint8), np.zeros((0, 5, 3), np.uint8), np.zeros((2, 2, 2, 3), np.uint8)):
            with pytest.raises(ImageError, match="a photo for tiles must be"):
                model.tiled(wrong, Tiles(2, 2))


def test_other_models_are_refused() -> None:
    message = "the task of this bundle is classification; allowed: detection"
    with Model(bundle.Bundle(devices.packed()), device="cpu") as model, pytest.raises(ArgumentError, match=message):
        model.tiled(devices.images(1)[0], Tiles(2, 2))
