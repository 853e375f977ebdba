"""Time series in CSV files: windows, their labels, and splits that share no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from hypothesis import given
from hypothesis import strategies as st

from compress.core.errors import DataError
from compress.data.class_names import Classes
from compress.data.dataset import Dataset, Splitting
from compress.data.label_tables import Labels
from compress.data.sources import Csv
from compress.data.splits import by_time, overlapping


def write(path: Path, rows: int, first: float = 0, labels: list[str] | None = None) -> Path:
    """Write rows of time, ax (the row's number), ay (the negative of ax) and optionally a label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "time,ax,ay" + ",activity" * bool(labels) + "\n"
    for row in range(rows):
        text += f"2026-01-01T00:{row:04d},{first + row},{-first - row}" + (f",{labels[row]}" if labels else "") + "\n"
    path.write_text(text)
    return path


def source(path: Path, window: int = 4, **settings: Any) -> Csv:
    return Csv(path=str(path), columns=("ax", "ay"), window=window, **settings)


def starts(data: Dataset, split: Any) -> list[int]:
    return [int(window[0, 0]) for window in data.raw(split, np.arange(len(data.labels(split))))]


def test_windows_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 10, labels=["walk"] * 10)
    samples = source(path, label_column="activity").load()
    assert [samples.read(index)[0, 0] for index in range(len(samples.labels))] == [0, 4]
    assert samples.read(1).dtype == np.float32
    np.testing.assert_array_equal(samples.read(1), [[4, -4], [5, -5], [6, -6], [7, -7]])
    assert samples.describe(1) == f"{path}, row 5"
    overlapping = source(path, label_column="activity", stride=3).load()
    assert [overlapping.read(index)[0, 0] for index in range(len(overlapping.labels))] == [0, 3, 6]


def test_no_window_goes_across_a_change_of_the_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 16, labels=["walk"] * 7 + ["run"] * 5 + ["walk"] * 4)
    samples = source(path, label_column="activity", stride=1).load()
    windows = [(int(samples.read(i)[0, 0]), samples.class_names[label]) for i, label in enumerate(samples.labels)]
    assert windows == [(0, "walk"), (1, "walk"), (2, "walk"), (3, "walk"), (7, "run"), (8, "run"), (12, "walk")]
    across = source(path, label_column="activity", stride=3, label_changes="majority").load()
    windows = [(int(across.read(i)[0, 0]), across.class_names[label]) for i, label in enumerate(across.labels)]
    assert windows == [(0, "walk"), (3, "walk"), (6, "run"), (9, "run"), (12, "walk")]


def test_short_stretches(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 8, labels=["walk"] * 6 + ["run"] * 2)
    left = source(path, label_column="activity").load()
    assert (left.class_names, left.notes) == (("walk",), ("1 stretches shorter than 4 rows were left out",))
    padded = source(path, label_column="activity", short="pad").load()
    np.testing.assert_array_equal(padded.read(1), [[6, -6], [7, -7], [0, 0], [0, 0]])
    with pytest.raises(DataError, match="no file has 7 rows in a row with one label; set window to fewer rows"):
        source(path, window=7, label_column="activity").load()


def test_folders_are_classes(tmp_path: Path) -> None:
    for index in range(6):
        write(tmp_path / ("walk" if index % 2 else "run") / f"{index}.csv", 8, 100 * index)
    data = dataset(source(tmp_path), splitting=Splitting(validation=0.3, test=0.3))
    assert data.class_names == ("run", "walk")
    files = [{start // 100 for start in starts(data, split)} for split in ("train", "validation", "test")]
    assert sum(map(len, files)) == 6  # no file is in two splits
    assert set.union(*files) == set(range(6))


def test_files_that_are_no_series_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "walk" / "a.csv", 8, labels=["walk"] * 8)
    write(tmp_path / "walk" / "b.txt", 8)
    write(tmp_path / "c.csv", 8, labels=["walk"] * 8)
    assert source(tmp_path, label_column="activity").load().notes == ("1 files were ignored: 1 .txt",)
    note = "2 files were ignored: 1 .csv in no folder of a class, 1 .txt"
    assert source(tmp_path).load().notes == (note,)


def test_a_table_of_files(tmp_path: Path) -> None:
    for index in range(3):
        write(tmp_path / "runs" / f"{index}.csv", 8, 100 * index)
    (tmp_path / "labels.csv").write_text("file,label,split\nruns/0.csv,1,train\nruns/1.csv,0,val\nruns/2.csv,1,test\n")
    (tmp_path / "names.txt").write_text("still\nmoving\n")
    series_source = source(tmp_path, labels=Labels(table="labels.csv"), classes=Classes(file="names.txt"))
    data = dataset(series_source)
    assert starts(data, "test") == [200, 204]
    assert data.labels("validation").tolist() == [0, 0]
    assert data.class_names == ("still", "moving")


def test_a_label_column_in_folders_of_splits(tmp_path: Path) -> None:
    places = [f"{split}/{index}" for split in ("Train", "val", "testing") for index in range(2)]
    for number, place in enumerate(places):
        write(tmp_path / f"{place}.csv", 8, 100 * number, labels=["walk"] * 4 + ["run"] * 4)
    data = dataset(source(tmp_path, label_column="activity"))
    split_starts = {split: starts(data, split) for split in ("train", "validation", "test")}
    assert split_starts == {"train": [0, 4, 100, 104], "validation": [200, 204, 300, 304], "test": [400, 404, 500, 504]}
    write(tmp_path / "extra" / "6.csv", 8, labels=["walk"] * 8)
    with pytest.raises(DataError, match=r"'extra/6\.csv' is of no split, other files are \(1 of 7\); allowed: train, "):
        source(tmp_path, label_column="activity").load()


def test_files_that_are_called_as_splits_are(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "test", "dev")):
        write(tmp_path / f"{name}.csv", 8, 100 * number, labels=["walk"] * 4 + ["run"] * 4)
    data = dataset(source(tmp_path, label_column="activity"))
    assert [starts(data, split) for split in ("train", "validation", "test")] == [[0, 4], [200, 204], [100, 104]]
    alone = source(tmp_path / "test.csv", label_column="activity").load()
    assert alone.splits == {}


def test_files_of_a_group_in_two_splits(tmp_path: Path) -> None:
    for index in range(4):
        write(tmp_path / "runs" / f"{index}.csv", 8)
    rows = "".join(
        f"runs/{index}.csv,{index % 2},{'train' if index < 3 else 'test'},m{index // 2}\n" for index in range(4)
    )
    (tmp_path / "labels.csv").write_text("file,label,split,machine\n" + rows)
    data = dataset(source(tmp_path, labels=Labels(table="labels.csv", group="machine")))
    with pytest.raises(DataError, match="the group 'm1' is in train and in test"):
        data.labels("test")


def test_divided_by_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 200, labels=["walk"] * 100 + ["run"] * 100)
    series_source = source(path, window=10, stride=2, label_column="activity", divide="time")
    data = dataset(series_source, splitting=Splitting(validation=0.2, test=0.2))
    rows = {
        split: {row for start in starts(data, split) for row in range(start, start + 10)}
        for split in ("train", "validation", "test")
    }
    assert not rows["train"] & rows["validation"]
    assert not rows["train"] & rows["test"]
    assert not rows["validation"] & rows["test"]
    windows = sum(map(len, (starts(data, split) for split in ("train", "validation", "test"))))
    assert data.notes == [f"{92 - windows} of 92 samples are in no split, and are not used"]  # they overlap two splits
    for begin in (0, 100):  # the last rows of each class are in the test split
        class_rows = {
            split: [row for row in split_rows if begin <= row < begin + 100] for split, split_rows in rows.items()
        }
        assert max(class_rows["train"]) < min(class_rows["validation"])
        assert max(class_rows["validation"]) < min(class_rows["test"])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 2)), min_size=2, max_size=60),
    st.integers(1, 9),
    st.floats(0.05, 0.6),
)
def test_windows_that_overlap_are_never_divided(windows: list[tuple[int, int, int]], length: int, share: float) -> None:
    series, begins, labels = (np.array(column, np.int64) for column in zip(*windows, strict=True))
    rest, taken = by_time(series, begins, length)(labels, np.arange(len(labels)), share, 0)
    assert not set(rest) & set(taken)
    for one in rest:
        for other in taken:
            assert series[one] != series[other] or abs(begins[one] - begins[other]) >= length
    everything = np.arange(len(labels))
    together = overlapping(series, begins, length, everything, taken)
    for one in everything:
        near = (series[taken] == series[one]) & (abs(begins[taken] - begins[one]) < length)
        assert together[one] == near.any()


def test_one_file_cannot_be_divided_by_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 40, labels=["walk"] * 20 + ["run"] * 20)
    data = dataset(source(path, label_column="activity"))
    with pytest.raises(DataError, match=r"one file .*; set `divide: time`"):
        data.labels("test")


def test_one_file_for_each_class_is_divided_by_time(tmp_path: Path) -> None:
    for kind in ("run", "walk"):
        write(tmp_path / f"{kind}.csv", 80, labels=[kind] * 80)
    data = dataset(source(tmp_path, label_column="activity"))
    with pytest.raises(
        DataError, match=r"split is empty: .*; a class in one file .* is in one split: set `divide: time`"
    ):
        data.labels("test")
    timed = dataset(source(tmp_path, label_column="activity", divide="time"))
    assert [len(timed.labels(split)) for split in ("train", "validation", "test")] == [28, 4, 8]
    few = dataset(source(tmp_path, window=40, label_column="activity", divide="time"))
    with pytest.raises(
        DataError, match=r"validation split is empty: 4 samples are too few; add rows, or change data\.s"
    ):
        few.labels("test")


BAD: dict[str, tuple[bytes, str]] = {
    "no column": (b"time,ax\n1,2\n", "has no column 'ay'; allowed: time, ax"),
    "text": (b"ax,ay\n1,2\n3,x\n", "line 3: 'x' is not a finite number"),
    "empty": (b"ax,ay\n1,2\n3,\n", "line 3: '' is not a finite number"),
    "NaN": (b"ax,ay\n1,nan\n", "line 2: 'nan' is not a finite number"),
    "infinity": (b"ax,ay\n1,1e999\n", "line 2: '1e999' is not a finite number"),
    "beyond float32": (b"ax,ay\n1,1e39\n", "line 2: '1e39' is not a finite number"),
    "ragged": (b"ax,ay\n1,2\n3\n", "line 3: has 1 columns; allowed: 2"),
    "NUL": (b"ax,ay\n1,2\0\n", "line 2: has a NUL byte"),
    "binary": (bytes(range(128, 256)) * 100, "is not UTF-8"),
    "wide": (b"ax,ay" + b",z" * 1_000_000, "is too long for a line"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path / "walk" / "good.csv", 12)
    write(tmp_path / "run" / "good.csv", 12)
    (tmp_path / "run" / "bad.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"bad.csv.*{message}"):
        source(tmp_path).load()
    skipped = source(tmp_path, corrupt="skip").load()
    assert len(skipped.labels) == 6
    assert "bad.csv" in skipped.corrupt[0]


def test_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.sources.time_series.MAX_VALUES", 20)
    write(tmp_path / "walk" / "a.csv", 11)
    with pytest.raises(DataError, match="has more than 20 values"):
        source(tmp_path).load()
