"""The report as Markdown, and sections as plain text for a terminal: no markup, tables with aligned columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from compress.report.blocks import (
    Block,
    Cell,
    Columns,
    FileLink,
    Heading,
    Pairs,
    Pictures,
    Preformatted,
    Section,
    Table,
    Text,
)
from compress.report.verdict import Overview
from compress.report.wording import MAX_PROSE, clean, shorten

MAX_PARAGRAPH = 1000  # chosen; bounds text that is not ours

#: Text in which no renderer finds markup, a link, a mention, an issue or an emoji.
_HARMLESS = re.compile(
    r"(?!.*(www\.|GH-\d))([^\W_]|(?<=[^\W_])_(?=[^\W_])|:(?= )|[ ,;.()'/=+%?×→≥≤…−“”·✓✕▲■»○-])*",  # noqa: RUF001
    re.IGNORECASE,
)
_INTERVAL = re.compile(r"\[[+−\d.,]+, [+−\d.,]+\](?!\()")  # noqa: RUF001
_FENCES = re.compile("`+")


def page(overview: Overview, sections: Sequence[Section]) -> str:
    """Return the report in Markdown, as GitHub and GitLab read it."""
    parts = [
        f"# {quote(shorten(overview.name, 100))}: {quote(overview.status)}",
        quote(overview.verdict, MAX_PARAGRAPH),
        *(["\n".join(f"- {quote(reason, MAX_PARAGRAPH)}" for reason in overview.reasons)] if overview.reasons else []),
        *([quote(overview.headline, MAX_PARAGRAPH)] if overview.headline else []),
    ]
    if overview.error is not None:
        error = overview.error
        message = quote(error.message, 500)
        parts.append(
            f"> **{quote(error.heading)}**, exit code {error.exit_code}: {message}\n>\n> {quote(error.valid, 500)}"
        )
    parts += _steps(overview)
    for section in sections:
        blocks = [text for block in section.blocks for text in _rendered(block)]
        if blocks:
            parts += [f"## {quote(section.title)}", *blocks]
    return "\n\n".join(parts) + "\n"


def _steps(overview: Overview) -> list[str]:
    """Return the next steps."""
    if not overview.steps:
        return []
    lines = []
    for index, step in enumerate(overview.steps, 1):
        lines.append(f"{index}. {quote(step.text)}")
        if step.command:
            command = shorten(clean(step.command), MAX_PROSE)
            fence = "``" + _fence(command)
            lines.append(f"\n   {fence}sh\n   {command}\n   {fence}\n")
    return ["## Next steps", "\n".join(lines).rstrip("\n")]


def quote(text: str, limit: int = MAX_PROSE) -> str:
    """Return a string, unchanged if it is harmless, otherwise as a code span; safe in a table."""
    text = shorten(clean(text), limit) or "(empty)"
    if _HARMLESS.fullmatch(_INTERVAL.sub("", text)):
        return text
    fence = _fence(text)
    if "`" in (text[0], text[-1]):
        text = f" {text} "
    return f"{fence}{text}{fence}".replace("|", "\\|")


def _fence(text: str) -> str:
    """Return more backticks than there are in any run of the text."""
    return "`" * (1 + max((len(run) for run in _FENCES.findall(text)), default=0))


def _rendered(block: Block) -> list[str]:
    """Return a block as paragraphs; figures and details are in the page alone."""
    if isinstance(block, Table):
        return [_table(block)]
    if isinstance(block, Text):
        return [quote(block.text, MAX_PARAGRAPH)]
    if isinstance(block, Heading):
        return [f"### {quote(block.text)}"]
    if isinstance(block, Pairs):
        return ["\n".join(f"- {quote(name)}: {quote(value)}" for name, value in block.rows)]
    if isinstance(block, Preformatted):
        text = clean(block.text)
        fence = "``" + _fence(text)
        return [f"{fence}\n{text}\n{fence}"]
    if isinstance(block, FileLink):
        return [f"- {quote(block.file)}: {quote(block.text)}"]
    if isinstance(block, Pictures):
        lines = [
            f"- {quote(picture.title)}, {quote(picture.file)}: {quote(picture.text)}" for picture in block.pictures
        ]
        return [quote(block.caption), "\n".join(lines)]
    if isinstance(block, Columns):
        return [text for column in block.columns for inner in column for text in _rendered(inner)]
    return []


def _table(table: Table) -> str:
    lines = [_row([quote(name) for name in table.header]), _row(["---"] * len(table.header))]
    lines += [_row([_cell(cell) for cell in row]) for row in table.cells]
    if table.caption:
        lines[:0] = [quote(table.caption, MAX_PARAGRAPH), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    """Return a measurement with its interval and its origin, or the reason why it is missing; or a text."""
    if cell.style == "missing":
        return f"missing: {quote(cell.note)}"
    if cell.is_measurement:
        return f"**{quote(cell.text)}** {quote(cell.small)}"
    if cell.small:
        return f"{quote(cell.text)} ({quote(cell.small)})"
    return quote(cell.text)


MOST_COLUMN = 44
"""Width of a column in characters; longer text continues on the next line."""
GAP = "  "


def plain_text(sections: Sequence[Section]) -> str:
    """Return the sections as text."""
    parts = []
    for section in sections:
        blocks = [text for block in section.blocks for text in _plain_lines(block)]
        if blocks:
            parts.append("\n".join([section.title, "=" * len(section.title), "\n\n".join(blocks)]))
    return clean("\n\n".join(parts)) + "\n"


def _plain_lines(block: Block) -> list[str]:
    if isinstance(block, Table):
        return [_plain_table(block)]
    if isinstance(block, Text | Heading | Preformatted):
        return [block.text]
    if isinstance(block, Pairs):
        return ["\n".join(f"{name}: {value}" for name, value in block.rows)]
    return []


def _plain_table(table: Table) -> str:
    """Return a table; the small print of a cell is below its text."""
    rows = [[[name] for name in table.header], *([_lines(cell) for cell in row] for row in table.cells)]
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(len(table.header))]
    lines = [table.caption] if table.caption else []
    for index, row in enumerate(rows):
        lines += _plain_row(row, widths)
        if index == 0:
            lines.append(GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def _lines(cell: Cell) -> list[str]:
    """Return the lines of a cell."""
    texts = [cell.text, cell.note if cell.style == "missing" else cell.small]
    return [line for text in texts for line in textwrap.wrap(clean(text), MOST_COLUMN)] or [""]


def _plain_row(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    height = max(map(len, row))
    padded = [[*cell, *[""] * (height - len(cell))] for cell in row]
    return [
        GAP.join(cell[line].ljust(width) for cell, width in zip(padded, widths, strict=True)).rstrip()
        for line in range(height)
    ]
