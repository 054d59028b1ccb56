"""The values of a verification: what each check found, and the verdict.

Never runs a check: that is ``verification/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ckptmove.model import OneLine, Severity
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.model import Finding

CheckStatus: TypeAlias = Literal["passed", "failed", "skipped"]


class CheckResult(NamedTuple):
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


def fails_run(findings: Iterable[Finding], *, strict: bool, proven: bool = True) -> bool:
    """Whether findings fail a run: errors do. ``--strict`` of every command adds warnings and what is not proven.

    Args:
        findings: those that count.
        strict: whether ``--strict`` was asked for.
        proven: whether a resume was proven, where a command proves one.
    """
    grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return any(finding.severity in grave for finding in findings) or (strict and not proven)


class SampleSize(NamedTuple):
    """How much of a checkpoint was looked at.

    Attributes:
        asked: how many parameters of each optimizer, and how many other tensors, were asked for.
        parameters: that optimizers step, of those looked at.
        of_parameters: that they step in all.
        tensors: whose values were looked at.
        of_tensors: in all.
    """

    asked: int
    parameters: int
    of_parameters: int
    tensors: int
    of_tensors: int

    @property
    def is_all(self) -> bool:
        """Whether there is no more than was asked for."""
        return (self.parameters, self.tensors) == (self.of_parameters, self.of_tensors)

    @property
    def of_all_parameters(self) -> str:
        """How many of the parameters, for people."""
        return f"{self.parameters:,} of {amount(self.of_parameters, 'parameter')}"

    @property
    def of_all_tensors(self) -> str:
        """How many of the tensors, for people."""
        return f"{self.tensors:,} of {amount(self.of_tensors, 'tensor')}"

    def __str__(self) -> str:
        """How much that is, for people."""
        return f"{self.of_all_parameters}, {self.of_all_tensors}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyResult(OneLine):
    """The verdict of ``verify`` on one checkpoint.

    Attributes:
        path: as it was given.
        target: the device that the step ran for.
        mode: ``real``, ``simulated`` or ``cpu``.
        passed: whether no check failed.
        proven: whether, besides, every optimizer was stepped on parameters of its own and with options of its own,
            and its step used the stored state: False where a step was skipped, something stood in for what the file
            does not hold, or only a sample was looked at. A case proves it where the step was skipped; where the case
            itself does not, neither does the step.
        checks: in the order of the contract.
        findings: of the file.
        sample: how much was looked at where only a sample was to be; else None.
    """

    path: str
    target: str
    mode: Literal["real", "simulated", "cpu"]
    passed: bool
    proven: bool
    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]
    sample: SampleSize | None = None

    def fails(self, *, strict: bool) -> bool:
        """Whether the verdict is no: a check failed, which every error makes; or ``strict`` as :func:`fails_run`."""
        return not self.passed or (strict and fails_run(self.findings, strict=True, proven=self.proven))

    def __str__(self) -> str:
        """The verdict, in one line."""
        verdict = "failed" if not self.passed else "passed" if self.proven else "passed, but not proven"
        part = f", by a sample: {self.sample}" if self.sample is not None else ""
        return f"{self.path}: {verdict} on {self.target} ({self.mode}){part}"
