"""How a figure stands in a sentence, and what of a text is a command.

Never knows what it counts, and never runs anything.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What cmd.exe and PowerShell take as it is typed.
_PLAIN_ON_WINDOWS: Final = re.compile(r"[\w.:/\\=~+-]+")


def amount(number: int, noun: str) -> str:
    """A number with its noun: ``1 tensor``, ``2,048 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Command(str):
    """A text that is a command line, or has one in it: it stays in one line, so that it can be copied."""

    __slots__ = ()


def quoted(word: str, separator: str = os.sep) -> str:
    """A word as a shell takes it; with what cannot be printed as ``$'...'``, which bash, zsh and ksh know.

    A newline between plain quotes is right, too, but a report has one line for each of its commands. Where paths have
    backslashes, a word gets double quotes: cmd.exe knows no others, and PowerShell takes them too.
    """
    if separator == "\\":
        return word if _PLAIN_ON_WINDOWS.fullmatch(word) else f'"{word}"'
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_in_quotes, word))}'"


def command_line(words: Iterable[str]) -> str:
    """Words as a line to type."""
    return " ".join(map(quoted, words))


def _in_quotes(letter: str) -> str:
    if letter.isprintable():
        return f"\\{letter}" if letter in "\\'" else letter
    # A lone surrogate of these stands for a byte of a name that is no UTF-8 (PEP 383).
    errors = "surrogateescape" if "\udc80" <= letter <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", errors))
