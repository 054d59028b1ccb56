"""Words and figures as people read them, with nothing in them that a terminal would obey.

Never trusts a text that comes from a file, and never prints.
"""

from __future__ import annotations

import math
from typing import Final

#: Longer names are cut even where there is no terminal: nobody reads them, and a hostile file can hold gigabytes.
LONGEST_NAME: Final = 500
_LONGEST_SENTENCE: Final = 4000
#: What a line begins with that the runner of GitHub's or Azure's CI obeys.
_COMMANDS: Final = frozenset({"::", "##"})
_KIB: Final = 1024
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def clean(text: str, limit: int = LONGEST_NAME) -> str:
    r"""A text that is safe to print on one line.

    Whatever is not printable becomes an escape: control characters (``\x1b``), newlines (``\x0a``), bidirectional
    controls and other invisible marks (``\u202e``), lone surrogates (``\udc80``). So does what begins a command of the
    runners of CI, which look for ``::`` and ``##[`` at the start of every line.

    Args:
        text: from a file, a path or the command line.
        limit: longest result in characters, escapes not counted; what is cut goes from the middle.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
    if text.lstrip()[:2] in _COMMANDS:
        lead = len(text) - len(text.lstrip())
        text = f"{text[:lead]}\\x{ord(text[lead]):02x}{text[lead + 1 :]}"
    return escaped(text)


def escaped(text: str) -> str:
    """A text with an escape in the place of each character that is not printable; of any length, for programs."""
    return text if text.isprintable() else "".join(map(_escape, text))


def sentence(text: str) -> str:
    """As :func:`clean`, for what is longer than a name: messages, and commands to copy."""
    return clean(text, _LONGEST_SENTENCE)


def _escape(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"  # noqa: PLR2004  # Python's own escapes


def size(nbytes: float) -> str:
    """Bytes for people: ``512 B``, ``6.8 KiB``, ``80.0 GiB``."""
    if nbytes < _KIB:
        return f"{nbytes:.0f} B"
    power = min(int(math.log2(nbytes)) // 10, len(_UNITS))
    return f"{nbytes / _KIB**power:.1f} {_UNITS[power - 1]}"


def width(text: str) -> int:
    """Columns that a cleaned text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415  # not worth its import for plain names

    return cell_len(text)


def shorten(text: str, columns: int) -> str:
    """A cleaned text in at most so many columns: what does not fit goes from the middle, where names say least."""
    if width(text) <= columns:
        return text
    tail = max((columns - 1) // 2, 0)
    head = max(columns - 1 - tail, 0)
    return f"{_fit(text, head)}…{_fit(text[::-1], tail)[::-1]}"


def _fit(text: str, columns: int) -> str:
    kept = text[:columns]
    while width(kept) > columns:
        kept = kept[:-1]
    return kept
