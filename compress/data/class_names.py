"""Class names in the order of the model's outputs: a list in the pipeline file, or a labels file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from compress.core.errors import DataError
from compress.core.settings import Settings
from compress.data import label_files, labels, tables
from compress.data.file_tree import Tree

LABELS_FILES = ("labels.txt", "classes.txt")
"""Names of a labels file in the folder of a model."""


class Classes(Settings):
    """A file with the class names in the order of their indices."""

    file: str
    """Path inside the folder or archive of a label file (`compress.data.label_files` lists the forms), or of a CSV file
    with the two columns below."""
    index: str | None = None
    """Column with the index of the class."""
    name: str | None = None
    """Column with the name of the class."""


NameList = Annotated[tuple[str, ...], Field(min_length=1)]
ClassList = NameList | str
"""The names, or the path of a labels file."""


def files_of(setting: Classes | ClassList | None) -> dict[str, Path]:
    """Return the labels file that is outside of the data, if there is one."""
    return {"classes": Path(setting)} if isinstance(setting, str) else {}


def origin(setting: Classes | ClassList | None) -> str:
    """Return the addition to a message with the labels file that the class names come from; nothing for a list."""
    file = setting.file if isinstance(setting, Classes) else setting
    return f", as in {file}" if isinstance(file, str) else ""


def note(setting: Classes | ClassList | None) -> tuple[str, ...]:
    """Return a note on the labels file outside of the data, if there is one."""
    return (f"the class names and their order are those of {setting}",) if isinstance(setting, str) else ()


def listed(setting: ClassList | None, where: str) -> tuple[str, ...] | None:
    """Return the class names of a list or a labels file; None without a setting.

    Raises:
        DataError: the file is unreadable, or two classes of a list have the same name.
    """
    if isinstance(setting, str):
        return label_files.read(Path(setting)).unique()
    if setting is not None:
        _check_names(enumerate(setting), lambda index: f"{where}.classes[{index}]")
    return setting


def checked(names: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return class names.

    Raises:
        DataError: a name is empty or too long, or two names are equal.
    """
    _check_names(enumerate(names), lambda index: f"{where}, class {index}")
    return names


def of_tree(tree: Tree, setting: Classes | ClassList | None, where: str) -> tuple[str, ...] | None:
    """Return the class names, also from a file inside the data; None without a setting.

    Raises:
        DataError: the file is unreadable, or does not have one name for every index from 0.
    """
    if not isinstance(setting, Classes):
        return listed(setting, where)
    location = tree.describe(setting.file)
    if (setting.index is None) != (setting.name is None):
        raise DataError("classes needs both index and name, or neither", where="data.source", hint="name both columns")
    with tree.open(setting.file) as stream:
        if setting.index is None or setting.name is None:
            return label_files.parsed(stream.read(label_files.MAX_BYTES), location).unique()
        rows = tables.CsvTable(stream, location, ",").columns([setting.index, setting.name])
        names = _names_by_index(rows, location)
        if sorted(names) != list(range(len(names))) or not names:
            raise DataError(f"names {len(names)} classes", where=location, allowed="indices from 0 without gaps")
        return tuple(names[index] for index in range(len(names)))


def beside(model: Path) -> Path | None:
    """Return the labels file in the folder of a model file, if there is one."""
    names = (f"{model.stem}.txt", f"{model.stem}_labels.txt", *LABELS_FILES)
    return next((path for name in names if (path := model.with_name(name)).is_file()), None)


def _check_names(names: Iterable[tuple[int, str]], location: labels.Location) -> None:
    """Refuse names that are empty, too long or there twice."""
    known: set[str] = set()
    for number, name in names:
        labels.check(name, location(number))
        if name in known:
            raise DataError(f"lists the class {name!r} twice", where=location(number), hint="give each class one name")
        known.add(name)


def _names_by_index(rows: Iterable[tuple[int, Sequence[str]]], where: str) -> dict[int, str]:
    """Return the class name of each index in a table's rows of index and name."""
    names: dict[int, str] = {}
    for number, (index, name) in rows:
        line = f"{where}, line {number}"
        if not (index.isascii() and index.isdigit()) or len(index) > labels.MAX_INDEX_DIGITS:
            raise DataError(f"{index!r} is not a class index", where=line)
        previous = names.setdefault(int(index), name.strip())
        if previous != name.strip():
            raise DataError(f"class {index} has two names: {previous!r} and {name!r}", where=line)
    return names
