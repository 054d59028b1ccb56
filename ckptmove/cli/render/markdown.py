"""``--report markdown=FILE``: GitHub's Markdown, for a comment or a job summary.

Text of a checkpoint cannot become Markdown, HTML, a mention or a link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.renderer import Document, printed
from ckptmove.cli.render.text import clean, sentence
from ckptmove.model import Severity
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.model import Finding
    from ckptmove.proof.evidence import CheckResult

_ICONS: Final = {
    "error": "❌",
    "warning": "⚠️",
    "info": "💡",
    "failed": "❌",
    "passed": "✅",
    "unproven": "⚠️",
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
#: Names in one cell.
_FIRST: Final = 3
#: Splits a text, so that no part of it becomes a link: GitHub makes links of addresses after it reads entities.
_NOTHING: Final = "<!-- -->"
#: Characters that mean something in Markdown inside a line.
_SPECIAL: Final = frozenset("\\`*_[]#|~<>&$")
#: Heads of the table of checkpoints, by command.
_HEADS: Final = {
    "inspect": ("", "checkpoint", "format", "content", "tensors", "findings"),
    "convert": ("", "checkpoint", "result"),
    "verify": ("", "checkpoint", "result"),
}


class MarkdownDocument(Document):
    """A heading with the verdict, and tables."""

    title = "a Markdown report of ckptmove"
    #: Invisible. Finds the comment of an earlier run, too.
    head = b"<!-- ckptmove -->\n"

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[str, ...], list[Sequence[str]]]] = []

    def inspect(self, answer: InspectAnswer) -> None:
        """Add a row for the checkpoint, and a table of its findings."""
        from ckptmove.cli.render.inspection import findings_summary, summary_facts
        from ckptmove.cli.render.text import Page
        from ckptmove.text import size

        inventory, findings = answer.result.inventory, printed(answer).result.findings
        devices = ", ".join(map(code, answer.result.devices[:_FIRST]))
        row = (
            _icon(answer.exit_code),
            code(inventory.path),
            ", ".join([*dict.fromkeys((inventory.container, inventory.layout)), size(inventory.size_bytes)]),
            prose(" · ".join(summary_facts(answer.result.summary))),
            f"{amount(len(inventory.tensors), 'tensor')} on {devices}" if devices else "no tensors",
            findings_summary(Page(), findings),
        )
        blocks = _findings(inventory.path, findings)
        expectation = answer.result.expectation
        if expectation is not None and expectation.misplaced:
            names = expectation.misplaced_names
            blocks.append([f"{_ICONS['error']} Not on {code(expectation.device)}: {_some(names)}"])
        fit = answer.result.fit
        if fit is not None:
            blocks.append([f"{_ICONS['passed' if fit.fits else 'failed']} {prose(str(fit))}"])
        self._entries.append((row, blocks))

    def convert(self, answer: ConvertAnswer) -> None:
        """Add a row for the checkpoint, and what its options do not match."""
        from ckptmove.cli.render.conversion import brief_line

        path, result = answer.request.path, answer.result
        row = (_icon(answer.exit_code), code(path), prose(brief_line(path, result)))
        lines = [f"{_ICONS['warning']} {prose(text)}" for text in (*map(str, result.unmatched), *result.warnings)]
        lines += [f"{_ICONS['info']} {prose(note)}" for note in result.notes]
        self._entries.append((row, [[line] for line in lines]))

    def skipped(self, path: str, output: str) -> None:
        """Add a row for the checkpoint."""
        self._entries.append(((_ICONS["skipped"], code(path), f"skipped, {code(output)} exists"), []))

    def verify(self, answer: VerifyAnswer) -> None:
        """Add a row for the checkpoint, and tables of its checks and findings."""
        from ckptmove.cli.render.verification import outcome, status_of

        result = answer.result
        status = status_of(result, strict=answer.strict)
        row = (_ICONS[status], code(result.path), prose(outcome(result, strict=answer.strict)))
        table = _table(("", "check", "result"), [(_ICONS[one.status], one.name, _detail(one)) for one in result.checks])
        summary = f"{amount(len(result.checks), 'check')} of {code(result.path)}"
        opened = "" if result.passed else " open"
        checks = [f"<details{opened}><summary>{summary}</summary>", "", *table, "", "</details>"]
        self._entries.append((row, [checks, *_findings(result.path, printed(answer).result.findings)]))

    def diff(self, result: Differences) -> None:
        """Add the answer, and a table of the differences."""
        from ckptmove.cli.render.difference import apart_in_words, brief_line

        rows = [("removed", code(name), "", "") for name in result.removed]
        rows += [("added", code(name), "", "") for name in result.added]
        for one in result.changed:
            apart = "" if one.gap is None else prose(apart_in_words(result, one.gap))
            sides = (apart, "") if apart else (code(one.source), code(one.target))
            rows.append((one.what, code(one.name), *sides))
        rows += [("not compared", code(one.name), prose(one.reason), "") for one in result.uncompared]
        blocks: list[Sequence[str]] = [[f"{_ICONS['passed' if result.same else 'failed']} {prose(brief_line(result))}"]]
        if rows:
            blocks.append(_table(("what", "name", "from", "to"), rows))
        self._entries.append(((), [*blocks, *([f"{_ICONS['info']} {prose(note)}"] for note in result.notes)]))

    def document(self, summary: Summary) -> str:
        """The document: the verdict, the checkpoints, the errors, and the details; what failed is above the rest.

        Blocks of details that GitHub would not take are counted.
        """
        icon = _ICONS["failed" if summary.exit_code else "passed"]
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


def _findings(path: str, findings: Sequence[Finding]) -> list[Sequence[str]]:
    """The table of findings, the worst first; nothing without findings."""
    if not findings:
        return []
    worst_first = sorted(findings, key=lambda finding: [*Severity].index(finding.severity))
    table = _table(("", "finding", "problem", "fix"), map(_finding, worst_first))
    return [[f"Findings in {code(path)}", "", *table]]


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


def _icon(exit_code: int) -> str:
    return _ICONS["failed" if exit_code else "passed"]


def _finding(finding: Finding) -> tuple[str, ...]:
    where = f" (at {_some(finding.where)})" if finding.where else ""
    fix = code(finding.fix) if finding.fix else ""
    label = f"{finding.code} {finding.name}"
    return _ICONS[finding.severity.value], label, f"{prose(finding.message)}{where}", fix


def _failure(failure: Failure) -> tuple[str, ...]:
    path = f"{code(failure.path)}: " if failure.path else ""
    return _ICONS["error"], f"{path}{prose(failure.message)}", prose(failure.hint)


def _detail(check: CheckResult) -> str:
    from ckptmove.cli.render.verification import detail_texts

    fix = [f"fix: {code(check.fix)}"] if check.fix else []
    return "<br>".join([*map(prose, detail_texts(check)), *fix])


def _some(names: Sequence[str]) -> str:
    rest = f", +{len(names) - _FIRST:,} more" if len(names) > _FIRST else ""
    return ", ".join(map(code, names[:_FIRST])) + rest


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    every = [*rows]
    lines = [heads, ["---"] * len(heads), *every[:_SHOWN]]
    more = [f"and {len(every) - _SHOWN:,} more", *[""] * (len(heads) - 1)]
    lines += [more] if len(every) > _SHOWN else []
    return [f"| {' | '.join(line)} |" for line in lines]
