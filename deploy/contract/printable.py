"""Texts from outside (labels, names, paths, messages of libraries) on their way to a terminal or a log.

A control character moves the cursor, changes the title of the window, or begins a false line. A bidirectional control
shows a text in another order. They are shown as escape sequences.
"""

from __future__ import annotations

import re
from typing import Match

UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\uffff]"
)
"""Control characters of C0 and C1, invisible and bidirectional controls, line and paragraph separators, and halves of
surrogate pairs. Source of the bidirectional controls: https://trojansource.codes, and Unicode Standard Annex 9."""
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def line(text: str) -> str:
    """Return a text that is printed as one line, with its unprintable characters as escape sequences."""
    return UNPRINTABLE.sub(_escaped, text)


def lines(text: str) -> str:
    """Return a text of several lines: line feeds and tabs stay."""
    return UNPRINTABLE.sub(lambda match: match.group() if match.group() in "\n\t" else _escaped(match), text)


def _escaped(match: Match[str]) -> str:
    code = ord(match.group())
    return _NAMED.get(match.group()) or ("\\x%02x" % code if code < 256 else "\\u%04x" % code)
