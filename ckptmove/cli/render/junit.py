"""``--report junit=FILE``: JUnit XML, which CI systems show as a list of tests.

The elements are those of Ant's JUnit task; no other specification exists. A checkpoint is a suite, a check is a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, tostring

from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.render.verification import outcome, warned

if TYPE_CHECKING:
    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.answers import Summary, VerifyAnswer
    from ckptmove.verification.evidence import CheckResult


class JUnitDocument(Document):
    """A suite for each checkpoint."""

    title = "XML"
    head = b"<?xml"

    def __init__(self) -> None:
        self._root = Element("testsuites")

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

    def document(self, summary: Summary) -> str:
        """The suites of all answers, then one with a case in error for each error."""
        command = summary.command or ""
        for failure in summary.failures:
            self._fail(command, failure)
        self._root.set("name", f"ckptmove {command}")
        _count(self._root)
        return f"<?xml version='1.0' encoding='utf-8'?>\n{tostring(self._root, encoding='unicode')}\n"

    def _fail(self, command: str, failure: Failure) -> None:
        name = clean(failure.path or "ckptmove")
        suite = SubElement(self._root, "testsuite", name=name)
        case = SubElement(suite, "testcase", classname=name, name=command)
        SubElement(case, "error", type=failure.kind, message=sentence(failure.message)).text = sentence(failure.hint)
        _count(suite)


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
