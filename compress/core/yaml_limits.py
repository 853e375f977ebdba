"""Limits of YAML files, checked on the stream of events, before anything is built.

A few bytes can stand for endless values (aliases). The parser takes about 0.1 ms for each node, and 0.02 ms for each
empty line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_BYTES = 1 << 19
"""A hundred times the largest recipe, because the YAML loader is slow."""
MAX_LINES = 50_000
"""Lines without content count, too: the loader reads them one by one."""
MAX_DEPTH = 32
"""The schema has fewer than ten levels, and the loader calls itself for each."""
MAX_NODES = 20_000
"""Keys, values, maps and lists of one file: a list of 10,000 classes with their indices."""


class YamlLimitError(Exception):
    """A file exceeds a limit.

    Args:
        what: the problem.
        line: its line, from 1.
        allowed: the limit.
        hint: advice.
    """

    def __init__(self, what: str, line: int, allowed: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.line, self.allowed, self.hint = what, line, allowed, hint


def limited_events(yaml: Any, text: str) -> Iterator[Any]:
    """Yield the events of a text.

    Args:
        yaml: the parser of ruamel.yaml.
        text: the text.

    Raises:
        YamlLimitError: there are aliases, or too many nodes or levels.
    """
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

    if text.count("\n") > MAX_LINES:
        raise YamlLimitError("has too many lines", MAX_LINES + 1, f"{MAX_LINES:,}")
    depth = nodes = 0
    for event in yaml.parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise YamlLimitError("anchors and aliases (&, *) are not allowed", line, hint="write the value out")
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        nodes += isinstance(event, NodeEvent)
        if depth > MAX_DEPTH:
            raise YamlLimitError("is nested too deeply", line, f"{MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise YamlLimitError("has too many keys and values", line, f"{MAX_NODES:,}")
        yield event
