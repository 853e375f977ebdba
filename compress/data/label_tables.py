"""Tables with the label of each file: their settings, and the recognition of their columns by content."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import Field

from compress.core.errors import DataError, nearest
from compress.core.settings import Settings
from compress.data import labels, tables
from compress.data.file_tree import Tree, inside
from compress.data.labels import SPLIT_WORDS
from compress.data.source import several
from compress.data.types import Split

TABLE_SUFFIXES = (".csv", ".tsv")
MAX_FOLDERS = 1
"""Number of folders above a table that is recognized: `labels.csv` or `train/_annotations.csv`."""
LABEL_HEADERS = ("label", "labels", "class", "classname", "category", "target", "tag", "y")
"""Headers of a column with labels, without blanks and underscores."""
BOX_HEADERS = {"xmin", "ymin", "xmax", "ymax"}
MAX_SHOWN = 30
"""Number of columns that a message lists."""
_BINARY = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


class Labels(Settings):
    """A CSV table with a header that gives the label of each file. The columns may be separated by commas, semicolons
    or tabs."""

    table: str
    """Path of the CSV file inside the folder or archive."""
    file: str = "file"
    """Column with the path of each sample inside the folder or archive; or its name, with or without the suffix, if
    only one sample has it."""
    label: str | Annotated[tuple[str, ...], Field(min_length=2)] = "label"
    """Column with the label: a class name, or an integer from 0. A list of columns with 0 and 1: any number of classes
    for each sample, for the task multi_label."""
    split: str | None = None
    """Column with the split (train, val or test); by default the column `split` or `Split`, if there is one."""
    group: str | None = None
    """Column with a group, such as a speaker or a device. All samples of a group are in the same split."""


@dataclass(frozen=True)
class LabelTable:
    """A table of labels in use.

    Attributes:
        settings: its path and its columns.
        split: the split of all its samples, from its name or folder; None if a column or nothing gives it.
        one_hot: whether the label is the one column with a 1.
        note: the recognized columns, for the user; empty if the settings name them.
    """

    settings: Labels
    split: Split | None = None
    one_hot: bool = False
    note: str = ""

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns with labels."""
        return (self.settings.label,) if isinstance(self.settings.label, str) else self.settings.label

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample has any number of classes."""
        return len(self.label_columns) > 1 and not self.one_hot


@dataclass(frozen=True)
class Listed:
    """A sample's file with its label.

    Attributes:
        file: the file.
        label: the class; empty without a class.
        split: its split, if the data says.
        group: its group; empty for none.
        location: the line of a table, for messages; empty without a table.
        marks: 0 or 1 for each class, for the task multi_label.
    """

    file: str
    label: str
    split: Split | None = None
    group: str = ""
    location: tuple[str, int] | None = None
    marks: tuple[int, ...] = ()


class FileNames:
    """The files that the cells of a table name: by path, by name, or by name without the suffix."""

    def __init__(self, tree: Tree, suffixes: tuple[str, ...]) -> None:
        self._paths = set(tree.names)
        self._suffixes = suffixes
        self._short: dict[str, list[str]] = defaultdict(list)
        for path in tree.names:
            if path.lower().endswith(suffixes):
                name = path.rpartition("/")[2]
                self._short[name].append(path)
                self._short[name.rpartition(".")[0]].append(path)

    def have_suffixes(self, cells: Sequence[str]) -> bool:
        """Return if most cells end with the suffix of a sample."""
        return 2 * sum(cell.lower().endswith(self._suffixes) for cell in cells) > len(cells)

    def find(self, cell: str, table: LabelTable | None = None) -> str | None:
        """Return the file that a cell names; None if no file or several files have this name.

        Args:
            cell: a path from the root of the data or from the folder of the table, or a name.
            table: the table; files in its folder, and in the folder of its split, come first.
        """
        path = cell.strip().replace("\\", "/").removeprefix("./")
        if path in self._paths:
            return path
        folder = table.settings.table.rpartition("/")[0] if table else ""
        if folder and f"{folder}/{path}" in self._paths:
            return f"{folder}/{path}"
        candidates = self._short.get(path, [])
        if len(candidates) > 1 and table and table.split:
            candidates = [name for name in candidates if SPLIT_WORDS.get(name.split("/")[0].lower()) == table.split]
        return candidates[0] if len(candidates) == 1 else None


def read(tree: Tree, table: LabelTable, names: FileNames) -> list[Listed]:
    """Return the samples that a table lists.

    Raises:
        DataError: a file does not exist or is listed twice, or a label or a split is invalid; with the line.
    """
    settings = table.settings
    where = tree.describe(settings.table)
    listed: dict[str, Listed] = {}
    missing: list[DataError] = []
    with tree.open(settings.table) as stream:
        content = tables.CsvTable(stream, where)
        split_column = settings.split
        if not split_column and not table.split:
            candidates = [name for name in content.header if name.strip().lower() == "split"]
            split_column = "split" if "split" in candidates else next(iter(candidates), None)
        columns = [settings.file, *table.label_columns, *filter(None, (split_column, settings.group))]
        for number, (file, *more) in content.columns(columns):
            line = f"{where}, line {number}"
            try:
                name = _file(file, table, names, line)
            except DataError as error:
                missing.append(error)
                continue
            if len(listed) == tables.MAX_NAMES:
                raise DataError("lists too many files", where=where, allowed=f"{tables.MAX_NAMES:,}")
            if name in listed:
                raise DataError(f"lists {name!r} twice", where=line, hint="remove one of the rows")
            cells = [text.strip() for text in more]
            count = len(table.label_columns)
            label, marks = _label(cells[:count], table, line)
            split, group = _split_and_group(cells[count:], bool(split_column), line)
            listed[name] = Listed(name, label, split or table.split, group, (where, number), marks)
    if missing:  # with no file found, the column is wrong: one line shows it
        raise several(missing if listed else missing[:1], "add the files, or remove the lines; or check labels.file")
    return list(listed.values())


def _file(cell: str, table: LabelTable, names: FileNames, line: str) -> str:
    file = names.find(cell, table)
    if file is not None:
        return file
    name = inside(cell, line)
    raise DataError(
        f"lists {name!r}, which is not there", where=line, hint="add the file, or remove the line; or check labels.file"
    )


def _label(cells: Sequence[str], table: LabelTable, line: str) -> tuple[str, tuple[int, ...]]:
    """Return the label of a row, and the values of its columns of 0 and 1."""
    if len(cells) == 1:
        labels.check(cells[0], line)
        return cells[0], ()
    for column, cell in zip(table.label_columns, cells, strict=True):
        if cell not in _BINARY:
            raise DataError(f"has {cell[:40]!r} in the column {column!r}", where=line, allowed="0 or 1")
    marks = tuple(_BINARY[cell] for cell in cells)
    return (table.label_columns[marks.index(1)], ()) if table.one_hot else ("", marks)


def _split_and_group(cells: Sequence[str], has_split: bool, line: str) -> tuple[Split | None, str]:
    rest = list(cells)
    split = labels.split_named(rest.pop(0), line) if has_split else None
    group = rest[0] if rest else ""
    if group:
        labels.check(group, line, "group")
    return split, group


def recognize(
    tree: Tree, suffixes: tuple[str, ...], ignored: str | None, label: str | None = None
) -> tuple[LabelTable, ...]:
    """Return the tables whose rows name the samples: one table, or one for each split; empty without tables.

    Args:
        tree: the files.
        suffixes: the suffixes of samples.
        ignored: a table that is something else.
        label: the column with the labels; None to recognize it, too.

    Raises:
        DataError: the meaning of columns or tables is ambiguous, or no table has the column `label`; with the columns
            that there are.
    """
    candidates = [
        name
        for name in tree.names
        if name.lower().endswith(TABLE_SUFFIXES) and name.count("/") <= MAX_FOLDERS and name != ignored
    ]
    if not candidates:
        return ()
    names = FileNames(tree, suffixes)
    recognized = []
    unreadable = []
    for name in candidates:
        try:
            columns = _columns(tree, name)
        except DataError as error:  # a table of something else may be of any form
            unreadable.append(error)
            continue
        if table := _recognized(tree, name, columns, names, label):
            recognized.append(table)
    if not recognized and unreadable:
        raise unreadable[0]
    splits = [table.split for table in recognized]
    if len(recognized) > 1 and (None in splits or len(set(splits)) < len(splits)):
        raise DataError(
            f"{len(recognized)} tables name the samples: {', '.join(table.settings.table for table in recognized)}",
            where=tree.where,
            hint="choose one with `labels: {table: …}`",
        )
    if len({table.label_columns for table in recognized if table.is_multi_label or table.one_hot}) > 1:
        raise DataError("the tables of the splits have different columns", where=tree.where, allowed="the same columns")
    return tuple(recognized)


def _recognized(
    tree: Tree, name: str, columns: dict[str, list[str]], names: FileNames, label: str | None
) -> LabelTable | None:
    """Return a table with its columns recognized; None if its rows do not name samples, or it has no labels."""
    where = tree.describe(name)
    path = PurePosixPath(name)
    words = [path.stem.lower(), *(part.lower() for part in path.parts[:-1])]
    split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
    table = LabelTable(Labels(table=name), split)
    matches = {column: [names.find(cell, table) for cell in cells] for column, cells in columns.items()}
    files = [column for column, paths in matches.items() if paths and 2 * sum(map(bool, paths)) > len(paths)]
    with_suffix = [column for column in files if names.have_suffixes(columns[column])]
    files = with_suffix or files  # the labels 0 to 9 are the names of 0.png to 9.png, too
    if not files or path.stem.lower().startswith("sample"):  # sample_submission.csv
        return None
    if any(matches[column] != matches[files[0]] for column in files):
        raise _ambiguous(table, where, "several columns name the samples", files)
    if {column.lower() for column in columns} >= BOX_HEADERS:
        what = "has boxes, which a table of labels cannot give"
        raise DataError(
            what, where=where, allowed="one label for each file", hint="use the source `voc`, `coco` or `yolo`"
        )
    rest = {column: cells for column, cells in columns.items() if matches[column] != matches[files[0]] and any(cells)}
    split_columns = [column for column, cells in rest.items() if are_splits(cells)]
    if len(split_columns) > 1:
        raise _ambiguous(table, where, "several columns have names of splits", split_columns)
    rest = {column: cells for column, cells in rest.items() if column not in split_columns and column.strip()}
    if label is not None:
        if label not in rest:
            what = f"has no column of labels {label!r}"
            raise DataError(what, where=where, allowed=", ".join(rest), hint=nearest(label, rest))
        return _with_labels(table, files[0], split_columns, {label: rest[label]}, where)
    repeating = {column: cells for column, cells in rest.items() if len(set(cells)) < len(cells)}
    return _with_labels(table, files[0], split_columns, repeating or rest, where) if rest else None


def _columns(tree: Tree, name: str) -> dict[str, list[str]]:
    where = tree.describe(name)
    with tree.open(name) as stream:
        table = tables.CsvTable(stream, where)
        header = table.header
        twice = next((column for column in header if header.count(column) > 1), None)
        if twice is not None:
            raise DataError(f"has two columns {twice!r}", where=f"{where}, line 1", hint="rename one of them")
        rows = [cells for _, cells in table.columns(header)]
    return {column: [row[index].strip() for row in rows] for index, column in enumerate(header)}


def is_number(cell: str) -> bool:
    """Return whether a cell is a decimal number."""
    return _NUMBER.fullmatch(cell) is not None


def is_label_header(column: str) -> bool:
    """Return whether a column is named like one of labels."""
    return re.sub(r"[\s_-]", "", column.lower()) in LABEL_HEADERS


def are_splits(cells: Sequence[str]) -> bool:
    """Return whether all cells are names of splits."""
    return all(cell.lower() in SPLIT_WORDS for cell in cells)


def _with_labels(
    table: LabelTable, file: str, split_columns: Sequence[str], rest: dict[str, list[str]], where: str
) -> LabelTable:
    """Return the table with its columns of labels."""
    named = [column for column in rest if is_label_header(column)]
    binary = tuple(column for column, cells in rest.items() if all(cell in _BINARY for cell in cells))
    split = split_columns[0] if split_columns else None
    one_hot = False
    label: str | tuple[str, ...]
    if len(rest) == 1 or len(named) == 1:
        label = named[0] if named else next(iter(rest))
        _refuse_numbers(label, rest[label], where)
    elif len(binary) == len(rest):
        label = binary
        rows = zip(*rest.values(), strict=True)
        one_hot = all(sum(_BINARY[cell] for cell in row) == 1 for row in rows)
    else:
        raise _ambiguous(table, where, "several columns may be the label", list(rest))
    settings = Labels(table=table.settings.table, file=file, label=label, split=split)
    shown = repr(label) if isinstance(label, str) else f"{len(label)} columns of 0 and 1"
    kind = " (one 1 in every row)" if one_hot else ""
    columns = [f"files in {file!r}", f"labels in {shown}{kind}", *([f"splits in {split!r}"] if split else [])]
    note = f"{settings.table} was recognized as the table of labels: {', '.join(columns)}"
    return LabelTable(settings, None if split else table.split, one_hot, note)


def _refuse_numbers(column: str, cells: Sequence[str], where: str) -> None:
    """Refuse a label column of numbers that are not integers."""
    fraction = next((cell for cell in cells if is_number(cell) and not float(cell).is_integer()), None)
    if fraction is not None and all(map(is_number, cells)):
        what = f"the column {column!r} has numbers such as {fraction}, which are not classes"
        hint = "for regression, use the source npz with `targets`"
        raise DataError(what, where=where, allowed="class names, or integers from 0", hint=hint)


def _ambiguous(table: LabelTable, where: str, what: str, columns: Sequence[str]) -> DataError:
    shown = ", ".join(columns[:MAX_SHOWN]) + (", ..." if len(columns) > MAX_SHOWN else "")
    hint = f"name the columns: `labels: {{table: {table.settings.table}, file: …, label: …}}`"
    return DataError(f"{what}: {shown}", where=where, hint=hint)
