"""The verdicts of ``verify`` as JUnit XML, which every CI system shows as a list of tests.

Never opens a file: whoever asked for it writes it.

The elements are those of Ant's JUnit task, which is all the specification that there is; a checkpoint is a suite, a
check a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, tostring

from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.render.verification import outcome, warned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.cli.render.answers import Failure
    from ckptmove.verification.evidence import CheckResult, VerifyResult


def junit_document(results: Iterable[VerifyResult], failures: Iterable[Failure], *, strict: bool) -> bytes:
    """The XML of a run, as UTF-8.

    Args:
        results: the verdicts.
        failures: of checkpoints that could not be verified: each is a suite with one case, in error.
        strict: whether a resume that is not proven is a failure, of the case ``proven``, and a warning one of the
            case ``warnings``.
    """
    root = Element("testsuites", name="ckptmove verify")
    for result in results:
        suite = _suite(root, result.path)
        for check in result.checks:
            _case(suite, result.path, check)
        proven = SubElement(suite, "testcase", classname=clean(result.path), name="proven")
        if not result.proven:
            SubElement(proven, "failure" if strict else "skipped", message=outcome(result, strict=strict))
        if strict:
            codes = ", ".join(warned(result))
            warnings = SubElement(suite, "testcase", classname=clean(result.path), name="warnings")
            if codes:
                SubElement(warnings, "failure", message=f"--strict fails on warnings: {codes}")
        _count(suite)
    for failure in failures:
        path = failure.path or "ckptmove"
        suite = _suite(root, path)
        case = SubElement(suite, "testcase", classname=clean(path), name="verify")
        SubElement(case, "error", type=failure.kind, message=sentence(failure.message)).text = sentence(failure.hint)
        _count(suite)
    _count(root)
    return bytes(tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _suite(root: Element, path: str) -> Element:
    return SubElement(root, "testsuite", name=clean(path))


def _case(suite: Element, path: str, check: CheckResult) -> None:
    case = SubElement(suite, "testcase", classname=clean(path), name=check.name)
    if check.status != "passed":
        detail = sentence(check.detail)
        SubElement(case, "failure" if check.status == "failed" else "skipped", message=detail).text = detail
    figures = "\n".join(f"{clean(name)} = {sentence(str(value))}" for name, value in check.evidence)
    SubElement(case, "system-out").text = f"{sentence(check.detail)}\n{figures}".rstrip()


def _count(element: Element) -> None:
    """How many cases there are below, and what came of them."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name, tag in counts.items():
        element.set(name, str(sum(1 for _ in element.iter(tag))))
