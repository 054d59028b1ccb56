"""``--report KIND=FILE``: documents about a whole command, written to files next to its report on stdout."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from ckptmove.api.failures import failure_of
from ckptmove.cli.render.formats import DOCUMENTS
from ckptmove.cli.render.renderer import Renderer, Summary
from ckptmove.errors import CkptMoveError, OutputIsNoReport, ReportFailed, UsageError, WriteFailed, reason_of
from ckptmove.io.locations import shared_mode
from ckptmove.io.portable import NEW_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import ConvertAnswer, Document, InspectAnswer, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.io.sink import FileSink
    from ckptmove.proof.evidence import FixedFile

#: Options that name a file of a report.
_OPTIONS: Final = frozenset({"--report", "--junit"})
#: Errors that the files of the reports contain.
_WRITTEN: Final[WeakSet[BaseException]] = WeakSet()


@contextmanager
def with_files(main: Renderer, command: str, reports: Sequence[str], paths: Sequence[str]) -> Iterator[Renderer]:
    """Open the files of the reports, next to the report on stdout.

    An error that ends the command is written to them. No report may replace one of the paths.
    """
    files: list[ReportFile] = []
    mode = shared_mode(paths)
    for word in reports:
        path, document = open_document(word)
        files.append(ReportFile(path, document, [*paths, *(file.path for file in files)], mode))
    renderer = _Reports(main, files)
    try:
        yield renderer
    except CkptMoveError as error:
        failure = failure_of(error)
        renderer.write(Summary(command, failure.exit_code, (failure,)))
        _WRITTEN.add(error)
        raise


def replace_earlier(
    words: Sequence[str], configured: Mapping[str, Sequence[str]], summary: Summary, error: BaseException
) -> None:
    """Write an error that ended a command before its reports were opened to their files, if these exist.

    The reports of an earlier run would look like those of this one.

    Args:
        configured: values of ``--report`` and ``--junit`` that are set and not typed, by option.
        summary: the end of the command, with the error.
        error: the error; nothing is written if :func:`with_files` has done it.
    """
    if error in _WRITTEN:
        return
    pairs = [*(word.partition("=")[::2] for word in words if "=" in word), *pairwise(words)]
    typed = {option for option, _ in pairs}
    pairs += [(option, value) for option, own in configured.items() if option not in typed for value in own]
    values = [value if option == "--report" else f"junit={value}" for option, value in pairs if option in _OPTIONS]
    with suppress(CkptMoveError):  # the error of the command counts
        for path, document in [open_document(value) for value in values]:
            if os.path.exists(path):
                ReportFile(path, document, ()).write(summary)


class _Reports(Renderer):
    """The reports of one command. All get its answers; only the report on stdout gets its errors when they occur."""

    def __init__(self, main: Renderer, files: Sequence[ReportFile]) -> None:
        self._main = main
        self._files = [*files]
        self._each = [*(file.document for file in files), main]  # an answer that stdout refuses is in the files
        self.shows_progress = main.shows_progress
        self.is_stream = main.is_stream

    def inspect(self, answer: InspectAnswer) -> None:
        for one in self._each:
            one.inspect(answer)

    def convert(self, answer: ConvertAnswer) -> None:
        for one in self._each:
            one.convert(answer)

    def skipped(self, path: str, output: str) -> None:
        for one in self._each:
            one.skipped(path, output)

    def edits(self, files: Sequence[FixedFile]) -> None:
        self._main.edits(files)

    def verify(self, answer: VerifyAnswer) -> None:
        for one in self._each:
            one.verify(answer)

    def diff(self, result: Differences) -> None:
        for one in self._each:
            one.diff(result)

    def failure(self, failure: Failure) -> None:
        self._main.failure(failure)

    def no_answer(self, path: str, exit_code: int) -> None:
        self._main.no_answer(path, exit_code)

    def finish(self, summary: Summary) -> int:
        """Write the files, then the end of the report on stdout, with the errors of files that failed."""
        return self._main.finish(self.write(summary))

    def write(self, summary: Summary) -> Summary:
        """Write the files that are not written yet. Their errors are added to the summary; the answers are kept."""
        while self._files:
            summary = self._written(self._files.pop(0), summary)
        return summary

    def _written(self, file: ReportFile, summary: Summary) -> Summary:
        try:
            file.write(summary)
        except ReportFailed as error:
            failure = failure_of(error)
            self._main.failure(failure)
            code = max(summary.exit_code, failure.exit_code)
            return summary._replace(exit_code=code, failures=(*summary.failures, failure))
        return summary


def open_document(word: str) -> tuple[str, Document]:
    """Start the document of a ``--report``, whose value is ``KIND=FILE``. Returns the file, and the empty document."""
    kind, equals, path = word.partition("=")
    if not equals or kind not in DOCUMENTS:
        raise UsageError(f"--report takes KIND=FILE, not '{word:.200}'; the kinds are {', '.join(DOCUMENTS)}")
    if not path:
        raise UsageError(f"--report {word} names no file")
    return path, DOCUMENTS[kind]()


class ReportFile:
    """The file of one document.

    Args:
        path: the file; an earlier report of this kind is replaced.
        document: collects the answers.
        others: paths that the command reads or writes, and the files of other reports.
        mode: permission bits of the checkpoints: nobody can read in the report what they cannot read there.
    """

    def __init__(self, path: str, document: Document, others: Sequence[str], mode: int = NEW_FILE) -> None:
        if path == "-":
            raise UsageError("a report is not written to standard output; use ./- for a file named -")
        path = os.path.realpath(path) if os.path.islink(path) else path  # the link stays
        if any(_is_same(other, path) for other in others):
            raise OutputIsNoReport("the report would replace a checkpoint or another output of this command", path=path)
        if not _is_replaceable(path, document.head):
            raise OutputIsNoReport(f"the report would replace a file that is not {document.title}", path=path)
        self.path = path
        self._mode = mode & NEW_FILE
        with self._open_sink():
            pass  # an uncommitted sink leaves no file
        self.document = document

    def write(self, summary: Summary) -> None:
        """Write the document as UTF-8."""
        with self._open_sink() as sink:
            sink.write(self.document.document(summary).encode("utf-8", "backslashreplace"))
            sink.commit()

    @contextmanager
    def _open_sink(self) -> Iterator[FileSink]:
        from ckptmove.io.sink import FileSink

        try:
            with FileSink(self.path, force=True, mode=self._mode) as sink:
                yield sink
        except WriteFailed as error:
            raise ReportFailed(self.path, error.reason) from error


def _is_same(one: str, other: str) -> bool:
    """Whether two paths lead to one file, which may not exist yet."""
    from ckptmove.io.locations import same_file

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
