"""``--format github``: annotations for GitHub Actions, escaped so that no text ends its annotation early."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.renderer import Renderer, printed
from ckptmove.cli.render.text import clean, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.cli.streams import Output
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.results import UndoResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.model import Finding
    from ckptmove.proof.evidence import Verdict

#: Levels of annotations, by the severity of a finding.
_LEVELS: Final = {"error": "error", "warning": "warning", "info": "notice"}
#: Names that one annotation lists.
_FIRST: Final = 3
#: Annotations of one level that GitHub shows of a step; it drops further ones silently.
_SHOWN: Final = 10


class GitHubRenderer(Renderer):
    """Writes an annotation for each finding, failed check, difference and error.

    What GitHub would not show is a line of the log: all but the first annotations of a level and the last one, which
    is the answer.
    """

    def __init__(self, out: Output) -> None:
        self._out = out
        self._counts: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def inspect(self, answer: InspectAnswer) -> None:
        self._write(inspection_lines(printed(answer)))

    def convert(self, answer: ConvertAnswer) -> None:
        self._write(conversion_lines(answer))

    def skipped(self, path: str, output: str) -> None:
        from ckptmove.cli.render.conversion import skipped_line

        self._write([_annotation("notice", path, "convert", skipped_line(path, output))])

    def undo(self, result: UndoResult) -> None:
        from ckptmove.cli.render.conversion import undo_line

        self._write([_annotation("notice", result.path, "convert", undo_line(result))])

    def verify(self, answer: VerifyAnswer) -> None:
        self._write(verification_lines(printed(answer).result, strict=answer.strict))

    def diff(self, result: Differences) -> None:
        self._write(difference_lines(result))

    def rules(self, entries: Sequence[Entry]) -> None:
        self._write(
            _annotation("notice", None, f"{entry.code} {entry.name}", f"{entry.when}. {entry.mend}")
            for entry in entries
        )

    def failure(self, failure: Failure) -> None:
        self._write([_annotation("error", failure.path, failure.kind, failure.text)])

    def finish(self, summary: Summary) -> int:
        for level, last in self._last.items():
            more = self._counts[level] - _SHOWN + 1
            note = f"::{level} title=ckptmove::{more:,} more in the log of this step"
            self._out.lines([note, last] if more else [last])
        return super().finish(summary)

    def _write(self, annotations: Iterable[str]) -> None:
        for one in annotations:
            level = one[2:].partition(" ")[0]
            self._counts[level] += 1
            is_shown = self._counts[level] <= _SHOWN - 2
            self._out.lines([one if is_shown else one[2:]])
            if not is_shown:
                self._last[level] = one


def inspection_lines(answer: InspectAnswer) -> Iterator[str]:
    """An annotation for each finding, for ``--expect`` and ``--fit``, and for a run that only ``--strict`` fails."""
    from ckptmove.cli.render import inspection

    path = answer.result.inventory.path
    findings = answer.result.findings
    for finding in findings:
        yield _finding(path, finding)
    if answer.result.unchecked:
        yield _annotation("notice", path, "inspect --check", inspection.unchecked_line(answer.result))
    expectation, fit = answer.result.expectation, answer.result.fit
    if expectation is not None and expectation.misplaced:
        names = expectation.misplaced_names
        yield _annotation("error", path, "expect", f"not on {expectation.device}: {_some(names)}")
    if fit is not None:
        yield _annotation("notice" if fit.fits else "error", path, "fit", str(fit))
    if answer.exit_code and not answer.result.fails(strict=False):
        yield _annotation("error", path, "inspect", inspection.brief_line(answer))


def conversion_lines(answer: ConvertAnswer) -> Iterator[str]:
    """A warning for each problem and each option without a match (with ``--strict`` an error), and the outcome."""
    from ckptmove.cli.render.conversion import brief_line

    path, result = answer.request.path, answer.result
    for one in result.unmatched:
        yield _annotation("error" if answer.exit_code else "warning", path, f"convert --{one.option}", str(one))
    for warning in result.warnings:
        yield _annotation("warning", path, "convert", warning)
    yield _annotation("notice", result.output or path, "convert", brief_line(path, result))


def verification_lines(result: Verdict, *, strict: bool = False) -> Iterator[str]:
    """An annotation for each failed check, each finding and the verdict."""
    from ckptmove.cli.render.verification import fixed_line, outcome, place_of

    for check in result.checks:
        if check.status == "failed":
            path, line = place_of(check, result)
            yield _annotation("error", path, f"verify {check.name}", check.detail, line)
    for finding in result.findings:
        yield _finding(result.path, finding)
    for fixed in result.fixed:
        yield _annotation("notice", fixed.path, "verify --fix", fixed_line(fixed))
    level = "error" if result.fails(strict=strict) else "notice" if result.proven else "warning"
    yield _annotation(level, result.path, "verify", outcome(result, strict=strict))


def difference_lines(result: Differences) -> Iterator[str]:
    """An annotation for each difference and each note, and one for the answer."""
    from ckptmove.cli.render import difference

    for what, names in (("added", result.added), ("removed", result.removed)):
        for name in names:
            yield _annotation("warning", result.second, f"diff {what}", name)
    for unknown in result.uncompared:
        yield _annotation("warning", result.second, "diff uncompared", f"{unknown.name}: {unknown.reason}")
    for change in result.changed:
        how = f"{change.source} -> {change.target}"
        if change.gap is not None:
            how = difference.apart_in_words(result, change.gap)
        yield _annotation("warning", result.second, f"diff {change.what}", f"{change.name}: {how}")
    for note in result.notes:
        yield _annotation("notice", result.second, "diff note", note)
    yield _annotation("notice" if result.same else "error", result.second, "diff", difference.brief_line(result))


def _finding(path: str, finding: Finding) -> str:
    where = f" (at {_some(finding.where)})" if finding.where else ""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return _annotation(
        _LEVELS[finding.severity.value], path, f"{finding.code} {finding.name}", f"{finding.message}{where}{fix}"
    )


def _some(names: tuple[str, ...] | list[str]) -> str:
    rest = f", +{len(names) - _FIRST:,} more" if len(names) > _FIRST else ""
    return ", ".join(map(clean, names[:_FIRST])) + rest


def _annotation(level: str, path: str | None, title: str, message: str, line: int | None = None) -> str:
    file = f"file={_property(clean(path))}," if path else ""
    file += f"line={line}," if line is not None else ""
    return f"::{level} {file}title={_property(clean(title))}::{_data(sentence(message))}"


def _data(text: str) -> str:
    """Escape as ``escapeData`` of actions/toolkit; ``text`` has no newlines."""
    return text.replace("%", "%25")


def _property(text: str) -> str:
    """Escape as ``escapeProperty`` of actions/toolkit."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
