"""The answers of commands as neutral reports, from which several formats are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from ckptmove.cli.render.renderer import Renderer, printed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.results import UndoResult
    from ckptmove.model import Finding
    from ckptmove.proof.evidence import Verdict

#: Levels of checks and verdicts that have another name than their status.
_LEVELS: Final = {"failed": "error", "unproven": "warning"}


class ReportCase(NamedTuple):
    """One statement of a report. A format has the kinds that it selects."""

    kind: str  # `finding`, `check`, `difference` and so on
    name: str  # code and name of a finding, name of a check, property that differs, option
    level: str  # `error`, `warning`, `info`, `passed` or `skipped`
    message: str = ""  # one line
    where: tuple[str, ...] = ()  # names of tensors or objects
    fix: str = ""  # command or edit
    path: str = ""  # file, if it is not that of the report
    line: int | None = None  # line of this file
    parts: tuple[str, ...] = ()  # failures that the message joins
    figures: tuple[tuple[str, object], ...] = ()  # evidence by name

    @property
    def text(self) -> str:
        """The message with its fix."""
        return f"{self.message}; fix: {self.fix}" if self.fix else self.message


class Report(NamedTuple):
    """The answer of a command for one checkpoint."""

    command: str
    path: str  # the checkpoint
    status: str  # a level, as of cases
    summary: str  # the answer in one line
    cases: tuple[ReportCase, ...] = ()
    output: str = ""  # file that was written, or exists already
    reference: str = ""  # checkpoint that it was compared with
    strict: bool = False  # whether warnings are failures, as differences are
    facts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # short texts by name


class ReportRenderer(Renderer, ABC):
    """A format that is written from neutral reports."""

    #: Whether it has the findings that are not printed for people.
    is_data = False

    @abstractmethod
    def add(self, report: Report) -> None:
        """Write the report on one checkpoint, or keep it for the end."""

    def inspect(self, answer: InspectAnswer) -> None:
        self.add(inspected(answer if self.is_data else printed(answer)))

    def convert(self, answer: ConvertAnswer) -> None:
        self.add(converted(answer))

    def skipped(self, path: str, output: str) -> None:
        from ckptmove.cli.render.conversion import skipped_line

        self.add(Report("convert", path, "skipped", skipped_line(path, output), output=output))

    def undo(self, result: UndoResult) -> None:
        from ckptmove.cli.render.conversion import undo_line

        self.add(Report("convert", result.path, "passed", undo_line(result)))

    def verify(self, answer: VerifyAnswer) -> None:
        self.add(verified((answer if self.is_data else printed(answer)).result, strict=answer.strict))

    def diff(self, result: Differences) -> None:
        self.add(compared(result))


def inspected(answer: InspectAnswer) -> Report:
    """Findings, ``--check``, ``--expect`` and ``--fit``."""
    from ckptmove.cli.render.inspection import brief_line, counted, summary_facts, unchecked_line
    from ckptmove.text import amount, size

    result, inventory = answer.result, answer.result.inventory
    cases = _findings(result.findings)
    if result.unchecked:
        cases.append(ReportCase("unchecked", "inspect --check", "info", unchecked_line(result)))
    expectation, fit = result.expectation, result.fit
    if expectation is not None:
        names = (*expectation.misplaced_names,)
        level, message = ("error", f"not on {expectation.device}") if names else ("passed", "")
        cases.append(ReportCase("expect", "expect", level, message, names, figures=(("device", expectation.device),)))
    if fit is not None:
        cases.append(ReportCase("fit", "fit", "passed" if fit.fits else "error", str(fit)))
    forms = dict.fromkeys((inventory.container, inventory.layout, size(inventory.size_bytes)))
    facts = (
        ("format", tuple(forms)),
        ("content", tuple(summary_facts(result.summary))),
        ("tensors", (amount(len(inventory.tensors), "tensor"), *result.devices)),
        ("findings", (counted(one.severity.value for one in result.findings),)),
    )
    status = "error" if answer.exit_code else "passed"
    line = brief_line(answer)
    return Report("inspect", inventory.path, status, line, tuple(cases), strict=answer.strict, facts=facts)


def converted(answer: ConvertAnswer) -> Report:
    """Options that match nothing, problems of the source, and notes."""
    from ckptmove.cli.render.conversion import brief_line

    path, result = answer.request.path, answer.result
    level = "error" if answer.exit_code else "warning"
    cases = (
        *(ReportCase("unmatched", one.option, level, str(one)) for one in result.unmatched),
        *(ReportCase("source", "source", "warning", warning) for warning in result.warnings),
        *(ReportCase("remark", "convert note", "info", note) for note in result.notes),
    )
    status = "error" if answer.exit_code else "passed"
    return Report("convert", path, status, brief_line(path, result), cases, output=result.output or "")


def verified(result: Verdict, *, strict: bool = False) -> Report:
    """Checks, findings, edits of ``--fix``, and whether the resume is proven."""
    from ckptmove.cli.render.verification import detail_texts, fixed_line, outcome, status_of, warned

    summary = outcome(result, strict=strict)
    cases = []
    for check in result.checks:
        figures = dict(check.evidence)
        file, line = str(figures.get("file") or ""), figures.get("line")
        level, detail = _LEVELS.get(check.status, check.status), check.detail.removesuffix(f"; fix: {check.fix}")
        place, parts = (file, line if type(line) is int else None), tuple(detail_texts(check))
        cases.append(ReportCase("check", check.name, level, detail, (), check.fix, *place, parts, check.evidence))
    cases += _findings(result.findings)
    cases += (ReportCase("edit", "verify --fix", "info", fixed_line(one), path=one.path) for one in result.fixed)
    level = "passed" if result.proven else "error" if strict else "warning"
    cases.append(ReportCase("unproven" if result.passed and not result.proven else "proof", "proven", level, summary))
    if strict:
        codes = ", ".join(warned(result))
        message = f"--strict fails on warnings: {codes}" if codes else "no warnings"
        cases.append(ReportCase("proof", "warnings", "error" if codes else "passed", message))
    status = status_of(result, strict=strict)
    return Report("verify", result.path, _LEVELS.get(status, status), summary, tuple(cases))


def compared(result: Differences) -> Report:
    """Differences one by one and by property, and notes."""
    from ckptmove.cli.render.difference import apart_in_words, brief_line
    from ckptmove.comparison.differences import What

    cases = [ReportCase("difference", "removed", "warning", where=(name,)) for name in result.removed]
    cases += (ReportCase("difference", "added", "warning", where=(name,)) for name in result.added)
    for one in result.changed:
        how = "" if one.gap is None else apart_in_words(result, one.gap)
        sides = (("from", one.source), ("to", one.target))
        cases.append(ReportCase("difference", one.what, "warning", how, (one.name,), figures=sides))
    cases += (ReportCase("difference", "uncompared", "warning", one.reason, (one.name,)) for one in result.uncompared)
    names: dict[str, list[str]] = {what: [] for what in ("removed", "added", *get_args(What), "uncompared")}
    for case in cases:
        names[case.name] += case.where
    cases += (
        ReportCase("property", what, "warning" if own else "passed", where=(*own,)) for what, own in names.items()
    )
    cases += (ReportCase("note", "diff note", "info", note) for note in result.notes)
    status = "passed" if result.same else "error"
    return Report("diff", result.second, status, brief_line(result), tuple(cases), reference=result.first, strict=True)


def _findings(findings: Sequence[Finding]) -> list[ReportCase]:
    return [
        ReportCase("finding", f"{one.code} {one.name}", one.severity.value, one.message, one.where, one.fix)
        for one in findings
    ]
