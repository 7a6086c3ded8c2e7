"""Tables and words on a terminal: nothing of them is cut off. Without pandas, so that planning stays quick."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]

_PIPE = 240  # columns; a pipe has no width of its own
_FOLDED = 20  # columns that text which folds has, unless it is shorter, before others are left out for it


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: its heading, and the text of a record's cell.

    `spare` columns are left out on a narrow terminal, the last first; `folds` is for text that may take several lines.
    What does not fold is never cut.
    """

    heading: str
    cell: Callable[[Record], str]
    number: bool = True
    spare: bool = False
    folds: bool = False


def print_words(text: str) -> None:
    """Print text for people: wrapped where a terminal is narrower than its lines, as it is where there is none."""
    columns = terminal_columns()
    print(text if columns is None else "\n\n".join(_wrapped(part, columns) for part in text.split("\n\n")))


def terminal_columns() -> int | None:
    """How wide the terminal on stdout is; None where there is none."""
    console = Console()
    return console.width if console.is_terminal else None


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    spare: Sequence[str] = (),
) -> None:
    """A table of texts: the first `left` columns are words, which may fold, others numbers; `spare` as in Column."""
    columns = [
        Column(heading=name, cell=itemgetter(str(i)), number=i >= left, folds=i < left, spare=name in spare)
        for i, name in enumerate(headings)
    ]
    show_records([{str(i): text for i, text in enumerate(row)} for row in rows], columns, title=title)


def show_records(
    rows: Sequence[Record],
    columns: Sequence[Column],
    *,
    title: str = "",
    note: str = "",
    console: Console | None = None,
) -> None:
    """Print a table for people, of which nothing is cut off.

    On a terminal too narrow for it, headings take more lines, and spare columns are left out and named below. Where
    that is not enough, each row becomes some lines of its own.
    """
    console = console or _console()
    texts = [[column.heading, *(column.cell(row) for row in rows)] for column in columns]
    shown, widths = _layout(columns, texts, console.width)
    if widths:
        console.print(_table(title, [columns[i] for i in shown], [texts[i] for i in shown], widths))
    else:
        _print_in_lines(console, title, texts)
    left_out = [columns[i].heading.replace("\n", " ") for i in range(len(columns)) if widths and i not in shown]
    if left_out:
        told = f"On a terminal of {console.width} columns without: {', '.join(left_out)}."
        console.print(told, style="dim", highlight=False, markup=False, end="\n" if note else "\n\n")
    if note:
        console.print(note, style="dim", highlight=False, markup=False)


def _layout(columns: Sequence[Column], texts: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """Which columns are shown and how wide each is; no widths where even those that are not spare have no room."""
    shown = list(range(len(columns)))
    spare = [i for i in shown if columns[i].spare]
    widths = [_least(*of, _FOLDED) for of in zip(columns, texts, strict=True)]
    while spare and _left(shown, widths, width) < 0:
        shown.remove(spare.pop())
    if _left(shown, widths, width) < 0:
        widths = [_least(*of, 1) for of in zip(columns, texts, strict=True)]
    if (more := _left(shown, widths, width)) < 0:
        return shown, []
    wishes = {i: max(0, max(map(_longest_line, texts[i])) - widths[i]) for i in shown}
    for left, i in zip(range(len(shown), 0, -1), sorted(shown, key=wishes.__getitem__), strict=True):
        given = min(wishes[i], more // left)  # headings first; long text takes what is left
        widths[i] += given
        more -= given
    return shown, [widths[i] for i in shown]


def _left(shown: Sequence[int], widths: Sequence[int], width: int) -> int:
    return width - 1 - sum(widths[i] + 2 for i in shown)  # 2 between columns


def _least(column: Column, texts: Sequence[str], folded: int) -> int:
    """Columns without which something would be cut off, for text that folds at least `folded`; headings may fold."""
    heading, *cells = texts
    natural = max(map(_longest_line, cells), default=0)
    if column.folds:
        longest_word = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        natural = min(natural, max(longest_word, folded))
    return max(natural, *map(len, heading.split()), 1)


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")))  # letters of some scripts are two columns wide


def _table(title: str, columns: Sequence[Column], texts: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(title=Text(title) if title else None, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.show_header = any(column.heading for column in columns)
    table.padding = (0, 1, 0, 0)
    for column, width in zip(columns, widths, strict=True):
        heading = "\n".join(textwrap.fill(line, width) for line in column.heading.split("\n"))
        table.add_column(
            Text(heading),
            justify="right" if column.number else "left",
            width=width,
            no_wrap=not column.folds,
            overflow="fold",
        )
    for row in list(zip(*texts, strict=True))[1:]:
        table.add_row(*map(Text, row))
    return table


def _print_in_lines(console: Console, title: str, texts: Sequence[Sequence[str]]) -> None:
    headings, *rows = zip(*texts, strict=True)
    blocks = [title] if title else []
    for row in rows:
        told = [(heading.replace("\n", " "), cell) for heading, cell in zip(headings, row, strict=True) if cell]
        blocks.append("\n".join(f"{heading}: {cell}" if heading else cell for heading, cell in told))
    console.print("\n\n".join(blocks), highlight=False, markup=False, overflow="fold", end="\n\n")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE)


def _wrapped(paragraph: str, columns: int) -> str:
    """A paragraph that has a line too long: filled anew, but for indented lines, of which each stands for itself."""
    if max(map(len, paragraph.split("\n"))) <= columns:
        return paragraph
    found = []
    for indent, lines in groupby(paragraph.split("\n"), key=lambda line: line[: len(line) - len(line.lstrip())]):
        for text in lines if indent else [" ".join(lines)]:
            margin = {"initial_indent": indent, "subsequent_indent": indent}
            found += textwrap.wrap(text.strip(), columns, **margin, break_long_words=False, break_on_hyphens=False)
    return "\n".join(found)
