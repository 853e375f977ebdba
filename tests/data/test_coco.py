"""COCO's JSON files: their content, and error messages about invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
from datasets import dataset
from pictures import turned
from PIL import Image
from pydantic import ValidationError

from compress.core.errors import DataError
from compress.data.sources.coco import Coco

BOX: scenes.Box = (10, 5, 30, 20)


def one(folder: Path, change: Callable[[Any], Any] = lambda content: None) -> Coco:
    """Write a file about one picture of 64 x 64 pixels with one ring; return its source."""
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    content = scenes.coco([("a.png", [("ring", BOX)])])
    change(content)
    (folder / "all.json").write_text(json.dumps(content))
    return Coco(file=str(folder / "all.json"))


def test_a_file_for_each_split(tmp_path: Path) -> None:
    folder = scenes.as_coco(tmp_path)
    source = Coco(train="train.json", test="test.json").with_paths_from(folder)
    data = dataset(source)
    samples = scenes.scenes(12)
    assert data.class_names == ("block", "ring")  # in the order of the ids 3 and 17
    assert [len(data.objects(split)) for split in ("train", "validation", "test")] == [
        6,
        2,
        4,
    ]  # one of each class for validation
    for (boxes, classes), (_, objects) in zip(data.objects("test"), samples[8:], strict=True):
        expected = [np.array([box[1], box[0], box[3], box[2]]) / 64 for _, box in objects]
        np.testing.assert_allclose(boxes, expected, atol=1e-6)
        assert [data.class_names[label] for label in classes] == [name for name, _ in objects]
    np.testing.assert_array_equal(data.raw("test", np.array([1]))[0], samples[9][0])


def test_images_may_be_in_a_folder_of_their_own(tmp_path: Path) -> None:
    one(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "a.png").rename(tmp_path / "photos" / "a.png")
    source = Coco(file="all.json", images="photos").with_paths_from(tmp_path)
    assert source.load().read(0).shape == (64, 64, 3)
    assert set(source.files()) == {"annotations of all", "all: a.png"}
    assert set(source.fingerprint()) == {"channels", "orientation", "keypoints", "sha256"}


def test_crowds_are_left_out_and_images_without_objects_kept(tmp_path: Path) -> None:
    samples = one(tmp_path, lambda content: content["annotations"][0].update(iscrowd=1)).load()
    assert samples.objects is not None
    assert len(samples.objects[0].classes) == 0
    assert samples.labels.tolist() == [2]


def without_size(content: Any) -> None:
    del content["images"][0]["width"], content["images"][0]["height"]


def with_exif(path: Path, size: tuple[int, int], orientation: int) -> None:
    """Write an image with a white block from (8, 16) to (24, 40), as one of the annotations has it."""
    picture = Image.new("RGB", size)
    picture.paste((255, 255, 255), (8, 16, 24, 40))
    picture.save(path, exif=turned(orientation))


def shown(box: Any, image: Any) -> tuple[float, float]:
    """Return the share of white pixels in a box, and the share of all white pixels that are in the box."""
    height, width = image.shape[:2]
    top, left, bottom, right = np.rint(np.asarray(box) * [height, width, height, width]).astype(int)
    white = (image == 255).all(axis=2)
    return float(white[top:bottom, left:right].mean()), float(white[top:bottom, left:right].sum() / white.sum())


@pytest.mark.parametrize("setting", ["exif", "ignore"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 99])
def test_boxes_of_the_stored_pixels_rotate_with_the_image(tmp_path: Path, orientation: int, setting: Any) -> None:
    source = one(tmp_path, lambda content: (edit("images", width=64, height=48)(content),
                                            edit("annotations", bbox=[8, 16, 16, 24])(content)))  # fmt: skip
    with_exif(tmp_path / "a.png", (64, 48), orientation)
    samples = source.model_copy(update={"orientation": setting}).load()
    image = samples.read(0)
    rotated = setting == "exif" and 5 <= orientation <= 8
    assert image.shape == ((64, 48, 3) if rotated else (48, 64, 3))
    assert samples.objects is not None
    assert shown(samples.objects[0].boxes[0], image) == (1, 1)


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_of_the_image_as_viewers_show_it(tmp_path: Path, orientation: int) -> None:
    source = one(tmp_path, lambda content: (edit("images", width=48, height=64)(content),
                                            edit("annotations", bbox=[10, 20, 30, 40])(content)))  # fmt: skip
    with_exif(tmp_path / "a.png", (64, 48), orientation)
    samples = source.load()
    assert samples.objects is not None
    np.testing.assert_allclose(samples.objects[0].boxes[0], [20 / 64, 10 / 48, 60 / 64, 40 / 48], rtol=1e-6)
    assert samples.read(0).shape == (64, 48, 3)
    assert samples.notes == ()
    stored = (
        r"annotated as 48x64, and a\.png is 64x48 \(rotated by viewers, EXIF orientation [5-8]\).*set `orientation: e"
    )
    with pytest.raises(DataError, match=stored):
        source.model_copy(update={"orientation": "ignore"}).load()


@pytest.mark.parametrize(
    ("orientation", "annotated", "size", "doubtful"),
    [(1, True, (64, 48), False), (6, True, (64, 48), False), (6, True, (64, 64), True), (6, False, (64, 48), True),
     (3, True, (64, 48), True), (99, True, (64, 48), False)],
)  # fmt: skip
def test_a_photo_whose_boxes_may_be_of_the_rotated_image_is_noted(
    tmp_path: Path, orientation: int, annotated: bool, size: tuple[int, int], doubtful: bool
) -> None:
    source = one(tmp_path, edit("images", width=size[0], height=size[1]) if annotated else without_size)
    with_exif(tmp_path / "a.png", size, orientation)
    what = f"1 images have an EXIF orientation, by which viewers rotate them (the first is {tmp_path / 'a.png'})"
    note = f"{what}: boxes are assumed to be in the coordinates of the stored pixels"
    assert source.load().notes == ((note,) if doubtful else ())


def drop(key: str) -> Callable[[Any], Any]:
    return lambda content: content.pop(key)


def edit(key: str, **changes: Any) -> Callable[[Any], Any]:
    return lambda content: content[key][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("annotations"), "all.json: has no list 'annotations'"),
        (lambda content: content["images"].append(3), r"images\[1\]: is not an object"),
        (
            lambda content: content["images"].append(content["images"][0]),
            r"images\[1\]: the id 7 belongs to another image too",
        ),
        (edit("images", id="7"), r"images\[0\]: id is '7'; allowed: an integer"),
        (edit("images", id=True), r"images\[0\]: id is 'True'"),
        (edit("images", file_name="../a.png"), r"images\[0\]: the file name '../a.png' leads out of the folder"),
        (edit("images", file_name="/etc/passwd"), "leads out of the folder"),
        (edit("images", file_name="a\0.png"), "leads out of the folder"),
        (edit("images", file_name="b.png"), r"images\[0\]: the image .*b.png does not exist"),
        (edit("images", width=32), "annotated as 32x64, and a.png is 64x64"),
        (
            edit("categories", name="ring"),
            r"categories\[1\]: the id 17 or the name 'ring' belongs to another category too",
        ),
        (edit("categories", name=None), r"categories\[0\]: name is 'None'"),
        (edit("annotations", image_id=8), r"annotations\[0\]: unknown image 8"),
        (edit("annotations", category_id=4), r"annotations\[0\]: unknown category 4; allowed: 3, 17"),
        (edit("annotations", bbox=[1, 2, 3]), r"annotations\[0\]: bbox is '\[1, 2, 3\]'; allowed: \[x, y, width"),
        (edit("annotations", bbox=[1, 2, 3, None]), r"annotations\[0\].bbox: 'None' is not a number"),
        (edit("annotations", bbox=[1, 2, 3, float("nan")]), r"bbox: 'nan' is not a number"),
        (edit("annotations", bbox=[1, 2, -3, 4]), r"annotations\[0\]: the box from .* is empty or inverted"),
        (edit("annotations", bbox=[1, 2, 0, 4]), "empty or inverted"),
        (edit("annotations", bbox=[50, 50, 30, 4]), "outside of the image; allowed: 0 to 64 across"),
    ],
)
def test_what_is_not_what_it_should_be_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, change).load()


def test_a_number_in_quotes_is_accepted(tmp_path: Path) -> None:
    assert one(tmp_path, edit("annotations", bbox=[1, 2, 3, "4"])).load().objects is not None


def test_many_categories(tmp_path: Path) -> None:
    def many(content: Any, count: int = 10_000) -> None:
        content["categories"] = [{"id": index, "name": f"c{index}"} for index in range(count)]

    assert len(one(tmp_path, many).load().class_names) == 10_000
    with pytest.raises(DataError, match=r"categories\[10000\]: there are too many categories; allowed: 10,000"):
        one(tmp_path, lambda content: many(content, 10_001)).load()


def test_an_image_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = one(tmp_path, lambda content: content["images"].append({**content["images"][0], "id": 9}))
    for work in (twice.load, twice.fingerprint):
        with pytest.raises(
            DataError, match=r"images\[1\]: the image .*a.png is annotated in .*all.json: images\[0\] too"
        ):
            work()
    folder = scenes.as_coco(tmp_path / "more")
    content = json.loads((folder / "train.json").read_text())
    (folder / "test.json").write_text(json.dumps({**content, "images": content["images"][3:], "annotations": []}))
    for test in ("test.json", "train.json"):
        source = Coco(train="train.json", test=test).with_paths_from(folder)
        with pytest.raises(
            DataError, match=rf"{test}: images\[0\]: .* is annotated in .*train.json: images\[[03]\] too"
        ):
            source.load()


@pytest.mark.parametrize(
    ("text", "message"), [("[1", "is not JSON"), ("[1]", "is not an object"), ("[" * 100_000, "is not JSON")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "all.json").write_text(text)
    with pytest.raises(DataError, match=message):
        Coco(file=str(tmp_path / "all.json")).load()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        Coco(file=str(tmp_path / "none.json")).fingerprint()


def test_files_with_other_categories_are_refused(tmp_path: Path) -> None:
    folder = scenes.as_coco(tmp_path)
    content = json.loads((folder / "test.json").read_text())
    content["categories"][0]["name"] = "brick"
    (folder / "test.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"test.json: has other categories than the file before"):
        Coco(train=str(folder / "train.json"), test=str(folder / "test.json")).load()


@pytest.mark.parametrize("keys", [{}, {"file": "a", "train": "b"}, {"file": "a", "test": "b"}])
def test_one_file_for_all_or_one_for_each_split(keys: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Coco(**keys)  # type: ignore[arg-type]
