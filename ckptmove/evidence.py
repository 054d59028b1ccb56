"""The values of a verification: what each check found, and the verdict.

Never runs a check: that is ``verification/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from ckptmove.model import Finding

CheckStatus: TypeAlias = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome of one check of ``verify``.

    Attributes:
        name: ``file``, ``restore``, ``placement``, ``structure``, ``numbers``, ``step``, ``parity``,
            ``fresh`` or, where one is named, ``case``.
        status: what came of it.
        detail: one line with figures; for a skipped check, the reason.
        evidence: the figures by name.
    """

    name: str
    status: CheckStatus
    detail: str
    evidence: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The verdict of ``verify`` on one checkpoint.

    Attributes:
        path: as it was given.
        target: the device that the step ran for.
        mode: ``real``, ``simulated`` or ``cpu``.
        passed: whether no check failed.
        proven: whether, besides, every optimizer was stepped on parameters of its own and with options of its own:
            False where a step was skipped, or something stood in for what the file does not hold.
        checks: in the order of the contract.
        findings: of the file.
    """

    path: str
    target: str
    mode: Literal["real", "simulated", "cpu"]
    passed: bool
    proven: bool
    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        """The verdict, in one line."""
        verdict = "failed" if not self.passed else "passed" if self.proven else "passed, but not proven"
        return f"{self.path}: {verdict} on {self.target} ({self.mode})"
