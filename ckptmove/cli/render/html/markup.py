"""HTML from nested calls: a text is escaped unless it is markup already."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from ckptmove.text import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Elements without content and end tag.
_VOID: Final = frozenset({"meta", "rect"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | bool) -> Markup:
    """Return an element.

    Args:
        children: its content: :class:`Markup` as it is, other text escaped.
        attributes: by their names, with ``_`` for ``-`` and ``class_`` for ``class``. False leaves one out, True has no
            value.
    """
    start = "".join(_attribute(name, value) for name, value in attributes.items() if value is not False)
    end = "" if tag in _VOID else f"{joined(children)}</{tag}>"
    return Markup(f"<{tag}{start}>{end}")


def joined(children: Iterable[str]) -> Markup:
    """Return the concatenation of markup and of texts, which are escaped."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


def text(content: str) -> Markup:
    """Return a text as HTML. Characters that are not printable become escapes, as in all reports."""
    return Markup(html.escape(escaped(content)))


def _attribute(name: str, value: str | float | bool) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(str(value))}"'
