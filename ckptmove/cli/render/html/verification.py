"""The section of one checkpoint, the answer of ``verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.api.document import finding_to_json
from ckptmove.cli.render.html.findings import copyable, finding_part
from ckptmove.cli.render.html.markup import Markup, element
from ckptmove.cli.render.html.sections import closed_table, facts, part, preformatted
from ckptmove.cli.render.text import clean, sentence
from ckptmove.cli.render.verification import detail_texts, unfixed_line
from ckptmove.text import amount

if TYPE_CHECKING:
    from ckptmove.proof.evidence import CheckResult, FixedFile, Verdict

_MARKS: Final = {"passed": "✓", "failed": "✗", "skipped": "–"}


def result_section(result: Verdict, verdict: str, status: str, name: str) -> Markup:
    """Return the report on one checkpoint."""
    findings = [finding_to_json(finding) for finding in result.findings]
    about = {
        "target": clean(result.target),
        "device": "simulated on the CPU" if result.mode == "simulated" else result.mode,
        "proven to resume": "yes" if result.proven else "no",
        "sample": str(result.sample) if result.sample else "",
    }
    return element(
        "section",
        element("h2", element("bdi", clean(result.path))),
        element("p", verdict, class_=f"verdict {status}"),
        facts(about),
        part("Checks", element("ol", *map(_check, result.checks), class_="checks")),
        finding_part(findings),
        *map(_edited, result.fixed),
        element("p", unfixed_line(result), class_="note") if result.unfixed else "",
        id=name,
    )


def _check(check: CheckResult) -> Markup:
    evidence = [(clean(key), sentence(str(value))) for key, value in check.evidence]
    return element(
        "li",
        element("span", _MARKS[check.status], role="img", aria_label=check.status, class_="mark"),
        element("h4", check.name),
        element(
            "div",
            *(element("p", sentence(detail)) for detail in detail_texts(check)),
            copyable(sentence(check.fix)) if check.fix else "",
            closed_table("Evidence", ("figure", "value"), evidence),
        ),
        class_=check.status,
    )


def _edited(file: FixedFile) -> Markup:
    """The edits of a file of the user's code."""
    lines = (line.expandtabs() for line in file.diff.splitlines())
    done = "not written" if file.backup is None else f"backup: {clean(file.backup)}"
    return part(f"{amount(file.fixes, 'edit')} of {clean(file.path)}; {done}", preformatted(lines))
