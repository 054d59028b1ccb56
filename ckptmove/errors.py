"""All errors of ckptmove: one family of exceptions, with the facts in fields. Hints and exit codes are in ``cli``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from ckptmove.model import ArchiveForm, ContainerName

#: Names that one message lists.
_SHOWN: Final = 4

#: Of a file that was taken back nothing is left to tell it from one that was never changed.
_NEVER: Final = "it was never converted in place, or it is as it was before that again"


class CkptMoveError(Exception):
    """The root: whatever ckptmove raises on purpose is one of these.

    Attributes:
        kind: kebab-case name of the error, as it stands in JSON.
        message: the fact, in one line, without a hint.
        path: the file or folder that it is about, if there is one.
        others: errors of the other files, where no file of a directory or an archive can be read.
    """

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.others: tuple[CkptMoveError, ...] = ()

    def __str__(self) -> str:
        """The fact, led by the file that it is about."""
        return f"{self.path}: {self.message}" if self.path else self.message


class UsageError(CkptMoveError):
    """What was asked for does not make sense, whatever the file holds."""

    kind = "usage"


class UnknownDevice(UsageError):
    """A device was named that torch does not know.

    Attributes:
        device: the word as it was typed.
        suggestion: a word that torch knows and that is close, or None.
    """

    kind = "unknown-device"

    def __init__(self, device: str, suggestion: str | None) -> None:
        super().__init__(f"'{device}' is not a device that torch knows")
        self.device = device
        self.suggestion = suggestion


class OutputIsStdout(UsageError):
    """A new file was to be written to standard output, which has no name that it could get when it is whole."""

    kind = "output-is-stdout"

    def __init__(self) -> None:
        super().__init__("a checkpoint is not written to standard output")


class TorchMissing(UsageError):
    """The command needs torch, and torch is not installed here."""

    kind = "torch-missing"

    def __init__(self) -> None:
        super().__init__("verify runs a real optimizer step and needs torch, which is not installed here")


class TorchBroken(UsageError):
    """torch is installed and cannot be imported; ``reason`` is its last line, or the signal that ended the process."""

    kind = "torch-broken"

    def __init__(self, reason: str) -> None:
        super().__init__(f"verify needs torch, which is installed here but cannot be imported: {reason}")
        self.reason = reason


class UnreadableInput(CkptMoveError):
    """The input cannot be read, is damaged, or is not a checkpoint."""

    kind = "unreadable"


class MissingFile(UnreadableInput):
    """There is nothing at the path."""

    kind = "missing-file"

    def __init__(self, path: str) -> None:
        super().__init__("no such file", path=path)


class NothingConfigured(UnreadableInput):
    """The project names checkpoints, and none of them is there.

    Attributes:
        patterns: the names and patterns, as seen from the working directory.
    """

    kind = "nothing-configured"

    def __init__(self, path: str, patterns: tuple[str, ...]) -> None:
        super().__init__(f"'checkpoints' in [tool.ckptmove] finds nothing: {', '.join(patterns)}", path=path)
        self.patterns = patterns


class AccessFailed(UnreadableInput):
    """The operating system refused to read the input; ``reason`` is its own text, for example ``Permission denied``."""

    kind = "access-failed"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot be read: {reason}", path=path)
        self.reason = reason


class NotACheckpoint(UnreadableInput):
    """The file is no checkpoint; ``found`` says in a noun phrase how it looks: ``an empty file``."""

    kind = "not-a-checkpoint"

    def __init__(self, path: str, found: str) -> None:
        super().__init__(f"not a checkpoint: {found}", path=path)
        self.found = found


class UnsupportedContainer(UnreadableInput):
    """A checkpoint whose container is recognised, but not read.

    Attributes:
        container: its name in the public contract, for example ``torch-tar``.
        described: the same for people: ``a tar of torch 0.1``.
    """

    kind = "unsupported-container"

    def __init__(self, path: str, container: str, described: str) -> None:
        super().__init__(f"{described}; not read yet", path=path)
        self.container = container
        self.described = described


class DamagedArchive(UnreadableInput):
    """The archive around the pickle does not hold together.

    Attributes:
        detail: which part, and in what way.
        runs: dangerous names in the pickles before the damage: a load runs them before it fails.
    """

    kind = "damaged-archive"

    def __init__(self, path: str, detail: str, *, runs: tuple[str, ...] = ()) -> None:
        super().__init__(f"damaged archive: {detail}{_warned(runs)}", path=path)
        self.detail = detail
        self.runs = runs


def _warned(runs: tuple[str, ...]) -> str:
    """What a load does before it meets the damage; empty where nothing dangerous comes first."""
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return f"; before that, loading it without weights_only could run {', '.join(runs[:_SHOWN])}{more}" if runs else ""


class CrcMismatch(UnreadableInput):
    """Bytes of a record differ from the CRC that the archive holds for them.

    Attributes:
        record: the record's name in the archive.
    """

    kind = "crc-mismatch"

    def __init__(self, path: str, record: str) -> None:
        super().__init__(f"the bytes of record '{record}' differ from their CRC", path=path)
        self.record = record


class DamagedPickle(UnreadableInput):
    """A pickle cannot be read to its end.

    Attributes:
        offset: byte in the pickle at which reading stopped.
        detail: what is wrong there.
        runs: dangerous names before the damage: a load runs them before it fails.
    """

    kind = "damaged-pickle"

    def __init__(self, detail: str, *, offset: int, path: str | None = None, runs: tuple[str, ...] = ()) -> None:
        super().__init__(f"damaged pickle: {detail} at byte {offset}{_warned(runs)}", path=path)
        self.runs = runs
        self.offset = offset
        self.detail = detail


class SourceChanged(UnreadableInput):
    """The source was shortened or replaced while it was being read."""

    kind = "source-changed"

    def __init__(self, path: str) -> None:
        super().__init__("the file changed while it was being read", path=path)


class Refused(CkptMoveError):
    """It could be done, and will not be: it would lose or spoil something."""

    kind = "refused"


class OutputExists(Refused):
    """The output is already there."""

    kind = "output-exists"

    def __init__(self, path: str) -> None:
        super().__init__("the output already exists", path=path)


class OutputIsSource(Refused):
    """The output names the source itself, by path or by a link to it, or one directory would lie in the other."""

    kind = "output-is-source"

    def __init__(self, path: str, relation: str = "is the source itself") -> None:
        super().__init__(f"the output {relation}", path=path)


class OutputIsFolder(Refused):
    """The output names a folder, where a file has to be named.

    Attributes:
        inside: a file in it that would do.
    """

    kind = "output-is-folder"

    def __init__(self, path: str, inside: str) -> None:
        super().__init__("the output is a folder, and has to be a file", path=path)
        self.inside = inside


class OutputSuffix(Refused):
    """The suffix of the output names a format that the output would not have.

    Attributes:
        instead: the same path with the suffix of the source.
    """

    kind = "output-suffix"

    def __init__(self, path: str, suffix: str, container: str, instead: str) -> None:
        super().__init__(
            f"the output keeps the format of the source, {container}, and '{suffix}' names another", path=path
        )
        self.instead = instead


class LimitExceeded(Refused):
    """The file asks for more than a limit allows.

    Attributes:
        resource: what is limited, for example ``operations``.
        limit: the most that is allowed, in the resource's own unit.
        actual: what the file asks for, as far as it was counted.
        is_fixed: whether no ``--limit-factor`` raises it.
    """

    kind = "limit-exceeded"

    def __init__(
        self, resource: str, *, limit: int, actual: int, path: str | None = None, is_fixed: bool = False
    ) -> None:
        super().__init__(f"the file exceeds the limit on {resource}: {actual} > {limit}", path=path)
        self.resource = resource
        self.limit = limit
        self.actual = actual
        self.is_fixed = is_fixed


class OutOfMemory(Refused):
    """The system has no more memory for what the file asks for."""

    kind = "out-of-memory"

    def __init__(self, path: str | None = None) -> None:
        super().__init__("there is not enough memory for what the file asks for", path=path)


class UnsupportedDtype(Refused):
    """The target device cannot hold a dtype that the file holds.

    Attributes:
        target: the device.
        tensors: name and dtype of each tensor that cannot go there.
    """

    kind = "unsupported-dtype"

    def __init__(self, target: str, tensors: tuple[tuple[str, str], ...]) -> None:
        first, dtype = tensors[0]
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        super().__init__(f"{target} has no {dtype}: {first}{more}")
        self.target = target
        self.tensors = tensors


class UncastableDtype(UnsupportedDtype):
    """The target device cannot hold a dtype, and it cannot be cast to one that it holds.

    Attributes:
        reason: why not, as a clause: ``it is not the dtype of a storage``.
    """

    kind = "uncastable-dtype"

    def __init__(self, target: str, tensors: tuple[tuple[str, str], ...], reason: str) -> None:
        super().__init__(target, tensors)
        self.message += f", which cannot be cast: {reason}"
        self.reason = reason


class UneditablePickle(Refused):
    """A planned edit falls on a place that no pickler of Python writes, and that cannot be edited safely.

    Attributes:
        offset: byte in the pickle of the operation that would have to change.
    """

    kind = "uneditable-pickle"

    def __init__(self, detail: str, *, offset: int) -> None:
        super().__init__(f"cannot edit the pickle: {detail} at byte {offset}")
        self.offset = offset


class UneditableGraph(Refused):
    """A conversion would leave a ``torch.export`` program that does not run on the target.

    Attributes:
        detail: what in it does not follow.
    """

    kind = "uneditable-graph"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"cannot move the graph: {detail}", path=path)
        self.detail = detail


class WriteFailed(CkptMoveError):
    """The output could not be written, and nothing of it is left; ``reason`` is the system's own text."""

    kind = "write-failed"

    def __init__(self, path: str, reason: str, figures: str = "") -> None:
        super().__init__(f"could not write: {reason}{figures}", path=path)
        self.reason = reason


class StdoutFailed(CkptMoveError):
    """The answer could not be written to standard output, for a ``reason``; what the command did besides is done."""

    kind = "stdout-failed"

    def __init__(self, reason: str, *, output: str | None = None) -> None:
        fact = f"standard output could not be written: {reason}"
        super().__init__(f"the new file is written and whole, but {fact}" if output else fact, path=output)
        self.reason = reason


def reason_of(error: OSError | ValueError) -> str:
    """What the system said; a ValueError is a path with a NUL, which no file system can hold.

    Windows has an own text for each error. It is given as elsewhere, in the words of ``errno``: hints depend on them.
    """
    if getattr(error, "winerror", None) and isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


class CaseUnusable(UsageError):
    """``--case`` names no function that returns a case.

    Attributes:
        known: functions that its file has.
    """

    kind = "case-unusable"

    def __init__(self, message: str, *, path: str | None = None, known: tuple[str, ...] = ()) -> None:
        super().__init__(f"--case: {message}", path=path)
        self.known = known


class InPlaceImpossible(Refused):
    """The conversion would move or lose bytes of the file; ``reason`` is a clause that says why."""

    kind = "in-place-impossible"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot be converted in place: {reason}", path=path)
        self.reason = reason


class NothingToUndo(Refused):
    """The file does not say what it was before a conversion in place.

    Attributes:
        reason: why not, as a clause.
        container: what the file is, or the directory; None where nobody has told.
    """

    kind = "nothing-to-undo"

    def __init__(self, path: str, reason: str = _NEVER, container: ContainerName | None = None) -> None:
        super().__init__(f"there is nothing to undo: {reason}", path=path)
        self.reason = reason
        self.container = container


class BeingConverted(Refused):
    """Another process is changing the file."""

    kind = "being-converted"

    def __init__(self, path: str) -> None:
        super().__init__("another process is converting it in place", path=path)


class ChangeFailed(WriteFailed):
    """The file could not be changed in place; it is whole all the same."""

    kind = "change-failed"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.message = f"could not be changed in place: {reason}"


class JournalInTheWay(ChangeFailed):
    """Where the journal of a change would be, there is one already, of a file of another name.

    Attributes:
        journal: that file.
    """

    kind = "journal-in-the-way"

    def __init__(self, path: str, journal: str) -> None:
        super().__init__(path, f"{journal} is in the way, the journal of a file of another name")
        self.journal = journal


class RollbackFailed(WriteFailed):
    """An interrupted conversion in place was found, and could not be taken back: the file is not whole.

    Attributes:
        journal: the file that says what has to be put back.
    """

    kind = "rollback-failed"

    def __init__(self, path: str, journal: str, reason: str) -> None:
        super().__init__(path, reason)
        self.journal = journal
        self.message = f"its conversion in place was interrupted, and cannot be taken back by {journal}: {reason}"


class NotDurable(WriteFailed):
    """The output has its name and is whole, but the system failed to make the name durable."""

    kind = "not-durable"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.message = f"is written and whole, but may be lost if the machine fails now: {reason}"


class OutputIsNoReport(Refused):
    """A report was to replace a file that is none: a checkpoint, for all that is known."""

    kind = "output-is-no-report"


class ReportFailed(WriteFailed):
    """A report about checkpoints could not be written to its file."""


class ArchiveOfFiles(NotACheckpoint):
    """A zip or a tar of files, no checkpoint itself: ``layouts`` reads those in it, as those of a directory.

    Attributes:
        form: which of the two.
    """

    def __init__(self, path: str, found: str, form: ArchiveForm) -> None:
        super().__init__(path, found)
        self.form = form


class MustBeUnpacked(UnreadableInput):
    """An archive of files that only a directory of them can stand for.

    Attributes:
        form: what unpacks it.
        locked: whether that takes a password.
    """

    kind = "must-be-unpacked"

    def __init__(self, path: str, detail: str, form: ArchiveForm, *, locked: bool = False) -> None:
        super().__init__(f"not read as it is: {detail}", path=path)
        self.form = form
        self.locked = locked


class MissingShard(UnreadableInput):
    """A file is not there that the index of a model in several files, or a ``.metadata``, names.

    Attributes:
        name: the first of those that are missing.
    """

    kind = "missing-shard"

    def __init__(self, path: str, name: str, others: int = 0) -> None:
        more = f", and {others:,} more" if others else ""
        super().__init__(f"a file that its index names is missing: '{name:.200}'{more}", path=path)
        self.name = name


class EmptyDirectory(NotACheckpoint):
    """No file of a directory, or of an archive, is a checkpoint.

    Attributes:
        files: how many were looked at.
        form: what the archive is; None for a directory.
        inner: path of an archive in it, where it holds one.
        is_cut: whether its end is missing, behind which there may have been more.
    """

    kind = "empty-directory"

    def __init__(
        self,
        path: str,
        files: int,
        described: str = "a directory",
        form: ArchiveForm | None = None,
        *,
        inner: str = "",
        is_cut: bool = False,
    ) -> None:
        beside = f", with another archive in it: '{inner:.80}'" if inner else ""
        super().__init__(path, f"{described}{beside}; by content, none of its files is one (looked at {files:,})")
        self.files = files
        self.form = form
        self.inner = inner
        self.is_cut = is_cut


class DistributedFile(UnsupportedContainer):
    """A file of a distributed checkpoint by itself, which only the others around it explain."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "dcp", "a file of a distributed checkpoint")
        self.message = "a file of a distributed checkpoint, which is read as a whole"


class OutputHoldsMore(Refused):
    """The directory that is to be replaced holds something that the new one does not.

    Attributes:
        name: the first such file.
    """

    kind = "output-holds-more"

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"the output is not replaced: it holds '{name}', which would be lost", path=path)
        self.name = name
