"""Rows of a CSV file, none of which a stray quotation mark can swallow.

In CSV a quoted cell may hold line breaks, so that one mark too many makes one cell of everything up to the next mark:
hundreds of utterances, without an error. Here a line is a row. A row over several lines is taken only if it is beyond
doubt: the marks are closed within a few lines exactly where a cell ends, it has as many cells as the header, and none
of its further lines would be a row of its own. Otherwise its first line is refused, and the next one is read by itself.
So every line that is not blank is part of a row, or is refused with its number.
"""

import csv
from collections import deque
from collections.abc import Iterator

MOST_LINES = 64
"""Lines of a row at most; no utterance has a longer transcript, and looking further costs time on each stray mark."""
_MOST_TEXT = 1 << 20
"""Characters to look ahead."""
_OPEN = (
    "a quotation mark opens a cell that does not end on this line: remove the mark, or double it and quote the cell; "
    "if the cell does hold a line break, put a space there"
)

NumberedLines = Iterator[tuple[int, str | None]]


def read_header(lines: NumberedLines) -> list[str]:
    """Cells of the first line.

    Raises:
        ValueError: a quotation mark is not closed in it, or it is not UTF-8.
    """
    _, line = next(lines, (1, ""))
    cells = None if line is None else _row_of_line(line)
    if cells is None:
        raise ValueError(f"the header cannot be read: {'it is not UTF-8' if line is None else _OPEN}")
    return cells


def read_rows(lines: NumberedLines, width: int) -> Iterator[tuple[int, list[str] | str]]:
    """Number of the first line and cells of each row after the header; text in place of cells says what is wrong.

    Args:
        lines: Numbered lines without their ends; None is a line that is not text.
        width: Cells of the header.
    """
    ahead: deque[tuple[int, str | None]] = deque()
    while found := ahead.popleft() if ahead else next(lines, None):
        number, line = found
        if line is None:
            yield number, "not UTF-8"
        elif line:
            cells, error = _cells(line)
            if cells is None and not error:
                _look_ahead(ahead, lines)
                cells, taken = _joined([line, *(text for _, text in ahead)], width)
                for _ in range(taken - 1):
                    ahead.popleft()
            yield number, cells if cells is not None else error or _OPEN


def read_tabbed(lines: NumberedLines) -> Iterator[tuple[int, list[str] | str]]:
    """Number and cells of each line of a tab-separated file, which has no quoted cells; text says what is wrong."""
    for number, line in lines:
        if line is None:
            yield number, "not UTF-8"
        elif line:
            yield number, line.split("\t")


def check_width(cells: list[str], width: int) -> str:
    """What is wrong with a row's number of cells; empty if nothing is."""
    return "" if len(cells) == width else f"{len(cells)} cells where the header has {width}"


def _look_ahead(ahead: deque[tuple[int, str | None]], lines: NumberedLines) -> None:
    size = sum(len(line or "") for _, line in ahead)
    while len(ahead) < MOST_LINES - 1 and size < _MOST_TEXT and (found := next(lines, None)):
        ahead.append(found)
        size += len(found[1] or "")


def _cells(line: str) -> tuple[list[str] | None, str]:
    """Cells of a line; None if a quoted one goes on in the next line, or, with a message, if there are none."""
    reader = csv.reader([line, ""])  # the empty line is read only if a cell goes on
    try:
        cells = next(reader)
    except csv.Error as error:
        return None, str(error)
    return (cells, "") if reader.line_num == 1 else (None, "")


def _row_of_line(line: str) -> list[str] | None:
    return _cells(line)[0]


def _joined(lines: list[str | None], width: int) -> tuple[list[str] | None, int]:
    """The row that the first few of these lines make beyond doubt, and how many lines it has; None and 1 if none."""
    reader = csv.reader((f"{line}\n" for line in _before_none(lines)), strict=True)
    try:
        cells = next(reader)
    except (csv.Error, StopIteration):
        return None, 1
    taken = reader.line_num
    rows = (_row_of_line(line) for line in lines[1:taken] if line)
    if len(cells) != width or any(row is not None and len(row) == width for row in rows):
        return None, 1
    return cells, taken


def _before_none(lines: list[str | None]) -> Iterator[str]:
    for line in lines:
        if line is None:
            return
        yield line
