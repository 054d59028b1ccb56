"""The outcome of a check as it is gathered and as it travels from the child process to its parent.

Never decides an outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ckptmove.model import Finding, Severity
from ckptmove.verification.evidence import CheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The order of the contract.
CHECKS: Final = ("file", "restore", "placement", "structure", "numbers", "step", "parity", "fresh")
#: After those, where the user names a case.
CASE: Final = "case"
#: Why most checks are skipped for a file of weights.
NOTHING_TO_RESUME: Final = "there is no optimizer state: nothing to resume"
_NAMED: Final = 5


@dataclass(slots=True)
class Offenders:
    """What is at fault: the first few by name, the rest as a number.

    Attributes:
        count: how many there are.
        first: the first few.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(text)

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        rest = self.count - len(self.first)
        return "; ".join(self.first) + (f"; and {rest:,} more" if rest else "")


def passed(name: str, detail: str, **evidence: object) -> CheckResult:
    """A check that found what it looked for."""
    return CheckResult(name=name, status="passed", detail=detail, evidence=tuple(evidence.items()))


def failed(name: str, detail: str, **evidence: object) -> CheckResult:
    """A check that did not."""
    return CheckResult(name=name, status="failed", detail=detail, evidence=tuple(evidence.items()))


def skipped(name: str, reason: str, **evidence: object) -> CheckResult:
    """A check that does not apply."""
    return CheckResult(name=name, status="skipped", detail=reason, evidence=tuple(evidence.items()))


def check_to_json(check: CheckResult) -> dict[str, object]:
    """A check as JSON, for ``--json`` and for the parent process."""
    return {"name": check.name, "status": check.status, "detail": check.detail, "evidence": dict(check.evidence)}


def check_from_json(value: Mapping[str, Any]) -> CheckResult:
    """The check that :func:`check_to_json` made."""
    return CheckResult(
        name=value["name"],
        status=value["status"],
        detail=value["detail"],
        evidence=tuple(value["evidence"].items()),
    )


def finding_to_json(finding: Finding) -> dict[str, object]:
    """A finding as JSON, for ``--json`` and for the parent process."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "message": finding.message,
        "where": list(finding.where),
        "fix": finding.fix,
    }


def finding_from_json(value: Mapping[str, Any]) -> Finding:
    """The finding that :func:`finding_to_json` made."""
    return Finding(
        code=value["code"],
        name=value["name"],
        severity=Severity(value["severity"]),
        message=value["message"],
        where=tuple(value["where"]),
        fix=value["fix"],
    )
