"""Integers in text that comes from outside: query parameters and headers of requests.

`str.isdigit` is true for characters that `int` refuses (superscript two), and `int` takes signs, spaces,
underscores and the digits of every script. Text from outside is therefore parsed here alone.
Runs on Python 3.7 with the standard library alone.
"""

from __future__ import annotations

import re
from typing import Optional

MAX_DIGITS = 18
_DIGITS = re.compile("[0-9]{1,%d}\\Z" % MAX_DIGITS)


def parse_integer(text: str, low: int, high: int) -> Optional[int]:
    """Return the integer that `text` writes in ASCII digits, or None if there is none from `low` to `high`.

    Args:
        text: what was sent, of any length.
        low: the smallest integer allowed, 0 or more.
        high: the largest integer allowed, of at most `MAX_DIGITS` digits.
    """
    if not _DIGITS.match(text):
        return None
    value = int(text)
    return value if low <= value <= high else None
