"""Standard output for answers, standard error for everything else."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.text import Page, clean, sentence
from ckptmove.errors import StdoutFailed, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from ckptmove.api.failures import Failure

_SIGNS: Final = "✓✗–…"
#: Errors of a write to a closed pipe: EPIPE, and on Windows, which has no SIGPIPE, also EINVAL.
_READER_GONE: Final = frozenset({errno.EPIPE} if hasattr(signal, "SIGPIPE") else {errno.EPIPE, errno.EINVAL})


class Output:
    """Standard output and standard error of one command."""

    __slots__ = ("_has_reported", "_page", "quiet", "verbose")

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose and not quiet
        self._page: Page | None = None
        self._has_reported = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A name may have characters that the encoding lacks.
                stream.reconfigure(errors="backslashreplace")

    @property
    def page(self) -> Page:
        """Width, color and character set of stdout."""
        if self._page is None:
            self._page = page_of(sys.stdout)
        return self._page

    def lines(self, lines: Iterable[str]) -> None:
        """Write lines to stdout."""
        write_answer("".join(f"{line}\n" for line in lines))

    def report(self, lines: Iterable[str]) -> None:
        """Write a report to stdout, with an empty line between reports."""
        self.lines([""] if self._has_reported else [])
        self._has_reported = True
        self.lines(lines)

    def failure(self, failure: Failure) -> None:
        """Write an error and its hint to stderr."""
        if self._has_reported:
            say("")
        path = f"{clean(failure.path)}: " if failure.path else ""
        say(f"error: {path}{sentence(failure.message)}")
        if failure.hint:
            say(f"hint: {sentence(failure.hint)}")


def page_of(stream: TextIO) -> Page:
    """Width, color and character set of a stream; rich reads ``NO_COLOR``, ``FORCE_COLOR``, ``TERM``, ``COLUMNS``."""
    try:
        _SIGNS.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        has_signs = False
    else:
        has_signs = True
    if not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return Page(unicode=has_signs)
    from rich.console import Console

    console = Console(file=stream)
    return Page(
        columns=console.width if stream.isatty() else None,
        # An old Windows console shows color codes as text.
        color=console.color_system is not None and not console.no_color and not console.legacy_windows,
        unicode=has_signs,
    )


def open_closed_streams() -> None:
    """Open the null device for each stream that the shell has closed, for example with ``2>&-``.

    In this order each stream gets its own descriptor. A file that is opened later cannot take that descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends


def suggest_command(command: str) -> None:
    """Write the next command to type to stderr."""
    say(f"next: {sentence(command)}")


def say(line: str) -> None:
    """Write a line to stderr. If stderr cannot be written, the line is lost."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def write_answer(text: str) -> None:
    """Write to stdout. If the reader has closed the pipe, the text is lost."""
    with _stdout_errors():
        sys.stdout.write(text)
        sys.stdout.flush()


def write_patch(text: str) -> None:
    """As :func:`write_answer`, in UTF-8 and with the line endings of the text; surrogate escapes become their bytes."""
    with _stdout_errors():
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _silence(sys.stdout)
        # A reader like `| head` stops early: that is no error, and the exit code stays.
        if error.errno not in _READER_GONE:
            raise StdoutFailed(reason_of(error)) from error


def _silence(stream: TextIO) -> None:
    """Send the buffered rest to the null device, so that the interpreter does not fail on it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
