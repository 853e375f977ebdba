"""Time series in CSV files, cut into windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError
from compress.data import class_names, labels, tables
from compress.data.file_listing import LabelledFiles, label_location
from compress.data.file_tree import Tree
from compress.data.label_tables import Labels, Listed
from compress.data.source import Samples, several
from compress.data.splits import Divide, Indices, by_group, by_time

MAX_VALUES = 1 << 30
"""Values are kept in memory; chosen: 4 GB of float32."""
_BLOCK = 4096
"""Rows that are converted to numbers at once; chosen, so that their texts take little memory."""
FEW_WINDOWS = "add rows, or change data.split"
FEW_FILES = (
    "a class in one file (or group) is in one split: set `divide: time`, or add files of it, or change data.split"
)


class Csv(LabelledFiles):
    """Time series in CSV files with a header, cut into windows: a file, or a folder of files. The rows are in time
    order.

    A sample is a window: float32 [window, columns]. A window has rows of one file only. The label is in a column, or it
    belongs to the file: the name of its folder, or a row of a table, as in `folder`. In both cases files may be in the
    folders train/, val/ and test/.
    """

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    single: ClassVar[bool] = True
    recognizes_tables: ClassVar[bool] = False

    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    """The columns of a window, in this order."""
    window: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of rows in a window."""
    stride: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of rows from the start of a window to the start of the next; by default the length of a window."""
    label_column: str | None = None
    """Column with the label of each row; without it, the labels belong to the files."""
    label_changes: Literal["split", "majority"] = "split"
    """How windows are formed where the label changes. split: no window crosses the change. majority: a window gets the
    label of most of its rows."""
    short: Literal["leave", "pad"] = "leave"
    """How stretches shorter than a window are handled. leave: left out. pad: padded with zeros at the end."""
    divide: Literal["file", "time"] = "file"
    """How samples are divided if the files define no splits. file: by whole files (or groups of the table). time: by
    time; the last part of each class is for the test. In both cases no two splits share a row."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """The character between the columns."""

    def listing(self, tree: Tree) -> list[Listed]:
        """Return every file. If a column has the labels, the files have no labels, but the split of their folder."""
        if self.label_column is None or self.labels is not None:
            return super().listing(tree)
        names = [name for name in tree.names if name.lower().endswith(self.suffixes) and name != self._classes_file]
        if not names:
            raise DataError("contains no samples", where=tree.where, allowed="*.csv")
        words = [name.lower().partition("/")[0].removesuffix(".csv") for name in names]  # train/a.csv, or train.csv
        splits = [labels.SPLIT_WORDS.get(word) if len(names) > 1 else None for word in words]
        labels.refuse_parts(names, splits, tree.where)
        return [Listed(name, "", split) for name, split in zip(names, splits, strict=True)]

    def load(self) -> Samples:
        """Read all files and find their windows."""
        tree = self.tree()
        listed = self.listing(tree)
        series, corrupt = self._series(tree, listed)
        windows, left = self._windows(series)
        if not windows:
            hint = "set window to fewer rows, or short: pad"
            raise DataError(f"no file has {self.window} rows in a row with one label", where=tree.where, hint=hint)
        names = self.class_list(tree)

        def location(index: int) -> str:
            file = series[windows[index].series]
            if self.label_column is None:
                return label_location(tree, listed[file.index])
            return f"{tree.describe(listed[file.index].file)}, line {file.lines[windows[index].start]}"

        if self.labels == "none":
            label, classes = np.zeros(len(windows), np.int64), names or ()
        else:
            origin = class_names.origin(self.classes)
            label, classes = labels.read([window.label for window in windows], names, location, origin)
        of = [listed[series[window.series].index] for window in windows]
        starts = np.array([window.start for window in windows], np.int64)
        short = f"{left} stretches shorter than {self.window} rows were left out"
        grouped = isinstance(self.labels, Labels) and self.labels.group is not None
        groups = np.array([window.group for window in of], np.str_) if grouped else None

        def read(index: int) -> NDArray[np.float32]:
            rows = series[windows[index].series].values[starts[index] : starts[index] + windows[index].length]
            return np.pad(rows, ((0, self.window - len(rows)), (0, 0)))

        return Samples(
            label,
            classes,
            read,
            labels.splits(window.split for window in of),
            lambda index: f"{tree.describe(of[index].file)}, row {starts[index] + 1}",
            self._divide(np.array([window.series for window in windows]), starts, groups),
            corrupt=tuple(corrupt),
            notes=(*[short] * bool(left), *self.notes(tree)),
            groups=groups,
            few=FEW_FILES if self.divide == "file" else FEW_WINDOWS,
            has_labels=self.labels != "none",
        )

    def _divide(self, series: NDArray[np.int64], starts: NDArray[np.int64], groups: NDArray[np.str_] | None) -> Divide:
        if self.divide == "time":
            return by_time(series, starts, self.window)
        groups_of_series = series if groups is None else np.unique(groups, return_inverse=True)[1]
        return by_group(groups_of_series) if len(np.unique(groups_of_series)) > 1 else _undivided

    def _series(self, tree: Tree, listed: list[Listed]) -> tuple[list[Series], list[str]]:
        """Return the contents of the files, and the errors of unreadable files that may be left out."""
        files, problems, size = [], [], 0
        for index, entry in enumerate(listed):
            try:
                series = self._read(tree, entry, index)
            except DataError as error:
                problems.append(error)
                continue
            size += series.values.size
            if size > MAX_VALUES:
                raise DataError(f"has more than {MAX_VALUES:,} values", where=tree.where, hint="make .npy files of it")
            files.append(series)
        if problems and self.corrupt == "refuse":
            raise several(problems)
        return files, [str(error) for error in problems]

    def _read(self, tree: Tree, listed: Listed, index: int) -> Series:
        where = tree.describe(listed.file)
        columns = [*self.columns, *([self.label_column] if self.label_column else [])]
        width = len(self.columns)
        parts = [np.zeros((0, len(self.columns)), np.float32)]
        words = []
        lines: list[int] = []
        size = 0
        with tree.open(listed.file) as stream:
            for block in _blocks(tables.CsvTable(stream, where, self.delimiter).columns(columns)):
                parts.append(_numbers([row[:width] for _, row in block], [line for line, _ in block], where))
                words += [row[width].strip() if self.label_column else listed.label for _, row in block]
                lines += [line for line, _ in block]
                size += parts[-1].size
                if size > MAX_VALUES:
                    raise DataError(f"has more than {MAX_VALUES:,} values", where=where, hint="make .npy files of it")
        for row, word in enumerate(words):
            labels.check(word, f"{where}, line {lines[row]}")
        return Series(np.concatenate(parts), np.array(words, np.str_), np.array(lines, np.int64), index)

    def _windows(self, series: list[Series]) -> tuple[list[SeriesWindow], int]:
        """Return all windows, and the number of stretches shorter than a window."""
        windows, left = [], 0
        stride = self.stride or self.window
        for number, file in enumerate(series):
            changes = np.flatnonzero(file.words[1:] != file.words[:-1]) + 1
            ends = [0, *(changes if self.label_changes == "split" else ()), len(file.words)]
            for start, end in pairwise(ends):
                if 0 < end - start < self.window and self.short == "pad":
                    windows.append(SeriesWindow(number, int(start), int(end - start), _most(file.words[start:end])))
                elif end - start < self.window:
                    left += 1
                windows += [
                    SeriesWindow(number, first, self.window, _most(file.words[first : first + self.window]))
                    for first in range(int(start), int(end) - self.window + 1, stride)
                ]
        return windows, left


@dataclass(frozen=True)
class Series:
    """A file: float32 [rows, columns], label and line number of each row, and the file's index in the listing."""

    values: NDArray[np.float32]
    words: NDArray[np.str_]
    lines: NDArray[np.int64]
    index: int


@dataclass(frozen=True)
class SeriesWindow:
    """A stretch of a series with one label."""

    series: int
    start: int
    length: int
    label: str


def _undivided(labels: Indices, indices: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    raise DataError(
        "one file (or group) cannot be divided by files", where="data.source.csv", hint="set `divide: time`"
    )


def _most(words: NDArray[np.str_]) -> str:
    if (words == words[0]).all():
        return str(words[0])
    values, counts = np.unique(words, return_counts=True)
    return str(values[counts.argmax()])


def _blocks(rows: Iterator[tuple[int, list[str]]]) -> Iterator[list[tuple[int, list[str]]]]:
    block = []
    for row in rows:
        block.append(row)
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block


def _numbers(rows: list[list[str]], lines: list[int], where: str) -> NDArray[np.float32]:
    """Convert text to numbers; an error names the line of a value that is not a finite number."""
    with np.errstate(over="ignore"):
        try:
            values: NDArray[Any] = np.array(rows, np.float64).astype(np.float32)
        except (ValueError, OverflowError):
            values = np.array([[_number(text) for text in row] for row in rows], np.float64).astype(np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0]
        shown = rows[row][column][:40]
        raise DataError(
            f"{shown!r} is not a finite number", where=f"{where}, line {lines[row]}", hint="repair the file"
        )
    return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
