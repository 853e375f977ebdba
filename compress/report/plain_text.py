"""Sections as plain text for a terminal: tables with aligned columns, without markup."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from compress.report.blocks import Block, Cell, Heading, Pairs, Preformatted, Section, Table, Text
from compress.report.wording import clean

MOST_COLUMN = 44
"""Width of a column in characters; longer text continues on the next line."""
GAP = "  "


def render(sections: Sequence[Section]) -> str:
    """Return the sections as text."""
    parts = []
    for section in sections:
        blocks = [text for block in section.blocks for text in _rendered(block)]
        if blocks:
            parts.append("\n".join([section.title, "=" * len(section.title), "\n\n".join(blocks)]))
    return clean("\n\n".join(parts)) + "\n"


def _rendered(block: Block) -> list[str]:
    if isinstance(block, Table):
        return [_table(block)]
    if isinstance(block, Text | Heading | Preformatted):
        return [block.text]
    if isinstance(block, Pairs):
        return ["\n".join(f"{name}: {value}" for name, value in block.rows)]
    return []


def _table(table: Table) -> str:
    """Return a table; the small print of a cell is below its text."""
    rows = [[[name] for name in table.header], *([_lines(cell) for cell in row] for row in table.cells)]
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(len(table.header))]
    lines = [table.caption] if table.caption else []
    for index, row in enumerate(rows):
        lines += _row(row, widths)
        if index == 0:
            lines.append(GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def _lines(cell: Cell) -> list[str]:
    """Return the lines of a cell."""
    texts = [cell.text, cell.note if cell.style == "missing" else cell.small]
    return [line for text in texts for line in textwrap.wrap(clean(text), MOST_COLUMN)] or [""]


def _row(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    height = max(map(len, row))
    padded = [[*cell, *[""] * (height - len(cell))] for cell in row]
    return [
        GAP.join(cell[line].ljust(width) for cell, width in zip(padded, widths, strict=True)).rstrip()
        for line in range(height)
    ]
