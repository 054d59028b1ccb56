"""Format counts and sizes, quote words for a shell, and spell options for a shell or for Python."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Whether options are spelled as the arguments of a function.
_IN_PYTHON: Final = ContextVar("in_python", default=False)
#: Words that cmd.exe and PowerShell need not have quoted.
_PLAIN_ON_WINDOWS: Final = re.compile(r"[\w.:/\\=~+-]+")
_KIB: Final = 1024
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def amount(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 tensor``, ``2,048 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def some(words: Iterable[str], most: int = 1) -> str:
    """Join the first words, and count the others: ``a, b and 3 more``."""
    named = [*words]
    more = f" and {len(named) - most:,} more" if len(named) > most else ""
    return ", ".join(named[:most]) + more


def size(nbytes: float) -> str:
    """Format a byte count with a binary unit: ``512 B``, ``6.8 KiB``, ``80.0 GiB``."""
    if round(nbytes) < _KIB:
        return f"{nbytes:.0f} B"
    scaled, *units = nbytes / _KIB, *_UNITS
    while round(scaled, 1) >= _KIB and len(units) > 1:  # 1023.96 KiB is 1.0 MiB
        scaled /= _KIB
        del units[0]
    return f"{scaled:.1f} {units[0]}"


class Command(str):
    """A text that is or contains a command line. It is never wrapped, so that it can be copied."""

    __slots__ = ()


class Argument(NamedTuple):
    """An option of a command, which is an argument of a function, as a part of a :class:`Phrase` or of any other text.

    Its ``str`` is spelled for a shell; inside :func:`spelled_for_python`, for a caller of a function.

    Attributes:
        name: of the argument: ``as_root``.
        value: its value; True for a flag. None for the name alone, and False for an option that is to be left out.
    """

    name: str
    value: str | bool | None = None

    @classmethod
    def typed(cls, word: str) -> Argument:
        """The option of a word of the command line: ``--as-root``."""
        return cls(word[2:].replace("-", "_"))

    @property
    def in_shell(self) -> str:
        """``--as-root ema``."""
        if self.name == "script_args":
            return f"-- {self.value}"
        option = f"--{self.name.replace('_', '-')}"
        return f"{option} {quoted(self.value)}" if isinstance(self.value, str) else option

    @property
    def in_python(self) -> str:
        """``as_root='ema'``."""
        if self.name == "no_check":
            return "check=False"
        if self.name == "script_args":
            return f"script_args={str(self.value).split()}"
        if self.name == "limit_factor":
            return f"limits=ckptmove.limits.Limits().times({self.value})"
        return f"{self.name}={self.value!r}" if self.value else self.name

    def __str__(self) -> str:
        return self.in_python if _IN_PYTHON.get() else self.in_shell


@contextmanager
def spelled_for_python(is_for_python: bool = True) -> Iterator[None]:
    """Spell the arguments in texts for a caller of a function, in this thread."""
    token = _IN_PYTHON.set(is_for_python)
    try:
        yield
    finally:
        _IN_PYTHON.reset(token)


class ShellOnly(str):
    """A part of a :class:`Phrase` about an option that no function has."""

    __slots__ = ()


class Phrase(str):
    """A message or a hint with options, as it is spelled for a shell.

    Attributes:
        parts: the texts, and the options among them.
        in_python: the same for a caller of a function.
    """

    __slots__ = ("in_python", "parts")

    parts: tuple[str | Argument, ...]
    in_python: str

    def __new__(cls, *parts: str | Argument) -> Phrase:
        """Spell the options among some texts."""
        phrase = super().__new__(cls, "".join(one.in_shell if isinstance(one, Argument) else one for one in parts))
        phrase.parts = parts
        phrase.in_python = "".join(map(spelled_in_python, parts))
        return phrase


def spelled_in_python(text: str | Argument) -> str:
    """A text for a caller of a function: with arguments in place of options."""
    if isinstance(text, ShellOnly):
        return ""
    return text.in_python if isinstance(text, Argument | Phrase) else text


def spelled(text: str) -> str:
    """A text as :func:`spelled_for_python` says."""
    return spelled_in_python(text) if _IN_PYTHON.get() else str(text)


def quoted(word: str, separator: str = os.sep) -> str:
    """Quote a word for a shell; one with unprintable characters as ``$'...'``, which bash, zsh and ksh support.

    Plain quotes around a newline would be valid too, but a report keeps each command on one line. With the Windows
    separator a word gets double quotes: cmd.exe supports only those, and PowerShell accepts them.
    """
    if separator == "\\":
        return word if _PLAIN_ON_WINDOWS.fullmatch(word) else f'"{word}"'
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_in_quotes, word))}'"


def command_line(words: Iterable[str]) -> str:
    """Join words to a command line for a shell."""
    return " ".join(map(quoted, words))


def in_python(text: str, separator: str = os.sep) -> str:
    """A text as a literal of Python, in the quotes that :func:`quoted` does not put around a command."""
    body = repr(f"{text}\"'")[1:-4]  # with both kinds of quotes in the text, repr escapes the single ones alone
    if separator == "\\":
        return f"'{body}'"
    return '"' + body.replace('"', '\\"') + '"'


def python_command(code: str) -> Command:
    """The command that runs some Python."""
    return Command(f"python -c {quoted(code)}")


def _in_quotes(letter: str) -> str:
    if letter.isprintable():
        return f"\\{letter}" if letter in "\\'" else letter
    # A lone surrogate in this range is a byte of a name that is not valid UTF-8 (PEP 383).
    errors = "surrogateescape" if "\udc80" <= letter <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", errors))


def escaped(text: str) -> str:
    """Replace characters that are not printable by escapes, for programs; the length is not limited."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
