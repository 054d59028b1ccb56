"""``--format github``: annotations for GitHub Actions, escaped so that no text ends its annotation early."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.report import ReportRenderer
from ckptmove.cli.render.text import clean, first_names, sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import Summary
    from ckptmove.cli.render.report import Report, ReportCase
    from ckptmove.cli.streams import Output
    from ckptmove.findings.catalogue import Entry

#: Levels of annotations, by the level of a case.
_LEVELS: Final = {"error": "error", "warning": "warning", "info": "notice"}
#: What is before the name of a case in the title of its annotation, by its kind.
_PREFIXES: Final = {"unmatched": "convert --", "check": "verify ", "difference": "diff "}
#: Kinds of cases without an annotation.
_LEFT_OUT: Final = frozenset({"remark", "proof", "unproven", "property"})
#: Differences that come first.
_ORDER: Final = {"added": 0, "removed": 1, "uncompared": 2}
#: Annotations of one level that GitHub shows of a step; it drops further ones silently.
_SHOWN: Final = 10


class GitHubRenderer(ReportRenderer):
    """Writes an annotation for each finding, failed check, difference and error.

    What GitHub would not show is a line of the log: all but the first annotations of a level and the last one, which
    is the answer.
    """

    def __init__(self, out: Output) -> None:
        self._out = out
        self._counts: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def add(self, report: Report) -> None:
        self._write(annotations_of(report))

    def rules(self, entries: Sequence[Entry]) -> None:
        self._write(
            _annotation("info", None, f"{entry.code} {entry.name}", f"{entry.when}. {entry.mend}") for entry in entries
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


def annotations_of(report: Report) -> Iterator[str]:
    """An annotation for each case that is no good news, and for the answer."""
    for case in sorted(report.cases, key=lambda case: _ORDER.get(case.name, len(_ORDER))):
        if case.kind not in _LEFT_OUT and (case.level in _LEVELS or case.kind == "fit"):
            title = "convert" if case.kind == "source" else _PREFIXES.get(case.kind, "") + case.name
            yield _annotation(case.level, case.path or report.path, title, _message(case), case.line)
    if report.command == "convert":  # its cases say what failed
        path = report.path if report.status == "skipped" else report.output or report.path
        yield _annotation("info", path, "convert", report.summary)
    elif report.command != "inspect" or (
        report.status == "error" and not any(case.level == "error" for case in report.cases)
    ):
        yield _annotation(report.status, report.path, report.command, report.summary)


def _message(case: ReportCase) -> str:
    if case.kind == "difference":
        sides = " -> ".join(str(value) for _, value in case.figures)
        return ": ".join(filter(None, (*case.where, case.message or sides)))
    names = first_names(case.where) if case.where else ""
    if case.kind == "expect":
        return f"{case.message}: {names}"
    return case._replace(message=f"{case.message} (at {names})" if names else case.message).text


def _annotation(level: str, path: str | None, title: str, message: str, line: int | None = None) -> str:
    kind = _LEVELS.get(level, "notice")
    file = f"file={_property(clean(path))}," if path else ""
    file += f"line={line}," if line is not None else ""
    return f"::{kind} {file}title={_property(clean(title))}::{_data(sentence(message))}"


def _data(text: str) -> str:
    """Escape as ``escapeData`` of actions/toolkit; ``text`` has no newlines."""
    return text.replace("%", "%25")


def _property(text: str) -> str:
    """Escape as ``escapeProperty`` of actions/toolkit."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
