"""``--junit FILE``: the verdicts of ``verify`` as JUnit XML, which CI systems show as a list of tests.

The elements are those of Ant's JUnit task; no other specification exists. A checkpoint is a suite, a check is a case.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, tostring

from ckptmove.cli.render.renderer import Renderer
from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.render.verification import outcome, warned
from ckptmove.errors import OutputIsNoReport, ReportFailed, UsageError, WriteFailed, reason_of
from ckptmove.io.locations import same_file
from ckptmove.io.sink import FileSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.render.answers import Failure, Summary, VerifyAnswer
    from ckptmove.verification.evidence import CheckResult

#: First bytes of every JUnit report, and of no checkpoint.
_XML: Final = b"<?xml"


class JUnitRenderer(Renderer):
    """Collects the verdicts of ``verify``, and writes them to a file at its end.

    Args:
        path: the file; an earlier report is replaced.
        checkpoints: paths that the command reads.

    Raises:
        UsageError: if ``path`` is ``-``.
        OutputIsNoReport: if the file is one of the checkpoints, or is not XML.
        ReportFailed: if the file cannot be written. It is tried at once, before hours are spent on checks.
    """

    def __init__(self, path: str, checkpoints: Sequence[str]) -> None:
        _require_report(path, checkpoints)
        self._path = path
        self._root = Element("testsuites", name="ckptmove verify")

    def verify(self, answer: VerifyAnswer) -> None:
        """Add a suite: a case for each check, ``proven``, and with ``--strict`` also ``warnings``."""
        result = answer.result
        name = clean(result.path)
        suite = SubElement(self._root, "testsuite", name=name)
        for check in result.checks:
            _add_check(suite, name, check)
        proven = SubElement(suite, "testcase", classname=name, name="proven")
        if not result.proven:
            message = outcome(result, strict=answer.strict)
            SubElement(proven, "failure" if answer.strict else "skipped", message=message)
        if answer.strict:
            codes = ", ".join(warned(result))
            warnings = SubElement(suite, "testcase", classname=name, name="warnings")
            if codes:
                SubElement(warnings, "failure", message=f"--strict fails on warnings: {codes}")
        _count(suite)

    def failure(self, failure: Failure) -> None:
        """Add a suite with one case in error, for a checkpoint that could not be verified."""
        name = clean(failure.path or "ckptmove")
        suite = SubElement(self._root, "testsuite", name=name)
        case = SubElement(suite, "testcase", classname=name, name="verify")
        SubElement(case, "error", type=failure.kind, message=sentence(failure.message)).text = sentence(failure.hint)
        _count(suite)

    def finish(self, summary: Summary) -> None:
        """Write the file as UTF-8; errors come after the verdicts."""
        for failure in summary.failures:
            self.failure(failure)
        _count(self._root)
        with _open_sink(self._path) as sink:
            sink.write(bytes(tostring(self._root, encoding="utf-8", xml_declaration=True)) + b"\n")
            sink.commit()


def _add_check(suite: Element, name: str, check: CheckResult) -> None:
    case = SubElement(suite, "testcase", classname=name, name=check.name)
    if check.status != "passed":
        detail = sentence(check.detail)
        SubElement(case, "failure" if check.status == "failed" else "skipped", message=detail).text = detail
    figures = "\n".join(f"{clean(name)} = {sentence(str(value))}" for name, value in check.evidence)
    SubElement(case, "system-out").text = f"{sentence(check.detail)}\n{figures}".rstrip()


def _count(element: Element) -> None:
    """Set the numbers of cases, failures, errors and skipped cases below an element."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))


def _require_report(path: str, checkpoints: Sequence[str]) -> None:
    if path == "-":
        raise UsageError("a JUnit report is not written to standard output; use ./- for a file named -")
    if any(same_file(checkpoint, path) for checkpoint in checkpoints):
        raise OutputIsNoReport("the JUnit report would replace a checkpoint of this command", path=path)
    if not _is_replaceable(path):
        raise OutputIsNoReport("the JUnit report would replace a file that is not XML", path=path)
    with _open_sink(path):
        pass  # an uncommitted sink leaves no file


def _is_replaceable(path: str) -> bool:
    """Whether the file is missing, empty, or an earlier report. A path that is no file fails when it is written."""
    if not os.path.isfile(path):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(_XML)) in {b"", _XML}
    except OSError as error:
        raise ReportFailed(path, reason_of(error)) from error


@contextmanager
def _open_sink(path: str) -> Iterator[FileSink]:
    try:
        with FileSink(path, force=True) as sink:
            yield sink
    except WriteFailed as error:
        raise ReportFailed(path, error.reason) from error
