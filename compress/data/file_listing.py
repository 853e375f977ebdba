"""Files that are samples, with their labels from class folders or from a CSV table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.data import class_names, labels, tables
from compress.data.class_names import Classes, ClassList
from compress.data.file_tree import Tree, inside, tree
from compress.data.labels import SPLIT_WORDS
from compress.data.source import Samples, Stored
from compress.data.splits import Divide, by_group, stratified
from compress.data.types import Split
from compress.errors import DataError
from compress.settings import Settings

MOST_KINDS = 10
"""Number of file types that a note lists."""


class Labels(Settings):
    """A CSV table with a header that gives the label of each file."""

    table: str
    """Path of the CSV file inside the folder or archive."""
    file: str = "file"
    """Column with the path of each sample inside the folder or archive."""
    label: str = "label"
    """Column with the label: a class name, or an integer from 0."""
    split: str | None = None
    """Column with the split (train, val or test); by default the column `split` or `Split`, if there is one."""
    group: str | None = None
    """Column with a group, such as a speaker or a device. All samples of a group are in the same split."""


@dataclass(frozen=True)
class Listed:
    """A sample's file with its label, and the line of a table that they are in; 0 if they are in none."""

    file: str
    label: str
    split: Split | None = None
    group: str = ""
    line: int = 0


@dataclass(frozen=True)
class Opened:
    """The listed samples of a source, not yet decoded.

    Attributes:
        tree: where they are.
        listed: the samples, in a fixed order.
        label: index of each sample's class.
        class_names: the classes.
        grouped: whether groups are to stay together.
        notes: what else there is to know.
    """

    tree: Tree
    listed: Sequence[Listed]
    label: Any
    class_names: tuple[str, ...]
    grouped: bool
    notes: tuple[str, ...] = ()

    def samples(self, read: Callable[[int], NDArray[Any]], *, skip: bool) -> Samples:
        """Return the samples; `read` decodes one when it is used, and `skip` leaves out unreadable ones."""
        groups = np.array([entry.group for entry in self.listed], np.str_) if self.grouped else None
        divide: Divide = stratified if groups is None else by_group(np.unique(groups, return_inverse=True)[1])
        return Samples(
            self.label,
            self.class_names,
            read,
            splits=labels.splits(entry.split for entry in self.listed),
            divide=divide,
            describe=lambda index: self.tree.describe(self.listed[index].file),
            skip=skip,
            notes=self.notes,
            groups=groups,
            has_labels=bool(self.class_names),
        )


class InFiles(Stored):
    """A source whose samples are files in a folder or a tar archive."""

    paths: ClassVar[tuple[str, ...]] = ("path", "classes", "manifest")
    suffixes: ClassVar[tuple[str, ...]]
    single: ClassVar[bool] = False
    """Whether the path may be that of one such file."""

    path: str
    """Path of a folder, or of a tar archive of one. Relative to the pipeline file. A .tar archive is read in place;
    .tar.gz, .tar.bz2 and .tar.xz are unpacked first."""
    corrupt: Literal["refuse", "skip"] = "refuse"
    """How unreadable samples are handled. refuse: stop with an error that names them. skip: leave them out and list
    them."""

    def tree(self) -> Tree:
        """Return all files."""
        return tree(Path(self.path), single=self.single)

    def used(self, tree: Tree) -> tuple[str, ...]:
        """Return the files with samples and labels."""
        return tuple(name for name in tree.names if name.lower().endswith(self.suffixes))

    def files(self) -> dict[str, Path]:
        """Return the used files, or the archive that contains them."""
        tree = self.tree()
        return tree.files(self.used(tree))


class LabelledFiles(InFiles):
    """A source of files with one label each, given by the folder of the file or by a table."""

    labels: Labels | Literal["none"] | None = None
    """A table of labels; without it, the class of a sample is the name of its folder. none: the samples have no
    labels."""
    classes: Classes | ClassList | None = None
    """The class names in the order of the model's outputs: a list; or the path of a labels file, relative to the
    pipeline file, with one name per line (`cat`, or `0 cat`); or a file in the folder. By default the labels are the
    names, in alphabetical order."""

    def task_name(self) -> str:
        """Return "outputs" for samples without labels."""
        return "outputs" if self.labels == "none" else super().task_name()

    @property
    def label_table(self) -> Labels | None:
        """The table of labels, if there is one."""
        return None if self.labels == "none" else self.labels

    def used(self, tree: Tree) -> tuple[str, ...]:
        """Return the files with samples, and the tables."""
        more = [table for table in (self.label_table and self.label_table.table, self._classes_file) if table]
        return (*(table.file for table in self.listing(tree)), *(inside(name, tree.where) for name in more))

    @property
    def _classes_file(self) -> str | None:
        """The file with class names inside the folder or archive, if there is one."""
        return self.classes.file if isinstance(self.classes, Classes) else None

    def files(self) -> dict[str, Path]:
        """Return the used files, or the archive that contains them, and the labels file."""
        return super().files() | class_names.files_of(self.classes)

    def class_list(self, tree: Tree) -> tuple[str, ...] | None:
        """Return the class names that the settings give, if they do."""
        return class_names.of_tree(tree, self.classes, f"data.source.{self.name}")

    def listing(self, tree: Tree) -> list[Listed]:
        """Return every sample with label and split, in a fixed order."""
        known = {self._classes_file} if self._classes_file else set()
        if self.labels == "none":
            listed = _unlabelled(tree, self.suffixes)
        elif self.labels:
            listed = _tabled(tree, self.labels)
        else:
            listed = _foldered(tree, self.suffixes, known, self.class_list(tree))
        if not listed:
            raise self._nothing_listed(tree)
        return listed

    def _nothing_listed(self, tree: Tree) -> DataError:
        suffixes = f"*{{{','.join(self.suffixes)}}}"
        if self.label_table is not None:
            return DataError(
                f"lists no files in {self.label_table.table}", where=tree.where, allowed="a row for each sample"
            )
        if self.labels == "none":
            return DataError("contains no samples", where=tree.where, allowed=suffixes)
        loose = _unlabelled(tree, self.suffixes)
        if loose:
            return DataError(
                f"contains {len(loose):,} samples, but none in the folder of a class",
                where=tree.where,
                allowed=f"CLASS/{suffixes}",
                hint="set `labels: none` to use them without labels, or name a table with `labels: {table: …}`",
            )
        shown = f"CLASS/{suffixes}, or the same inside train/, val/ and test/"
        return DataError("contains no samples", where=tree.where, allowed=shown)

    def open_files(self) -> Opened:
        """Return samples and labels without decoding."""
        tree = self.tree()
        listed = self.listing(tree)
        classes = self.class_list(tree)
        if self.labels == "none":
            return Opened(tree, listed, np.zeros(len(listed), np.int64), (), False, self.notes(tree))
        words = [entry.label for entry in listed]
        reading = labels.read if self.labels else labels.named
        origin = class_names.origin(self.classes)
        indexed = reading(words, classes, lambda index: self.label_place(tree, listed[index]), origin)
        return Opened(tree, listed, *indexed, bool(self.labels and self.labels.group), self.notes(tree))

    def label_place(self, tree: Tree, listed: Listed) -> str:
        """Return the location of a sample's label: the line of the table, or the file."""
        table = self.label_table
        return f"{tree.describe(table.table)}, line {listed.line}" if table else tree.describe(listed.file)

    def notes(self, tree: Tree) -> tuple[str, ...]:
        """Return notes on a labels file, and on ignored files unless a table lists the files."""
        order = class_names.note(self.classes)
        return order if self.label_table else (*order, *passed_over(tree.names, self.used(tree), self.suffixes))


def passed_over(names: Sequence[str], used: Sequence[str], suffixes: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return a note with the number of ignored files by suffix, if there are any.

    Args:
        names: of all files.
        used: of those that are.
        suffixes: of files that would be used if they lay in the folder of a class.
    """
    rest = sorted(set(names) - set(used))
    ends = [os.path.splitext(name)[1].lower() for name in rest]
    kinds = Counter(f"{end} in no folder of a class" if end in suffixes else end or "without a suffix" for end in ends)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(MOST_KINDS))
    return (f"{len(rest):,} files were ignored: {shown}{', ...' * (len(kinds) > MOST_KINDS)}",) if rest else ()


def _unlabelled(tree: Tree, suffixes: tuple[str, ...]) -> list[Listed]:
    """Return all samples, wherever they are; if all are in folders of splits, with their split."""
    names = [name for name in tree.names if name.lower().endswith(suffixes)]
    words = [name.split("/")[0].lower() if "/" in name else "" for name in names]
    divided = bool(names) and all(word in SPLIT_WORDS for word in words)
    return [Listed(name, "", SPLIT_WORDS[word] if divided else None) for name, word in zip(names, words, strict=True)]


def _foldered(tree: Tree, suffixes: tuple[str, ...], known: set[str], classes: tuple[str, ...] | None) -> list[Listed]:
    """Return the samples in class folders, optionally inside folders of splits.

    Args:
        tree: the files.
        suffixes: of samples.
        known: files that are not samples.
        classes: the class names, if they are known; their folders may be empty.
    """
    divided = _divided(tree)
    depth = 1 if divided else 0
    listed = []
    for name in tree.names:
        parts = name.split("/")
        if len(parts) > depth + 1 and name.lower().endswith(suffixes):
            listed.append(Listed(name, parts[depth], SPLIT_WORDS[parts[0].lower()] if divided else None))
    if listed:
        folders = [name for name in tree.folders if name.count("/") == depth]
        _refuse_empty(tree, [name for name in folders if name.split("/")[-1] not in (classes or ())], listed, known)
    return listed


def _refuse_empty(tree: Tree, folders: Sequence[str], listed: Sequence[Listed], known: set[str]) -> None:
    """Refuse a class folder without samples: it would shift the indices of later classes."""
    classes = {entry.label for entry in listed} | {part for name in known for part in name.split("/")[:-1]}
    empty = next((name for name in folders if name.split("/")[-1] not in classes), None)
    if empty is not None:
        others = passed_over([name for name in tree.names if name.startswith(f"{empty}/")], ())
        reason = (
            f"the folder {empty!r} is that of a class and contains no samples{''.join(f' ({note})' for note in others)}"
        )
        hint = "convert its files, remove the folder, or list the class names with `classes: [...]`"
        raise DataError(reason, where=tree.where, allowed="a sample of every class", hint=hint)


def _divided(tree: Tree) -> bool:
    """Return if the top folders are splits. Otherwise they are classes."""
    top = [name for name in tree.folders if "/" not in name]
    splits = [name for name in top if name.lower() in SPLIT_WORDS]
    others = [name for name in top if name not in splits]
    if len(splits) > 1 and others:  # one alone may be a class: a train, a test
        reason = f"contains the folder {others[0]!r} next to {splits[0]!r} and {splits[1]!r}"
        raise DataError(reason, where=tree.where, allowed="either splits or classes")
    if splits:
        _refuse_unknown_split(tree, splits)
    return bool(splits) and not others


def _refuse_unknown_split(tree: Tree, splits: Sequence[str]) -> None:
    """Refuse a folder that has the same class folders as a split, but not the name of one."""
    pairs = [name.split("/")[:2] for name in tree.folders if "/" in name]
    class_names = {inner for outer, inner in pairs if outer in splits}
    for outer, inner in pairs:
        if inner in class_names and outer not in splits:
            reason = f"contains {splits[0]!r} and {outer!r}, each with a folder {inner!r}"
            hint = f"is {outer!r} a split? give it one of these names, or put it elsewhere"
            raise DataError(reason, where=tree.where, allowed=f"for splits: {', '.join(SPLIT_WORDS)}", hint=hint)


def _tabled(tree: Tree, settings: Labels) -> list[Listed]:
    """Return the samples that a table lists."""
    where = tree.describe(settings.table)
    split_column = settings.split or _split_column(tree, settings.table)
    columns = [settings.file, settings.label, *(name for name in (split_column, settings.group) if name)]
    listed: dict[str, Listed] = {}
    known = set(tree.names)
    with tree.open(settings.table) as stream:
        for number, (file, *more) in tables.table(stream, where, columns):
            line = f"{where}, line {number}"
            name = inside(file, line)
            if len(listed) == tables.MAX_NAMES:
                raise DataError("lists too many files", where=where, allowed=f"{tables.MAX_NAMES:,}")
            if name in listed:
                raise DataError(f"lists {name!r} a second time", where=line, hint="remove one of the rows")
            if name not in known:
                raise DataError(f"lists {name!r}, which is not there", where=line, hint="check labels.file and path")
            listed[name] = _listed_row(name, [text.strip() for text in more], bool(split_column), (number, line))
    return list(listed.values())


def _listed_row(name: str, cells: Sequence[str], has_split: bool, row: tuple[int, str]) -> Listed:
    """Return a sample from the cells after the file name: label, split and group; the last two are optional.

    Args:
        name: the file.
        cells: the other cells.
        has_split: whether one of them is the split.
        row: the number of the line, and its location for messages.
    """
    number, line = row
    label, *more = cells
    labels.check(label, line)
    split = labels.split_named(more.pop(0), line) if has_split else None
    group = more[0] if more else ""
    if group:
        labels.check(group, line)
    return Listed(name, label, split, group, number)


def _split_column(tree: Tree, table: str) -> str | None:
    """Return the name of the column `split` of a table, in upper or lower case; None without one."""
    with tree.open(table) as stream:
        header = tables.header(stream, tree.describe(table))
    candidates = [name for name in header if name.strip().lower() == "split"]
    return "split" if "split" in candidates else next(iter(candidates), None)
