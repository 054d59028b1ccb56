"""The neutral report of an answer, from which JUnit, SARIF, Markdown and annotations are written."""

from __future__ import annotations

import pytest

from ckptmove.cli.render.junit import JUnitDocument
from ckptmove.cli.render.renderer import Summary, VerifyAnswer
from ckptmove.cli.render.report import verified
from ckptmove.cli.render.sarif import SarifDocument
from ckptmove.model import Finding, Severity
from ckptmove.proof import checks
from ckptmove.proof.evidence import Verdict
from ckptmove.proof.request import VerifyRequest

WARNING = Finding("D102", "optimizer-device", Severity.WARNING, "moments on the cpu", ("state.0.exp_avg",))


def verdict(check, *, proven=False, findings=()) -> Verdict:
    return Verdict(
        path="a.pth", target="mps", mode="real", passed=check.status != "failed", proven=proven, checks=(check,),
        findings=findings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("check", "proven", "strict", "status", "proof"),
    [
        (checks.passed("step", "4 moved"), True, False, "passed", ("proof", "passed")),
        (checks.passed("step", "4 moved"), False, False, "warning", ("unproven", "warning")),
        (checks.passed("step", "4 moved"), False, True, "error", ("unproven", "error")),
        (checks.failed("step", ["2 stayed"], "move them"), False, False, "error", ("proof", "warning")),
    ],
)
def test_a_proof_is_a_case(check, proven, strict, status, proof) -> None:
    report = verified(verdict(check, proven=proven), strict=strict)
    first, last, *_ = report.cases
    assert (report.command, report.path, report.status) == ("verify", "a.pth", status)
    assert (last.name, last.kind, last.level) == ("proven", *proof)
    assert (first.kind, first.text, first.fix) == ("check", check.detail, check.fix)


def test_findings_of_verify_are_in_sarif_and_not_in_junit() -> None:
    answer = VerifyAnswer(VerifyRequest("a.pth"), verdict(checks.passed("step", ""), findings=(WARNING,)))
    for made, has_it in ((JUnitDocument(), False), (SarifDocument(), True)):
        made.verify(answer)
        assert (WARNING.code in made.document(Summary("verify", 0))) is has_it
