"""Possible states of a disk after a power cut, computed from the operations that `fault_shim.c` recorded.

Data that a program writes is in memory first. Only `fsync` guarantees that it is on the disk: `fsync` of a file for its
content, `fsync` of a folder for the names in it. Before that, any part of it may be on the disk. The names of a folder
change in their order, and a rename is there completely or not at all, as journals of file systems guarantee. But the
content of a file may be missing although its name is there, and the folders are independent of each other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """One entry of a record: the operation, its paths, the offset in the file, and the data."""

    name: str
    path: str
    other: str
    offset: int
    data: bytes


@dataclass(eq=False)
class Node:
    """A file, folder or link: its state in memory, and the content that is certainly on the disk."""

    mode: int
    target: str | None = None
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    names: dict[str, Node] | None = None


@dataclass(frozen=True)
class Change:
    """A change of names that may not be on the disk yet: (folder, name, node or None if removed), all or nothing."""

    folder: Node
    entries: tuple[tuple[Node, str, Node | None], ...]


COUNTED = "counted"
"""The name of the entries that only count the operations that can fail; their path is the kind of operation."""


def read(trace: Path) -> list[Operation]:
    content, position, operations = trace.read_bytes(), 0, []
    while position < len(content):
        end = content.index(b"\n", position)
        name, path, other, offset, size = content[position:end].decode().split("\t")
        position = end + 1 + int(size)
        operations.append(Operation(name, path, other, int(offset), content[end + 1 : position]))
    return operations


class Disk:
    """A simulated folder: its state in memory and its possible states on the disk.

    Args:
        folder: its path in the record.
        content: a folder with its initial files, which are all on the disk.
    """

    def __init__(self, folder: Path, content: Path) -> None:
        self._path = str(folder)
        self._root = _load(content)
        self._on_disk: dict[Node, dict[str, Node]] = {}
        self._remember(self._root)
        self._pending: list[Change] = []

    def _remember(self, node: Node) -> None:
        if node.names is not None:
            self._on_disk[node] = dict(node.names)
            for child in node.names.values():
                self._remember(child)

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._root
        for part in path[len(self._path) :].split("/"):
            if part and node is not None:
                node = (node.names or {}).get(part)
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        parent, _, name = path.rpartition("/")
        folder = self._find(parent)
        assert folder is not None, path
        assert folder.names is not None, path
        return folder, name

    def apply(self, operation: Operation) -> None:
        """Apply an operation in memory."""
        path, node = operation.path, self._find(operation.path)
        if operation.name in ("create", "mkdir", "symlink"):
            new_node = Node(0o644)
            if operation.name == "mkdir":
                new_node = Node(0o755, names={})
                self._on_disk[new_node] = {}
            elif operation.name == "symlink":
                new_node = Node(0o777, operation.other)
            self._change(*self._place(path), new_node)
        elif operation.name in ("unlink", "rmdir"):
            self._change(*self._place(path), None)
        elif operation.name == "rename":
            self._rename(path, operation.other)
        elif operation.name == "sync_folder" and node is not None:
            self._sync(node)
        elif node is None or node.names is not None:
            return  # a file without a name, which cannot survive a power cut
        elif operation.name == "write":
            end = operation.offset + len(operation.data)
            node.content.extend(bytes(max(end - len(node.content), 0)))
            node.content[operation.offset : end] = operation.data
        elif operation.name == "truncate":
            node.content[operation.offset :] = bytes(max(operation.offset - len(node.content), 0))
        elif operation.name == "sync":
            node.synced = bytes(node.content)

    def _change(self, folder: Node, name: str, node: Node | None) -> None:
        self._add(Change(folder, ((folder, name, node),)))

    def _rename(self, path: str, other: str) -> None:
        source, target = self._place(path), self._place(other)
        node = self._find(path)
        self._add(Change(target[0], ((*source, None), (*target, node))))

    def _add(self, change: Change) -> None:
        _apply(change, {folder: folder.names for folder, _, _ in change.entries if folder.names is not None})
        self._pending.append(change)

    def _sync(self, folder: Node) -> None:
        """Flush a folder: its pending changes are on the disk now."""
        rest = []
        for change in self._pending:
            if any(folder is entry_folder for entry_folder, _, _ in change.entries):
                _apply(change, self._on_disk)
            else:
                rest.append(change)
        self._pending = rest

    def write(self, folder: Path, how: str, chance: random.Random) -> None:
        """Write a possible state of the disk into an empty folder.

        Args:
            folder: the empty folder.
            how: `flushed`: everything; `synced`: only what is certainly on the disk; `names`: all names, but only
                synced content; `some`: a random part.
            chance: the random generator for `some`.
        """
        names = {node: dict(entries) for node, entries in self._on_disk.items()}
        ended = set()
        for change in self._pending:
            if how in ("flushed", "names") or (how == "some" and change.folder not in ended and chance.random() < 0.8):
                _apply(change, names)
            else:
                ended.add(change.folder)
        _write(self._root, folder, names, _CONTENTS[how], chance)


def _apply(change: Change, names: dict[Node, dict[str, Node]]) -> None:
    for folder, name, node in change.entries:
        if node is None:
            names[folder].pop(name, None)
        else:
            names[folder][name] = node


def _some(node: Node, chance: random.Random) -> bytes:
    """Return by chance the synced content, the full content, the beginning of it, or zeros of the same size."""
    content = bytes(node.content)
    part = content[: chance.randrange(len(content) + 1)]
    return chance.choice((node.synced, content, part, bytes(len(content))))


_CONTENTS: dict[str, Callable[[Node, random.Random], bytes]] = {
    "flushed": lambda node, _: bytes(node.content),
    "synced": lambda node, _: node.synced,
    "names": lambda node, _: node.synced,
    "some": lambda node, chance: node.synced if node.synced == node.content else _some(node, chance),
}
HOW = tuple(_CONTENTS)


def _load(path: Path) -> Node:
    mode = path.lstat().st_mode & 0o7777
    if path.is_symlink():
        return Node(mode, os.readlink(path))
    if path.is_dir():
        return Node(mode, names={child.name: _load(child) for child in path.iterdir()})
    content = path.read_bytes()
    return Node(mode, None, bytearray(content), content)


def _write(
    node: Node,
    path: Path,
    names: dict[Node, dict[str, Node]],
    content: Callable[[Node, random.Random], bytes],
    chance: random.Random,
) -> None:
    if node.target is not None:
        path.symlink_to(node.target)
    elif node.names is None:
        path.write_bytes(content(node, chance))
        path.chmod(node.mode)
    else:
        path.mkdir(exist_ok=True)
        for name, child in sorted(names[node].items()):
            _write(child, path / name, names, content, chance)
