"""Build check results, and convert them to JSON for the pipe between child process and parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ckptmove.model import Finding, Severity
from ckptmove.verification.evidence import CheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping

#: All checks, in the order of the report.
CHECKS: Final = ("file", "restore", "placement", "structure", "numbers", "step", "parity", "fresh")
#: The check of ``--case``, reported last.
CASE: Final = "case"
#: Why most checks are skipped for a file that contains only weights.
NOTHING_TO_RESUME: Final = "there is no optimizer state: nothing to resume"
_NAMED: Final = 5


@dataclass(slots=True)
class Offenders:
    """A list of faults: the first few as text, the rest as a number.

    Attributes:
        count: number of faults.
        first: texts of the first few.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add a fault."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(text)

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        rest = self.count - len(self.first)
        return "; ".join(self.first) + (f"; and {rest:,} more" if rest else "")


def passed(name: str, detail: str, **evidence: object) -> CheckResult:
    """Result of a check that passed."""
    return CheckResult(name=name, status="passed", detail=detail, evidence=tuple(evidence.items()))


def failed(name: str, detail: str, **evidence: object) -> CheckResult:
    """Result of a check that failed."""
    return CheckResult(name=name, status="failed", detail=detail, evidence=tuple(evidence.items()))


def skipped(name: str, reason: str, **evidence: object) -> CheckResult:
    """Result of a check that was not made, with the reason."""
    return CheckResult(name=name, status="skipped", detail=reason, evidence=tuple(evidence.items()))


def check_to_json(check: CheckResult) -> dict[str, object]:
    """A check as JSON, for ``--json`` and for the parent process."""
    return {"name": check.name, "status": check.status, "detail": check.detail, "evidence": dict(check.evidence)}


def check_from_json(value: Mapping[str, Any]) -> CheckResult:
    """Convert the JSON object of :func:`check_to_json` back."""
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
    """Convert the JSON object of :func:`finding_to_json` back."""
    return Finding(
        code=value["code"],
        name=value["name"],
        severity=Severity(value["severity"]),
        message=value["message"],
        where=tuple(value["where"]),
        fix=value["fix"],
    )
