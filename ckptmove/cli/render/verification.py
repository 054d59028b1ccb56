"""Human-readable report of ``verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from ckptmove.cli.render.inspection import finding_lines, findings_summary
from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.selection import ON_REQUEST
from ckptmove.model import Severity
from ckptmove.proof.evidence import NOT_KNOWN
from ckptmove.text import amount, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.cli.render.renderer import VerifyAnswer
    from ckptmove.cli.render.text import Page
    from ckptmove.proof.evidence import CheckResult, FixedFile, Verdict

_DIFF_STYLES: Final = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}
_STYLES: Final = {"passed": "bold green", "failed": "bold red", "skipped": "dim", "unproven": "bold yellow"}


def verification_lines(page: Page, result: Verdict, *, verbose: bool, strict: bool = False) -> Iterator[str]:
    """The report on one checkpoint: a line for each check, the findings, the verdict (see :func:`outcome`)."""
    place = clean(result.target)
    yield f"{page.paint(clean(result.path), 'bold')} on {place}"
    broad = max((len(check.name) for check in result.checks), default=0)
    marks = {check.status: page.mark(check.status) for check in result.checks}
    widest = max(map(len, marks.values()), default=0)  # as words they differ in length
    for check in result.checks:
        mark = f"{marks[check.status]:<{widest}}"
        label = f"{mark} {check.name:<{broad}}  "
        first, *rest = _detail_lines(page, label, check)
        yield page.paint(first[: len(mark)], _STYLES[check.status]) + first[len(mark) :]
        yield from rest
        if verbose:
            for name, value in check.evidence:
                yield f"{' ' * len(label)}{clean(name)} = {clean(str(value))}"
    if result.findings:
        # Notes are left out, unless they were asked for: the step itself shows whether the checkpoint resumes.
        shown = [
            finding
            for finding in result.findings
            if verbose or finding.code in ON_REQUEST or finding.severity is not Severity.INFO
        ]
        yield from ["", *finding_lines(page, shown, verbose=verbose)] if shown else []
        codes = ", ".join(dict.fromkeys(finding.code for finding in result.findings))
        yield f"{findings_summary(page, result.findings)} ({codes})"
    yield from fixed_lines(result)
    for line in page.wrap(outcome(result, strict=strict), 2):
        yield page.paint(line, _STYLES[status_of(result, strict=strict)])


def _detail_lines(page: Page, label: str, check: CheckResult) -> Iterator[str]:
    """The detail of a check, one failure per line. A fix stays on one line, so that it can be copied."""
    texts = detail_texts(check)
    indent = " " * len(label)
    for number, text in enumerate(texts):
        yield from page.wrap((indent if number else label) + sentence(text), len(label))
    if check.fix:
        yield f"{indent}fix: {sentence(check.fix)}"


def detail_texts(check: CheckResult) -> Sequence[str]:
    """The failures of a check, or else its detail, without the fix."""
    return check.failures or (check.detail.removesuffix(f"; fix: {check.fix}"),)


def diff_lines(page: Page, files: Sequence[FixedFile]) -> Iterator[str]:
    """The diffs of files, for a terminal."""
    for line in (line for file in files for line in file.diff.splitlines()):
        style = next((style for start, style in _DIFF_STYLES.items() if line.startswith(start)), "")
        yield page.paint(sentence(line.expandtabs()), style)


def fixed_lines(result: Verdict) -> Iterator[str]:
    """A line for each file that ``--fix`` edited, and whether that ends the fault."""
    yield from map(fixed_line, result.fixed)
    if result.unfixed:
        yield unfixed_line(result)
    elif any(file.backup is None for file in result.fixed):
        yield f"with the patch, the {result.checks[-1].name} passes"


def unfixed_line(result: Verdict) -> str:
    """Why the code does not pass with the edits, in one line, or that this is not known."""
    text = sentence(result.unfixed)
    return text if result.unfixed.startswith(NOT_KNOWN) else f"not fixed: {text}"


def fixed_line(file: FixedFile) -> str:
    """What ``--fix`` did with a file, in one line."""
    edits = f"{amount(file.fixes, 'edit')} of {clean(file.path)}"
    return f"{edits}, not written (--dry-run)" if file.backup is None else f"{edits}; backup: {clean(file.backup)}"


def status_of(result: Verdict, *, strict: bool) -> str:
    """``failed``, ``passed`` or ``unproven``."""
    if result.fails(strict=strict):
        return "failed"
    return "passed" if result.proven else "unproven"


def brief_line(result: Verdict, *, strict: bool = False) -> str:
    """The verdict on one checkpoint in one line (see :func:`outcome`), with the names of the failed checks."""
    failed = ", ".join(check.name for check in result.checks if check.status == "failed")
    return f"{clean(result.path)}: {outcome(result, strict=strict)}{f' ({failed})' if failed else ''}"


def needs_case(answer: VerifyAnswer) -> bool:
    """Whether ``--case`` would prove a resume that this run does not."""
    result = answer.result
    is_whole = result.sample is None or result.sample.is_all
    has_state = any(dict(check.evidence).get("with_state") for check in result.checks)
    has_case = any(check.name in {"case", "script"} for check in result.checks)
    return result.passed and not result.proven and not has_case and is_whole and has_state


def has_edit(result: Verdict) -> bool:
    """Whether ``--fix`` would edit the user's files; False if it has."""
    edits = any(check.status == "failed" and "edit" in dict(check.evidence) for check in result.checks)
    return edits and not result.fixed and not result.unfixed


def warned(result: Verdict) -> list[str]:
    """The codes of the findings that are warnings."""
    return list(dict.fromkeys(one.code for one in result.findings if one.severity is Severity.WARNING))


def outcome(result: Verdict, *, strict: bool = False) -> str:
    """The verdict, always with the device of the step: ``passed, simulated cuda:0``."""
    place = "cpu" if result.mode == "cpu" else f"{result.mode} {clean(result.target)}"
    place += "" if result.run is None else f", {result.run}"
    sample = "" if result.sample is None else f", by a sample: {result.sample}"
    if not result.passed and result.run is not None:
        return f"failed, {place}"
    if not result.passed:
        steps = [check for check in result.checks if check.name == "step" and check.status == "failed"]
        is_made = result.mode != "simulated" or all(dict(step.evidence).get("simulated") for step in steps)
        return f"failed, {place if is_made else clean(result.target)}{sample}"
    place += sample  # also for a sample of everything: CRCs were not compared
    reasons = {check.name: check.detail for check in result.checks if check.status == "skipped"}
    if any(check.name == "keys" for check in result.checks):
        return f"passed, {place}: {_of_ranks(result, reasons)}"
    if result.proven:
        rest = ", not compared with what torch.load returns" if "restore" in reasons else ""
        rest += f", but --strict fails it: {', '.join(warned(result))}" if result.fails(strict=strict) else ""
        return f"passed, {place}{rest}{_not_looked_at(result)}"
    failing = " (a failure with --strict)" if strict else ""
    return f"passed, {place}, but not proven to resume{failing}: {sentence(_doubt(result, reasons))}"


def _not_looked_at(result: Verdict) -> str:
    """What no check looks at, as the end of a sentence; empty for nothing."""
    if not result.not_looked_at:
        return ""
    named = ", ".join(result.not_looked_at)
    has_code = any(check.name in {"case", "script"} for check in result.checks)
    return f"; not looked at: the {named}" if has_code else f"; {named}: in the file, not looked at"


def _of_ranks(result: Verdict, reasons: Mapping[str, str]) -> str:
    """The proof of a run under torchrun."""
    if not result.proven:
        if "parity" in reasons:
            return f"every shard equal, but one step not compared: {sentence(reasons['parity'])}"
        return f"every shard equal, but not proven to resume: {sentence(reasons['fresh'])}"
    parity = next(dict(check.evidence) for check in result.checks if check.name == "parity")
    return f"every shard and one step equal {'bit for bit' if parity['exact'] else 'within tolerance'}"


def _doubt(result: Verdict, reasons: Mapping[str, str]) -> str:
    """Why a resume is not proven; ``reasons`` holds the details of the skipped checks."""
    figures = {check.name: dict(check.evidence) for check in result.checks}
    not_shown = cast("Sequence[str]", figures.get("restore", {}).get("not_shown", ()))
    if not_shown:
        return some(not_shown)
    step, own = figures.get("step", {}), next((name for name in ("case", "script") if name in figures), "")
    is_asked = own == "script" or step.get("proven") is True or (bool(own) and "step" in reasons)
    if is_asked and own and figures[own].get("proven") is not True:
        reason = reasons.get(own) or str(figures[own].get("unproven") or f"the {own} does not prove it")
        return reason.removeprefix("not proven: ")
    if is_asked:
        return "only a sample was checked"
    skipped = reasons.get("step") or reasons.get("fresh", "")
    stood_in = "a value missing from the file was replaced"
    return skipped.partition("; ")[0] or str(step.get("unproven") or stood_in)
