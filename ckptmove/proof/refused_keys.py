"""The finding about ``module.`` in front of every key, once a plain model has refused these keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.model import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import Finding
    from ckptmove.proof.evidence import CheckResult


def with_refused_keys(findings: Iterable[Finding], checks: Sequence[CheckResult]) -> tuple[Finding, ...]:
    """The findings, with K601 as a warning if a strict load of the user's code failed on the prefix alone.

    Args:
        findings: those of the file, where K601 is a note if the prefix may be a part of the model.
    """
    fixes = [check.fix for check in checks if check.status == "failed" and "prefix" in dict(check.evidence)]
    return tuple(
        one._replace(severity=Severity.WARNING, fix=fixes[0])
        if fixes and one.code == "K601" and one.severity is Severity.INFO
        else one
        for one in findings
    )
