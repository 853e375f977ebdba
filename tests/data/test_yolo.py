"""YOLO's text files: layouts, content, and error messages about invalid files."""

from __future__ import annotations

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
from compress.data.dataset import Dataset
from compress.data.sources.yolo import Yolo
from deploy.contract.preprocessing import Preprocessing

NAMES = "names: [block, ring]\n"
ROW = "1 0.5 0.5 0.25 0.5\n"


def image(path: Path, size: tuple[int, int] = (64, 32)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)
    return path


def one(folder: Path, rows: str = ROW, described: str = "train: images/train\n" + NAMES) -> Yolo:
    """Write two photos of 64 x 32 pixels, the first with labels, and data.yaml; return the source."""
    image(folder / "images" / "train" / "a.png")
    image(folder / "images" / "train" / "b.jpg")
    (folder / "labels" / "train").mkdir(parents=True)
    (folder / "labels" / "train" / "a.txt").write_text(rows)
    (folder / "data.yaml").write_text(described)
    return Yolo(file=str(folder / "data.yaml"))


def objects(source: Yolo) -> list[tuple[list[float], int]]:
    samples = source.load()
    assert samples.objects is not None
    return [
        (box.tolist(), int(label))
        for image_objects in samples.objects
        for box, label in zip(*image_objects, strict=True)
    ]


def as_yolo(folder: Path, splits: dict[str, int]) -> Path:
    """Write scenes with labels into a folder for each split."""
    pictures = iter(scenes.scenes(sum(splits.values())))
    for split, count in splits.items():
        for index in range(count):
            picture, scene_objects = next(pictures)
            path = image(folder / "images" / split / f"{index}.png")
            Image.fromarray(picture).save(path)
            text = folder / "labels" / split / f"{index}.txt"
            text.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                f"{scenes.CLASSES.index(name)} {(a + c) / 128} {(b + d) / 128} {(c - a) / 64} {(d - b) / 64}\n"
                for name, (a, b, c, d) in scene_objects
            ]
            text.write_text("".join(rows))
    return folder


@pytest.mark.parametrize("described", [True, False])
def test_the_splits_of_data_yaml_and_of_folders(tmp_path: Path, described: bool) -> None:
    as_yolo(tmp_path, {"train2017": 7, "val2017": 3, "test": 2})
    text = f"path: .\ntrain: images/train2017\nval: images/val2017/\ntest: ./images/test\nnc: 2\n{NAMES}"
    if described:
        (tmp_path / "data.yaml").write_text(text)
    else:
        (tmp_path / "classes.txt").write_text("block\nring\n")
    data = dataset(Yolo(folder=str(tmp_path)))
    assert data.task == "detection"
    assert data.class_names == scenes.CLASSES
    assert [len(data.objects(split)) for split in ("train", "validation", "test")] == [7, 3, 2]
    expected = scenes.scenes(12)[7:10]
    for (boxes, classes), (_, scene_objects) in zip(data.objects("validation"), expected, strict=True):
        np.testing.assert_allclose(boxes * 64, [[b, a, d, c] for _, (a, b, c, d) in scene_objects], atol=1e-4)
        assert [data.class_names[label] for label in classes] == [name for name, _ in scene_objects]
    np.testing.assert_array_equal(data.raw("validation", np.array([1]))[0], expected[1][0])


def test_boxes_are_moved_by_letterboxes_and_crops(tmp_path: Path) -> None:
    source = one(
        tmp_path, "0 0.5 0.5 0.25 0.5\n1 0.05 0.5 0.1 1\n", f"train: images/train\ntest: images/train\n{NAMES}"
    )
    source = Yolo(folder=str(tmp_path), classes=("block", "ring"), labels="labels")
    (tmp_path / "data.yaml").unlink()
    for name in ("val", "test"):
        image(tmp_path / "images" / name / f"{name}.png")
    letterbox = Preprocessing([{"resize": {"size": [64, 64], "fit": "letterbox"}}])
    boxes, classes = Dataset(source, letterbox, None).objects("train")[0]
    np.testing.assert_allclose(boxes, [[0.375, 0.375, 0.625, 0.625], [0.25, 0, 0.75, 0.1]], atol=1e-6)
    assert classes.tolist() == [0, 1]
    cropped = dataset(source, {"crop": {"size": [32, 32]}})
    boxes, classes = cropped.objects("train")[0]
    np.testing.assert_allclose(boxes, [[0.25, 0.25, 0.75, 0.75]], atol=1e-6)
    assert classes.tolist() == [0]
    assert len(cropped.objects("train")[1].classes) == 0
    too_large = dataset(source, {"crop": {"size": [64, 32]}})
    with pytest.raises(DataError, match=r"a\.png.*crop to \[64, 32\]"):
        too_large.objects("train")


def test_images_without_a_file_and_with_an_empty_one_have_no_objects(tmp_path: Path) -> None:
    source = one(tmp_path)
    image(tmp_path / "images" / "train" / "c.png")
    (tmp_path / "labels" / "train" / "c.txt").write_text("\n  \n")
    samples = source.load()
    assert samples.objects is not None
    assert [len(image_objects.classes) for image_objects in samples.objects] == [1, 0, 0]
    assert set(source.files()) == {
        "data.yaml",
        *(f"images/train/{name}" for name in ("a.png", "b.jpg", "c.png")),
        *(f"labels/train/{name}.txt" for name in "ac"),
    }


@pytest.mark.parametrize(
    "train",
    [
        "images/train",
        "[images/train]",
        "[images/train/]",
        "../images/train",  # as Roboflow writes it
        "train.txt",
        "lists/train.txt",
        ".",
    ],
)
def test_forms_of_train(tmp_path: Path, train: str) -> None:
    source = one(tmp_path, described=f"train: {train}\nval:\ntest: ''\n{NAMES}")
    (tmp_path / "train.txt").write_text("./images/train/a.png\nimages/train/b.jpg\n\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("images/train/a.png\nimages/train/b.jpg\n")
    assert objects(source) == [([0.25, 0.375, 0.75, 0.625], 1)]
    assert len(source.load().labels) == 2


def test_the_last_folder_called_images_is_replaced(tmp_path: Path) -> None:
    image(tmp_path / "images" / "set" / "images" / "images.png")
    labels = tmp_path / "images" / "set" / "labels"
    labels.mkdir()
    (labels / "images.txt").write_text(ROW)
    assert len(objects(Yolo(folder=str(tmp_path)))) == 1


def test_labels_beside_images(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(ROW)
    assert len(objects(Yolo(folder=str(tmp_path)))) == 1


def test_labels_may_be_elsewhere(tmp_path: Path) -> None:
    one(tmp_path)
    (tmp_path / "detection").mkdir()
    (tmp_path / "labels").rename(tmp_path / "detection" / "boxes")
    (tmp_path / "data.yaml").rename(tmp_path / "detection" / "classes.yaml")
    with pytest.raises(DataError, match=r"no image has a label file; allowed: for example .*labels/train/a\.txt"):
        Yolo(folder=str(tmp_path)).load()
    source = Yolo(folder=str(tmp_path), labels="detection/boxes")
    assert len(objects(source)) == 1
    assert source.load().class_names == ("block", "ring")
    described = Yolo(file=str(tmp_path / "detection" / "classes.yaml"), labels="detection/boxes", root=str(tmp_path))
    assert len(objects(described)) == 1
    with pytest.raises(DataError, match="files inside, by relative paths"):
        Yolo(folder=str(tmp_path), labels="../elsewhere").load()


def test_polygons_become_boxes_and_repeated_rows_count_once(tmp_path: Path) -> None:
    source = one(tmp_path, "0 0.1 0.2 0.5 0.2 0.3 0.8\n" + 2 * ROW)
    assert objects(source)[0] == (pytest.approx([0.2, 0.1, 0.8, 0.5]), 0)
    samples = source.load()
    assert samples.objects is not None
    assert len(samples.objects[0].classes) == 2
    assert samples.notes == ("1 boxes are in a label file twice, and count once",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2 0.5 0.5 0.1 0.1", "the class 2 is out of range; allowed: 0 to 1"),
        ("-1 0.5 0.5 0.1 0.1", "the class -1 is out of range"),
        ("0.5 0.5 0.5 0.1 0.1", "the class 0.5 is out of range"),
        ("1e300 0.5 0.5 0.1 0.1", "is out of range"),
        ("0 nan 0.5 0.1 0.1", "'nan' is not a number"),
        ("0 0.5 inf 0.1 0.1", "'inf' is not a number"),
        ("0 0.5 0.5 0 0.1", "is empty or inverted"),
        ("0 0.5 0.5 0.1 -0.1", "is empty or inverted"),
        ("0 0.9 0.5 0.4 0.1", "is outside of the image"),
        ("0 20 10 5 5", "is outside of the image"),
        ("0 0.5 0.5 0.1 0.1 0.9", "has 6 numbers; allowed: 5"),
        ("0 0.5 0.5", "has 3 numbers"),
        ("ring 0.5 0.5 0.1 0.1", "'ring' is not a number"),
        ("\x00\xff", "is not a number"),
    ],
)
def test_rows_that_are_no_labels_are_refused_with_their_line(tmp_path: Path, row: str, message: str) -> None:
    source = one(tmp_path, ROW + row + "\n")
    with pytest.raises(DataError) as error:
        source.load()
    assert message in str(error.value)
    assert str(tmp_path / "labels" / "train" / "a.txt") + ", line 2" in str(error.value)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("val: images/train\n" + NAMES, "has no key 'train'"),
        ("train: images/none\n" + NAMES, "line 1: train: 'images/none' is neither a folder nor a list"),
        ("train: labels\n" + NAMES, "'labels' contains no images"),
        (f"train: images/train\npath: ../..\n{NAMES}", "line 2: path: '../..' leads out of the folder of this file"),
        (f"train: images/train\npath: /etc\n{NAMES}", "path: '/etc' leads out"),
        (f"train: images/train\npath: gone\n{NAMES}", "path: 'gone' is not a folder"),
        (f"train: ../../elsewhere\n{NAMES}", "train: '../../elsewhere' leads out"),
        (f"train: /etc\n{NAMES}", "train: '/etc' leads out"),
        (f"train: 3\n{NAMES}", "train: '3' is not a path"),
        (f"train: {{a: b}}\n{NAMES}", "is not a path"),
        ("train: images/train\nnc: 3\n" + NAMES, "line 2: nc: 3, but there are 2 names"),
        ("train: images/train\nnc: many\n", "nc: 'many' is not a number of classes"),
        ("train: images/train\nnames: {0: a, 2: b}\n", "names: its indices have gaps"),
        ("train: images/train\nnames: [a, a]\n", "lists the class 'a' twice"),
        ("train: images/train\nnames: [a, [b]]\n", "is not a name"),
        ("train: images/train\nnames: a\n", "names: is not a list of names"),
        ("train: images/train\nnames: []\n", "names: is not a list of names"),
        ("train: a\ntrain: b\n", "is not YAML"),
        ("a: &x [1]\nb: *x\n", "line 1.*anchors and aliases"),
        ("a: " + 40 * "[" + 40 * "]", "is nested too deeply"),
        ("- a\n", "is not a map"),
        ("a: [", "is not YAML"),
        ("", "is not a map"),
        (f"path: {5000 * 'a'}\ntrain: images/train\n{NAMES}", "path: 'a+' is not a folder"),
        ("train: images/train\nkpt_shape: [0, 3]\n" + NAMES, "line 2: kpt_shape"),
        ("train: images/train\nkpt_shape: [2000000000, 3]\n" + NAMES, "kpt_shape"),
        ("train: images/train\nkpt_shape: 17\n" + NAMES, "kpt_shape"),
    ],
)
def test_descriptions_that_are_refused(tmp_path: Path, described: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        one(tmp_path, described=described).load()
    assert "data.yaml" in str(error.value)


def test_lists_that_are_refused(tmp_path: Path) -> None:
    source = one(tmp_path, described="train: train.txt\n" + NAMES)
    (tmp_path / "train.txt").write_text("images/train/a.png\nimages/train/z.png\n")
    with pytest.raises(DataError, match=r"train\.txt, line 2: the image 'images/train/z\.png' does not exist"):
        source.load()
    (tmp_path / "train.txt").write_text("../../../etc/a.png\n")
    with pytest.raises(DataError, match=r"train\.txt, line 1: names the file '\.\./"):
        source.load()
    (tmp_path / "train.txt").write_text("images/train/a.png\nimages/train/a.png\n")
    with pytest.raises(DataError, match=r"data\.yaml, line 1: train: the image 'images/train/a\.png' is listed twice"):
        source.load()


def test_an_image_in_two_splits_is_refused(tmp_path: Path) -> None:
    source = one(tmp_path, described="train: images/train\nval: images/train\n" + NAMES)
    with pytest.raises(
        DataError, match=r"line 2: val: the image 'images/train/a\.png' is in `train` too.*remove `val`"
    ):
        source.load()


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert objects(one(tmp_path, "\ufeff" + ROW)) == objects(one(tmp_path / "plain"))


def test_folders_of_which_only_some_are_splits_are_refused(tmp_path: Path) -> None:
    one(tmp_path)
    (tmp_path / "data.yaml").unlink()
    image(tmp_path / "images" / "more" / "c.png")
    with pytest.raises(DataError, match="is of no split"):
        Yolo(folder=str(tmp_path)).load()


def test_empty_folders_and_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no files"):
        Yolo(folder=str(tmp_path)).load()
    (tmp_path / "note.md").touch()
    with pytest.raises(DataError, match="contains no images"):
        Yolo(folder=str(tmp_path)).load()
    (tmp_path / "a.tar").touch()
    with pytest.raises(DataError, match=r"is an archive.*unpack it"):
        Yolo(folder=str(tmp_path / "a.tar")).load()


def test_either_a_file_or_a_folder() -> None:
    for settings in ({}, {"file": "a.yaml", "folder": "b"}, {"folder": "b", "root": "c"}):
        with pytest.raises(ValidationError):
            Yolo(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["exif", "ignore"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_those_of_the_decoded_image(tmp_path: Path, orientation: int, setting: Any) -> None:
    """The programs that write such labels first rotate photos by their EXIF orientation."""
    source = one(tmp_path, "0 0.5 0.5 1 1\n").model_copy(update={"orientation": setting})
    Image.new("RGB", (64, 32)).save(tmp_path / "images" / "train" / "a.png", exif=turned(orientation))
    samples = source.load()
    assert samples.objects is not None
    assert samples.sizes is not None
    assert samples.objects[0].boxes.tolist() == [[0, 0, 1, 1]]
    assert tuple(samples.sizes[0]) == samples.read(0).shape[:2]


# --- keypoints --------------------------------------------------------------------------

POSE = "0 0.5 0.5 0.5 0.5 0.375 0.5 2 0.625 0.75 1 0 0 0\n"


def test_keypoints_need_their_shape(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 14 numbers.*keypoints need `kpt_shape`"):
        one(tmp_path, POSE).load()
    source = one(tmp_path / "b", POSE, "train: images/train\nkpt_shape: [3, 3]\n" + NAMES)
    assert objects(source) == [([0.25, 0.25, 0.75, 0.75], 0)]
    with pytest.raises(DataError, match="has no key 'kpt_shape'"):
        one(tmp_path / "c").model_copy(update={"keypoints": source.__class__(folder="", keypoints={}).keypoints}).load()
    source = one(tmp_path / "d", ROW, "train: images/train\nkpt_shape: [3, 3]\n" + NAMES)
    with pytest.raises(DataError, match="has 5 numbers; allowed: 14"):
        source.load()


def test_objects_with_keypoints_are_cropped(tmp_path: Path) -> None:
    one(tmp_path, POSE, "train: images/train\nkpt_shape: [3, 3]\n" + NAMES)
    samples = Yolo(file=str(tmp_path / "data.yaml"), keypoints={"margin": 0}).load()  # type: ignore[arg-type]
    assert samples.read(0).shape == (16, 32, 3)
    assert samples.points is not None
    np.testing.assert_allclose(samples.points, [[[0.25, 0.5, 2], [0.75, 1, 1], [0, 0, 0]]], atol=1e-6)
    wide = Yolo(file=str(tmp_path / "data.yaml"), keypoints={"margin": 0.5}).load()  # type: ignore[arg-type]
    assert wide.read(0).shape == (32, 64, 3)
    assert wide.points is not None
    np.testing.assert_allclose(wide.points[0, :2], [[0.375, 0.5, 2], [0.625, 0.75, 1]], atol=1e-6)
    with pytest.raises(DataError, match="no object has keypoints"):
        Yolo(file=str(tmp_path / "data.yaml"), keypoints={"fewest": 3}).load()  # type: ignore[arg-type]


def test_a_keypoint_far_outside_is_not_marked(tmp_path: Path) -> None:
    row = "0 0.5 0.5 0.5 0.5 0.5 0.5 2 1e308 1e308 2\n"
    one(tmp_path, row, "train: images/train\nkpt_shape: [2, 3]\n" + NAMES)
    points = Yolo(file=str(tmp_path / "data.yaml"), keypoints={"margin": 0}).load().points  # type: ignore[arg-type]
    assert points is not None
    assert points.tolist() == [[[0.5, 0.5, 2], [0, 0, 0]]]


def test_the_fingerprint_changes_with_class_names_and_lists(tmp_path: Path) -> None:
    source = one(tmp_path, described="train: train.txt\nval: val.txt\n")
    (tmp_path / "classes.txt").write_text("block\nring\n")
    fingerprints = []
    for train, validation, names in (("a.png", "b.jpg", "block"), ("b.jpg", "a.png", "block"), ("a.png", "b.jpg", "c")):
        (tmp_path / "train.txt").write_text(f"images/train/{train}\n")
        (tmp_path / "val.txt").write_text(f"images/train/{validation}\n")
        (tmp_path / "classes.txt").write_text(f"{names}\nring\n")
        assert source.load().class_names == (names, "ring")
        fingerprints.append(source.fingerprint()["sha256"])
    assert len(set(fingerprints)) == 3
