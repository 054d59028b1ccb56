"""Annotations for GitHub Actions: ``--format github``.

Never prints, and never lets a text end its annotation or begin another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render import conversion, difference, inspection
from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.render.verification import outcome
from ckptmove.model import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.cli.render.answers import Failure, InspectAnswer
    from ckptmove.comparison.differences import DiffResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.io.changes import UndoResult
    from ckptmove.model import Finding
    from ckptmove.moves import ConvertResult
    from ckptmove.verification.evidence import VerifyResult

_LEVELS: Final = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_FIRST: Final = 3


def inspection_lines(answer: InspectAnswer) -> Iterator[str]:
    """An annotation for each finding, one for an expectation that is not met, and one where only that fails the run."""
    path = answer.inspection.inventory.path
    findings = answer.inspection.findings
    for finding in findings:
        yield _finding(path, finding)
    if answer.inspection.unchecked:
        yield _annotation("notice", path, "inspect --check", inspection.unchecked_line(answer.inspection))
    expectation = answer.expectation
    if expectation is not None and expectation.misplaced:
        names = [name for edit in expectation.misplaced for name in edit.names or (edit.storage,)]
        yield _annotation("error", path, "expect", f"not on {expectation.device}: {_some(names)}")
    elif answer.exit_code and not any(finding.severity is Severity.ERROR for finding in findings):
        yield _annotation("error", path, "inspect", inspection.brief_line(answer))


def conversion_lines(path: str, result: ConvertResult, *, strict: bool = False) -> Iterator[str]:
    """A warning for each option that met nothing, which ``strict`` makes an error; a notice that says what was done."""
    for one in result.unmatched:
        yield _annotation("error" if strict else "warning", path, f"convert --{one.option}", str(one))
    yield _annotation("notice", result.output or path, "convert", conversion.brief_line(path, result))


def undo_line(result: UndoResult) -> str:
    """A notice that says what was undone."""
    return _annotation("notice", result.path, "convert", conversion.undo_line(result))


def verification_lines(result: VerifyResult, *, strict: bool = False) -> Iterator[str]:
    """An annotation for each failed check, for each finding and for the verdict, which ``strict`` makes an error."""
    for check in result.checks:
        if check.status == "failed":
            told = dict(check.evidence)  # of a case, the line of the user's that failed
            path, line = str(told.get("file") or result.path), told.get("line")
            yield _annotation("error", path, f"verify {check.name}", check.detail, line if type(line) is int else None)
    for finding in result.findings:
        yield _finding(result.path, finding)
    level = "error" if result.fails(strict=strict) else "notice" if result.proven else "warning"
    yield _annotation(level, result.path, "verify", outcome(result, strict=strict))


def difference_lines(result: DiffResult) -> Iterator[str]:
    """An annotation for each change, and one for the answer."""
    for change in result.changed:
        how = f"{change.source} -> {change.target}"
        if change.gap is not None:
            how = difference.apart_in_words(result, change.gap)
        yield _annotation("warning", result.second, f"diff {change.what}", f"{change.name}: {how}")
    for note in result.notes:
        yield _annotation("notice", result.second, "diff note", note)
    yield _annotation("notice" if result.same else "error", result.second, "diff", difference.brief_line(result))


def failure_line(failure: Failure) -> str:
    """An annotation for an error."""
    message = f"{failure.message}; {failure.hint}" if failure.hint else failure.message
    return _annotation("error", failure.path, failure.kind, message)


def entry_line(entry: Entry) -> str:
    """A notice that explains a code."""
    return _annotation("notice", None, f"{entry.code} {entry.name}", f"{entry.when}. {entry.mend}")


def _finding(path: str, finding: Finding) -> str:
    where = f" (at {_some(finding.where)})" if finding.where else ""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return _annotation(
        _LEVELS[finding.severity], path, f"{finding.code} {finding.name}", f"{finding.message}{where}{fix}"
    )


def _some(names: tuple[str, ...] | list[str]) -> str:
    rest = f", +{len(names) - _FIRST:,} more" if len(names) > _FIRST else ""
    return ", ".join(map(clean, names[:_FIRST])) + rest


def _annotation(level: str, path: str | None, title: str, message: str, line: int | None = None) -> str:
    file = f"file={_property(clean(path))}," if path else ""
    file += f"line={line}," if line is not None else ""
    return f"::{level} {file}title={_property(clean(title))}::{_data(sentence(message))}"


def _data(text: str) -> str:
    """As ``escapeData`` of actions/toolkit; newlines are gone already."""
    return text.replace("%", "%25")


def _property(text: str) -> str:
    """As ``escapeProperty`` of actions/toolkit."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
