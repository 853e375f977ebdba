"""Tables of labels and files of class names, for sources of files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import image

from compress.core.errors import DataError
from compress.data.class_names import Classes
from compress.data.dataset import Dataset, Splitting
from compress.data.label_tables import Labels
from compress.data.sources import ImageFolder
from deploy.contract.preprocessing import Preprocessing

KINDS = ("tea", "coffee", "water")


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


def folder(root: Path, classes: Classes | None = None, **settings: Any) -> ImageFolder:
    return ImageFolder(path=str(root), labels=Labels(table="labels.csv", **settings), classes=classes)


def test_numbers_in_a_table(tmp_path: Path) -> None:
    rows = [{"photo": f"photos/{index}.png", "kind": 10 - index % 2} for index in range(6)]
    samples = folder(shop(tmp_path, rows), file="photo", label="kind").load()
    assert samples.class_names == tuple(map(str, range(11)))
    assert samples.labels.tolist() == [10, 9] * 3


def test_spaces_around_labels_and_groups_do_not_count(tmp_path: Path) -> None:
    names = [" coffee", "coffee", "tea ", "tea", "tea\t", "coffee "]
    rows = [{"file": f"photos/{index}.png", "label": name, "who": f"{index // 2} "} for index, name in enumerate(names)]
    rows[0]["who"] = "0"
    samples = folder(shop(tmp_path, rows), group="who").load()
    assert (samples.class_names, samples.labels.tolist()) == (("coffee", "tea"), [0, 0, 1, 1, 1, 0])
    kept, taken = samples.divide(samples.labels, np.arange(6), 0.3, 0)
    assert len(set(kept // 2) & set(taken // 2)) == 0


def test_whole_numbers_with_a_point(tmp_path: Path) -> None:
    rows = [{"file": f"photos/{index}.png", "label": f"{index}.0"} for index in range(12)]
    samples = folder(shop(tmp_path, rows)).load()
    assert samples.class_names == tuple(map(str, range(12)))
    assert samples.labels.tolist() == list(range(12))
    mixed = [{"file": f"photos/{index}.png", "label": f"{index / 2}"} for index in range(4)]
    assert folder(shop(tmp_path, mixed)).load().class_names == ("0.0", "0.5", "1.0", "1.5")  # these stay names


def test_names_of_classes(tmp_path: Path) -> None:
    shop(tmp_path, [{"file": f"photos/{index}.png", "label": index % 3} for index in range(6)])
    (tmp_path / "names.txt").write_text("water, still\n\ntea\ncoffee\n")
    named = folder(tmp_path, Classes(file="names.txt")).load()
    assert named.class_names == ("water, still", "tea", "coffee")
    assert named.labels.tolist() == [0, 1, 2] * 2
    (tmp_path / "names.csv").write_text("kind,code\ncoffee,2\nwater,0\n tea,1\ntea,1\n")
    tabled = folder(tmp_path, Classes(file="names.csv", index="code", name="kind")).load()
    assert tabled.class_names == ("water", "tea", "coffee")


def test_names_give_the_order(tmp_path: Path) -> None:
    (shop(tmp_path) / "names.txt").write_text("water\ntea\ncoffee\nmilk")
    samples = folder(tmp_path, Classes(file="names.txt")).load()
    assert samples.labels[:3].tolist() == [1, 2, 0]
    (tmp_path / "labels.csv").unlink()
    flat = ImageFolder(path=str(tmp_path), classes=Classes(file="names.txt"))
    with pytest.raises(DataError, match="unknown class 'photos'; allowed: water, tea, coffee, milk"):
        flat.load()


@pytest.mark.parametrize(("column", "setting"), [("split", None), ("Split", None), ("part", "part")])
def test_splits_in_a_table(tmp_path: Path, column: str, setting: str | None) -> None:
    shop(tmp_path, **{column: ["train", "Train", "val", "test", " validation"]})
    samples = folder(tmp_path, split=setting).load()
    assert {split: len(of) for split, of in samples.splits.items()} == {"train": 12, "validation": 12, "test": 6}
    assert samples.splits["test"].tolist() == [3, 8, 13, 18, 23, 28]


def test_splits_that_share_a_group_are_refused(tmp_path: Path) -> None:
    shop(tmp_path, speaker=["ada", "bob"], split=["train", "test", "train", "val", "train"])
    data = Dataset(folder(tmp_path, group="speaker"), Preprocessing([]), None)
    with pytest.raises(
        DataError, match=r"data.source.folder: the group 'ada' is in train and in .*; correct the table"
    ):
        data.labels("train")
    anew = Dataset(folder(tmp_path, group="speaker"), Preprocessing([]), Splitting(validation=0.3, test=0.3))
    with pytest.raises(DataError, match="split is empty"):  # two groups are too few for three splits
        anew.labels("train")
    shop(
        tmp_path,
        speaker=["ada", "bob", "cy", ""],
        split=["train", "test", "val", "train", "train", "test", "val", "val"],
    )
    disjoint_data = Dataset(folder(tmp_path, group="speaker"), Preprocessing([]), None)
    assert [len(disjoint_data.labels(split)) for split in ("train", "validation", "test")] == [12, 10, 8]


def test_what_changes_the_digest(tmp_path: Path) -> None:
    source = folder(shop(tmp_path))
    seen = [source.fingerprint()]
    (tmp_path / "photos" / "more.png").write_bytes(b"not in the table")
    assert source.fingerprint() == seen[0]
    text = (tmp_path / "labels.csv").read_text()
    (tmp_path / "labels.csv").write_text(text.replace("0.png,tea", "0.png,water"))
    assert source.fingerprint() not in seen


BAD: dict[str, tuple[bytes, str]] = {
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


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_tables(tmp_path: Path, content: bytes, message: str) -> None:
    (shop(tmp_path) / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        _ = Dataset(folder(tmp_path), Preprocessing([]), None).labels("test")


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
        folder(tmp_path, Classes(file="names", **settings)).load()


def test_a_byte_order_mark_and_other_line_ends(tmp_path: Path) -> None:
    shop(tmp_path)
    text = "file,label\n" + "".join(f"photos/{index}.png,{KINDS[index % 3]}\n" for index in range(6))
    (tmp_path / "labels.csv").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert len(folder(tmp_path).load().labels) == 6


def test_numbers_with_and_without_zeros_are_the_same_class(tmp_path: Path) -> None:
    shop(tmp_path, [{"file": f"photos/{index}.png", "label": ["1", "01", "0"][index % 3]} for index in range(6)])
    np.testing.assert_array_equal(folder(tmp_path).load().labels, [1, 1, 0] * 2)
