"""The answers of commands, as renderers receive them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptmove.api.document import Json
    from ckptmove.api.failures import Failure
    from ckptmove.api.figures import Expectation
    from ckptmove.api.functions import InspectRequest
    from ckptmove.api.results import Inspection
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted
    from ckptmove.model import Finding, TensorRecord
    from ckptmove.proof.evidence import Verdict
    from ckptmove.proof.request import VerifyRequest


class Detail(NamedTuple):
    """Optional parts of the report of ``inspect``.

    Attributes:
        tensors: a row for each tensor.
        tree: the outline.
        globals: the names that the pickle imports.
        verbose: every place of every finding.
    """

    tensors: bool = False
    tree: bool = False
    globals: bool = False
    verbose: bool = False


class InspectAnswer(NamedTuple):
    """The answer of ``inspect`` for one checkpoint.

    Attributes:
        request: the options of the command.
        inspection: the inventory, and the findings that ``--select`` and ``--ignore`` leave.
        tensors: the tensors that ``--match`` leaves.
        exit_code: 0 or 1.
        detail: optional parts of the report.
        strict: whether warnings are failures.
        version: fingerprint of the sizes and versions of its files; None if unknown.
        unprinted: codes of findings that only data has.
    """

    request: InspectRequest
    inspection: Inspection
    tensors: tuple[TensorRecord, ...]
    exit_code: int
    detail: Detail = Detail()
    strict: bool = False
    version: str | None = None
    unprinted: frozenset[str] = frozenset()

    @property
    def printed(self) -> tuple[Finding, ...]:
        """The findings of a report for people."""
        return tuple(one for one in self.inspection.findings if one.code not in self.unprinted)

    def with_findings(self, findings: tuple[Finding, ...]) -> InspectAnswer:
        """The answer with other findings."""
        return self._replace(inspection=replace(self.inspection, findings=findings))

    @property
    def expectation(self) -> Expectation | None:
        """The result of ``--expect``, or None."""
        return self.inspection.expectation

    def entry(self) -> Json:
        """The answer as an entry of ``checkpoints`` in JSON."""
        from ckptmove.api.document import checkpoint

        found = self.inspection
        return checkpoint(
            found.inventory,
            found.findings,
            tensors=self.tensors,
            summary=found.summary,
            pairings=found.pairings,
            expectation=found.expectation,
            fit=found.fit,
            unchecked=found.unchecked,
            traffic=found.traffic,
            version=self.version,
        )


class ConvertAnswer(NamedTuple):
    """The answer of ``convert``.

    Attributes:
        request: the options of the command.
        result: the plan, and the output if one was written.
        exit_code: 1 if ``--strict`` stopped the conversion, otherwise 0.
        strict_from: path of the configuration file that sets ``strict``; empty if ``--strict`` was typed.
    """

    request: ConvertRequest
    result: Converted
    exit_code: int = 0
    strict_from: str = ""


class VerifyAnswer(NamedTuple):
    """The answer of ``verify`` for one checkpoint.

    Attributes:
        request: the options of the command.
        result: the checks, the findings and the verdict.
        strict: whether warnings, and a resume that is not proven, are failures.
        dry_run: whether the answer is a patch of the user's files, which are not written.
        unprinted: codes of findings that only data has.
    """

    request: VerifyRequest
    result: Verdict
    strict: bool = False
    dry_run: bool = False
    unprinted: frozenset[str] = frozenset()

    @property
    def printed(self) -> tuple[Finding, ...]:
        """The findings of a report for people."""
        return tuple(one for one in self.result.findings if one.code not in self.unprinted)

    def with_findings(self, findings: tuple[Finding, ...]) -> VerifyAnswer:
        """The answer with other findings."""
        return self._replace(result=replace(self.result, findings=findings))

    @property
    def fails(self) -> bool:
        """Whether the exit code is 1."""
        return self.result.fails(strict=self.strict)


class Summary(NamedTuple):
    """The outcome of a command.

    Attributes:
        command: name of the command, or None if the command line names no known one.
        exit_code: the highest exit code of its checkpoints.
        failures: errors, in the order in which they occurred.
        checkpoints: number of checkpoints of the command.
        good: number of checkpoints with the exit code 0.
        unproven: how many of those are not proven to resume.
        skipped: how many of those were left out by ``--skip-existing`` or ``--skip-seen``.
        unwritten: how many of those needed no change, so that nothing was written.
        is_planned: whether nothing was written because of ``--dry-run``.
        is_complete: False if an interruption left checkpoints out.
    """

    command: str | None
    exit_code: int
    failures: tuple[Failure, ...] = ()
    checkpoints: int = 1
    good: int = 0
    unproven: int = 0
    skipped: int = 0
    unwritten: int = 0
    is_planned: bool = False
    is_complete: bool = True
