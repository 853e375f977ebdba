"""Parts of messages: the nearest known word, lists of allowed words, values as in YAML."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

MAX_SHOWN = 100
"""A longer value would make a message longer than two lines of a terminal."""


def shown(value: object) -> str:
    """Return a value for a message: as in YAML, on one line, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` if a known word is similar, otherwise an empty string."""
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def listing(words: Sequence[str]) -> str:
    """Return words for an `allowed:` clause."""
    return ", ".join(words) if words else "nothing"
