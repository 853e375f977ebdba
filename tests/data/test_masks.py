"""Masks as PNG files: pairs, classes, pixels that do not count, and transformations together with their images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from numpy.typing import NDArray
from pictures import turned
from PIL import Image

from compress.core.errors import DataError
from compress.core.progress import SilentProgress
from compress.data.sources.masks import Masks
from compress.data.summary import examine

CLASSES = ("background", "person", "dog")
MASK = np.array([[0, 1, 2, 2], [0, 1, 255, 2]], np.uint8)


def write(
    folder: Path, name: str, mask: NDArray[Any] = MASK, mode: str = "L", size: tuple[int, int] | None = None
) -> Path:
    """Write an image and its mask; return the path of the mask."""
    for kind in ("images", "masks"):
        (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size or mask.shape[::-1]).save(folder / "images" / f"{name}.png")
    path = folder / "masks" / f"{name}.png"
    picture = Image.fromarray(mask)
    if mode == "P":
        picture = Image.frombytes("P", picture.size, picture.tobytes())
        picture.putpalette([value for index in range(256) for value in (index, 255 - index, 7)])
    elif mode == "I;16":
        picture = Image.fromarray(mask.astype(np.uint16))
    elif mode != "L":
        picture = picture.convert(mode)
    picture.save(path)
    return path


def source(folder: Path, **settings: Any) -> Masks:
    return Masks.model_validate_json(json.dumps({"path": str(folder), "classes": CLASSES, **settings}))


def first(masks: Masks) -> list[list[int]]:
    read = masks.load().read_mask
    assert read is not None
    values: list[list[int]] = read(0).tolist()
    return values


@pytest.mark.parametrize("mode", ["L", "P"])
def test_grey_levels_and_palettes_are_class_indices(tmp_path: Path, mode: str) -> None:
    write(tmp_path, "a", mode=mode)
    assert first(source(tmp_path)) == MASK.tolist()
    assert source(tmp_path).load().class_names == CLASSES


def test_one_bit(tmp_path: Path) -> None:
    write(tmp_path, "a", 255 * (MASK == 1).astype(np.uint8), "1")
    assert first(source(tmp_path, classes=2)) == (MASK == 1).astype(int).tolist()


@pytest.mark.parametrize(
    ("settings", "names", "expected"),
    [
        ({}, CLASSES, [[0, 1, 2, 2], [0, 1, 255, 2]]),
        ({"classes": 3}, ("0", "1", "2"), [[0, 1, 2, 2], [0, 1, 255, 2]]),
        ({"keep": {"person": ["person"]}}, ("rest", "person"), [[0, 1, 0, 0], [0, 1, 255, 0]]),
        ({"keep": {"animal": [2], "human": ["person"]}}, ("rest", "animal", "human"), [[0, 2, 1, 1], [0, 2, 255, 1]]),
        ({"keep": {"any": ["person", "dog"]}, "rest": "floor"}, ("floor", "any"), [[0, 1, 1, 1], [0, 1, 255, 1]]),
        ({"keep": {"unknown": [255]}, "classes": None}, ("rest", "unknown"), [[0, 0, 0, 0], [0, 0, 1, 0]]),
        ({"ignore": ["background"]}, ("person", "dog"), [[255, 0, 1, 1], [255, 0, 255, 1]]),
        (
            {"keep": {"person": [1]}, "ignore": [2], "classes": None},
            ("rest", "person"),
            [[0, 1, 255, 255], [0, 1, 255, 255]],
        ),
    ],
)
def test_classes_that_are_kept_and_ignored(
    tmp_path: Path, settings: dict[str, Any], names: tuple[str, ...], expected: list[list[int]]
) -> None:
    write(tmp_path, "a")
    masks = source(tmp_path, **settings)
    assert masks.load().class_names == names
    assert first(masks) == expected


def test_names_in_a_file_may_have_gaps(tmp_path: Path) -> None:
    write(tmp_path, "a", np.where(MASK == 2, 200, MASK).astype(np.uint8))
    (tmp_path / "classes.yaml").write_text("classes:\n  0: background\n  1: person\n  200: rug\n")
    masks = source(tmp_path, classes=None)
    assert masks.load().class_names == ("background", "person", "rug")
    assert first(masks) == MASK.tolist()
    assert set(masks.files()) == {"images/a.png", "masks/a.png", "classes.yaml"}
    (tmp_path / "classes.yaml").rename(tmp_path / "names.yaml")
    assert first(source(tmp_path, classes=str(tmp_path / "names.yaml"))) == MASK.tolist()
    with pytest.raises(DataError, match=r"the classes of the masks are not known.*set `classes:`"):
        source(tmp_path, classes=None).load()


def test_splits_and_images_without_masks(tmp_path: Path) -> None:
    for split, count in (("train2017", 4), ("val2017", 2), ("test", 1)):
        for index in range(count):
            write(tmp_path, f"{split}/{index}")
    (tmp_path / "masks" / "train2017" / "0.png").unlink()
    data = dataset(source(tmp_path))
    assert data.task == "segmentation"
    assert data.has_targets
    assert [len(data.targets(split)) for split in ("train", "validation", "test")] == [3, 2, 1]
    assert data.notes == ["1 images have no mask, and were left out"]


@pytest.mark.parametrize(
    "steps",
    [
        [{"resize": {"size": [12, 20]}}],
        [{"resize": {"size": [16, 16], "fit": "letterbox", "fill": 114, "antialias": True}}],
        [{"crop": {"size": [20, 30]}}, {"resize": {"size": [16, 24], "fit": "crop"}}],
        [{"pad": {"size": [50, 50]}}, {"colour": {"to": "grey"}}],
    ],
)
def test_masks_are_moved_with_their_images(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    mask = np.zeros((24, 48), np.uint8)
    mask[4:20, 8:32] = 1
    for index in range(8):
        write(tmp_path, f"train/{index}", mask)
        Image.fromarray(np.repeat(200 * mask[..., np.newaxis], 3, 2)).save(
            tmp_path / "images" / "train" / f"{index}.png"
        )
    data = dataset(source(tmp_path), *steps)
    masks, images = data.targets("train"), data.inputs("train")
    assert masks.shape == images.shape[:3]
    assert masks.dtype == np.uint8
    counted = masks != 255
    assert ((images[..., 0] > 100) == (masks == 1))[counted].mean() > 0.97  # pixels at edges may differ
    assert (counted.all()) == (not any("pad" in step or "letterbox" in str(step) for step in steps))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("setting", ["exif", "ignore"])
def test_masks_rotate_with_photos(tmp_path: Path, orientation: int, setting: Any) -> None:
    mask = np.zeros((8, 16), np.uint8)
    mask[1:3, 2:8] = 1
    write(tmp_path, "a", mask)
    path = tmp_path / "images" / "a.png"
    Image.fromarray(np.repeat(255 * mask[..., np.newaxis], 3, 2)).save(path, exif=turned(orientation))
    samples = source(tmp_path, orientation=setting).load()
    assert samples.read_mask is not None
    np.testing.assert_array_equal(samples.read_mask(0) == 1, samples.read(0)[..., 0] == 255)
    if setting == "exif" and orientation >= 5:  # the mask was drawn on the photo as viewers show it
        shown = np.arange(128).reshape(16, 8).astype(np.uint8) % 3
        Image.fromarray(shown).save(tmp_path / "masks" / "a.png")
        assert samples.read_mask(0).tolist() == shown.tolist()


@pytest.mark.parametrize(
    ("values", "mode", "size", "message"),
    [
        (MASK + 2, "L", None, r"has the value [34] in row 0, column [01]; allowed: values of 3 classes, or 255"),
        (MASK, "RGB", None, r"has colours \(RGB\), so it is not a mask"),
        (MASK, "LA", None, r"has colours \(LA\)"),
        (MASK, "I;16", None, "has 16 bits, so it is not a mask"),
        (MASK, "L", (2, 4), "the mask has 4x2 pixels, and a.png 2x4"),
        (MASK, "L", (8, 4), "the mask has 4x2 pixels, and a.png 8x4.*store both in the same size"),
    ],
)
def test_masks_that_are_refused(tmp_path: Path, values: Any, mode: str, size: Any, message: str) -> None:
    path = write(tmp_path, "a", values.astype(np.uint8), mode, size)
    with pytest.raises(DataError, match=message) as error:
        first(source(tmp_path))
    assert str(path) in str(error.value)


def test_damaged_masks_are_named(tmp_path: Path) -> None:
    for index in range(6):
        path = write(tmp_path, f"{index}", np.tile(MASK, (20, 20)))
    content = path.read_bytes()
    for damaged in (b"", content[:-20], b"\xff\xd8" + content, content[:60] + b"\0\0\0" + content[63:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"masks/5\.png.*is not a readable PNG"):
            source(tmp_path).load().read_mask(5)  # type: ignore[misc]
    report, refused = examine(dataset(source(tmp_path)), SilentProgress())
    assert refused
    assert "5.png" in report["refused"][0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": {"cat": ["cat"]}}, r"keep\.cat: unknown class 'cat'; allowed: background, person, dog"),
        ({"ignore": ["Dog"]}, "'dog' differs only in case"),
        ({"keep": {"a": [1], "b": ["person"]}}, "the value 1 is in two classes"),
        ({"keep": {"rest": [1]}}, "'rest' twice"),
        ({"keep": {"a": [1]}, "ignore": ["person"]}, "the value 1 is in `keep` and in `ignore`"),
        ({"masks": "../masks"}, "files inside, by relative paths"),
        ({"masks": "none"}, "contains no images with masks; allowed: images/NAME.jpg with none/NAME.png"),
        ({"images": "none"}, r"there is no image none/a\.\*"),
        ({"classes": ("a", "a")}, "lists the class 'a' twice"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write(tmp_path, "a")
    with pytest.raises(DataError, match=message):
        source(tmp_path, **settings).load()


def test_two_images_of_one_mask_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a")
    Image.new("RGB", (4, 2)).save(tmp_path / "images" / "a.jpg")
    with pytest.raises(DataError, match=r"there is a\.jpg too"):
        source(tmp_path).load()


def test_the_data_command_shows_the_shares_of_pixels(tmp_path: Path) -> None:
    for index in range(10):
        write(tmp_path, f"{index}")
    report, refused = examine(dataset(source(tmp_path)), SilentProgress())
    assert not refused
    shares = "dog 42.9%, background 28.6%, person 28.6%; 12.5% do not count"
    assert report["notes"] == [f"pixels of the training masks: {shares}"]
    assert not report["warnings"]


def test_masks_of_one_class_are_probably_a_mistake(tmp_path: Path) -> None:
    for index in range(10):
        write(tmp_path, f"{index}", 255 * (MASK == 1).astype(np.uint8))
    report, _ = examine(dataset(source(tmp_path)), SilentProgress())
    assert report["warnings"] == [
        "every pixel of the training masks is of the class 'background': check `classes`, `keep` and `ignore`"
    ]
