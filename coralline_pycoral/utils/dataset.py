"""Label files."""

from __future__ import annotations

import re
from typing import Dict

_NUMBERED = re.compile(r"(\d+)[:\s]+(.*)", re.DOTALL)


def read_label_file(file_path: str) -> Dict[int, str]:
    """Return the class names in a text file, UTF-8, by class index.

    A line is `3:cat`, `3 cat` or `cat`. A name without an index has the number of its line, from 0.
    """
    labels = {}
    with open(file_path, encoding="utf-8") as stream:
        for row, line in enumerate(stream):
            text = line.strip()
            match = _NUMBERED.match(text)
            if match:
                labels[int(match.group(1))] = match.group(2)
            else:
                labels[row] = text
    return labels
