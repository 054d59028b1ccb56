"""The page that a report is written on: how wide it is, and whether it takes colour and more than ASCII.

Never asks a terminal: whoever makes a page does.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.cli.render.text import shorten, width

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MARKS: Final = {"passed": "✓", "failed": "✗", "skipped": "–"}  # noqa: RUF001  # a dash: neither yes nor no
_ASCII_MARKS: Final = {"passed": "ok", "failed": "FAILED", "skipped": "-"}
#: A column that gives way to a narrow terminal keeps at least so much.
_NARROWEST: Final = 12


class Page(NamedTuple):
    """What a stream can show.

    Attributes:
        columns: width of the terminal; None where there is none: then nothing is wrapped or cut.
        color: whether it takes ANSI colours.
        unicode: whether its encoding has more than ASCII.
    """

    columns: int | None = None
    color: bool = False
    unicode: bool = True

    def paint(self, text: str, style: str) -> str:
        """A text in a style of rich, for example ``bold red``; as it is where the page takes no colour."""
        if not self.color or not style or not text:
            return text
        from rich.color import ColorSystem  # noqa: PLC0415  # colour is for terminals; pipes should not wait for it
        from rich.style import Style  # noqa: PLC0415  # colour is for terminals; pipes should not wait for it

        # The sixteen colours that every terminal has, and that its user has chosen.
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    def mark(self, status: str) -> str:
        """The sign of a check's status; words where the encoding has no signs."""
        return _MARKS[status] if self.unicode else _ASCII_MARKS[status]

    def wrap(self, text: str, indent: int) -> list[str]:
        """A paragraph in lines, every line after the first indented.

        Args:
            text: cleaned, and itself beginning where the first line begins.
            indent: in columns.
        """
        if self.columns is None:
            return [text]
        # Names and commands stay whole, so that they can be copied.
        return textwrap.wrap(
            text,
            max(self.columns, indent + _NARROWEST),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def cut(self, text: str, indent: int = 0) -> str:
        """A text in what an indented line leaves of the terminal."""
        return text if self.columns is None else shorten(text, max(self.columns - indent, _NARROWEST))


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: its heading.
        right: whether it holds figures, which stand at its right edge.
        gives_way: whether it is cut where the terminal is too narrow, if its cells can then be told apart.
        style: style of its cells.
    """

    title: str
    right: bool = False
    gives_way: bool = False
    style: str = ""


def table(page: Page, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table.

    rich's own tables take minutes for a hundred thousand rows, and cut at the end, where names differ.

    Args:
        page: what it is written on.
        columns: headings and manners.
        rows: cleaned cells, one for each column.
    """
    widths = [
        max(width(column.title), max((width(row[place]) for row in rows), default=0))
        for place, column in enumerate(columns)
    ]
    if page.columns is not None:
        spare = page.columns - sum(widths) - 2 * (len(widths) - 1)
        for place, column in enumerate(columns):
            if column.gives_way and spare < 0:
                narrowed = max(widths[place] + spare, min(_NARROWEST, widths[place]))
                if _stay_apart({row[place] for row in rows}, narrowed):
                    spare += widths[place] - narrowed
                    widths[place] = narrowed
    yield _line(page, columns, widths, [column.title for column in columns], ["bold"] * len(columns))
    styles = [column.style for column in columns]
    for row in rows:
        yield _line(page, columns, widths, row, styles)


def _stay_apart(cells: set[str], columns: int) -> bool:
    """Whether cells that differ do so too when they are cut: names of layers and ranks differ by a number within."""
    return len({shorten(cell, columns) for cell in cells}) == len(cells)


def _line(
    page: Page, columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str], styles: Sequence[str]
) -> str:
    parts = []
    for column, room, cell, style in zip(columns, widths, cells, styles, strict=True):
        text = shorten(cell, room)
        gap = " " * (room - width(text))
        painted = page.paint(text, style)
        parts.append(gap + painted if column.right else painted + gap)
    return "  ".join(parts).rstrip()
