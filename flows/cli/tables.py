"""Lists as tables that are readable in narrow terminals, and whole in pipes and files."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flows.cli.common import out, say

_UNLIMITED = 100_000


def print_table(cells: Mapping[str, Sequence[str]], less_important: Sequence[str] = (), title: str = "") -> None:
    """Print a table whose first column, names to be copied, is always on one line: other columns make room for it.

    No word is broken. Where standard output is not a terminal, each row is on one line and has all columns.

    Args:
        cells: Texts of each column, by its header.
        less_important: Columns that are left out, in this order, if the terminal is too narrow.
        title: Text above the table.
    """
    if not out.is_terminal:
        table = _table(cells, title, whole=True)
        Console(file=out.file, width=Console(width=_UNLIMITED).measure(table).maximum).print(table)
        return
    shown, left_out = dict(cells), []
    for head in less_important:
        if _least_width(shown) <= out.width:
            break
        if shown.pop(head, None) is not None:
            left_out.append(head)
    least = _least_width(shown)
    # a console cuts what is wider than itself; a terminal that is narrower than the rest folds the lines
    (out if least <= out.width else Console(file=out.file, width=least)).print(_table(shown, title))
    if left_out:
        say(f"not shown in {out.width} columns: {', '.join(left_out)} (--json has everything)")


def _table(cells: Mapping[str, Sequence[str]], title: str, whole: bool = False) -> Table:
    name, *others = cells
    longest = max(map(len, (name, *cells[name])))
    columns = [Column(head, no_wrap=whole, min_width=_longest_word((head, *cells[head]))) for head in others]
    table = Table(
        Column(name, no_wrap=True, min_width=longest),
        *columns,
        header_style="bold",
        title=title or None,
        title_justify="left",
    )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


def _least_width(cells: Mapping[str, Sequence[str]]) -> int:
    """Width of a table with borders whose first column is not folded, and whose others are folded between words."""
    name, *others = cells
    words = [_longest_word((head, *cells[head])) for head in others]
    return max(len(name), *map(len, cells[name])) + sum(words) + 3 * len(cells) + 1


def _longest_word(texts: Iterable[str]) -> int:
    return max(map(len, " ".join(texts).split()))
