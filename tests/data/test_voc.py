"""Pascal VOC's folders: their content, and error messages about invalid annotations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
from datasets import dataset
from pictures import turned
from PIL import Image

from compress.core.errors import DataError
from compress.data.sources.voc import MAX_XML_BYTES, Voc


def one(folder: Path, text: str | None = None, objects: list[tuple[str, scenes.Box]] | None = None) -> Voc:
    """Write a folder with one picture of 40 x 20 pixels and its annotation; return its source."""
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (40, 20)).save(folder / "a.png")
    text = text or scenes.annotation("a.png", objects or [("cat", (10, 5, 30, 20))], (40, 20))
    (folder / "a.xml").write_text(text)
    return Voc(path=str(folder))


def test_the_standard_folders_with_their_lists_of_splits(tmp_path: Path) -> None:
    folder = scenes.as_voc(tmp_path / "voc")
    data = dataset(Voc(path=str(folder)), {"resize": {"size": [32, 32]}})
    samples = scenes.scenes(12)
    assert data.task == "detection"
    assert data.class_names == ("block", "ring")
    assert data.inputs("test").shape == (3, 32, 32, 3)
    assert [len(data.objects(split)) for split in ("train", "validation", "test")] == [7, 2, 3]
    for index, (boxes, classes) in zip((0, 4, 8), data.objects("test"), strict=True):
        expected = [np.array([box[1], box[0], box[3], box[2]]) / 64 for _, box in samples[index][1]]
        np.testing.assert_allclose(boxes, expected, atol=1e-6)
        assert [data.class_names[label] for label in classes] == [name for name, _ in samples[index][1]]
        assert boxes.dtype == np.float32
        assert classes.dtype == np.int64


def test_images_and_annotations_side_by_side_in_folders_of_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        one(tmp_path / split)
    samples = Voc(path=str(tmp_path)).load()
    assert {split: len(indices) for split, indices in samples.splits.items()} == dict.fromkeys(
        ("train", "validation", "test"), 1
    )
    assert samples.objects is not None
    np.testing.assert_allclose(samples.objects[0].boxes, [[0.25, 0.25, 1.0, 0.75]])
    assert samples.read(0).shape == (20, 40, 3)
    assert Voc(path=str(tmp_path), channels=1).load().read(0).shape == (20, 40, 1)


def test_folders_that_are_no_split_beside_those_that_are(tmp_path: Path) -> None:
    for split in ("train", "test", "extra"):
        one(tmp_path / split)
    with pytest.raises(DataError, match=r"'extra/a\.xml' is of no split, other files are \(1 of 3\); allowed: train"):
        Voc(path=str(tmp_path)).load()


def test_lists_further_down_are_found(tmp_path: Path) -> None:
    for year, seed in (("VOC2007", 0), ("VOC2012", 1)):  # both have the same file names
        scenes.as_voc(tmp_path / year, seed=seed)
    main = tmp_path / "VOC2012" / "ImageSets" / "Main"
    (main / "test.txt").write_text("0000\n")
    data = dataset(Voc(path=str(tmp_path)))
    assert [len(data.objects(split)) for split in ("train", "validation", "test")] == [14, 4, 4]
    assert data.notes == ["2 images with an .xml file are in no list of ImageSets/Main, and were left out"]
    assert len(data.source.files()) == 12 + 12 + 3 + 10 + 10 + 3
    Image.new("RGB", (64, 64)).save(tmp_path / "VOC2007" / "JPEGImages" / "0000.png", exif=turned(6))
    both = Voc(path=str(tmp_path)).load().notes
    assert (len(both), both[1:]) == (2, tuple(data.notes))
    assert "EXIF orientation" in both[0]


@pytest.mark.parametrize(
    ("lists", "sizes"),
    [
        ({"trainval": range(8), "test": range(8, 12)}, {"train": 8, "test": 4}),
        ({"trainval": range(8)}, {"train": 8}),
        ({"train": range(5), "trainval": range(8)}, {"train": 5, "validation": 3}),
        ({"val": range(5), "trainval": range(8)}, {"train": 3, "validation": 5}),
        ({"train": range(5), "val": range(5, 8), "trainval": range(8)}, {"train": 5, "validation": 3}),
        ({"trainval": range(8), "test": range(7, 12)}, "trainval.txt, line 8: '0007' is in the split test too"),
        ({"train": range(5), "test": range(4, 8)}, r"test\.txt, line 1: '0004' is in the split train too"),
    ],
)
def test_a_list_of_what_is_for_training_and_validation(tmp_path: Path, lists: Any, sizes: Any) -> None:
    main = scenes.as_voc(tmp_path / "voc") / "ImageSets" / "Main"
    for path in main.iterdir():
        path.unlink()
    for name, places in lists.items():
        (main / f"{name}.txt").write_text("".join(f"{place:04}\n" for place in places))
    source = Voc(path=str(tmp_path / "voc"))
    if isinstance(sizes, str):
        with pytest.raises(DataError, match=sizes):
            source.load()
        return
    samples = source.load()
    assert {split: len(indices) for split, indices in samples.splits.items()} == sizes
    assert main / "trainval.txt" in source.files().values()


def test_the_name_of_another_image_that_was_left_in_a_file(tmp_path: Path) -> None:
    folder = scenes.as_voc(tmp_path / "voc")
    for index in range(12):
        path = folder / "Annotations" / f"{index:04}.xml"
        path.write_text(path.read_text().replace(f"{index:04}.png", "0000.png"))
    samples = Voc(path=str(folder)).load()
    for index, (picture, _) in enumerate(scenes.scenes(12)):
        np.testing.assert_array_equal(samples.read(index), picture)
    (folder / "JPEGImages" / "0005.png").unlink()
    for work in (Voc(path=str(folder)).load, Voc(path=str(folder)).fingerprint):
        with pytest.raises(DataError, match=r"0005.xml: the image .*0000.png is annotated in .*0000.xml too; join"):
            work()


def test_a_difficult_object_is_ignored(tmp_path: Path) -> None:
    text = scenes.annotation("a.png", [("cat", (10, 5, 30, 20)), ("dog", (0, 0, 9, 9))], (40, 20))
    text = text.replace("<name>dog</name>", "<name>dog</name><difficult>1</difficult>")
    assert one(tmp_path, text).load().class_names == ("cat",)


def test_boxes_up_to_a_pixel_outside_are_cut_off(tmp_path: Path) -> None:
    samples = one(tmp_path, objects=[("cat", (-1, 0, 41, 20))]).load()
    assert samples.objects is not None
    np.testing.assert_array_equal(samples.objects[0].boxes, [[0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><object></annotation>", "a.xml: is not XML: mismatched tag: line 1"),
        ("", "a.xml: is not XML: no element found"),
        ("<html></html>", "begins with <html>; allowed: <annotation>"),
        (
            "<annotation><object><name>cat</name></object></annotation>",
            "line 1: an <object> has no <name> or no <bndbox>",
        ),
        ("<a>" * 40 + "</a>" * 40, "has more than 32 elements inside of each other"),
        (scenes.annotation("a.png", [("cat", (1, 1, 2, 2))]), "annotated as 64x64, and a.png is 40x20"),
        # A path of another machine: the image with the name of the annotation file is used.
        (scenes.annotation("b.jpg", [("cat", (1, 1, 2, 2))]).replace("b.jpg", "../../b.jpg"), "a.png is 40x20"),
        (scenes.annotation("a.png", [("cat", (30, 5, 10, 20))], (40, 20)), "a.xml, line 4: .*empty or inverted"),
        (scenes.annotation("a.png", [("cat", (41, 5, 41.5, 20))], (40, 20)), "a.xml, line 4: .*outside of the image"),
    ],
)
def test_annotations_that_cannot_be_read_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, text or " ").load()


def test_a_number_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    for number in ("", "ten", "nan", "1e999"):
        text = scenes.annotation("a.png", [("cat", (1, 1, 2, 2))], (40, 20))
        with pytest.raises(DataError, match=r"line 4: <xmin>: '.*' is not a number"):
            one(tmp_path, text.replace("<xmin>1<", f"<xmin>{number}<")).load()


BOMB = """<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<annotation>&b;</annotation>"""
OUTSIDE = """<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation><filename>&x;</filename></annotation>"""


@pytest.mark.parametrize("text", [BOMB, OUTSIDE, '<!DOCTYPE annotation SYSTEM "http://x.invalid/a.dtd"><annotation/>'])
def test_document_types_are_refused_before_anything_is_unfolded_or_fetched(tmp_path: Path, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match=r"line [12]: declares a document type"):
        one(tmp_path, text).load()
    assert time.monotonic() - started < 5


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="allowed: 4,194,304 bytes"):
        one(tmp_path, " " * (MAX_XML_BYTES + 1)).load()


def test_a_missing_image_a_missing_annotation_and_an_unknown_class(tmp_path: Path) -> None:
    folder = scenes.as_voc(tmp_path / "voc")
    with pytest.raises(DataError, match="xml, line 4: unknown class 'ring'; allowed: block") as caught:
        Voc(path=str(folder), classes=("block",)).load()
    assert "Annotations" in str(caught.value)
    (folder / "JPEGImages" / "0003.png").unlink()
    for work in (Voc(path=str(folder)).load, Voc(path=str(folder)).fingerprint):
        with pytest.raises(DataError, match=r"0003.xml: the image .*0003.png does not exist"):
            work()
    (folder / "Annotations" / "0003.xml").unlink()
    with pytest.raises(DataError, match=r"ImageSets/Main/train\.txt, line 2: names '0003', which has no .xml file"):
        Voc(path=str(folder)).load()


def test_no_folder_no_annotations_no_objects(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        Voc(path=str(tmp_path / "nowhere")).load()
    with pytest.raises(DataError, match=r"contains no .xml files"):
        Voc(path=str(tmp_path)).load()
    one(tmp_path, scenes.annotation("a.png", [], (40, 20)))
    data = dataset(Voc(path=str(tmp_path)))
    with pytest.raises(DataError, match="the images contain no objects"):
        data.objects("train")


def test_the_fingerprint_changes_with_a_box_and_with_an_image_and_not_with_the_place(tmp_path: Path) -> None:
    first, second = one(tmp_path / "one"), one(tmp_path / "two")
    assert first.fingerprint() == second.fingerprint()
    one(tmp_path / "two", objects=[("cat", (10, 5, 31, 20))])
    assert first.fingerprint() != second.fingerprint()
    one(tmp_path / "two")
    Image.new("RGB", (40, 20), "red").save(tmp_path / "two" / "a.png")
    assert first.fingerprint() != second.fingerprint()


def test_the_summary_counts_objects(tmp_path: Path) -> None:
    folder = scenes.as_voc(tmp_path / "voc")
    (folder / "Annotations" / "0000.xml").write_text(scenes.annotation("0000.png", []))
    summary = dataset(Voc(path=str(folder))).summary()
    objects = [name for _, rows in scenes.scenes(12)[1:] for name, _ in rows]
    assert summary["samples"] == {"train": 7, "validation": 2, "test": 3}
    counted = np.sum([summary["counts"][split] for split in summary["samples"]], axis=0)
    assert counted.tolist() == [objects.count("block"), objects.count("ring")]
    assert summary["notes"] == ["classes are counted by objects; 1 of 12 images have none"]


def test_images_are_divided_so_that_rare_classes_are_in_every_split(tmp_path: Path) -> None:
    for index in range(30):
        name = f"{index:02}"
        Image.new("RGB", (40, 20)).save(tmp_path / f"{name}.png")
        objects = [("cat", (1, 1, 9, 9))] + ([("dog", (20, 1, 30, 9))] if index % 5 == 0 else [])
        (tmp_path / f"{name}.xml").write_text(scenes.annotation(f"{name}.png", objects, (40, 20)))
    data = dataset(Voc(path=str(tmp_path)))
    for split in ("train", "validation", "test"):
        assert any(1 in image_objects.classes for image_objects in data.objects(split))  # type: ignore[arg-type]


def test_the_lists_of_splits_are_in_the_fingerprint_and_the_manifest(tmp_path: Path) -> None:
    source = Voc(path=str(scenes.as_voc(tmp_path / "voc")))
    assert {name.partition("/")[0] for name in source.files()} == {"Annotations", "JPEGImages", "ImageSets"}
    before = source.fingerprint()
    train = tmp_path / "voc" / "ImageSets" / "Main" / "train.txt"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[1:]))
    assert source.fingerprint() != before
