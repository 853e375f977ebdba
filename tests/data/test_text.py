"""Tables of texts: their content, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset

from compress.core.errors import DataError
from compress.data.sources import TextTable
from deploy.contract.text import text_of

ROWS = [
    ("a cat, and more", "cat", "train", "1"),
    ('says "dog"', "dog", "train", "2"),
    ("dög\nbarks", "dog", "val", "3"),
]
ROWS += [("cats", "cat", "validation", "4"), ("one cat", "cat", "test", "5"), ("dogs", "dog", "", "6")]


def written(folder: Path, rows: Any = ROWS, header: str = "text,label,split,author", delimiter: str = ",") -> str:
    cells = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    path = folder / "texts.csv"
    path.write_text("\n".join([header.replace(",", delimiter), *cells]), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_texts_labels_and_splits(tmp_path: Path, delimiter: str) -> None:
    source = TextTable(file=written(tmp_path, delimiter=delimiter), split="split", max_bytes=32)
    data = dataset(source, {"tokens": {"length": 3, "buckets": 50}})
    assert data.class_names == ("cat", "dog")
    assert {split: data.labels(split).tolist() for split in ("train", "validation", "test")} == {
        "train": [0, 1],
        "validation": [1, 0],
        "test": [0],
    }
    first, second = data.raw("train", np.array([0, 1]))
    assert [text_of(first), text_of(second)] == ["a cat, and more", 'says "dog"']
    assert first.shape == (32,)
    assert data.inputs("test").shape == (1, 3)
    assert data.describe("test", 0).endswith("line 7")  # one text has two lines
    assert data.decoding == {"text_bytes": 32}
    assert data.notes == ["1 of 6 samples are in no split, and are not used"]


def test_groups_stay_together(tmp_path: Path) -> None:
    rows = [(f"text {index}", "ab"[index % 2], "", str(index // 4)) for index in range(80)]
    source = TextTable(file=written(tmp_path, rows), group="author")
    data = dataset(source, {"tokens": {"length": 3, "buckets": 50}})
    authors: dict[str, set[int]] = {}
    for split in ("train", "validation", "test"):
        raw = data.raw(split, np.arange(len(data.labels(split))))
        authors[split] = {int(text_of(sample).split()[1]) // 4 for sample in raw}
    assert not authors["train"] & authors["test"]
    assert not authors["validation"] & (authors["train"] | authors["test"])


def test_texts_without_a_group_are_divided_one_by_one(tmp_path: Path) -> None:
    rows = [(f"text {index}", "ab"[index % 2], "", " x" if index < 10 else "") for index in range(100)]
    source = TextTable(file=written(tmp_path, rows), group="author")
    data = dataset(source, {"tokens": {"length": 3, "buckets": 50}})
    for split in ("train", "validation", "test"):
        raw = data.raw(split, np.arange(len(data.labels(split))))
        named = [int(text_of(sample).split()[1]) < 10 for sample in raw]
        assert len(named) - sum(named) >= 5
        assert sum(named) in (0, 10)


def test_notes_and_texts_without_labels(tmp_path: Path) -> None:
    samples = TextTable(file=written(tmp_path, [*ROWS, (" ", "cat", "", "")]), label=None, max_bytes=8).load()
    assert samples.notes == ("3 of 7 texts are longer than 8 bytes, and cut", "1 of 7 texts are blank")
    assert not samples.has_labels
    assert TextTable(file="x", label=None).task_name() == "outputs"


@pytest.mark.parametrize(
    ("rows", "header", "settings", "message"),
    [
        (ROWS, "words,label,split,author", {}, "has no column 'text'"),
        ([], "text,label", {}, "has no rows"),
        ([("a", "")], "text,label", {}, "line 2: has no label"),
        ([("a", "cat", "other")], "text,label,split", {"split": "split"}, "unknown split 'other'"),
        ([("a", "cat")], "text,label", {"classes": ("dog",)}, "unknown class 'cat'"),
        ([("a", "cat", "x" * 201)], "text,label,by", {"group": "by"}, "line 2: has a group of 201 letters"),
        ([("a", "cat", "more")], "text,label", {}, "line 2: has 3 columns; allowed: 2, .* double quotes"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, rows: Any, header: str, settings: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TextTable(file=written(tmp_path, rows, header), **settings).load()


def test_an_open_quote_is_reported_with_the_line_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text('text,label\na,cat\n"b,cat\nc,cat\n')
    with pytest.raises(DataError, match=r"lines 3 to 4: is not a readable CSV file: .* in double quotes"):
        TextTable(file=str(tmp_path / "texts.csv")).load()
