"""The one door to the terminal: the answer on stdout, everything else on stderr.

Never decides what to say, and never writes to a reader who has gone.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from enum import Enum
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.page import Page
from ckptmove.cli.render.text import clean, sentence
from ckptmove.errors import StdoutFailed, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from ckptmove.cli.render.answers import Failure
    from ckptmove.cli.render.document import Json

_SIGNS: Final = "✓✗–…"  # noqa: RUF001  # what reports are written with
#: What a closed pipe says to who writes to it; Windows, which has no SIGPIPE, says EINVAL.
_READER_GONE: Final = frozenset({errno.EPIPE} if hasattr(signal, "SIGPIPE") else {errno.EPIPE, errno.EINVAL})


class Format(str, Enum):
    """How the answer is written."""

    HUMAN = "human"
    JSON = "json"
    GITHUB = "github"


class Output:
    """What one command says.

    Attributes:
        format: how the answer is written.
        quiet: whether people get one line a file, and no hints.
        verbose: whether they get everything.
    """

    __slots__ = ("_has_reported", "_page", "format", "quiet", "verbose")

    def __init__(self, form: Format, *, quiet: bool = False, verbose: bool = False) -> None:
        self.format = form
        self.quiet = quiet
        self.verbose = verbose and not quiet
        self._page: Page | None = None
        self._has_reported = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A name that the encoding lacks must not end the report.
                stream.reconfigure(errors="backslashreplace")

    @property
    def is_watched(self) -> bool:
        """Whether people wait for the answer, and want to see how far it is."""
        return self.format is Format.HUMAN and not self.quiet

    @property
    def page(self) -> Page:
        """What stdout can show."""
        if self._page is None:
            self._page = page_of(sys.stdout)
        return self._page

    def lines(self, lines: Iterable[str]) -> None:
        """Write the answer.

        Raises:
            StdoutFailed: stdout does not take it.
        """
        write_answer("".join(f"{line}\n" for line in lines))

    def report(self, lines: Iterable[str]) -> None:
        """Write a report of several lines, apart from the one before it.

        Raises:
            StdoutFailed: stdout does not take it.
        """
        self.lines([""] if self._has_reported else [])
        self._has_reported = True
        self.lines(lines)

    def document(self, value: Json) -> None:
        """Write the one document of ``--json``: in one line for programs, indented for a terminal.

        Raises:
            StdoutFailed: stdout does not take it.
        """
        from ckptmove.cli.render.document import dumps  # noqa: PLC0415  # people do not wait for what programs read

        self.lines([dumps(value, indent=2 if sys.stdout.isatty() else None)])

    def failure(self, failure: Failure) -> None:
        """Say what went wrong, and what to do next; in ``--json`` the document says it too."""
        if self.format is Format.GITHUB:
            from ckptmove.cli.render.github import failure_line  # noqa: PLC0415  # only an annotation is written with it

            self.lines([failure_line(failure)])
            return
        if self._has_reported:
            say("")
        path = f"{clean(failure.path)}: " if failure.path else ""
        say(f"error: {path}{sentence(failure.message)}")
        if failure.hint:
            say(f"hint: {sentence(failure.hint)}")


def page_of(stream: TextIO) -> Page:
    """What a stream can show; ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and ``COLUMNS`` count, as rich reads them."""
    try:
        _SIGNS.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        has_signs = False
    else:
        has_signs = True
    if not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return Page(unicode=has_signs)
    from rich.console import Console  # noqa: PLC0415  # a pipe should not wait for what only a terminal has

    console = Console(file=stream)
    return Page(
        columns=console.width if stream.isatty() else None,
        # An old console of Windows would show the codes of colours as text.
        color=console.color_system is not None and not console.no_color and not console.legacy_windows,
        unicode=has_signs,
    )


def open_closed_streams() -> None:
    """Give the streams that the shell has closed, as with ``2>&-``, somewhere to go: nobody wants what they say.

    In this order each gets its own descriptor, so that no file that is opened later takes the place of one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  # for as long as the process lives


def suggest(command: str) -> None:
    """Name the next command to type."""
    say(f"next: {sentence(command)}")


def say(line: str) -> None:
    """Write a line to stderr; where nobody takes it, it is lost."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def write_answer(text: str) -> None:
    """Write to stdout; where the reader has gone, it is lost.

    Raises:
        StdoutFailed: stdout does not take it.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _silence(sys.stdout)
        # As with `| head`: whoever read has seen enough, and the exit code still tells the truth.
        if error.errno not in _READER_GONE:
            raise StdoutFailed(reason_of(error)) from error


def _silence(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not fail on it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
