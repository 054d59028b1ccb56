"""The answers of commands, and the protocol of the formats that write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.api.document import Json
    from ckptmove.api.failures import Failure
    from ckptmove.api.inspection import Inspection, InspectRequest
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted, UndoResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.model import Finding, TensorRecord
    from ckptmove.proof.evidence import FixedFile, Verdict
    from ckptmove.proof.request import VerifyRequest


class Detail(NamedTuple):
    """Optional parts of the report of ``inspect``."""

    tensors: bool = False  # a row for each tensor
    tree: bool = False  # the outline
    globals: bool = False  # the names that the pickle imports
    verbose: bool = False  # every place of every finding


class InspectAnswer(NamedTuple):
    """The answer of ``inspect`` for one checkpoint."""

    request: InspectRequest  # the options of the command
    result: Inspection  # the inventory, and the findings that `--select` and `--ignore` leave
    tensors: tuple[TensorRecord, ...]  # the tensors that `--match` leaves
    exit_code: int  # 0 or 1
    detail: Detail = Detail()  # optional parts of the report
    strict: bool = False  # whether warnings are failures
    version: str | None = None  # fingerprint of the sizes and versions of its files; None if unknown
    unprinted: frozenset[str] = frozenset()  # codes of findings that only data has

    def entry(self) -> Json:
        """The answer as an entry of ``checkpoints`` in JSON."""
        from ckptmove.api.document import checkpoint

        found = self.result
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
    """The answer of ``convert``."""

    request: ConvertRequest  # the options of the command
    result: Converted  # the plan, and the output if one was written
    exit_code: int = 0  # 1 if `--strict` stopped the conversion, otherwise 0
    strict_from: str = ""  # path of the configuration file that sets `strict`; empty if `--strict` was typed


class VerifyAnswer(NamedTuple):
    """The answer of ``verify`` for one checkpoint."""

    request: VerifyRequest  # the options of the command
    result: Verdict  # the checks, the findings and the verdict
    strict: bool = False  # whether warnings, and a resume that is not proven, are failures
    dry_run: bool = False  # whether the answer is a patch of the user's files, which are not written
    unprinted: frozenset[str] = frozenset()  # codes of findings that only data has

    @property
    def fails(self) -> bool:
        """Whether the exit code is 1."""
        return self.result.fails(strict=self.strict)


FoundAnswer = TypeVar("FoundAnswer", InspectAnswer, VerifyAnswer)


def printed(answer: FoundAnswer) -> FoundAnswer:
    """The answer for people, without the findings that only data has."""
    return with_findings(answer, [one for one in answer.result.findings if one.code not in answer.unprinted])


def with_findings(answer: FoundAnswer, findings: Iterable[Finding]) -> FoundAnswer:
    """The answer with other findings."""
    return answer._replace(result=replace(answer.result, findings=tuple(findings)))


class Summary(NamedTuple):
    """The outcome of a command."""

    command: str | None  # name of the command, or None if the command line names no known one
    exit_code: int  # the highest exit code of its checkpoints
    failures: tuple[Failure, ...] = ()  # errors, in the order in which they occurred
    checkpoints: int = 1  # number of checkpoints of the command
    good: int = 0  # number of checkpoints with the exit code 0
    unproven: int = 0  # how many of those are not proven to resume
    skipped: int = 0  # how many of those were left out by `--skip-existing` or `--skip-seen`
    unwritten: int = 0  # how many of those needed no change, so that nothing was written
    is_planned: bool = False  # whether nothing was written because of `--dry-run`
    is_complete: bool = True  # False if an interruption left checkpoints out


class Renderer:
    """Writes the answers of all commands in one format.

    A format is a subclass with a line in :data:`ckptmove.cli.render.formats.RENDERERS`. A command calls the method of
    its answer once for each checkpoint, :meth:`failure` for each error, and :meth:`finish` at its end. Methods that a
    format leaves out write nothing. Each method raises StdoutFailed if stdout cannot be written.
    """

    #: Whether a progress bar may be shown on stderr.
    shows_progress = False
    #: Whether it writes each answer at once, so that the answers may come in any order.
    is_stream = False

    def inspect(self, answer: InspectAnswer) -> None:
        """Write the inventory and the findings of one checkpoint."""

    def convert(self, answer: ConvertAnswer) -> None:
        """Write the plan and the output of a conversion."""

    def skipped(self, path: str, output: str) -> None:
        """Write that a checkpoint was left out because its output exists."""

    def undo(self, result: UndoResult) -> None:
        """Write the result of ``convert --undo``."""

    def edits(self, files: Sequence[FixedFile]) -> None:
        """Write the edits of the user's files, before these are written."""

    def verify(self, answer: VerifyAnswer) -> None:
        """Write the checks and the verdict of one checkpoint."""

    def diff(self, result: Differences) -> None:
        """Write the differences between two checkpoints."""

    def rules(self, entries: Sequence[Entry]) -> None:
        """Write entries of the catalogue of findings."""

    def failure(self, failure: Failure) -> None:
        """Write an error, with its hint."""

    def no_answer(self, path: str, exit_code: int) -> None:
        """Write that one of several checkpoints has no answer; its errors have been written."""

    def finish(self, summary: Summary) -> int:
        """Write what the end of a report has, and return the exit code of the command.

        That is the code of the summary, or a higher one if a file could not be written.
        """
        return summary.exit_code


class Document(Renderer, ABC):
    """Collects the answers of a command for one document, as ``--report`` writes to a file.

    A kind of document is a subclass with a line in :data:`ckptmove.cli.render.formats.DOCUMENTS`.
    """

    #: Name of the format, for messages.
    title: ClassVar[str]
    #: First bytes of every document of this kind, and of no checkpoint: a file that begins otherwise is not replaced.
    head: ClassVar[bytes]

    @abstractmethod
    def document(self, summary: Summary) -> str:
        """The document at the end of the command. Errors are those of the summary."""
