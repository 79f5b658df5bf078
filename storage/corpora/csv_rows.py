"""Reads CSV rows such that a stray quotation mark cannot swallow other rows.

In CSV, quoted cells may contain line breaks, so a stray quotation mark turns everything up to the next mark into one
cell: hundreds of utterances, without an error. Here, a row normally is one line. A row of several lines is accepted
only if it is unambiguous: the quotation closes within a few lines exactly at the end of a cell, the row has as many
cells as the header, and none of its further lines would be a valid row. Otherwise, its first line is reported as an
error, and the next line is read separately. So every non-blank line is either part of a row or reported with its
number.
"""

import csv
from collections import deque
from collections.abc import Collection, Iterator

from storage.corpora.base import NOT_UTF8

MOST_LINES = 64
"""Maximum lines of a row: transcripts are shorter, and every stray mark costs a search over this many lines."""
_MOST_TEXT = 1 << 20
"""Maximum number of characters to look ahead."""
_OPEN = (
    "a quotation mark opens a cell that does not end on this line: remove the mark, or double it and quote the cell; "
    "if the cell contains a line break, replace it by a space"
)

_SEPARATORS = ",;\t|"
_NEVER_QUOTED = "\t|"
"""Separators of tables whose cells are not quoted: a quotation mark is part of the text."""

NumberedLines = Iterator[tuple[int, str | None]]


def find_separator(header: str, names: Collection[str], usual: str) -> str:
    """Detect the separator of a table by its header: a comma, a semicolon, a tab, or "|".

    Args:
        header: The first line.
        names: Known names of columns. The separator is that by which most cells have one of them; if equal, or if none
            has, that with most cells.
        usual: The separator if these are equal, too.
    """

    def score(separator: str) -> tuple[int, int]:
        cells = header.split(separator)
        return sum(cell.strip().strip('"') in names for cell in cells), len(cells)

    candidates: list[str] = [usual, *_SEPARATORS]
    return max(candidates, key=score)


def read_header(lines: NumberedLines, separator: str = ",") -> list[str]:
    """Read the cells of the first line.

    Raises:
        ValueError: the line cannot be decoded, or contains an unclosed quotation mark.
    """
    _, line = next(lines, (1, ""))
    cells = None if line is None else _row_of_line(line, separator)
    if cells is None:
        raise ValueError(f"the header cannot be read: {f'it is {NOT_UTF8}' if line is None else _OPEN}")
    return [cell.strip() for cell in cells]


def read_rows(lines: NumberedLines, width: int, separator: str = ",") -> Iterator[tuple[int, list[str] | str]]:
    """Yield the rows after the header: number of the first line, and the cells or a description of the error.

    Args:
        lines: Numbered lines without line ends; None for an undecodable line.
        width: Number of cells in the header.
        separator: Between cells.
    """
    if separator in _NEVER_QUOTED:
        for number, line in lines:
            if line != "":
                yield number, NOT_UTF8 if line is None else line.split(separator)
        return
    ahead: deque[tuple[int, str | None]] = deque()
    while numbered := ahead.popleft() if ahead else next(lines, None):
        number, line = numbered
        if line is None:
            yield number, NOT_UTF8
        elif line:
            cells, error = _cells(line, separator)
            if cells is None and not error:
                _look_ahead(ahead, lines)
                cells, taken = _joined([line, *(text for _, text in ahead)], width, separator)
                for _ in range(taken - 1):
                    ahead.popleft()
            yield number, cells if cells is not None else error or _OPEN


def check_width(cells: list[str], width: int) -> str:
    """Check a row's number of cells; returns an error message or ""."""
    return "" if len(cells) == width else f"{len(cells)} cells where the header has {width}"


def _look_ahead(ahead: deque[tuple[int, str | None]], lines: NumberedLines) -> None:
    size = sum(len(line or "") for _, line in ahead)
    while len(ahead) < MOST_LINES - 1 and size < _MOST_TEXT and (numbered := next(lines, None)):
        ahead.append(numbered)
        size += len(numbered[1] or "")


def _cells(line: str, separator: str) -> tuple[list[str] | None, str]:
    """Cells of a line; None if a quoted cell continues in the next line, or, with a message, if the line is invalid."""
    reader = csv.reader([line, ""], delimiter=separator)  # the empty line is read only if a cell continues
    try:
        cells = next(reader)
    except csv.Error as error:
        most = csv.field_size_limit()
        return None, f"a cell has more than {most:,} characters: shorten it" if len(line) > most else str(error)
    return (cells, "") if reader.line_num == 1 else (None, "")


def _row_of_line(line: str, separator: str) -> list[str] | None:
    return line.split(separator) if separator in _NEVER_QUOTED else _cells(line, separator)[0]


def _joined(lines: list[str | None], width: int, separator: str) -> tuple[list[str] | None, int]:
    """The unambiguous row that starts these lines and its number of lines; None and 1 if there is none."""
    reader = csv.reader((f"{line}\n" for line in _before_none(lines)), strict=True, delimiter=separator)
    try:
        cells = next(reader)
    except (csv.Error, StopIteration):
        return None, 1
    taken = reader.line_num
    rows = (_row_of_line(line, separator) for line in lines[1:taken] if line)
    if len(cells) != width or any(row is not None and len(row) == width for row in rows):
        return None, 1
    return cells, taken


def _before_none(lines: list[str | None]) -> Iterator[str]:
    for line in lines:
        if line is None:
            return
        yield line
