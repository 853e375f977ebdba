"""The content of the report: sections of text, tables and figures. `html` and `markdown` render the same sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_REASON = 44
"""A missing value's reason that is longer goes below the table."""
LONG_WORD = 24
"""Characters of a word that may be broken between two lines; numbers with their units are shorter."""
FEW_COLUMNS = 3
"""Columns of a table that fits a telephone."""

Style = Literal["", "measured", "predicted", "missing", "good", "bad", "unsure", "none"]
"""The origin of a measurement, or the kind of a remark; "none" is for the reason why a part is missing."""


class _Element:
    @property
    def kind(self) -> str:
        """The name of the class, by which the page's template distinguishes the blocks."""
        return type(self).__name__


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: the text, or a value with its unit.
        small: small print: the interval and the origin of a measurement.
        note: the conditions of a measurement; the reason why it is missing.
    """

    text: str
    small: str = ""
    style: Style = ""
    note: str = ""

    @property
    def is_measurement(self) -> bool:
        """Whether the cell shows a measurement."""
        return self.style in ("measured", "predicted", "missing")

    @property
    def has_long_word(self) -> bool:
        """Whether a word, such as a path or a digest, is so long that a narrow column must break it."""
        return any(len(word) > LONG_WORD for word in f"{self.text} {self.small}".split())

    @property
    def footnote(self) -> str:
        """The note, if it does not fit into the cell."""
        if self.style == "missing" and len(self.note) <= MAX_REASON:
            return ""
        return self.note

    @property
    def remark(self) -> str:
        """The small print in the cell, with the reason of a missing value if it is short."""
        if self.style != "missing":
            return self.small
        return "see note" if self.footnote else self.note


@dataclass(frozen=True)
class Table(_Element):
    """A table; the first cell of a row is its header."""

    header: tuple[str, ...]
    rows: Sequence[tuple[Cell | str, ...]]
    caption: str = ""

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, with every text as a cell."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    @property
    def is_narrow(self) -> bool:
        """Whether the table has so few columns that a telephone shows it as a table."""
        return len(self.header) <= FEW_COLUMNS

    @property
    def footnotes(self) -> list[str]:
        """The notes below the table, each once."""
        notes = [cell.footnote for row in self.cells for cell in row]
        return list(dict.fromkeys(note for note in notes if note))


@dataclass(frozen=True)
class Text(_Element):
    """A paragraph."""

    text: str
    style: Style = ""


@dataclass(frozen=True)
class Heading(_Element):
    """A heading inside a section."""

    text: str


@dataclass(frozen=True)
class Pairs(_Element):
    """Names and their values."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Preformatted(_Element):
    """A text whose lines are kept."""

    text: str


@dataclass(frozen=True)
class Figure(_Element):
    """A drawing by `charts`, which only the page shows.

    Attributes:
        caption: what explains the drawing: its marks, its axes, and what is not drawn.
        is_wide: whether it is scrolled where the page is narrower.
        data: the values of the drawing.
        see: the title of the table below that has the values, if `data` is None.
    """

    svg: str
    title: str
    caption: str = ""
    is_wide: bool = False
    data: Table | None = None
    see: str = ""


@dataclass(frozen=True)
class Picture:
    """An image in a file, with its content in words.

    `file` is the path from the folder of the report, and `source` the image as a data: URI; empty if the file is
    missing or was changed.
    """

    title: str
    text: str
    file: str
    source: str


@dataclass(frozen=True)
class Pictures(_Element):
    """Images next to each other; in Markdown the list of their files."""

    pictures: Sequence[Picture]
    caption: str


@dataclass(frozen=True)
class FileLink(_Element):
    """A link to a file in the folder of the report, and what the file is."""

    file: str
    text: str


@dataclass(frozen=True)
class Details(_Element):
    """Blocks that the page shows on request, and that the Markdown leaves out."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False


@dataclass(frozen=True)
class Columns(_Element):
    """Blocks next to each other on a wide screen."""

    columns: Sequence[Sequence[Block]]


Block = Table | Text | Heading | Pairs | Preformatted | Figure | Pictures | FileLink | Details | Columns


@dataclass(frozen=True)
class Section:
    """A part of the report under a title.

    `key` is the identifier in the page, where the title depends on the run; by default the title in lower case.
    """

    title: str
    blocks: Sequence[Block]
    key: str = ""

    @property
    def ident(self) -> str:
        """The identifier of the section in the page, to which links lead. It is the same in every report."""
        return self.key or self.title.lower().replace(" ", "-")


def missing(reason: str) -> Text:
    """Return the paragraph in place of a missing part: the reason as a sentence."""
    return Text(f"{reason[:1].upper()}{reason[1:]}.", "none")


def table(header: tuple[str, ...], rows: Sequence[tuple[Cell | str, ...]], caption: str = "") -> list[Block]:
    """Return a table; nothing if it has no rows."""
    return [Table(header, rows, caption)] if rows else []


def joined(separator: str, *parts: str) -> str:
    """Return the parts that are not empty, with a separator between them."""
    return separator.join(part for part in parts if part)


def or_missing(blocks: Sequence[Block], reason: str) -> Sequence[Block]:
    """Return the blocks, or the reason for their absence."""
    return blocks or [missing(reason)]
