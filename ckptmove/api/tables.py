"""Small HTML tables of results, for notebooks. Every text of a file is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from ckptmove.text import escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Rows of a table; a notebook prints a result after every cell.
_MOST_ROWS: Final = 10
#: Characters of a cell. A longer text loses its middle.
_LONGEST: Final = 120


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A title and a table of the first rows, which says how many others there are."""
    more = len(rows) - _MOST_ROWS
    lines = [_row("th", header), *(_row("td", row) for row in rows[:_MOST_ROWS])]
    lines += [_row("td", [f"and {more:,} more"])] if more > 0 else []
    table = f"<table>{''.join(lines)}</table>" if rows else ""
    return f"<div><b>{_text(title)}</b>{table}</div>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(str(cell))}</{tag}>' for cell in cells)}</tr>"


def _text(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return escape(escaped(text))
