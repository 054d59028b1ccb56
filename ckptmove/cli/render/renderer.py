"""The protocol of all report formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.cli.render.answers import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.conversion.results import UndoResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.proof.evidence import FixedFile


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

    A kind of document is a subclass with a line in :data:`ckptmove.cli.render.documents.DOCUMENTS`.
    """

    #: Name of the format, for messages.
    title: ClassVar[str]
    #: First bytes of every document of this kind, and of no checkpoint: a file that begins otherwise is not replaced.
    head: ClassVar[bytes]

    @abstractmethod
    def document(self, summary: Summary) -> str:
        """The document at the end of the command. Errors are those of the summary."""
