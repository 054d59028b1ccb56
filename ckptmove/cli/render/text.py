"""Text for display: escape, shorten, wrap, color and tabulate it for the width and the characters of a stream.

Text of a file must not control the terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.text import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Longest name in characters, on every stream: a name in a hostile file can have gigabytes.
LONGEST_NAME: Final = 500
_LONGEST_SENTENCE: Final = 4000
#: A line that starts with one of these is a command to the runners of GitHub or Azure.
_COMMANDS: Final = frozenset({"::", "##"})
_MARKS: Final = {"passed": "✓", "failed": "✗", "skipped": "–"}  # a dash: neither yes nor no
_ASCII_MARKS: Final = {"passed": "ok", "failed": "FAILED", "skipped": "-"}
#: Style of devices in tables.
DEVICE_STYLE: Final = "cyan"
#: Names in a list of the first ones.
_FIRST: Final = 3
#: Cells of a column for which several widths are tried.
_FEW_CELLS: Final = 100
#: Smallest width of a shortened column.
_NARROWEST: Final = 12


def clean(text: str, limit: int = LONGEST_NAME) -> str:
    r"""Make a text safe to print on one line.

    Characters that are not printable become escapes: control characters (``\x1b``), newlines (``\x0a``), bidirectional
    controls and other invisible marks (``\u202e``), lone surrogates (``\udc80``). The start of a command of CI runners,
    which look for ``::`` and ``##[`` at the start of every line, is escaped too. A text with more characters than the
    limit loses its middle.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
    if text.lstrip()[:2] in _COMMANDS:
        lead = len(text) - len(text.lstrip())
        text = f"{text[:lead]}\\x{ord(text[lead]):02x}{text[lead + 1 :]}"
    return escaped(text)


def sentence(text: str) -> str:
    """As :func:`clean`, for texts longer than a name: messages, and commands to copy."""
    return clean(text, _LONGEST_SENTENCE)


def first_names(names: Sequence[str], form: Callable[[str], str] = clean) -> str:
    """The first names, and the number of the others, for one cell or one line."""
    rest = f", +{len(names) - _FIRST:,} more" if len(names) > _FIRST else ""
    return ", ".join(map(form, names[:_FIRST])) + rest


def width(text: str) -> int:
    """The width of a cleaned text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shorten(text: str, columns: int, tail: int | None = None) -> str:
    """Shorten a cleaned text to some columns. It loses its middle, because names differ at their ends.

    Its end keeps ``tail`` columns; None for half of them.
    """
    if width(text) <= columns:
        return text
    tail = max((columns - 1) // 2, 0) if tail is None else tail
    head = max(columns - 1 - tail, 0)
    return f"{_fit(text, head)}…{_fit(text[::-1], tail)[::-1]}"


def _fit(text: str, columns: int) -> str:
    kept = text[:columns]
    while width(kept) > columns:
        kept = kept[:-1]
    return kept


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
        import textwrap

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
