"""CSV tables, read line by line. Limits apply before unreasonable contents fill the memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import IO

from compress.core.errors import DataError

MAX_LINE = 1 << 20
"""Bytes of a line; chosen, so that a file without line ends is not read as a whole."""
MAX_COLUMNS = 4096
"""Chosen, so that a row of commas alone does not take much memory."""
MAX_NAMES = 1_000_000
"""Rows of a table of files or of texts; chosen, so that a table fits into memory."""
QUOTES = "put a cell that has the delimiter, a double quote or a line end in double quotes, and double those in it"
"""The advice for a row that is not read as intended."""


def rows(stream: IO[bytes], where: str, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file with their line numbers, without empty lines."""
    reader = csv.reader(_lines(stream, where), delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            line_range = f"line {first}" if reader.line_num <= first else f"lines {first} to {reader.line_num}"
            raise DataError(
                f"is not a readable CSV file: {error}", where=f"{where}, {line_range}", hint=QUOTES
            ) from error
        if row is None:
            return
        if len(row) > MAX_COLUMNS:
            location = f"{where}, line {reader.line_num}"
            raise DataError(f"has {len(row):,} columns", where=location, allowed=f"{MAX_COLUMNS:,} columns")
        if row:
            yield reader.line_num, row


def _lines(stream: IO[bytes], where: str) -> Iterator[str]:
    number = 0
    while True:
        try:
            line = stream.readline(MAX_LINE + 1)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=where) from error
        if not line:
            return
        number += 1
        location = f"{where}, line {number}"
        if len(line) > MAX_LINE:
            raise DataError("is too long for a line of a CSV file", where=location, allowed=f"{MAX_LINE:,} bytes")
        if b"\0" in line:
            raise DataError("has a NUL byte: this is not a CSV file", where=location, allowed="text in UTF-8")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8: byte {error.object[error.start]:#04x}"
            raise DataError(reason, where=location, hint="write the file in UTF-8") from error


class CsvTable:
    """A CSV file with a header. The rows are read once, while the stream is open.

    Args:
        stream: the file.
        where: its path, for messages.
        delimiter: the character between the columns; None for a tab, a comma or a semicolon, by the header.

    Attributes:
        header: the column names; empty for an empty file.
    """

    def __init__(self, stream: IO[bytes], where: str, delimiter: str | None = None) -> None:
        if delimiter is None:
            first = next(_lines(stream, where), "")
            delimiter = next((character for character in "\t,;" if character in first), ",")
            stream.seek(0)
        self._where = where
        self._rows = rows(stream, where, delimiter)
        self.header = next(self._rows, (0, []))[1]

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield some columns in the requested order, with line numbers.

        Raises:
            DataError: a column does not exist or exists twice, or a row has more or fewer columns than the header.
        """
        header = self.header
        for name in names:
            if header.count(name) != 1:
                reason = f"has no column {name!r}" if name not in header else f"has two columns {name!r}"
                shown = ", ".join(header[:20]) + (", ..." if len(header) > 20 else "")
                allowed = shown or "none: it is empty"
                raise DataError(reason, where=self._where, allowed=allowed, hint="check data.source")
        indices = [header.index(name) for name in names]
        for number, row in self._rows:
            if len(row) != len(header):
                location = f"{self._where}, line {number}"
                allowed = f"{len(header)}, as the header has"
                raise DataError(f"has {len(row)} columns", where=location, allowed=allowed, hint=QUOTES)
            yield number, [row[index] for index in indices]
