"""Columns of a table as compact JSON: texts are stored once, and rows refer to them by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.api.document import Json


def words(title: str, cells: Iterable[str], **more: object) -> Json:
    """Return a column of texts that repeat: devices, dtypes."""
    return {"title": title, "kind": "words", **_numbered(cells), **more}


def names(title: str, cells: Sequence[str]) -> Json:
    """Return a column of dotted names. The part before the last dot is shared by the tensors of a module."""
    parts = [clean(cell).rpartition(".") for cell in cells]
    heads = _numbered(head + dot for head, dot, _ in parts)
    return {"title": title, "kind": "names", "heads": heads, "tails": _numbered(tail for _, _, tail in parts)}


def numbers(title: str, cells: Iterable[float | None], kind: str = "numbers") -> Json:
    """Return a column of numbers; ``kind`` is ``bytes`` for sizes. None is an empty cell."""
    return {"title": title, "kind": kind, "values": list(cells)}


def _numbered(cells: Iterable[str]) -> Json:
    """The distinct texts, in the order of their first use, and the number of the text in each row."""
    numbers_of: dict[str, int] = {}
    at = [numbers_of.setdefault(cell, len(numbers_of)) for cell in cells]
    return {"words": list(numbers_of), "at": at}
