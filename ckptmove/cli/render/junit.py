"""``--report junit=FILE``: JUnit XML, which CI systems show as a list of tests.

The elements are those of Ant's JUnit task; no other specification exists. A checkpoint is a suite. A case is a check,
a finding, or a property that may differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.text import clean, sentence
from ckptmove.model import Severity

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.proof.evidence import CheckResult


class JUnitDocument(Document):
    """A suite for each checkpoint."""

    title = "a JUnit report of ckptmove"
    head = b"<?xml version='1.0' encoding='utf-8'?>\n<testsuites name=\"ckptmove "

    def __init__(self) -> None:
        from xml.etree.ElementTree import Element

        self._root = Element("testsuites")

    def inspect(self, answer: InspectAnswer) -> None:
        """Add a suite: a case for the file, for each finding, ``--expect`` and ``--fit``. Notes are left out."""
        from ckptmove.cli.render.inspection import brief_line

        inspection = answer.result
        suite, name = self._suite(inspection.inventory.path)
        _add_case(suite, name, "inspect").text = brief_line(answer)
        for finding in inspection.findings:
            if finding.severity is not Severity.INFO:
                fails = answer.strict or finding.severity is Severity.ERROR
                fix = f"; fix: {finding.fix}" if finding.fix else ""
                message, where = f"{finding.message}{fix}", "\n".join(map(clean, finding.where))
                case = f"{finding.code} {finding.name}"
                _add_case(suite, name, case, "failure" if fails else "skipped", message).text = where
        expectation = inspection.expectation
        if expectation is not None:
            names = expectation.misplaced_names
            message = f"not on {expectation.device}: {', '.join(names)}" if names else ""
            _add_case(suite, name, "expect", "failure" if names else "", message)
        fit = inspection.fit
        if fit is not None:
            _add_case(suite, name, "fit", "" if fit.fits else "failure", str(fit)).text = sentence(str(fit))
        _count(suite)

    def convert(self, answer: ConvertAnswer) -> None:
        """Add a suite: a case that fails if ``--strict`` stopped the conversion, and one for warnings of the source."""
        from ckptmove.cli.render.conversion import brief_line

        suite, name = self._suite(answer.request.path)
        unmatched = "; ".join(map(str, answer.result.unmatched))
        case = _add_case(suite, name, "convert", "failure" if answer.exit_code else "", unmatched)
        case.text = brief_line(answer.request.path, answer.result)
        if answer.result.warnings:
            text = "\n".join(map(clean, answer.result.warnings))
            _add_case(suite, name, "warnings", "skipped", answer.result.warnings[0]).text = text
        _count(suite)

    def skipped(self, path: str, output: str) -> None:
        """Add a suite with one case, which is skipped."""
        from ckptmove.cli.render.conversion import skipped_line

        suite, name = self._suite(path)
        _add_case(suite, name, "convert", "skipped", skipped_line(path, output))
        _count(suite)

    def diff(self, result: Differences) -> None:
        """Add a suite: a case for each property that may differ."""
        from ckptmove.cli.render.difference import names_by_difference

        suite, name = self._suite(result.second)
        for what, own in names_by_difference(result).items():
            message = f"{len(own):,} differ from {result.first}" if own else ""
            _add_case(suite, name, what, "failure" if own else "", message).text = "\n".join(map(clean, own))
        _count(suite)

    def verify(self, answer: VerifyAnswer) -> None:
        """Add a suite: a case for each check, ``proven``, and with ``--strict`` also ``warnings``."""
        from ckptmove.cli.render.verification import outcome, warned

        result = answer.result
        suite, name = self._suite(result.path)
        for check in result.checks:
            _add_check(suite, name, check)
        proven = _add(suite, "testcase", classname=name, name="proven")
        if not result.proven:
            message = outcome(result, strict=answer.strict)
            _add(proven, "failure" if answer.strict else "skipped", message=message)
        if answer.strict:
            codes = ", ".join(warned(result))
            warnings = _add(suite, "testcase", classname=name, name="warnings")
            if codes:
                _add(warnings, "failure", message=f"--strict fails on warnings: {codes}")
        _count(suite)

    def document(self, summary: Summary) -> str:
        """The suites of all answers, then one with a case in error for each error."""
        from xml.etree.ElementTree import tostring

        command = summary.command or ""
        for failure in summary.failures:
            suite, name = self._suite(failure.path or "ckptmove")
            case = _add(suite, "testcase", classname=name, name=command)
            _add(case, "error", type=failure.kind, message=sentence(failure.message)).text = sentence(failure.hint)
            _count(suite)
        self._root.set("name", f"ckptmove {command}")  # the first attribute: `head` has it
        _count(self._root)
        return f"<?xml version='1.0' encoding='utf-8'?>\n{tostring(self._root, encoding='unicode')}\n"

    def _suite(self, path: str) -> tuple[Element, str]:
        name = clean(path)
        return _add(self._root, "testsuite", name=name), name


def _add(parent: Element, tag: str, **attributes: str) -> Element:
    """Add an element, as ``SubElement`` does."""
    child = parent.makeelement(tag, attributes)
    parent.append(child)
    return child


def _add_case(suite: Element, classname: str, name: str, outcome: str = "", message: str = "") -> Element:
    """Add a case that passed, or has an outcome. Returns the element of its text."""
    case = _add(suite, "testcase", classname=classname, name=name)
    return _add(case, outcome, message=sentence(message)) if outcome else _add(case, "system-out")


def _add_check(suite: Element, name: str, check: CheckResult) -> None:
    case = _add(suite, "testcase", classname=name, name=check.name)
    if check.status != "passed":
        detail = sentence(check.detail)
        _add(case, "failure" if check.status == "failed" else "skipped", message=detail).text = detail
    figures = "\n".join(f"{clean(name)} = {sentence(str(value))}" for name, value in check.evidence)
    _add(case, "system-out").text = f"{sentence(check.detail)}\n{figures}".rstrip()


def _count(element: Element) -> None:
    """Set the numbers of cases, failures, errors and skipped cases below an element."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))
