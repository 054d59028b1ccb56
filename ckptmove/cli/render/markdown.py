"""``--report markdown=FILE``: GitHub's Markdown, for a comment or a job summary.

Text of a checkpoint cannot become Markdown, HTML, a mention or a link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.report import ReportRenderer
from ckptmove.cli.render.text import clean, first_names, sentence
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import Summary
    from ckptmove.cli.render.report import Report, ReportCase

_ICONS: Final = {
    "error": "❌",
    "warning": "⚠️",
    "info": "💡",
    "passed": "✅",
    "skipped": "⏭️",
}
#: Rows of one table.
_SHOWN: Final = 50
#: Most characters of a document: those of a comment on GitHub. A job summary takes 1 MiB.
_LONGEST: Final = 65_536
#: Characters of the line about what is left out.
_NOTE: Final = 100
#: Icons of checkpoints, the worst first.
_WORST: Final = ("❌", "⚠️", "✅", "⏭️")
#: Devices in one cell.
_FIRST: Final = 3
#: Splits a text, so that no part of it becomes a link: GitHub makes links of addresses after it reads entities.
_NOTHING: Final = "<!-- -->"
#: Characters that mean something in Markdown inside a line.
_SPECIAL: Final = frozenset("\\`*_[]#|~<>&$")
#: Kinds of cases with a line each.
_LINES: Final = ("expect", "fit", "unmatched", "source", "remark", "note")
#: Heads of the table of checkpoints, by command.
_HEADS: Final = {
    "inspect": ("", "checkpoint", "format", "content", "tensors", "findings"),
    "convert": ("", "checkpoint", "result"),
    "verify": ("", "checkpoint", "result"),
}


class MarkdownDocument(ReportRenderer, Document):
    """A heading with the verdict, and tables."""

    title = "a Markdown report of ckptmove"
    #: Invisible. Finds the comment of an earlier run, too.
    head = b"<!-- ckptmove -->\n"

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[str, ...], list[Sequence[str]]]] = []

    def add(self, report: Report) -> None:
        """Add a row for the checkpoint, and its blocks: tables of checks, findings and differences, and lines."""
        cases: dict[str, list[ReportCase]] = {}
        for case in report.cases:
            cases.setdefault(case.kind, []).append(case)
        blocks: list[Sequence[str]] = []
        if report.command == "verify":
            blocks.append(_checks(report.path, cases.get("check", ())))
        if "finding" in cases:
            blocks.append(_findings(report.path, cases["finding"]))
        if report.command == "diff":
            blocks.append([f"{_ICONS[report.status]} {prose(report.summary)}"])
        if "difference" in cases:
            blocks.append(_table(("what", "name", "from", "to"), map(_difference, cases["difference"])))
        blocks += ([_line(case)] for kind in _LINES for case in cases.get(kind, ()) if case.message)
        self._entries.append((() if report.command == "diff" else _row(report), blocks))

    def document(self, summary: Summary) -> str:
        """The document: the verdict, the checkpoints, the errors, and the details; what failed is above the rest.

        Blocks of details that GitHub would not take are counted.
        """
        icon = _ICONS["error" if summary.exit_code else "passed"]
        verdict = f"exit code {summary.exit_code}" if summary.exit_code else "passed"
        blocks: list[Sequence[str]] = [[f"### {icon} ckptmove {summary.command}: {verdict}"]]
        entries = sorted(self._entries, key=lambda entry: _WORST.index(entry[0][0]) if entry[0] else 0)
        rows = [row for row, _ in entries if row]
        if rows:
            blocks.append(_table(_HEADS[summary.command or ""], rows))
        if summary.failures:
            blocks.append(_table(("", "error", "hint"), map(_failure, summary.failures)))
        blocks += (block for _, details in entries for block in details)
        text, left = self.head.decode(), 0
        for block in blocks:
            part = "\n".join(block) + "\n\n"
            if len(text) + len(part) > _LONGEST - _NOTE:
                left += 1
            else:
                text += part
        note = f"{_ICONS['info']} {amount(left, 'section')} left out, for the limit of a comment\n"
        return text + note if left else text.rstrip("\n") + "\n"


def _row(report: Report) -> tuple[str, ...]:
    """The row of a checkpoint."""
    head = _ICONS[report.status], code(report.path)
    if report.facts:
        form, content, (tensors, *devices), findings = (texts for _, texts in report.facts)
        placed = f"{tensors} on {', '.join(map(code, devices[:_FIRST]))}" if devices else "no tensors"
        return *head, ", ".join(form), prose(" · ".join(content)), placed, *findings
    return *head, f"skipped, {code(report.output)} exists" if report.status == "skipped" else prose(report.summary)


def _checks(path: str, checks: Sequence[ReportCase]) -> list[str]:
    """The table of checks, open if one failed."""
    table = _table(("", "check", "result"), [(_ICONS[one.level], one.name, _detail(one)) for one in checks])
    opened = " open" if any(one.level == "error" for one in checks) else ""
    summary = f"{amount(len(checks), 'check')} of {code(path)}"
    return [f"<details{opened}><summary>{summary}</summary>", "", *table, "", "</details>"]


def _findings(path: str, findings: Sequence[ReportCase]) -> list[str]:
    """The table of findings, the worst first."""
    worst_first = sorted(findings, key=lambda finding: [*_ICONS].index(finding.level))
    return [f"Findings in {code(path)}", "", *_table(("", "finding", "problem", "fix"), map(_finding, worst_first))]


def _difference(case: ReportCase) -> tuple[str, ...]:
    sides = (prose(case.message), "") if case.message else [code(str(value)) for _, value in case.figures] or ("", "")
    return "not compared" if case.name == "uncompared" else case.name, *map(code, case.where), *sides


def _line(case: ReportCase) -> str:
    if case.kind == "expect":
        return f"{_ICONS['error']} Not on {code(str(dict(case.figures)['device']))}: {first_names(case.where, code)}"
    # An option without a match is no error of the checkpoint.
    return f"{_ICONS['warning' if case.kind == 'unmatched' else case.level]} {prose(case.message)}"


def code(text: str) -> str:
    """A text of a checkpoint, a path or a command, shown as it is. GitHub links no mention in it."""
    return f"<code>{_escaped(clean(text)).replace('@', f'@{_NOTHING}')}</code>"


def prose(text: str) -> str:
    """A message, which may have text of a checkpoint."""
    return _escaped(sentence(text)).replace("@", "@&#8203;")  # no mention


def _escaped(text: str) -> str:
    """A text inside a line, with entities in place of characters that would be Markdown, HTML or a link."""
    plain = "".join(f"&#{ord(one)};" if one in _SPECIAL else one for one in text)
    return plain.replace("://", f":{_NOTHING}//").replace("www.", f"www{_NOTHING}.")


def _finding(finding: ReportCase) -> tuple[str, ...]:
    where = f" (at {first_names(finding.where, code)})" if finding.where else ""
    fix = code(finding.fix) if finding.fix else ""
    return _ICONS[finding.level], finding.name, f"{prose(finding.message)}{where}", fix


def _failure(failure: Failure) -> tuple[str, ...]:
    path = f"{code(failure.path)}: " if failure.path else ""
    return _ICONS["error"], f"{path}{prose(failure.message)}", prose(failure.hint)


def _detail(check: ReportCase) -> str:
    fix = [f"fix: {code(check.fix)}"] if check.fix else []
    return "<br>".join([*map(prose, check.parts), *fix])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    every = [*rows]
    lines = [heads, ["---"] * len(heads), *every[:_SHOWN]]
    more = [f"and {len(every) - _SHOWN:,} more", *[""] * (len(heads) - 1)]
    lines += [more] if len(every) > _SHOWN else []
    return [f"| {' | '.join(line)} |" for line in lines]
