"""Escape, shorten and format text for display: text of a file must not control the terminal."""

from __future__ import annotations

from typing import Final

from ckptmove.text import escaped

#: Longest name in characters, on every stream: a name in a hostile file can have gigabytes.
LONGEST_NAME: Final = 500
_LONGEST_SENTENCE: Final = 4000
#: A line that starts with one of these is a command to the runners of GitHub or Azure.
_COMMANDS: Final = frozenset({"::", "##"})


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
