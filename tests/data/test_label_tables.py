"""Tables of labels that are recognized by their content, and columns of 0 and 1."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pictures import flat, image

from compress.core.errors import DataError
from compress.data.dataset import Dataset
from compress.data.label_tables import Labels
from compress.data.sources import ImageFolder
from deploy.contract.preprocessing import Preprocessing

KINDS = ("tea", "coffee", "water")
HEAD = "schema_version: 1\nname: t\nmodel: {builder: digits_cnn}\nstages: [{train: {epochs: 1}}, quantize]\n"


def photos(root: Path, count: int = 12, folder: str = "") -> Path:
    for index in range(count):
        image(root / folder / f"{index}.png", value=index)
    return root


def table(path: Path, rows: Sequence[Sequence[object]], delimiter: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows(rows)


def kind(index: int) -> str:
    return KINDS[index % 3]


LAYOUTS = {
    "names": ("", ["file", "label"], lambda index: [f"{index}.png", kind(index)]),
    "paths": ("images", ["image_path", "kind"], lambda index: [f"images/{index}.png", kind(index)]),
    "bare names": ("images", ["image", "kind"], lambda index: [f"{index}.png", kind(index)]),
    "without suffix": ("train_images", ["id", "breed"], lambda index: [index, kind(index)]),
    "other columns": ("", ["", "Class Name", "camera", "photo"], lambda i: [i, kind(i), "c1", f"{i}.png"]),
    "two columns of files": ("", ["id", "file", "kind"], lambda i: [i, f"./{i}.png", kind(i)]),
}


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "annotations.csv", "_annotations.csv", "train.csv"])
def test_names_of_tables(tmp_path: Path, name: str) -> None:
    photos(tmp_path)
    delimiter = "\t" if name.endswith("tsv") else ","
    table(tmp_path / name, [["file", "label"], *([f"{i}.png", kind(i)] for i in range(12))], delimiter)
    samples = ImageFolder(path=str(tmp_path)).load()
    assert [samples.class_names[label] for label in samples.labels] == [kind(index) for index in range(12)]
    assert samples.read(7)[0, 0, 0] == 7
    assert samples.notes[0] == (f"{name} was recognized as the table of labels: files in 'file', labels in 'label'")
    assert tmp_path / name in ImageFolder(path=str(tmp_path)).files().values()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns(tmp_path: Path, layout: str, delimiter: str) -> None:
    folder, header, row = LAYOUTS[layout]
    photos(tmp_path, folder=folder)
    table(tmp_path / "labels.csv", [header, *(row(index) for index in range(12))], delimiter)
    samples = ImageFolder(path=str(tmp_path)).load()
    assert [samples.class_names[label] for label in samples.labels] == [kind(index) for index in range(12)]
    assert [samples.read(index)[0, 0, 0] for index in range(12)] == list(range(12))


def test_integers_as_labels_are_not_taken_for_names_of_files(tmp_path: Path) -> None:
    photos(tmp_path)
    table(tmp_path / "labels.csv", [["digit", "file"], *([11 - i, f"{i}.png"] for i in range(12))])
    assert ImageFolder(path=str(tmp_path)).load().labels.tolist() == list(range(11, -1, -1))


def test_a_column_of_splits(tmp_path: Path) -> None:
    photos(tmp_path)
    words = ["train", "Valid", "test"]
    table(tmp_path / "labels.csv", [["x", "part", "k"], *([f"{i}.png", words[i // 4], kind(i)] for i in range(12))])
    samples = ImageFolder(path=str(tmp_path)).load()
    assert {split: len(of) for split, of in samples.splits.items()} == {"train": 4, "validation": 4, "test": 4}
    assert "files in 'x', labels in 'k', splits in 'part'" in samples.notes[0]


@pytest.mark.parametrize("names", [("train.csv", "test.csv"), ("train/_classes.csv", "test/_classes.csv")])
def test_a_table_for_each_split(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        split = name.split("/")[0].removesuffix(".csv")
        photos(tmp_path, 6, split)
        table(tmp_path / name, [["id", "label"], *([f"{i}.png", kind(i)] for i in range(6))])
    samples = ImageFolder(path=str(tmp_path)).load()
    assert {split: len(of) for split, of in samples.splits.items()} == {"train": 6, "test": 6}
    data = Dataset(ImageFolder(path=str(tmp_path)), Preprocessing([]), None)
    assert len(data.labels("test")) == 6
    assert len(samples.notes) == 2


def test_a_competition_with_photos_without_labels(tmp_path: Path) -> None:
    photos(tmp_path, 9, "train")
    for index in range(20, 24):
        image(tmp_path / "test" / f"{index}.png")
    table(tmp_path / "train.csv", [["id", "breed"], *([index, kind(index)] for index in range(9))])
    table(tmp_path / "test.csv", [["id"], *([index] for index in range(20, 24))])
    table(tmp_path / "sample_submission.csv", [["id", "tea", "coffee"], *([i, 0.5, 0.5] for i in range(20, 24))])
    samples = ImageFolder(path=str(tmp_path)).load()
    assert len(samples.labels) == 9
    assert samples.notes[-1] == "6 files were ignored: 4 .png in no row of a table, 2 .csv"


MARKS = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1]] * 3


def test_columns_of_0_and_1_are_labels(tmp_path: Path) -> None:
    photos(tmp_path)
    table(tmp_path / "labels.csv", [["f", "sun", "sea", "ship"], *([f"{i}.png", *MARKS[i]] for i in range(12))])
    source = ImageFolder(path=str(tmp_path))
    assert source.task_name() == "multi_label"
    samples = source.load()
    assert samples.class_names == ("sun", "sea", "ship")
    np.testing.assert_array_equal(samples.targets, MARKS)
    assert "3 columns of 0 and 1" in samples.notes[0]
    other = source.model_copy(update={"classes": ("ship", "sun", "sea")}).load()
    np.testing.assert_array_equal(other.targets, np.array(MARKS)[:, [2, 0, 1]])
    with pytest.raises(DataError, match=r"the classes are not the columns of labels\.csv; allowed: sun, sea, ship"):
        source.model_copy(update={"classes": ("sun", "sea")}).load()


def test_columns_of_0_and_1_by_name(tmp_path: Path) -> None:
    photos(tmp_path)
    path = tmp_path / "labels.csv"
    table(path, [["file", "sun", "sea", "note"], *([f"{i}.png", *MARKS[i][:2], "x"] for i in range(12))])
    settings = Labels(table="labels.csv", label=("sea", "sun"))
    source = ImageFolder(path=str(tmp_path), labels=settings)
    assert source.task_name() == "multi_label"
    np.testing.assert_array_equal(source.load().targets, np.array(MARKS)[:, [1, 0]])
    path.write_text(path.read_text().replace("1.png,1,1", "1.png,1,yes"))
    with pytest.raises(DataError, match=r"labels\.csv, line 3: has 'yes' in the column 'sea'; allowed: 0 or 1"):
        source.load()


def test_one_1_in_every_row_is_a_class(tmp_path: Path) -> None:
    photos(tmp_path)
    rows = [[f"{i}.png", *("1.0" if i % 3 == k else "0.0" for k in range(3))] for i in range(12)]
    table(tmp_path / "labels.csv", [["image", *KINDS], *rows])
    source = ImageFolder(path=str(tmp_path))
    assert source.task_name() == "classification"
    samples = source.load()
    assert samples.class_names == KINDS  # in the order of the columns
    assert samples.labels.tolist() == [0, 1, 2] * 4


REFUSED = {
    "several labels": (
        ["file", "kind", "colour"],
        ["tea", "red"],
        "may be the label: kind, colour; name",
    ),
    "several headers": (["file", "label", "class"], ["tea", "red"], "several columns may be the label: label, class"),
    "several splits": (["file", "a", "b", "kind"], ["train", "test", "x"], "have names of splits: a, b"),
    "numbers": (["file", "price"], ["1.25"], "the column 'price' has numbers such as 1.25, which are not classes"),
    "boxes": (["file", "class", "xmin", "ymin", "xmax", "ymax"], "a1234", "has boxes, .*; use the source `voc`, "),
    "a header twice": (["file", "label", "label"], "ab", r"labels\.csv, line 1: has two columns 'label'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_tables_are_refused(tmp_path: Path, case: str) -> None:
    header, cells, message = REFUSED[case]
    photos(tmp_path)
    table(tmp_path / "labels.csv", [header, *([f"{i}.png", *cells] for i in range(12))])
    with pytest.raises(DataError, match=message):
        ImageFolder(path=str(tmp_path)).load()


def test_files_that_two_columns_name_differently(tmp_path: Path) -> None:
    photos(tmp_path)
    table(tmp_path / "labels.csv", [["left", "right", "k"], *([f"{i}.png", f"{11 - i}.png", "a"] for i in range(12))])
    with pytest.raises(DataError, match=r"several columns name the samples: left, right; name the columns: `lab"):
        ImageFolder(path=str(tmp_path)).load()


def test_two_tables(tmp_path: Path) -> None:
    photos(tmp_path)
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, [["file", "label"], *([f"{i}.png", kind(i)] for i in range(12))])
    with pytest.raises(DataError, match=r"2 tables name the samples: a\.csv, b\.csv; choose one with `labels: {table"):
        ImageFolder(path=str(tmp_path)).load()
    assert len(ImageFolder(path=str(tmp_path), labels=Labels(table="a.csv")).load().labels) == 12


def test_all_files_that_are_missing_are_named(tmp_path: Path) -> None:
    photos(tmp_path)
    rows = [[f"{index}.png", kind(index)] for index in range(12)]
    table(tmp_path / "labels.csv", [["file", "label"], ["98.png", "tea"], *rows, ["99.png", "tea"]])
    every = r"2 samples cannot be used: .*line 2: lists '98\.png', .*line 15: lists '99\.png', .*; add the files, or"
    with pytest.raises(DataError, match=every):
        ImageFolder(path=str(tmp_path)).load()


def test_class_folders_come_first(tmp_path: Path) -> None:
    flat(tmp_path)
    table(tmp_path / "labels.csv", [["file", "label"], *([f"cat/{i}.png", kind(i)] for i in range(10))])
    assert ImageFolder(path=str(tmp_path)).load().class_names == ("cat", "dog")


def test_a_table_of_something_else(tmp_path: Path) -> None:
    photos(tmp_path)
    table(tmp_path / "prices.csv", [["file", "price"], ["x", 3.5]])
    with pytest.raises(DataError, match="contains 12 samples, but none in the folder of a class"):
        ImageFolder(path=str(tmp_path)).load()
