"""Words for messages: the nearest known word, lists of what is allowed, values as a user wrote them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

MAX_SHOWN = 100


def shown(value: object) -> str:
    """A value for a message: as it would stand in YAML, one line, not too long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def nearest(word: object, known: Iterable[str]) -> str:
    """`did you mean 'x'?` if a known word is close, otherwise nothing."""
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def listing(words: Sequence[str]) -> str:
    """Words for an `allowed:` clause."""
    return ", ".join(words) if words else "nothing"
