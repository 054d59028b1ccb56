"""``--report KIND=FILE``: a document about a whole command, written to a file at its end."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptmove.errors import OutputIsNoReport, ReportFailed, UsageError, WriteFailed, reason_of
from ckptmove.io.locations import same_file
from ckptmove.io.sink import FileSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.render.answers import Summary
    from ckptmove.cli.render.renderer import Document


class ReportFile:
    """The file of one document.

    Args:
        path: the file; an earlier report of this kind is replaced.
        document: collects the answers.
        others: paths that the command reads or writes, and the files of other reports.

    Raises:
        UsageError: if ``path`` is ``-``.
        OutputIsNoReport: if the file is one of the others, or is not an earlier report.
        ReportFailed: if the file cannot be written. It is tried at once, before hours are spent on checks.
    """

    def __init__(self, path: str, document: Document, others: Sequence[str]) -> None:
        if path == "-":
            raise UsageError("a report is not written to standard output; use ./- for a file named -")
        path = os.path.realpath(path) if os.path.islink(path) else path  # the link stays
        if any(_is_same(other, path) for other in others):
            raise OutputIsNoReport("the report would replace a checkpoint or another output of this command", path=path)
        if not _is_replaceable(path, document.head):
            raise OutputIsNoReport(f"the report would replace a file that is not {document.title}", path=path)
        with _open_sink(path):
            pass  # an uncommitted sink leaves no file
        self.path = path
        self.document = document

    def write(self, summary: Summary) -> None:
        """Write the document as UTF-8.

        Raises:
            ReportFailed: if the file cannot be written.
        """
        with _open_sink(self.path) as sink:
            sink.write(self.document.document(summary).encode("utf-8", "backslashreplace"))
            sink.commit()


def _is_same(one: str, other: str) -> bool:
    """Whether two paths lead to one file, which may not exist yet."""
    try:
        return same_file(one, other) or os.path.realpath(one) == os.path.realpath(other)
    except ValueError:  # a null byte: writing the file fails with a better message
        return False


def _is_replaceable(path: str, head: bytes) -> bool:
    """Whether the file is missing, empty, or an earlier report. A path that is no file fails when it is written."""
    if not os.path.isfile(path):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(head)) in {b"", head}
    except OSError as error:
        raise ReportFailed(path, reason_of(error)) from error


@contextmanager
def _open_sink(path: str) -> Iterator[FileSink]:
    try:
        with FileSink(path, force=True) as sink:
            yield sink
    except WriteFailed as error:
        raise ReportFailed(path, error.reason) from error
