"""Mapping of points between an image and the input of a model; masks; letterboxes of YOLO detectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deploy.contract.image_geometry import IDENTITY, NO_CLASS, STEPS, input_map, mask_in_input, moves_positions
from deploy.contract.preprocessing import STEPS as ALL_STEPS
from deploy.contract.preprocessing import Preprocessing, PreprocessingError

SHAPES = [(48, 64), (64, 48), (64, 64), (40, 121), (333, 500), (37, 53)]
MOVED: list[list[dict[str, Any]]] = [
    [{"resize": {"size": [32, 32], "fit": "pad", "fill": 7}}],
    [{"resize": {"size": [32, 48], "fit": "crop"}}],
    [{"resize": {"size": [32, 48], "fit": "letterbox", "fill": 7}}],
    [{"resize": {"size": [48, 32], "fit": "letterbox", "fill": 7, "align": "top_left"}}],
    [{"crop": {"share": 0.7}}, {"resize": {"size": [32, 32]}}],
    [{"crop": {"size": [30, 34]}}, {"pad": {"size": [50, 61], "fill": 7}}],
    [{"pad": {"size": [555, 555], "fill": 7}}],
    [
        {"pad": {"size": [640, 640], "fill": 7}},
        {"colour": {"to": "bgr"}},
        {"resize": {"size": [100, 90], "fit": "crop"}},
    ],
]


def ultralytics(height: int, width: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the borders above, left, below and right of the image, by the published formula of LetterBox."""
    ratio = min(size[0] / height, size[1] / width)
    unpadded = round(width * ratio), round(height * ratio)
    rest_x, rest_y = (size[1] - unpadded[0]) / 2, (size[0] - unpadded[1]) / 2
    return round(rest_y - 0.1), round(rest_x - 0.1), round(rest_y + 0.1), round(rest_x + 0.1)


def area_of_image(result: np.ndarray) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the area that is not 114."""
    rows, columns = (np.flatnonzero((result[..., 0] != 114).any(axis=axis)) for axis in (1, 0))
    return int(rows[0]), int(columns[0]), len(rows), len(columns)


@pytest.mark.parametrize("size", [(416, 416), (320, 640), (96, 128)])
def test_letterboxes_have_the_sizes_of_ultralytics_and_yolox(size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    shapes = [*random.integers(20, 700, (60, 2)).tolist(), [427, 640], [640, 427]]
    for height, width in shapes:
        sample = np.zeros((height, width, 1), np.uint8)
        settings = {"size": list(size), "filter": "nearest", "fit": "letterbox", "fill": 114}
        centred = Preprocessing([{"resize": settings}])(sample)
        top, left, rows, columns = area_of_image(centred)
        border = (top, left, size[0] - top - rows, size[1] - left - columns)
        assert centred.shape[:2] == size
        assert border == ultralytics(height, width, size)
        corner = Preprocessing([{"resize": {**settings, "align": "top_left"}}])(sample)
        ratio = min(size[0] / height, size[1] / width)
        assert area_of_image(corner) == (0, 0, max(int(height * ratio), 1), max(int(width * ratio), 1))


def test_the_pixels_of_a_letterbox_are_those_of_a_plain_resize() -> None:
    sample = np.random.default_rng(1).integers(0, 256, (427, 640, 3)).astype(np.uint8)
    boxed = Preprocessing([{"resize": {"size": [416, 416], "fit": "letterbox", "fill": 114}}])(sample)
    plain = Preprocessing([{"resize": {"size": [278, 416]}}])(sample)
    np.testing.assert_array_equal(boxed[69:347], plain)
    assert (boxed[:69] == 114).all()
    assert (boxed[347:] == 114).all()


def test_align_is_for_letterboxes() -> None:
    with pytest.raises(PreprocessingError, match=r"align: top_left is for `fit: letterbox`, not for `fit: pad`"):
        Preprocessing([{"resize": {"size": [8, 8], "fit": "pad", "align": "top_left"}}])


@pytest.mark.parametrize("steps", MOVED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bright_block_is_where_the_map_says(steps: list[dict[str, Any]], shape: tuple[int, int]) -> None:
    height, width = shape
    if "size" in steps[0].get("crop", {}):
        height, width = 45, 60
    sample = np.zeros((height, width, 3), np.uint8)
    top, left = height * 3 // 8, width * 3 // 8
    bottom, right = height * 5 // 8, width * 5 // 8
    sample[top:bottom, left:right] = 255
    preprocessing = Preprocessing(steps)
    result = preprocessing(sample)[..., 0]
    box = np.array([[top / height, left / width, bottom / height, right / width]])
    placed = input_map(preprocessing, height, width)
    moved, visible = placed.boxes_to_input(box)
    rows, columns = (np.flatnonzero((result > 127).any(axis=axis)) for axis in (1, 0))
    bounding_box = np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1])
    assert visible.tolist() == [True]
    assert np.abs(moved[0] * [*result.shape, *result.shape] - bounding_box).max() <= 1.01  # one pixel of the result
    np.testing.assert_allclose(placed.boxes_to_image(moved), box, atol=1e-6)
    assert moves_positions(preprocessing)


def test_a_stretched_image_keeps_its_fractions() -> None:
    preprocessing = Preprocessing([{"resize": {"size": [7, 90]}}, {"scale": {"from": [0, 255]}}])
    assert input_map(preprocessing, 48, 64) == IDENTITY
    assert not moves_positions(preprocessing)


def test_objects_outside_of_a_crop_are_not_visible() -> None:
    placed = input_map(Preprocessing([{"crop": {"size": [50, 50]}}]), 100, 100)  # 0.25 to 0.75
    boxes = np.array([[0, 0, 0.2, 0.2], [0.3, 0.3, 0.6, 0.6], [0.3, 0.05, 0.6, 0.35], [0.3, 0.15, 0.6, 0.35]])
    moved, visible = placed.boxes_to_input(boxes)
    assert visible.tolist() == [False, True, False, True]  # of the last two boxes, a third and a half are visible
    np.testing.assert_allclose(moved[1], [0.1, 0.1, 0.7, 0.7], atol=1e-6)
    np.testing.assert_allclose(moved[3], [0.1, 0, 0.7, 0.2], atol=1e-6)
    assert placed.boxes_to_input(np.zeros((0, 4)))[0].shape == (0, 4)


def test_boxes_in_the_border_are_empty_in_the_image() -> None:
    placed = input_map(Preprocessing([{"resize": {"size": [100, 100], "fit": "letterbox"}}]), 50, 100)
    boxes = placed.boxes_to_image(np.array([[0, 0, 0.2, 1], [0.2, 0.1, 0.5, 0.5]]))
    assert boxes[0, 0] == boxes[0, 2]
    np.testing.assert_allclose(boxes[1], [0, 0.1, 0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize("steps", MOVED)
def test_masks_follow_their_images(steps: list[dict[str, Any]]) -> None:
    height, width = (45, 60) if steps[0].get("crop", {}).get("size") else (120, 90)
    mask = np.zeros((height, width), np.uint8)
    mask[height * 3 // 8 : height * 5 // 8, width * 3 // 8 : width * 5 // 8] = 200
    preprocessing = Preprocessing(steps)
    moved = mask_in_input(preprocessing, mask)
    image = preprocessing(np.repeat(mask[..., np.newaxis], 3, axis=2))[..., 0]
    assert moved.shape == image.shape
    assert set(np.unique(moved)) <= {0, 200, NO_CLASS}
    counted = moved != NO_CLASS
    assert ((moved == 200) == (image > 100))[counted].mean() > 0.97  # edges may differ by one pixel
    assert counted.all() == (7 not in image)


def test_positions_are_not_known_after_other_steps() -> None:
    assert set(STEPS) <= set(ALL_STEPS)
    preprocessing = Preprocessing([{"resize": {"size": [4, 4]}}, {"reshape": {"shape": [-1]}}])
    with pytest.raises(PreprocessingError, match="after reshape, positions in the image are not known") as error:
        input_map(preprocessing, 8, 8)
    assert error.value.step == 1
    with pytest.raises(PreprocessingError, match="after reshape"):
        mask_in_input(preprocessing, np.zeros((8, 8), np.uint8))
    with pytest.raises(PreprocessingError, match="resize or pad it before") as error:
        input_map(Preprocessing([{"crop": {"size": [9, 9]}}]), 8, 8)
    assert error.value.step == 0
