"""Label files: the names of classes by index, in every form that models are published with.

| form | example |
|---|---|
| names, one on each line | `cat` |
| numbered lines, also with gaps or from 1 | `0 cat`, `0: cat`, `0,cat`, `0<tab>cat` |
| CSV with or without a header | `index,mid,display_name` |
| YAML with `names`, a list or a map | `data.yaml` of Ultralytics |
| label maps of TensorFlow's Object Detection API | `item { id: 1 name: "cat" }` |

Byte order marks, line ends of Windows, quotes around names and commas after them are not part of a name. Text that is
not UTF-8 is Windows-1252. `n/a`, `???` and an empty name mean a class without a name.

A file alone does not always say which outputs its names belong to: numbers may begin at 1, and a name may begin with a
number. So a file has several readings, and the number of the model's classes decides.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.core.errors import DataError
from compress.data import files, labels

MAX_BYTES = 1 << 22
"""Chosen: 20,000 names of the longest length fit."""
MAX_INDEX = 10**labels.MAX_INDEX_DIGITS - 1
UNNAMED = ("", "n/a", "???")
"""Entries for indices that have no class, as in the label files of COCO."""
NAME_HEADERS = ("display_name", "name", "label", "class_name", "class", "labels", "names", "classes")
INDEX_HEADERS = ("index", "id", "class_id", "class_index", "number", "label_id")
BACKGROUND = "background"
_NUMBERED = re.compile(r"(\d{1,6})(?:\s*([,:;\t])\s*|\s+|$)(.*)")
_ITEM = re.compile(r"\bitem\s*\{([^{}]*)\}")
_FIELD = re.compile(r"""\b(id|name|display_name)\s*:\s*("[^"\n]*"|'[^'\n]*'|\d+)""")

Names = Mapping[int, str]


@dataclass(frozen=True)
class LabelReading:
    """One way to read a file.

    Attributes:
        names: the names by index, without classes that have none.
        count: the number of classes, with those that have no name.
        is_open: whether more classes without a name may follow: the file numbers its lines, with gaps.
        is_shifted: whether the numbers of the file begin at 1, and these indices at 0.
    """

    names: Names
    count: int
    is_open: bool = False
    is_shifted: bool = False

    def fits(self, classes: int) -> bool:
        """Return whether this can be the list of so many classes."""
        return self.count == classes or (self.is_open and self.count <= classes)


@dataclass(frozen=True)
class LabelFile:
    """The content of a label file.

    Attributes:
        where: the file, for messages.
        readings: the ways to read the file, the likeliest first.
    """

    where: str
    readings: tuple[LabelReading, ...]

    def names(self, classes: int | None = None) -> Names:
        """Return the names by index of the model's output, without classes that have no name.

        `classes` is the number of the model's classes, if it is known.

        Raises:
            DataError: the file has another number of classes.
        """
        return self._reading(classes).names

    def listed(self, classes: int | None = None) -> tuple[str, ...]:
        """Return a name for each class; a class without one has its index as its name.

        Raises:
            DataError: the file has another number of classes.
        """
        reading = self._reading(classes)
        return tuple(reading.names.get(index, str(index)) for index in range(classes or reading.count))

    def unique(self) -> tuple[str, ...]:
        """Return a different name for each class of data: equal names get their index, as in `crane (134)`.

        Data has no background: numbers from 1 become indices from 0.
        """
        reading = next((reading for reading in self.readings[:2] if reading.is_shifted), self.readings[0])
        listed = [reading.names.get(index, str(index)) for index in range(reading.count)]
        counts = Counter(listed)
        return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(listed))

    def _reading(self, classes: int | None) -> LabelReading:
        if classes is None:
            return self.readings[0]
        fitting = next((reading for reading in self.readings if reading.fits(classes)), None)
        if fitting is not None:
            return fitting
        count = self.readings[0].count
        names = self.readings[0].names
        hint = "choose the label file of this model"
        if count == classes - 1:
            hint = f"if the model has a background class at index 0, insert {BACKGROUND!r} as the first name"
        elif count == classes + 1 and BACKGROUND in names.get(0, BACKGROUND).lower():
            hint = "the file begins with a background class, which this model does not have: remove that line"
        raise DataError(f"names {count} classes, and the model has {classes}", where=self.where, hint=hint)


def read(path: Path) -> LabelFile:
    """Read a label file.

    Raises:
        DataError: the file cannot be read, or holds no names.
    """
    return parsed(files.read(path, MAX_BYTES), str(path))


def parsed(content: bytes, where: str) -> LabelFile:
    """Return the content of a label file; the suffix of its path `where` can say the form.

    Raises:
        DataError: the content is not a text, or has no names.
    """
    text = _text(content, where)
    suffix = Path(where).suffix.lower()
    if suffix in (".yaml", ".yml") or re.search(r"^names\s*:\s*(\[|\{|$)", text, re.MULTILINE):
        readings = _of_numbers(_yaml_names(text, where))
    elif _ITEM.search(text):
        readings = _of_numbers(_map_items(text, where))
    elif suffix == ".csv":
        readings = _table(text, where)
    else:
        readings = _lines(text.splitlines(), where)
    if not readings or not readings[0].names:
        raise DataError("names 0 classes", where=where, allowed="one name on each line, such as `cat` or `0 cat`")
    return LabelFile(where, tuple(readings))


def label_map(names: Names) -> str:
    """Return names as the text of a numbered label file, as Frigate and the vendor's programs read it."""
    return "".join(f"{index} {' '.join(names[index].split())}\n" for index in sorted(names))


def _text(content: bytes, where: str) -> str:
    """Return text in UTF-8 or Windows-1252, without a byte order mark."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if b"\0" in line:
            raise DataError("has a NUL byte", where=f"{where}, line {number}", allowed="text in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _plain(name: str) -> str:
    """Return a name without a comma after it and quotes around it."""
    name = name.strip().rstrip(",").strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1].strip()
    return name


def _checked(entries: Iterable[tuple[int, str]], where: str) -> dict[int, str]:
    """Return the names by index, without unnamed classes."""
    names: dict[int, str] = {}
    for index, name in entries:
        if index > MAX_INDEX:
            raise DataError(f"the class index {index} is too large", where=where, allowed=f"up to {MAX_INDEX:,}")
        if names.setdefault(index, name) != name:
            raise DataError(f"class {index} has two names: {names[index]!r} and {name!r}", where=where)
        if name.lower() not in UNNAMED:
            labels.check(name, f"{where}, class {index}")
    return names


def _without_unnamed(entries: Mapping[int, str]) -> dict[int, str]:
    return {index: name for index, name in sorted(entries.items()) if name.lower() not in UNNAMED}


def _of_numbers(entries: Mapping[int, str]) -> list[LabelReading]:
    """Return the readings of numbered entries: as they are, and, if they begin at 1, with indices from 0."""
    if not entries:
        return []
    count = max(entries) + 1
    has_gaps = len(entries) < count - (min(entries) == 1)
    readings = [LabelReading(_without_unnamed(entries), count, has_gaps)]
    if min(entries) == 1:
        shifted = {index - 1: name for index, name in entries.items()}
        readings.append(LabelReading(_without_unnamed(shifted), count - 1, has_gaps, is_shifted=True))
    return readings


def _of_rows(rows: Sequence[str]) -> list[LabelReading]:
    """Return the readings of names without numbers: without empty lines, or with each as a class without a name."""
    last = max((index for index, name in enumerate(rows) if name), default=-1)
    filled = [name for name in rows if name]
    readings = [LabelReading(_without_unnamed(dict(enumerate(filled))), len(filled))]
    if len(filled) <= last:
        readings.append(LabelReading(_without_unnamed(dict(enumerate(rows[: last + 1]))), last + 1))
    return readings


def _lines(lines: Sequence[str], where: str) -> list[LabelReading]:
    """Return the readings of lines with or without numbers."""
    rows = [_plain(line) for line in lines]
    for number, name in enumerate(rows, 1):
        if len(name) > labels.MOST_LETTERS:
            labels.check(name, f"{where}, line {number}")
    as_names = _of_rows(rows)
    filled = [row for row in rows if row]
    matches = [match for row in filled if (match := _NUMBERED.fullmatch(row)) is not None]
    indices = [int(match[1]) for match in matches]
    has_delimiters = all(match[2] for match in matches)
    repeats = len(set(indices)) < len(indices) and not has_delimiters
    if len(matches) < len(filled) or not any(match[3] for match in matches) or repeats:
        return as_names
    numbered = _of_numbers(_checked(((int(match[1]), _plain(match[3])) for match in matches), where))
    # "100 meter dash" is a name: numbers before a blank are indices if the lines have most of the indices.
    is_numbered = has_delimiters or max(indices) < 2 * len(indices)
    return numbered + as_names if is_numbered else as_names + numbered


def _table(text: str, where: str) -> list[LabelReading]:
    """Return the readings of a CSV file: by its header, or by the column of numbers; of one column as lines."""
    try:
        rows = [[_plain(cell) for cell in row] for row in csv.reader(text.splitlines(), strict=True) if any(row)]
    except csv.Error as error:
        raise DataError(f"is not a readable CSV file: {error}", where=where) from error
    header = [cell.lower() for cell in rows[0]] if rows else []
    name_column = next((header.index(name) for name in NAME_HEADERS if name in header), None)
    if name_column is None:
        return _table_without_header(rows, text, where)
    index_column = next((header.index(name) for name in INDEX_HEADERS if name in header), None)
    names = [_cell(row, name_column) for row in rows[1:]]
    if index_column is None:
        return _of_rows(names)
    indices = [_cell(row, index_column) for row in rows[1:]]
    wrong = next((index for index in indices if not index.isdecimal()), None)
    if wrong is not None:
        raise DataError(f"{wrong!r} is not a class index", where=where)
    return _of_numbers(_checked(zip(map(int, indices), names, strict=True), where))


def _table_without_header(rows: Sequence[Sequence[str]], text: str, where: str) -> list[LabelReading]:
    """Return the readings of rows: an index and a name in this or the other order; otherwise lines of text."""
    for index_column in (0, 1):
        if rows and all(_cell(row, index_column).isdecimal() and _cell(row, 1 - index_column) for row in rows):
            entries = [(int(row[index_column]), row[1 - index_column]) for row in rows]
            return _of_numbers(_checked(entries, where))
    if all(len([cell for cell in row if cell]) == 1 for row in rows):
        return _lines([row[0] for row in rows], where)
    return _lines(text.splitlines(), where)  # names with commas


def _cell(row: Sequence[str], column: int) -> str:
    return row[column] if column < len(row) else ""


def _map_items(text: str, where: str) -> dict[int, str]:
    """Return the names of a label map by their ids; the name for people if there is one."""
    entries = []
    for item in _ITEM.findall(re.sub(r"#[^\n]*", "", text)):
        fields = {key: value.strip("\"'") for key, value in _FIELD.findall(item)}
        if not fields.get("id", "").isdecimal():
            raise DataError("an item has no id", where=where, allowed='item { id: 1 name: "cat" }')
        entries.append((int(fields["id"]), fields.get("display_name") or fields.get("name", "")))
    return _checked(entries, where)


def _yaml_names(text: str, where: str) -> dict[int, str]:
    """Return the names under `names` in a YAML file, a list or a map from indices."""
    from compress.data.yaml_description import Description

    names = Description(Path(where), text).names_by_index(unique=False)
    if names is None:
        raise DataError("has no key names", where=where, allowed="a list of names, or a map from indices")
    return _checked(names.items(), where)
