"""Apply edits to the source of the user's files: encoding, line endings and indentation stay. Does not import torch."""

from __future__ import annotations

import difflib
import io
import os
import re
import tokenize
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDING: Final = re.compile(r"(\r\n|\r|\n)")
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")


class FixNotWritten(WriteFailed):
    """A file of the user could not be written: it has its old content. ``reason`` is the message of the system."""

    kind = "fix-not-written"


class Edit(NamedTuple):
    """One line to insert into a file, or to put in place of some lines."""

    path: str  # absolute path of the file, as Python names it (`co_filename`)
    how: str  # `before`, `after` or `in place of`
    first: int  # number of the first of the lines that `how` refers to, from 1
    last: int  # number of the last one
    text: str  # the new line. It is indented as line `first`.
    sha256: str = ""  # `digest` of the lines that the numbers refer to

    @property
    def span(self) -> tuple[int, int]:
        """Indexes of the lines that the new line replaces: start and exclusive end; equal for an insertion."""
        return {"before": (self.first - 1,) * 2, "after": (self.last,) * 2}.get(self.how, (self.first - 1, self.last))

    def edited(self, lines: Sequence[str]) -> list[str]:
        """The lines of the file with the edit."""
        begin, end = self.span
        return [*lines[:begin], self._indented(lines[self.first - 1]), *lines[end:]]

    def applied(self, data: bytes) -> bytes:
        """The bytes of the file with the edit. A new line has the line ending of the line that it is put next to."""
        encoding, text = _decoded(data)
        pieces = _ENDING.split(text)  # lines at even indexes, line endings at odd ones
        begin, end = self.span
        line = self._indented(pieces[2 * self.first - 2])
        ending = next(iter(pieces[2 * self.first - 1 :: 2] or pieces[1::2]), "\n")
        if begin < end:
            pieces[2 * begin : 2 * end - 1] = [line]
        elif 2 * begin < len(pieces):
            if ending == "\r" and pieces[2 * begin : 2 * begin + 2] == ["", "\n"]:
                ending = "\r\n"  # the two would be one ending
            pieces[2 * begin : 2 * begin] = [line, ending]
        else:  # after a last line without a line ending
            pieces += [ending, line]
        return "".join(pieces).encode(encoding)

    def number_before(self, number: int) -> int:
        """Number that a line of the edited file has without the edit; the new line keeps its number."""
        begin, end = self.span
        return number - 1 + end - begin if number > begin + 1 else number

    def _indented(self, line: str) -> str:
        return line[: len(line) - len(line.lstrip())] + self.text


def digest(lines: Sequence[str]) -> str:
    r"""SHA-256 of the lines of a file in UTF-8, each with ``\n``: independent of encoding and line endings."""
    import hashlib

    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def lines_of(data: bytes) -> list[str]:
    """The lines of a Python file, without line endings."""
    encoding, text = _decoded(data)
    if text.encode(encoding) != data:
        raise UnicodeError(f"{encoding} changes bytes of the file")
    lines = _ENDING.split(text)[::2]
    return lines if lines[-1] else lines[:-1]


def _decoded(data: bytes) -> tuple[str, str]:
    """Encoding and text of a Python file, by its byte order mark or its coding cookie."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return encoding, data.decode(encoding)


def diff_of(path: str, before: bytes, after: bytes) -> str:
    """Unified diff of a file, for ``git apply`` and ``patch -p1``. Bytes that are not UTF-8 are surrogate escapes."""
    name = path.replace(os.sep, "/") + "\t" * (" " in path)  # the tab ends a name with spaces
    old, new = (_LINE.findall(data.decode("utf-8", "surrogateescape")) for data in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
