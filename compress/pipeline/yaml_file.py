"""A YAML file as plain values, with the line of every key.

YAML 1.2: `1e-3` is a number, `no` is a string. Duplicate keys, anchors, aliases, tags,
infinity, control characters and more than one document are refused: a pipeline file says
everything once, and every value in it fits into a one-line message.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.core.errors import PipelineError, shown
from compress.core.yaml_limits import MAX_BYTES, YamlLimitError, limited_events

Location = tuple[str | int, ...]
MAX_INTEGER = (1 << 63) - 1
"""The largest signed 64-bit integer: numpy and JSON readers of other languages take no larger one."""
_INVALID_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line separators, and unpaired surrogates."""


@dataclass(frozen=True)
class Document:
    """A parsed file.

    Attributes:
        path: the file.
        value: maps, lists, strings, numbers, booleans and None.
        lines: line (from 1) of each key and list item, by its location; empty for content that was not read from a
            file.
    """

    path: Path
    value: Any
    lines: dict[Location, int]

    @property
    def root(self) -> DocumentNode:
        """The value of the whole file."""
        return DocumentNode(self, (), self.value)

    def where(self, location: Location) -> str:
        """Return `file:line: key` for a message: for a missing key the line of its parent; without lines no line."""
        known = location
        while known not in self.lines and known:
            known = known[:-1]
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        line = f":{self.lines.get(known, 1)}" if self.lines else ""
        return f"{self.path}{line}" + (f": {dotted}" if dotted else "")


@dataclass(frozen=True)
class DocumentNode:
    """A value in a document.

    Attributes:
        document: the file.
        location: keys and indices that lead to the value.
        value: the value.
    """

    document: Document
    location: Location
    value: Any

    def child(self, key: str | int) -> DocumentNode:
        """Return an item of a map or a list."""
        return DocumentNode(self.document, (*self.location, key), self.value[key])

    def where(self, *inner: str | int) -> str:
        """Return file, line and location of the value, or of a value in it, for a message."""
        return self.document.where((*self.location, *inner))

    def error(self, what: str, *inner: str | int, allowed: str = "", hint: str = "") -> PipelineError:
        """Return an error at the value, or at a value in it."""
        return PipelineError(what, where=self.where(*inner), allowed=allowed, hint=hint)


def read(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        PipelineError: not there, not readable, not YAML, or more than plain YAML.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise PipelineError(
            f"cannot be read: {error.strerror}", where=str(path), hint="give the path of a pipeline file"
        ) from error
    if len(content) > MAX_BYTES:
        raise PipelineError("is too large for a pipeline file", where=str(path), allowed=f"{MAX_BYTES} bytes")
    try:
        return _parse(content.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PipelineError("is not a text file in UTF-8", where=f"{path}:{line}") from error


def _parse(text: str, path: Path) -> Document:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    lines: dict[Location, int] = {}
    yaml = YAML(typ="safe", pure=True)
    try:
        _refuse_extras(yaml, text, path)
        root = yaml.compose(text)
        if root is None:
            raise PipelineError("is empty", where=str(path), hint="start from the shipped pipeline.yaml")
        return Document(path, _plain(yaml, root, (), lines, path), lines)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        begun = error.context_mark.line + 1 if error.context_mark else line
        problem = " ".join(part for part in (error.context, error.problem) if part)
        since = f" (begun in line {begun})" if begun != line else ""
        raise PipelineError(f"is not valid YAML: {problem}{since}", where=f"{path}:{line}") from error
    except YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        first = str(error).splitlines()[0]
        raise PipelineError(f"is not valid YAML: {first}", where=f"{path}:{line}") from error
    except (ValueError, OverflowError) as error:  # the parser's own, for \U with more than 10FFFF
        raise PipelineError(
            "is not valid YAML: an escape sequence is not a valid character", where=str(path)
        ) from error


def _refuse_extras(yaml: Any, text: str, path: Path) -> None:
    """Refuse tags, other versions and more documents, in addition to the limits of every YAML file."""
    from ruamel.yaml.events import DocumentStartEvent

    documents = 0
    try:
        for event in limited_events(yaml, text):
            where = f"{path}:{event.start_mark.line + 1}"
            if getattr(event, "tag", None):
                raise PipelineError(f"the tag {event.tag!r} is not allowed", where=where, hint="remove it")
            if isinstance(event, DocumentStartEvent) and event.version and tuple(event.version) != (1, 2):
                raise PipelineError("the version in the %YAML line is not allowed", where=where, allowed="1.2")
            documents += isinstance(event, DocumentStartEvent)
            if documents > 1:
                raise PipelineError("a second document (---) is not allowed", where=where)
    except YamlLimitError as error:
        where = f"{path}:{error.line}"
        raise PipelineError(error.what, where=where, allowed=error.allowed, hint=error.hint) from error


def _plain(yaml: Any, node: Any, location: Location, lines: dict[Location, int], path: Path) -> Any:
    """Return a composed node as plain values, and fill `lines`."""
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    line = node.start_mark.line + 1
    lines.setdefault(location, line)
    if isinstance(node, SequenceNode):
        return [_plain(yaml, item, (*location, i), lines, path) for i, item in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        return _scalar(yaml, node, f"{path}:{line}")
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key, str) or key == "<<" or _INVALID_CHARACTER.search(key):
            raise PipelineError("a key must be a plain word; merging (<<) is not allowed", where=f"{path}:{line}")
        if key in result:
            first = lines[(*location, key)]
            raise PipelineError(
                f"the key {key!r} occurs twice (first in line {first})", where=f"{path}:{line}", hint="remove one"
            )
        lines[(*location, key)] = line
        result[key] = _plain(yaml, value_node, (*location, key), lines, path)
    return result


def _scalar(yaml: Any, node: Any, where: str) -> Any:
    kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
    if kind not in ("null", "bool", "int", "float"):
        if refusal := _INVALID_CHARACTER.search(node.value):
            raise PipelineError(
                f"the text contains the character {refusal[0]!r}", where=where, allowed="one line of text"
            )
        return str(node.value)
    try:
        value = yaml.constructor.construct_object(node)
    except ValueError as error:
        raise PipelineError(f"{shown(node.value)} is not a number", where=where) from error
    if kind == "int" and abs(value) > MAX_INTEGER:
        raise PipelineError(f"{shown(node.value)} is too large", where=where, allowed=f"numbers up to {MAX_INTEGER}")
    if kind == "float" and not math.isfinite(value):
        raise PipelineError(f"{shown(node.value)} is infinite or not a number", where=where, allowed="finite numbers")
    return value
