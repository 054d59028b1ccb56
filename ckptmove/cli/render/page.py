"""Wrap, color and tabulate text for the width and the character set of a stream."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.cli.render.text import shorten, width

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MARKS: Final = {"passed": "✓", "failed": "✗", "skipped": "–"}  # a dash: neither yes nor no
_ASCII_MARKS: Final = {"passed": "ok", "failed": "FAILED", "skipped": "-"}
#: Style of devices in tables.
DEVICE_STYLE: Final = "cyan"
#: Cells of a column for which several widths are tried.
_FEW_CELLS: Final = 100
#: Smallest width of a shortened column.
_NARROWEST: Final = 12


class Page(NamedTuple):
    """Width, color and character set of a stream."""

    columns: int | None = None  # width of the terminal, or None for other streams: then nothing is wrapped or shortened
    color: bool = False  # whether ANSI colors are shown
    unicode: bool = True  # whether the encoding has more than ASCII

    def paint(self, text: str, style: str) -> str:
        """Style a text if colors are shown; ``style`` is one of rich, for example ``bold red``."""
        if not self.color or not style or not text:
            return text
        from rich.color import ColorSystem
        from rich.style import Style

        # The 16 standard colors, which users choose in their terminal.
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    def mark(self, status: str) -> str:
        """The sign of a status; a word if the encoding lacks the signs."""
        return _MARKS[status] if self.unicode else _ASCII_MARKS[status]

    @property
    def separator(self) -> str:
        """The text between facts on one line."""
        return " · " if self.unicode else " - "

    def wrap(self, text: str, indent: int) -> list[str]:
        """Wrap a cleaned text; lines after the first are indented by ``indent`` columns."""
        if self.columns is None:
            return [text]
        # Names and commands are not broken, so that they can be copied.
        return textwrap.wrap(
            text,
            max(self.columns, indent + _NARROWEST),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def cut(self, text: str, indent: int = 0) -> str:
        """Shorten a text to the width of the terminal, less ``indent`` columns."""
        return text if self.columns is None else shorten(text, max(self.columns - indent, _NARROWEST))


class Column(NamedTuple):
    """A column of a table."""

    title: str  # heading
    right: bool = False  # whether cells are aligned right, as numbers are
    #: whether cells are shortened on a narrow terminal, unless different cells would become equal.
    gives_way: bool = False
    style: str = ""  # style of the cells


def table(page: Page, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; ``rows`` holds cleaned cells, one for each column.

    A table of rich takes minutes for 100,000 rows, and cuts cells at the end, where names differ.
    """
    widths = [
        max(width(column.title), max((width(row[place]) for row in rows), default=0))
        for place, column in enumerate(columns)
    ]
    tails: list[int | None] = [None] * len(widths)
    if page.columns is not None:
        spare = page.columns - sum(widths) - 2 * (len(widths) - 1)
        for place, column in enumerate(columns):
            if column.gives_way and spare < 0:
                least = max(widths[place] + spare, min(_NARROWEST, widths[place]))
                narrowed, tails[place] = _narrowed({row[place] for row in rows}, least, widths[place])
                spare += widths[place] - narrowed
                widths[place] = narrowed
    rooms = list(zip(widths, tails, strict=True))
    yield _line(page, columns, rooms, [column.title for column in columns], ["bold"] * len(columns))
    styles = [column.style for column in columns]
    for row in rows:
        yield _line(page, columns, rooms, row, styles)


def _narrowed(cells: set[str], least: int, most: int) -> tuple[int, int | None]:
    """The fewest columns in which different cells stay different when shortened, and those after the ellipsis.

    Names of layers differ by a number in the middle, and paths of files by a folder in front of a long name.
    """
    for room in range(least, most) if len(cells) <= _FEW_CELLS else (least,):
        for tail in ((room - 1) // 2, (room - 1) * 3 // 4, (room - 1) * 7 // 8):
            if len({shorten(cell, room, tail) for cell in cells}) == len(cells):
                return room, tail
    return most, None


def _line(
    page: Page,
    columns: Sequence[Column],
    rooms: Sequence[tuple[int, int | None]],
    cells: Sequence[str],
    styles: Sequence[str],
) -> str:
    parts = []
    for column, (room, tail), cell, style in zip(columns, rooms, cells, styles, strict=True):
        text = shorten(cell, room, tail)
        gap = " " * (room - width(text))
        painted = page.paint(text, style)
        parts.append(gap + painted if column.right else painted + gap)
    return "  ".join(parts).rstrip()
