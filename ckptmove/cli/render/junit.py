"""``--report junit=FILE``: JUnit XML, which CI systems show as a list of tests.

The elements are those of Ant's JUnit task; no other specification exists. A checkpoint is a suite. A case is a check,
a finding, or a property that may differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.report import ReportRenderer
from ckptmove.cli.render.text import clean, sentence

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ckptmove.cli.render.renderer import Summary
    from ckptmove.cli.render.report import Report, ReportCase


class JUnitDocument(ReportRenderer, Document):
    """A suite for each checkpoint."""

    title = "a JUnit report of ckptmove"
    head = b"<?xml version='1.0' encoding='utf-8'?>\n<testsuites name=\"ckptmove "
    is_data = True

    def __init__(self) -> None:
        from xml.etree.ElementTree import Element

        self._root = Element("testsuites")

    def add(self, report: Report) -> None:
        """Add a suite: a case for the file, and for each check, finding and property. Notes are left out."""
        suite = self._suite(report.path)
        if report.command in {"inspect", "convert"}:
            _add_answer(suite, report)
        # The checks of `verify` say what its findings say.
        kinds = {"expect", "fit", "property", *(["finding"] if report.command == "inspect" else [])}
        for case in report.cases:
            if case.kind in {"proof", "unproven"}:
                proof = _add_case(suite, case.name)
                if case.level != "passed":
                    _add_result(proof, case.level, case.message)
            elif case.kind == "check":
                _add_check(suite, case)
            elif case.kind in kinds and case.level != "info":
                _add_other(suite, case, report)
        _count(suite)

    def document(self, summary: Summary) -> str:
        """The suites of all answers, then one with a case in error for each error."""
        from xml.etree.ElementTree import tostring

        command = summary.command or ""
        for failure in summary.failures:
            suite = self._suite(failure.path or "ckptmove")
            error = _add(_add_case(suite, command), "error", type=failure.kind, message=sentence(failure.message))
            error.text = sentence(failure.hint)
            _count(suite)
        self._root.set("name", f"ckptmove {command}")  # the first attribute: `head` has it
        _count(self._root)
        return f"<?xml version='1.0' encoding='utf-8'?>\n{tostring(self._root, encoding='unicode')}\n"

    def _suite(self, path: str) -> Element:
        return _add(self._root, "testsuite", name=clean(path))


def _add(parent: Element, tag: str, **attributes: str) -> Element:
    """Add an element, as ``SubElement`` does."""
    child = parent.makeelement(tag, attributes)
    parent.append(child)
    return child


def _add_case(suite: Element, name: str) -> Element:
    return _add(suite, "testcase", classname=suite.get("name", ""), name=name)


def _add_result(case: Element, level: str, message: str, *, strict: bool = False) -> Element:
    """Add that a case passed, failed or was skipped; a warning fails if ``strict``. Returns the element of its text."""
    if level == "passed":
        return _add(case, "system-out")
    fails = level == "error" or (strict and level == "warning")
    return _add(case, "failure" if fails else "skipped", message=sentence(message))


def _add_answer(suite: Element, report: Report) -> None:
    """Add the case of the file, which fails if ``--strict`` stopped the conversion, and one of the source."""
    case = _add_case(suite, report.command)
    if report.status == "skipped":
        _add_result(case, "skipped", report.summary)
    else:
        unmatched = "; ".join(one.message for one in report.cases if one.kind == "unmatched")
        level = report.status if report.command == "convert" else "passed"
        _add_result(case, level, unmatched).text = report.summary
    warnings = [one.message for one in report.cases if one.kind == "source"]
    if warnings:
        _add_result(_add_case(suite, "warnings"), "warning", warnings[0]).text = "\n".join(map(clean, warnings))


def _add_other(suite: Element, case: ReportCase, report: Report) -> None:
    """Add a finding, ``--expect``, ``--fit`` or a property, with its names."""
    message, text = case.text, "\n".join(map(clean, case.where))
    if case.kind == "expect":
        message, text = f"{message}: {', '.join(case.where)}", ""
    elif case.kind == "fit":
        text = sentence(message)
    elif case.kind == "property":
        message = f"{len(case.where):,} differ from {report.reference}"
    _add_result(_add_case(suite, case.name), case.level, message, strict=report.strict).text = text


def _add_check(suite: Element, check: ReportCase) -> None:
    case, detail = _add_case(suite, check.name), sentence(check.text)
    if check.level != "passed":
        _add_result(case, check.level, detail).text = detail
    figures = "\n".join(f"{clean(name)} = {sentence(str(value))}" for name, value in check.figures)
    _add(case, "system-out").text = f"{detail}\n{figures}".rstrip()


def _count(element: Element) -> None:
    """Set the numbers of cases, failures, errors and skipped cases below an element."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))
