"""Texts in a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import DataError, nearest
from compress.data import class_names, files, labels, tables
from compress.data.class_names import ClassList
from compress.data.label_tables import are_splits, is_label_header, is_number
from compress.data.source import Samples, Stored
from compress.data.splits import Divide, by_name, stratified
from deploy.contract.text import MAX_BYTES, sample_of

MAX_CHARACTERS = 2 << 30
"""Texts are kept in memory; chosen: 2 GB of ASCII."""
LOOKED_AT, CHARACTERS_LOOKED_AT = 100_000, 1 << 26
"""Most rows, and about the most characters, from which the columns of a table are recognized; it may be sorted by
class."""
LENGTHS = tuple(1 << power for power in range(7, MAX_BYTES.bit_length()))
"""The values of `max_bytes` that are suggested: powers of two from 128."""
_FILE = re.compile(r"\S+\.[A-Za-z0-9]{2,4}")


class TextTable(Stored):
    """A CSV or TSV file with a header: a text in each row, and its label.

    A sample is the text in UTF-8: uint8 [max_bytes], with zeros after its end. The preprocessing step `tokens` makes
    numbers of it.
    """

    name: ClassVar[str] = "text"
    paths: ClassVar[tuple[str, ...]] = ("file", "classes", "manifest")

    file: str
    """Path of the table, relative to the pipeline file."""
    text: str = "text"
    """Column with the texts."""
    label: str | None = "label"
    """Column with the labels: class names, or integers from 0. null: the samples have no labels."""
    split: str | None = None
    """Column with the split of each row: train, validation or test. An empty one: the row is not used."""
    group: str | None = None
    """Column with what no two splits may share, such as the author or the document of a text. An empty one: the text is
    in no group."""
    max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = 512
    """Longest text in bytes of UTF-8. Longer texts are cut, also on the device."""
    classes: ClassList | None = None
    """The class names in the order of the model's outputs: a list, or the path of a labels file, relative to the
    pipeline file. By default the labels are the names."""

    def task_name(self) -> str:
        """Return "outputs" without labels."""
        return "outputs" if self.label is None else "classification"

    @property
    def decoding(self) -> dict[str, Any]:
        """How the device decodes texts."""
        return {"text_bytes": self.max_bytes}

    def files(self) -> dict[str, Path]:
        """Return the table, and the labels file."""
        return {"file": Path(self.file), **class_names.files_of(self.classes)}

    def load(self) -> Samples:
        """Read the table."""
        columns = [self.text, *filter(None, (self.label, self.split, self.group))]
        lines, rows = self._rows(columns)

        def location(index: int) -> str:
            return f"{self.file}, line {lines[index]}"

        cells = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        texts = cells[self.text]
        names = class_names.listed(self.classes, f"data.source.{self.name}")
        label, classes = np.zeros(len(rows), np.int64), names or ()
        if self.label is not None:
            words = [word.strip() for word in cells[self.label]]
            for index, word in enumerate(words):
                labels.check(word, location(index))
            label, classes = labels.read(words, names, location, class_names.origin(self.classes))
        groups = None if self.group is None else _groups(cells[self.group], location)
        divide: Divide = stratified if groups is None else by_name(groups)
        splits = {}
        if self.split is not None:
            words = cells[self.split]
            splits = labels.splits(
                labels.split_named(word, location(index)) if word.strip() else None for index, word in enumerate(words)
            )

        def read(index: int) -> NDArray[np.uint8]:
            sample: NDArray[np.uint8] = sample_of(texts[index], self.max_bytes)
            return sample

        return Samples(
            label,
            classes,
            read,
            splits,
            location,
            divide,
            notes=(*class_names.note(self.classes), *self._notes(texts)),
            groups=groups,
            has_labels=self.label is not None,
        )

    def _rows(self, columns: list[str]) -> tuple[list[int], list[list[str]]]:
        lines, rows, size = [], [], 0
        with files.opened(Path(self.file)) as stream:
            for line, row in tables.CsvTable(stream, self.file).columns(columns):
                lines.append(line)
                rows.append(row)
                size += sum(map(len, row))
                if len(rows) > tables.MAX_NAMES or size > MAX_CHARACTERS:
                    allowed = f"{tables.MAX_NAMES:,} rows, and {MAX_CHARACTERS:,} characters"
                    hint = "take a part of the rows, or shorten the texts"
                    raise DataError("is too large for a table of texts", where=self.file, allowed=allowed, hint=hint)
        if not rows:
            raise DataError("has no rows", where=self.file, hint="add texts")
        return lines, rows

    def _notes(self, texts: list[str]) -> tuple[str, ...]:
        long = sum(len(text.encode("utf-8", "replace")) > self.max_bytes for text in texts)
        blank = sum(not text.strip() for text in texts)
        notes = []
        if long:
            notes.append(f"{long:,} of {len(texts):,} texts are longer than {self.max_bytes} bytes, and cut")
        if blank:
            notes.append(f"{blank:,} of {len(texts):,} texts are blank")
        return tuple(notes)


def _groups(cells: list[str], location: labels.Location) -> NDArray[np.str_]:
    """Return the name of the group of each row; "" for none."""
    names = [cell.strip() for cell in cells]
    for index, name in enumerate(names):
        if name:
            labels.check(name, location(index), "group")
    return np.array(names, np.str_)


def recognized(path: Path, label: str | None = None) -> dict[str, Any]:
    """Return the settings of this source for a table, from the headers and the first rows.

    The column with the longest cells has the texts. The labels are in the column with a usual header, or in the only
    one in which values repeat.

    Args:
        path: the table.
        label: the column with the labels; None to recognize it, too.

    Raises:
        DataError: the table cannot be read, or has no texts, or it is not clear which column has the labels.
    """
    columns = _first_cells(path)
    splits = [name for name, cells in columns.items() if any(cells) and are_splits([*filter(None, cells)])]
    rest = {name: cells for name, cells in columns.items() if name.strip() and name not in splits}
    if label is not None and label not in rest:
        what = f"has no column of labels {label!r}"
        raise DataError(what, where=str(path), allowed=", ".join(rest), hint=nearest(label, rest))
    lengths = {
        name: sum(map(len, cells))
        for name, cells in rest.items()
        if name != label and not is_label_header(name) and not _most(is_number, cells)
    }
    text = max(lengths, key=lambda name: lengths[name], default=None)
    if text is None or not lengths[text]:
        allowed = "a header, and a column with a text in each row"
        raise DataError("has no texts", where=str(path), allowed=allowed, hint="arrays are read from .npz files")
    if _most(_FILE.fullmatch, rest[text]):
        hint = "give the folder that has the files and this table"
        raise DataError(f"the column {text!r} has names of files, not texts", where=str(path), hint=hint)
    settings = {"text": text, "label": label or _label_of(path, {name: rest[name] for name in rest if name != text})}
    long = float(np.quantile([len(cell.encode("utf-8", "replace")) for cell in rest[text]], 0.95))
    most = next((length for length in LENGTHS if length >= long), LENGTHS[-1])
    return {"file": str(path), **settings, **({"split": splits[0]} if splits else {}), "max_bytes": most}


def _first_cells(path: Path) -> dict[str, list[str]]:
    where = str(path)
    rows: list[list[str]] = []
    size = 0
    with files.opened(path) as stream:
        table = tables.CsvTable(stream, where)
        for _, row in islice(table.columns(table.header), LOOKED_AT):
            rows.append(row)
            size += sum(map(len, row))
            if size > CHARACTERS_LOOKED_AT:
                break
    if not rows:
        raise DataError("has no rows", where=where, allowed="a header, and a row for each sample")
    return {name: [row[index].strip() for row in rows] for index, name in enumerate(table.header)}


def _label_of(path: Path, columns: dict[str, list[str]]) -> str:
    named = [name for name in columns if is_label_header(name)]
    repeating = [name for name, cells in columns.items() if 1 < len(set(cells)) < len(cells)]
    candidates = named or repeating
    if not candidates:
        hint = "name the column with --label, or add one with the class of each text"
        raise DataError("has no column of labels", where=str(path), hint=hint)
    if len(candidates) > 1:
        raise DataError(
            f"several columns may be the label: {', '.join(candidates)}",
            where=str(path),
            hint="name the column with --label",
        )
    return candidates[0]


def _most(condition: Callable[[str], object], cells: list[str]) -> bool:
    """Return whether a condition holds for most cells."""
    return 2 * sum(bool(condition(cell)) for cell in cells) > len(cells)
