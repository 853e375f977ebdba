"""Files that are samples, with their labels from class folders or from a CSV table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.data import class_names, labels
from compress.data.class_names import Classes, ClassList
from compress.data.file_tree import Tree, inside, tree
from compress.data.label_tables import FileNames, Labels, LabelTable, Listed, recognize
from compress.data.label_tables import read as read_table
from compress.data.labels import SPLIT_WORDS
from compress.data.source import Samples, Stored
from compress.data.splits import by_name, stratified

MOST_KINDS = 10
"""Number of file types that a note lists."""


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

    convertible: ClassVar[tuple[str, ...]] = ()
    """Suffixes of files that could be samples after a conversion."""
    how_to_convert: ClassVar[str] = ""
    recognizes_tables: ClassVar[bool] = True
    """Whether a table of labels is used without a setting."""

    def task_name(self) -> str:
        """Return "outputs" for samples without labels, "multi_label" for columns of 0 and 1."""
        if self.labels == "none":
            return "outputs"
        if isinstance(self.labels, Labels):
            label_tables = [LabelTable(self.labels)]
        else:
            try:
                label_tables = [*self.tables(self.tree())]
            except DataError:  # reported when the data is read
                label_tables = []
        return "multi_label" if any(table.is_multi_label for table in label_tables) else super().task_name()

    def tables(self, tree: Tree) -> tuple[LabelTable, ...]:
        """Return the table of labels, or the tables of the splits: those of the settings, or those that are recognized
        where no folders give the classes."""
        if self.labels is not None:
            return (LabelTable(self.labels),) if isinstance(self.labels, Labels) else ()
        if not self.recognizes_tables or _has_class_folders(tree, self.suffixes):
            return ()
        return recognize(tree, self.suffixes, self._classes_file)

    def used(self, tree: Tree) -> tuple[str, ...]:
        """Return the files with samples, and the tables."""
        more = [*(table.settings.table for table in self.tables(tree)), *filter(None, [self._classes_file])]
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
        label_tables = self.tables(tree)
        if self.labels == "none":
            listed = _unlabelled(tree, self.suffixes)
        elif label_tables:
            listed = _tabled(tree, label_tables, self.suffixes)
        else:
            known = {self._classes_file} if self._classes_file else set()
            listed = _foldered(tree, self.suffixes, known, self.class_list(tree))
        if not listed:
            raise self._nothing_listed(tree)
        return listed

    def _nothing_listed(self, tree: Tree) -> DataError:
        suffixes = f"*{{{','.join(self.suffixes)}}}"
        if isinstance(self.labels, Labels):
            what = f"lists no files in {self.labels.table}"
            return DataError(what, where=tree.where, allowed="a row for each sample")
        loose = [] if self.labels == "none" else _unlabelled(tree, self.suffixes)
        unsupported = self._convertible(tree)
        if unsupported and not loose:
            return DataError(
                f"contains only {unsupported}, which cannot be decoded",
                where=tree.where,
                allowed=suffixes,
                hint=self.how_to_convert,
            )
        if self.labels == "none":
            return DataError("contains no samples", where=tree.where, allowed=suffixes)
        if loose:
            return DataError(
                f"contains {len(loose):,} samples, but none in the folder of a class",
                where=tree.where,
                allowed=f"CLASS/{suffixes}",
                hint="set `labels: none` to use them without labels, or name a table with `labels: {table: …}`",
            )
        shown = f"CLASS/{suffixes}, or the same inside train/, val/ and test/"
        return DataError("contains no samples", where=tree.where, allowed=shown)

    def samples(self, read: Callable[[Tree, str], NDArray[Any]]) -> Samples:
        """Return the samples with their labels; `read` decodes a file of the tree when the sample is used."""
        tree = self.tree()
        listed = self.listing(tree)
        label_tables = self.tables(tree)
        label, names, targets = self._labels(tree, listed, label_tables)
        is_grouped = bool(label_tables) and label_tables[0].settings.group is not None
        groups = np.array([entry.group for entry in listed], np.str_) if is_grouped else None
        return Samples(
            label,
            names,
            lambda index: read(tree, listed[index].file),
            splits=labels.splits(entry.split for entry in listed),
            divide=stratified if groups is None else by_name(groups),
            describe=lambda index: tree.describe(listed[index].file),
            skip=self.corrupt == "skip",
            notes=self.notes(tree),
            warnings=self.warnings(tree),
            groups=groups,
            targets=targets,
            has_labels=bool(names),
        )

    def _labels(
        self, tree: Tree, listed: Sequence[Listed], label_tables: Sequence[LabelTable]
    ) -> tuple[NDArray[np.int64], tuple[str, ...], NDArray[np.uint8] | None]:
        """Return the class of each sample, the class names, and for the task multi_label 0 or 1 for each class."""
        classes = self.class_list(tree)
        nothing = np.zeros(len(listed), np.int64)
        if self.labels == "none":
            return nothing, (), None
        if label_tables and label_tables[0].is_multi_label:
            targets = np.array([entry.marks for entry in listed], np.uint8)
            names = _columns_in_order(label_tables[0], classes, self.name)
            order = [label_tables[0].label_columns.index(name) for name in names]
            return nothing, names, targets[:, order]
        if label_tables and label_tables[0].one_hot:
            classes = classes or label_tables[0].label_columns
        reading = labels.read if label_tables else labels.named
        words = [entry.label for entry in listed]
        origin = class_names.origin(self.classes)
        return *reading(words, classes, lambda index: label_location(tree, listed[index]), origin), None

    def notes(self, tree: Tree) -> tuple[str, ...]:
        """Return notes on a labels file, on recognized tables, and on ignored files unless a setting names a table."""
        notes = class_names.note(self.classes)
        if isinstance(self.labels, Labels):
            return notes
        recognized = (table.note for table in self.tables(tree))
        missing_from = "in no row of a table" if self.tables(tree) else "in no folder of a class"
        ignored = passed_over(tree.names, self.used(tree), self.suffixes, missing_from)
        return (*notes, *recognized, *ignored)

    def warnings(self, tree: Tree) -> tuple[str, ...]:
        """Return a warning about files that could be samples after a conversion."""
        unsupported = self._convertible(tree)
        return (f"{unsupported} cannot be decoded and are left out: {self.how_to_convert}",) if unsupported else ()

    def _convertible(self, tree: Tree) -> str:
        """Return the number of files that must be converted first, by suffix; empty without such files."""
        ends = (os.path.splitext(name)[1].lower() for name in tree.names)
        kinds = Counter(end for end in ends if end in self.convertible)
        return ", ".join(f"{count:,} {end} files" for end, count in sorted(kinds.items()))


def label_location(tree: Tree, listed: Listed) -> str:
    """Return the location of a sample's label: the line of the table, or the file."""
    return f"{listed.location[0]}, line {listed.location[1]}" if listed.location else tree.describe(listed.file)


def _columns_in_order(table: LabelTable, classes: tuple[str, ...] | None, name: str) -> tuple[str, ...]:
    """Return the columns of 0 and 1 in the order of the classes."""
    columns = table.label_columns
    if classes is not None and sorted(classes) != sorted(columns):
        what = f"the classes are not the columns of {table.settings.table}"
        raise DataError(what, where=f"data.source.{name}", allowed=", ".join(columns))
    return classes or columns


def _tabled(tree: Tree, label_tables: Sequence[LabelTable], suffixes: tuple[str, ...]) -> list[Listed]:
    """Return the samples of one or several tables."""
    names = FileNames(tree, suffixes)
    listed: dict[str, Listed] = {}
    for table in label_tables:
        for entry in read_table(tree, table, names):
            if entry.file in listed:
                where = label_location(tree, entry)
                raise DataError(
                    f"lists {entry.file!r}, as {label_location(tree, listed[entry.file])} does", where=where
                )
            listed[entry.file] = entry
    return list(listed.values())


def _has_class_folders(tree: Tree, suffixes: tuple[str, ...]) -> bool:
    """Return if the samples are in the folders of two or more classes."""
    top = {name.split("/")[0].lower() for name in tree.names if "/" in name and name.lower().endswith(suffixes)}
    depth = 1 if top & SPLIT_WORDS.keys() else 0
    folders = (name.split("/")[depth:-1] for name in tree.names if name.lower().endswith(suffixes))
    return len({parts[0] for parts in folders if parts}) > 1


def passed_over(
    names: Sequence[str], used: Sequence[str], suffixes: tuple[str, ...] = (), missing_from: str = ""
) -> tuple[str, ...]:
    """Return a note with the number of ignored files by suffix, if there are any.

    Args:
        names: all files.
        used: the files in use.
        suffixes: the suffixes of samples.
        missing_from: the reason why a sample is not used.
    """
    rest = sorted(set(names) - set(used))
    ends = [os.path.splitext(name)[1].lower() for name in rest]
    kinds = Counter(f"{end} {missing_from}" if end in suffixes else end or "without a suffix" for end in ends)
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
