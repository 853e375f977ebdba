"""Tables of labels, named by settings or recognized by their content, columns of 0 and 1, and files of class names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from pictures import flat, image

from compress.core.errors import DataError
from compress.data.class_names import Classes
from compress.data.dataset import Splitting
from compress.data.label_tables import Labels
from compress.data.sources import ImageFolder

KINDS = ("tea", "coffee", "water")


# --- tables that settings name ----------------------------------------------------------


def shop(root: Path, rows: list[dict[str, Any]] | None = None, count: int = 30, **more: Any) -> Path:
    """Write the images 0.png, 1.png, ... and labels.csv; return the folder."""
    for index in range(count):
        image(root / "photos" / f"{index}.png", value=index)
    rows = rows or [{"file": f"photos/{index}.png", "label": KINDS[index % 3]} for index in range(count)]
    for place, row in enumerate(rows):
        row.update({key: values[place % len(values)] for key, values in more.items()})
    with (root / "labels.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    return root


def tabled(root: Path, classes: Classes | None = None, **settings: Any) -> ImageFolder:
    return ImageFolder(path=str(root), labels=Labels(table="labels.csv", **settings), classes=classes)


def test_spaces_around_labels_and_groups_do_not_count(tmp_path: Path) -> None:
    names = [" coffee", "coffee", "tea ", "tea", "tea\t", "coffee "]
    rows = [{"file": f"photos/{index}.png", "label": name, "who": f"{index // 2} "} for index, name in enumerate(names)]
    rows[0]["who"] = "0"
    samples = tabled(shop(tmp_path, rows), group="who").load()
    assert (samples.class_names, samples.labels.tolist()) == (("coffee", "tea"), [0, 0, 1, 1, 1, 0])
    kept, taken = samples.divide(samples.labels, np.arange(6), 0.3, 0)
    assert len(set(kept // 2) & set(taken // 2)) == 0


def test_whole_numbers_with_a_point(tmp_path: Path) -> None:
    rows = [{"file": f"photos/{index}.png", "label": f"{index}.0"} for index in range(12)]
    samples = tabled(shop(tmp_path, rows)).load()
    assert samples.class_names == tuple(map(str, range(12)))
    assert samples.labels.tolist() == list(range(12))
    mixed = [{"file": f"photos/{index}.png", "label": f"{index / 2}"} for index in range(4)]
    assert tabled(shop(tmp_path, mixed)).load().class_names == ("0.0", "0.5", "1.0", "1.5")  # these stay names


def test_names_of_classes(tmp_path: Path) -> None:
    shop(tmp_path, [{"file": f"photos/{index}.png", "label": index % 3} for index in range(6)])
    (tmp_path / "names.txt").write_text("water, still\n\ntea\ncoffee\n")
    named = tabled(tmp_path, Classes(file="names.txt")).load()
    assert named.class_names == ("water, still", "tea", "coffee")
    assert named.labels.tolist() == [0, 1, 2] * 2
    (tmp_path / "names.csv").write_text("kind,code\ncoffee,2\nwater,0\n tea,1\ntea,1\n")
    listed = tabled(tmp_path, Classes(file="names.csv", index="code", name="kind")).load()
    assert listed.class_names == ("water", "tea", "coffee")


def test_names_give_the_order(tmp_path: Path) -> None:
    (shop(tmp_path) / "names.txt").write_text("water\ntea\ncoffee\nmilk")
    samples = tabled(tmp_path, Classes(file="names.txt")).load()
    assert samples.labels[:3].tolist() == [1, 2, 0]
    (tmp_path / "labels.csv").unlink()
    flat = ImageFolder(path=str(tmp_path), classes=Classes(file="names.txt"))
    with pytest.raises(DataError, match="unknown class 'photos'; allowed: water, tea, coffee, milk"):
        flat.load()


@pytest.mark.parametrize(("column", "setting"), [("split", None), ("Split", None), ("part", "part")])
def test_splits_in_a_table(tmp_path: Path, column: str, setting: str | None) -> None:
    shop(tmp_path, **{column: ["train", "Train", "val", "test", " validation"]})
    samples = tabled(tmp_path, split=setting).load()
    assert {split: len(of) for split, of in samples.splits.items()} == {"train": 12, "validation": 12, "test": 6}
    assert samples.splits["test"].tolist() == [3, 8, 13, 18, 23, 28]


def test_splits_that_share_a_group_are_refused(tmp_path: Path) -> None:
    shop(tmp_path, speaker=["ada", "bob"], split=["train", "test", "train", "val", "train"])
    data = dataset(tabled(tmp_path, group="speaker"))
    with pytest.raises(
        DataError, match=r"data.source.folder: the group 'ada' is in train and in .*; correct the table"
    ):
        data.labels("train")
    again = dataset(tabled(tmp_path, group="speaker"), splitting=Splitting(validation=0.3, test=0.3))
    with pytest.raises(DataError, match="split is empty"):  # two groups are too few for three splits
        again.labels("train")
    shop(
        tmp_path,
        speaker=["ada", "bob", "cy", ""],
        split=["train", "test", "val", "train", "train", "test", "val", "val"],
    )
    disjoint_data = dataset(tabled(tmp_path, group="speaker"))
    assert [len(disjoint_data.labels(split)) for split in ("train", "validation", "test")] == [12, 10, 8]


def test_what_changes_the_digest(tmp_path: Path) -> None:
    source = tabled(shop(tmp_path))
    seen = [source.fingerprint()]
    (tmp_path / "photos" / "more.png").write_bytes(b"not in the table")
    assert source.fingerprint() == seen[0]
    text = (tmp_path / "labels.csv").read_text()
    (tmp_path / "labels.csv").write_text(text.replace("0.png,tea", "0.png,water"))
    assert source.fingerprint() not in seen


BAD_TABLES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "labels.csv: has no column 'file'; allowed: none: it is empty"),
    "no rows": (b"file,label\n", "lists no files in labels.csv"),
    "no label": (b"file,kind\nphotos/0.png,a\n", "has no column 'label'; allowed: file, kind"),
    "twice": (b"file,label,label\n", "has two columns 'label'"),
    "empty label": (b"file,label\nphotos/0.png,\n", "line 2: has no label"),
    "long label": (b"file,label\nphotos/0.png," + b"x" * 999, "line 2: has a label of 999 letters"),
    "ragged": (b"file,label\nphotos/0.png,a,b\n", "line 2: has 3 columns; allowed: 2, as the header has"),
    "ragged below": (b"file,label\nphotos/0.png,a\nphotos/1.png\n", "line 3: has 1 columns"),
    "absent file": (b"file,label\nphotos/999.png,a\n", "line 2: lists 'photos/999.png', which is not there"),
    "leads out": (b"file,label\n../secret.png,a\n", r"line 2: names the file '\.\./secret\.png'"),
    "absolute": (b"file,label\n/etc/passwd,a\n", "line 2: names the file '/etc/passwd'"),
    "a file twice": (b"file,label\nphotos/0.png,a\n./photos/0.png,b\n", "line 3: lists 'photos/0.png' twice"),
    "unknown split": (b"file,label,split\nphotos/0.png,a,odd\n", "line 2: unknown split 'odd'; allowed: train, val"),
    "NUL": (b"file,label\nphotos/0.png,a\0\n", "line 2: has a NUL byte"),
    "not UTF-8": ("file,label\nphotos/0.png,café\n".encode("latin-1"), "line 2: is not UTF-8: byte 0xe9"),
    "UTF-16": ("file,label\n".encode("utf-16"), "labels.csv, line 1: "),
    "a million columns": (b"file,label" + b",x" * 1_000_000, "line 1: is too long"),
    "many columns": (b"file,label" + b",x" * 100_000, "line 1: has 100,002 columns; allowed: 4,096 columns"),
    "no lines": (b"a" * (2 << 20), "line 1: is too long for a line of a CSV file; allowed: 1,048,576 bytes"),
    "open quote": (b'file,label\n"photos/0.png,a\n' + b"x" * 200_000, "is not a readable CSV file"),
    "label beyond": (b"file,label\nphotos/0.png,999999999\nphotos/1.png,1\n", "label 999999999 is out of range"),
}


@pytest.mark.parametrize(("content", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables(tmp_path: Path, content: bytes, message: str) -> None:
    (shop(tmp_path) / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        _ = dataset(tabled(tmp_path)).labels("test")


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("index,name\n0,a\n2,b\n", {"index": "index", "name": "name"}, "allowed: indices from 0 without gaps"),
        ("index,name\n0,a\n0,b\n", {"index": "index", "name": "name"}, "class 0 has two names: 'a' and 'b'"),
        ("index,name\n-1,a\n", {"index": "index", "name": "name"}, "line 2: '-1' is not a class index"),
        ("", {}, "names 0 classes"),
        ("a\nb\n", {"index": "index"}, "needs both index and name"),
        ("tea\n", {}, "unknown class 'coffee'"),
    ],
)
def test_bad_classes(tmp_path: Path, content: str, settings: dict[str, str], message: str) -> None:
    (shop(tmp_path) / "names").write_text(content)
    with pytest.raises(DataError, match=message):
        tabled(tmp_path, Classes(file="names", **settings)).load()


def test_a_byte_order_mark_and_other_line_ends(tmp_path: Path) -> None:
    shop(tmp_path)
    text = "file,label\n" + "".join(f"photos/{index}.png,{KINDS[index % 3]}\n" for index in range(6))
    (tmp_path / "labels.csv").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert len(tabled(tmp_path).load().labels) == 6


def test_numbers_with_and_without_zeros_are_the_same_class(tmp_path: Path) -> None:
    shop(tmp_path, [{"file": f"photos/{index}.png", "label": ["1", "01", "0"][index % 3]} for index in range(6)])
    np.testing.assert_array_equal(tabled(tmp_path).load().labels, [1, 1, 0] * 2)


# --- tables that are recognized ---------------------------------------------------------


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
    data = dataset(ImageFolder(path=str(tmp_path)))
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
