"""Folders of images: their layouts, decoding, and errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from pictures import divided, flat, image

from compress.core.errors import DataError
from compress.data.class_names import Classes
from compress.data.dataset import Dataset
from compress.data.sources import ImageFolder, images


def everything(data: Dataset) -> list[np.ndarray]:
    return [data.inputs(split) for split in ("train", "validation", "test")]


def test_flat_folder(tmp_path: Path) -> None:
    data = dataset(ImageFolder(path=str(flat(tmp_path))))
    assert data.class_names == ("cat", "dog")
    assert sum(len(data.labels(split)) for split in ("train", "validation", "test")) == 20
    assert data.inputs("test").shape == (4, 4, 6, 3)
    np.testing.assert_array_equal(data.labels("test"), [0, 0, 1, 1])
    for label, picture in zip(data.labels("train"), data.inputs("train"), strict=True):
        assert label == picture[0, 0, 0] // 100
        assert picture[0, 0, 1] == picture[0, 0, 0] // 2


NAMES = ("train val test", "Train VALID Test", "train validation test", "Training dev testing", "training val Eval")


@pytest.mark.parametrize("names", NAMES)
def test_divided_folder(tmp_path: Path, names: str) -> None:
    data = dataset(ImageFolder(path=str(divided(tmp_path, tuple(names.split())))))
    assert data.class_names == ("cat", "dog")
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(data.labels(split), [0] * 4 + [1] * 4)


def test_divided_folder_with_a_class_that_one_split_lacks(tmp_path: Path) -> None:
    divided(tmp_path)
    image(tmp_path / "train" / "bird" / "1.png")
    data = dataset(ImageFolder(path=str(tmp_path)))
    assert data.class_names == ("bird", "cat", "dog")
    assert set(data.labels("train")) == {0, 1, 2}
    assert set(data.labels("test")) == {1, 2}


def test_folder_without_validation(tmp_path: Path) -> None:
    data = dataset(ImageFolder(path=str(divided(tmp_path, ("train", "test")))))
    assert [len(data.labels(split)) for split in ("train", "validation", "test")] == [6, 2, 8]


@pytest.mark.parametrize("names", [("test",), ("val", "test")])
def test_folder_without_train(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="has no train split"):
        dataset(ImageFolder(path=str(divided(tmp_path, names)))).labels("test")


def test_splits_beside_other_folders(tmp_path: Path) -> None:
    divided(tmp_path)
    (tmp_path / "annotations").mkdir()
    with pytest.raises(DataError, match="contains the folder 'annotations' next to 'test' and 'train'; allowed"):
        ImageFolder(path=str(tmp_path)).load()


def test_a_folder_beside_train_that_holds_the_same_classes(tmp_path: Path) -> None:
    divided(tmp_path, ("train", "holdout"))
    with pytest.raises(DataError, match="contains 'train' and 'holdout', each with a folder 'cat'; allowed: for"):
        ImageFolder(path=str(tmp_path)).load()


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    flat(tmp_path)
    image(tmp_path / "train" / "1.png")
    assert ImageFolder(path=str(tmp_path)).load().class_names == ("cat", "dog", "train")


def test_hidden_and_other_files_are_left_out(tmp_path: Path) -> None:
    flat(tmp_path)
    before = ImageFolder(path=str(tmp_path)).fingerprint()
    (tmp_path / "cat" / "._0.png").write_bytes(b"no image")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "folder.png").mkdir()
    (tmp_path / "readme.md").write_text("no image")
    image(tmp_path / ".cache" / "1.png")
    image(tmp_path / "__MACOSX" / "cat" / "1.png")
    image(tmp_path / "cat" / ".thumbs" / "1.png")
    image(tmp_path / "loose.png")
    source = ImageFolder(path=str(tmp_path))
    assert source.load().class_names == ("cat", "dog")
    assert len(source.load().labels) == 20
    assert source.fingerprint() == before


def test_images_in_folders_of_a_class_and_of_every_format(tmp_path: Path) -> None:
    flat(tmp_path)
    for suffix in ("jpg", "JPEG", "bmp", "webp", "PNG", "jfif"):
        image(tmp_path / "cat" / "deep" / "er" / f"x.{suffix}")
    assert np.bincount(ImageFolder(path=str(tmp_path)).load().labels).tolist() == [16, 10]


@pytest.mark.parametrize("where", [".", "train"])
def test_a_class_whose_files_are_all_of_another_kind_is_refused(tmp_path: Path, where: str) -> None:
    flat(tmp_path / where)
    (tmp_path / where / "cow").mkdir()
    for index in range(3):
        (tmp_path / where / "cow" / f"{index}.gif").write_bytes(b"GIF89a")
    (tmp_path / where / "cow" / "notes.txt").write_text("moo")
    pattern = (
        r"'[a-z/]*cow' is that of a class and contains no samples \(4 files were ignored: 3 .gif, 1 .txt\); allowed"
    )
    for ask in (ImageFolder(path=str(tmp_path)).load, ImageFolder(path=str(tmp_path)).fingerprint):
        with pytest.raises(DataError, match=pattern):
            ask()
    image(tmp_path / where / "cow" / "3.png")
    assert ImageFolder(path=str(tmp_path)).load().class_names == ("cat", "cow", "dog")


def test_files_that_are_no_samples_are_counted(tmp_path: Path) -> None:
    divided(tmp_path)
    for place in ("cat/1.tif", "cat/2.TIF", "dog/x.ppm", "loose.png", "README"):
        (tmp_path / "train" / place).write_bytes(b"")
    data = dataset(ImageFolder(path=str(tmp_path)))
    note = "5 files were ignored: 2 .tif, 1 without a suffix, 1 .ppm, 1 .png in no folder of a class"
    assert data.notes == data.summary()["notes"] == [note]
    convert = "2 .tif files cannot be decoded and are left out: convert them, for example with `mogrify -format png`"
    assert data.warnings[0].startswith(convert)
    assert data.summary()["warnings"] == data.warnings


def test_a_folder_for_the_names_of_classes(tmp_path: Path) -> None:
    flat(tmp_path)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "names.txt").write_text("dog\ncat\n")
    samples = ImageFolder(path=str(tmp_path), classes=Classes(file="meta/names.txt")).load()
    assert (samples.class_names, samples.notes) == (("dog", "cat"), ())


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name in ("absent", "file", "a\0b"):
        with pytest.raises(DataError, match=r"is not a folder; allowed: .*; check data\.source"):
            ImageFolder(path=str(tmp_path / name)).fingerprint()


def test_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no samples; allowed: CLASS/\*"):
        ImageFolder(path=str(tmp_path)).load()
    loose = r"contains 1 samples, but none in the folder of a class; allowed: CLASS/\*.*; set `labels: none`"
    image(tmp_path / "loose.png")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=loose):
        ImageFolder(path=str(tmp_path)).load()
    (tmp_path / "loose.png").rename(tmp_path / "cat" / "loose.png")
    (tmp_path / "cat").rename(tmp_path / "train")
    with pytest.raises(DataError, match=loose):
        ImageFolder(path=str(tmp_path)).load()


def test_photos_without_labels(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "more/c.png"):
        image(tmp_path / name)
    samples = ImageFolder(path=str(tmp_path), labels="none").load()
    assert (len(samples.labels), samples.class_names, samples.has_labels) == (3, (), False)
    assert ImageFolder(path=str(tmp_path), labels="none").task_name() == "outputs"
    for name in ("train/a.png", "val/b.png", "test/c.png"):
        image(tmp_path / "divided" / name)
    divided = ImageFolder(path=str(tmp_path / "divided"), labels="none").load()
    assert {split: len(indices) for split, indices in divided.splits.items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }


def test_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    flat(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"0\.png: cannot be read: Permission denied"):
        ImageFolder(path=str(tmp_path)).fingerprint()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        ImageFolder(path=str(tmp_path)).load()


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp"])
def test_a_corrupt_image_is_named(tmp_path: Path, suffix: str) -> None:
    path = image(flat(tmp_path) / "cat" / f"broken.{suffix}", (60, 40))
    for content in (b"", b"no image", path.read_bytes()[:-60], path.read_bytes()[:40]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{re.escape(str(path))}: is not a readable image.*; remove or repair it"):
            everything(dataset(ImageFolder(path=str(tmp_path))))


def test_an_image_of_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat(tmp_path)
    monkeypatch.setattr(images, "MAX_PIXELS", 23)
    with pytest.raises(DataError, match="has 6 x 4 pixels; at most 23, and at most 65536 along a side"):
        dataset(ImageFolder(path=str(tmp_path))).inputs("test")
    monkeypatch.setattr(images, "MAX_PIXELS", 24)
    assert len(dataset(ImageFolder(path=str(tmp_path))).inputs("test")) == 4
