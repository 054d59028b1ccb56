"""The reports of one command: on stdout, and in the files of ``--report``."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from ckptmove.api.failures import failure_of
from ckptmove.cli.render.answers import Summary
from ckptmove.cli.render.registry import open_report
from ckptmove.cli.render.renderer import Renderer
from ckptmove.errors import CkptMoveError, ReportFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.options import OutputOptions
    from ckptmove.cli.render.answers import ConvertAnswer, InspectAnswer, VerifyAnswer
    from ckptmove.cli.render.report_file import ReportFile
    from ckptmove.comparison.differences import DiffResult
    from ckptmove.verification.evidence import FixedFile

#: Options that name a file of a report.
_OPTIONS: Final = frozenset({"--report", "--junit"})
#: Errors that the files of the reports contain.
_WRITTEN: Final[WeakSet[BaseException]] = WeakSet()


@contextmanager
def reporting(
    options: OutputOptions, command: str, reports: Sequence[str] | None = None, paths: Sequence[str] = ()
) -> Iterator[Renderer]:
    """Open the reports of a command. An error that ends the command is also written to the files.

    Args:
        options: the options of the report on stdout.
        command: name of the command.
        reports: values of ``--report``.
        paths: paths that the command reads or writes, which no report may replace.

    Raises:
        UsageError: as :func:`~ckptmove.cli.render.registry.open_report`, and as
            :func:`~ckptmove.cli.render.reports.open_document`.
        CkptMoveError: as :class:`ckptmove.cli.render.report_file.ReportFile`.
    """
    main = open_report(options.format, command, as_json=options.json, quiet=options.quiet, verbose=options.verbose)
    if not reports:
        yield main
        return
    renderer = _Reports(main, _open_files(reports, paths))
    try:
        yield renderer
    except CkptMoveError as error:
        failure = failure_of(error)
        renderer.write(Summary(command, failure.exit_code, (failure,)))
        _WRITTEN.add(error)
        raise


def replace_earlier(words: Sequence[str], summary: Summary, error: BaseException) -> None:
    """Write an error that ended a command before its reports were opened to their files, if these exist.

    The reports of an earlier run would look like those of this one.

    Args:
        words: the words of the command line.
        summary: the end of the command, with the error.
        error: the error; nothing is written if :func:`reporting` has done it.
    """
    if error in _WRITTEN:
        return
    from ckptmove.cli.render.report_file import ReportFile
    from ckptmove.cli.render.reports import open_document

    pairs = [*(word.partition("=")[::2] for word in words if "=" in word), *pairwise(words)]
    values = [value if option == "--report" else f"junit={value}" for option, value in pairs if option in _OPTIONS]
    with suppress(CkptMoveError):  # the error of the command counts
        for path, document in [open_document(value) for value in values]:
            if os.path.exists(path):
                ReportFile(path, document, ()).write(summary)


def _open_files(reports: Sequence[str], paths: Sequence[str]) -> list[ReportFile]:
    from ckptmove.cli.render.report_file import ReportFile
    from ckptmove.cli.render.reports import open_document

    files: list[ReportFile] = []
    for word in reports:
        path, document = open_document(word)
        files.append(ReportFile(path, document, [*paths, *(file.path for file in files)]))
    return files


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

    def diff(self, result: DiffResult) -> None:
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
