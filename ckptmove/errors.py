"""Define all errors of ckptmove, with their facts in fields. Hints and exit codes are in ``cli``."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, ClassVar, Final

from ckptmove.text import Argument, Phrase, some

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.model import ArchiveForm

#: Maximum number of names in one message.
_SHOWN: Final = 4

#: A file that was restored is identical to one that was never converted, so that both get the same message.
_NEVER: Final = "it was never converted in place, or has already been restored"


class CkptMoveError(Exception):
    """Base class of all errors that ckptmove raises.

    Attributes:
        kind: kebab-case name of the error, as in the JSON output.
        message: the error in one line, without a hint.
        path: the file or directory concerned, or None.
        others: errors of the other files, if no file of a directory or an archive can be read.
        runs: dangerous names in pickles of the file, which a load may run before it fails.
        hint: what to do next, if the API raised the error; may be empty.
        mends: options with which the conversion that has failed would succeed, each with a text.
    """

    kind: ClassVar[str] = "error"
    hint: str = ""
    mends: tuple[Phrase, ...] = ()
    runs: tuple[str, ...] = ()
    #: What runs the dangerous names, as the warning says it.
    _loads: ClassVar[str] = "loading it without weights_only"

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.others: tuple[CkptMoveError, ...] = ()

    def __str__(self) -> str:
        """Return the message, with the path in front of it."""
        return f"{self.path}: {self.message}" if self.path else self.message

    def warn(self, runs: Iterable[str]) -> None:
        """Add dangerous names to the message."""
        message = self.message.removesuffix(self._warning())
        self.runs = tuple(dict.fromkeys((*self.runs, *runs)))
        self.message = message + self._warning()

    def _warning(self) -> str:
        """What can run all the same; empty without dangerous names."""
        return f"; {self._loads} can still run {some(self.runs, _SHOWN)}" if self.runs else ""


class UsageError(CkptMoveError, ValueError):
    """The request is invalid.

    Attributes:
        is_of_checkpoint: whether it may be valid for another checkpoint.
    """

    kind = "usage"
    is_of_checkpoint: ClassVar[bool] = False


class NotAPath(UsageError):
    """A path of ``convert`` does not exist, and is probably the value of an option.

    Attributes:
        word: the path as the user typed it.
        option: the option, with its dashes.
    """

    def __init__(self, word: str, option: str) -> None:
        meaning = "a device, and not a PATH" if option == "--to" else "no existing PATH"
        super().__init__(f"'{word}' is {meaning}")
        self.word = word
        self.option = option


class UnknownDevice(UsageError):
    """torch does not know the device.

    Attributes:
        device: the device as the user typed it.
        suggestion: a similar device that torch knows, or None.
    """

    kind = "unknown-device"

    def __init__(self, device: str, suggestion: str | None) -> None:
        super().__init__(f"'{device}' is not a device that torch knows")
        self.device = device
        self.suggestion = suggestion


class OutputIsStdout(UsageError):
    """The output is standard output, but a checkpoint needs a file that can be renamed once it is complete."""

    kind = "output-is-stdout"

    def __init__(self) -> None:
        super().__init__("a checkpoint cannot be written to standard output")


class UnreadableInput(CkptMoveError):
    """The input cannot be read, is damaged, or is not a checkpoint."""

    kind = "unreadable"


class MissingFile(UnreadableInput, FileNotFoundError):
    """The path does not exist."""

    kind = "missing-file"

    def __init__(self, path: str) -> None:
        super().__init__("no such file", path=path)
        self.errno, self.filename = errno.ENOENT, path


class NothingConfigured(UnreadableInput):
    """The patterns of the project's configuration match no file.

    Attributes:
        patterns: names and patterns, relative to the working directory.
    """

    kind = "nothing-configured"

    def __init__(self, path: str, patterns: tuple[str, ...]) -> None:
        super().__init__(f"'checkpoints' in [tool.ckptmove] matches no file: {', '.join(patterns)}", path=path)
        self.patterns = patterns


class AccessFailed(UnreadableInput, OSError):
    """The operating system failed to read the input. ``reason`` is its message, for example ``Permission denied``."""

    kind = "access-failed"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot be read: {reason}", path=path)
        self.reason = reason


class NotACheckpoint(UnreadableInput):
    """The file is not a checkpoint, but ``found``, a noun phrase. ``holds_pickle``: whether a pickle is in it."""

    kind = "not-a-checkpoint"
    _loads: ClassVar[str] = "unpickling it"  # other readers have no weights_only

    def __init__(self, path: str, found: str, runs: tuple[str, ...] | None = None) -> None:
        super().__init__(f"not a checkpoint: {found}", path=path)
        self.found, self.holds_pickle = found, runs is not None
        self.warn(runs or ())


class UnsupportedContainer(UnreadableInput):
    """The container is not supported. ``container`` is its name in JSON, ``described`` the same in words."""

    kind = "unsupported-container"

    def __init__(self, path: str, container: str, described: str) -> None:
        super().__init__(f"{described}; not supported yet", path=path)
        self.container = container
        self.described = described


class DamagedArchive(UnreadableInput):
    """The archive around the pickle is damaged. ``detail`` is the damaged part and its damage."""

    kind = "damaged-archive"

    def __init__(self, path: str, detail: str, *, runs: tuple[str, ...] = ()) -> None:
        super().__init__(f"damaged archive: {detail}", path=path)
        self.detail = detail
        self.warn(runs)


class CrcMismatch(UnreadableInput):
    """The bytes of a record do not match the CRC stored in the archive."""

    kind = "crc-mismatch"

    def __init__(self, path: str, record: str) -> None:
        super().__init__(f"the bytes of record '{record}' differ from their CRC", path=path)
        self.record = record


class DamagedPickle(UnreadableInput):
    """A pickle cannot be read to its end.

    Attributes:
        offset: byte in the pickle where reading stopped.
        detail: the damage.
    """

    kind = "damaged-pickle"

    def __init__(self, detail: str, *, offset: int, path: str | None = None, runs: tuple[str, ...] = ()) -> None:
        super().__init__(f"damaged pickle: {detail} at byte {offset}", path=path)
        self.warn(runs)
        self.offset = offset
        self.detail = detail


class SourceChanged(UnreadableInput):
    """The source was truncated or replaced while it was read."""

    kind = "source-changed"

    def __init__(self, path: str) -> None:
        super().__init__("the file changed while it was being read", path=path)


class Refused(CkptMoveError):
    """The operation is possible, but would lose or damage data."""

    kind = "refused"


class OutputExists(Refused, FileExistsError):
    """The output already exists."""

    kind = "output-exists"

    def __init__(self, path: str) -> None:
        super().__init__("the output already exists", path=path)


class OutputClaimed(Refused):
    """Another process is writing the output."""

    kind = "output-claimed"

    def __init__(self, path: str) -> None:
        super().__init__("another process is writing this output", path=path)


class OutputIsSource(Refused):
    """The output is the source itself (by path or by a link), or one directory is inside the other."""

    kind = "output-is-source"

    def __init__(self, path: str, relation: str = "is the source itself") -> None:
        super().__init__(f"the output {relation}", path=path)


class OutputIsFolder(Refused):
    """The output is a folder, but must be a file.

    Attributes:
        inside: a path in the folder that would be valid.
    """

    kind = "output-is-folder"

    def __init__(self, path: str, inside: str) -> None:
        super().__init__("the output is a folder, but must be a file", path=path)
        self.inside = inside


class OutputSuffix(Refused):
    """The suffix of the output does not fit its format.

    Attributes:
        instead: the same path with a suffix that does.
    """

    kind = "output-suffix"

    def __init__(self, path: str, suffix: str, container: str, instead: str) -> None:
        super().__init__(
            f"the format of the output is {container}, which the suffix '{suffix}' does not fit", path=path
        )
        self.instead = instead


class LimitExceeded(Refused):
    """The file needs more of a resource than its limit allows.

    Attributes:
        resource: name of the resource, for example ``operations``.
        limit: maximum, in the unit of the resource.
        actual: amount that the file needs, counted up to the point where reading stopped.
        is_fixed: whether ``--limit-factor`` does not raise the limit.
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


class OutOfMemory(Refused, MemoryError):
    """The system does not have enough memory for the file."""

    kind = "out-of-memory"

    def __init__(self, path: str | None = None) -> None:
        super().__init__("not enough memory to process the file", path=path)


class UnsupportedDtype(Refused):
    """The target device does not support a dtype of the file.

    Attributes:
        target: the device.
        tensors: name and dtype of each unsupported tensor.
    """

    kind = "unsupported-dtype"

    def __init__(self, target: str, tensors: tuple[tuple[str, str], ...]) -> None:
        super().__init__(f"{target} has no {tensors[0][1]}: {some([name for name, _ in tensors])}")
        self.target = target
        self.tensors = tensors


class UncastableDtype(UnsupportedDtype):
    """The target device does not support a dtype, which has no smaller dtype to cast to.

    Attributes:
        reason: why a cast is impossible, as a clause: ``it is not the dtype of a storage``.
    """

    kind = "uncastable-dtype"

    def __init__(self, target: str, tensors: tuple[tuple[str, str], ...], reason: str) -> None:
        super().__init__(target, tensors)
        self.message += f", which cannot be cast: {reason}"
        self.reason = reason


class UneditablePickle(Refused):
    """An edit would change bytes that Python's pickler never writes in this form, so that editing them is not safe.

    Attributes:
        offset: byte in the pickle of the operation to be changed.
    """

    kind = "uneditable-pickle"

    def __init__(self, detail: str, *, offset: int) -> None:
        super().__init__(f"cannot edit the pickle: {detail} at byte {offset}")
        self.offset = offset


class WriteFailed(CkptMoveError, OSError):
    """The output could not be written and was removed. ``reason`` is the message of the system."""

    kind = "write-failed"

    def __init__(self, path: str, reason: str, figures: str = "") -> None:
        super().__init__(f"could not write: {reason}{figures}", path=path)
        self.reason, self.filename = reason, path


class StdoutFailed(CkptMoveError):
    """The result could not be written to standard output; the command itself has finished."""

    kind = "stdout-failed"

    def __init__(self, reason: str, *, output: str | None = None) -> None:
        fact = f"standard output could not be written: {reason}"
        super().__init__(f"the new file is complete, but {fact}" if output else fact, path=output)
        self.reason = reason


def reason_of(error: OSError | ValueError) -> str:
    """Return the message of the system. A ValueError is a path with a NUL, which no file system supports.

    On Windows the message is taken from ``errno``, as on other systems, because hints depend on it.
    """
    if getattr(error, "winerror", None) and isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


class CaseUnusable(UsageError):
    """``--case`` does not name a function that returns a case.

    Attributes:
        known: functions that its file defines, first one with a similar name, or else the last.
    """

    kind = "case-unusable"

    def __init__(self, message: str, *, path: str | None = None, known: tuple[str, ...] = ()) -> None:
        super().__init__(Phrase(Argument("case"), f": {message}"), path=path)
        self.known = known


class InPlaceImpossible(Refused):
    """A conversion in place would move or lose bytes of the file. ``reason`` is a clause."""

    kind = "in-place-impossible"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot be converted in place: {reason}", path=path)
        self.reason = reason


class NothingToUndo(Refused):
    """The file holds no record of its state before a conversion in place.

    Attributes:
        reason: why, as a clause.
        container: container of the file or directory, if known.
    """

    kind = "nothing-to-undo"

    def __init__(self, path: str, reason: str = _NEVER, container: str | None = None) -> None:
        super().__init__(f"there is nothing to undo: {reason}", path=path)
        self.reason = reason
        self.container = container


class BeingConverted(Refused):
    """Another process is converting the file in place."""

    kind = "being-converted"

    def __init__(self, path: str) -> None:
        super().__init__("another process is converting it in place", path=path)


class ChangeFailed(WriteFailed):
    """The file could not be changed in place and is intact."""

    kind = "change-failed"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.message = f"could not be changed in place: {reason}"


class JournalInTheWay(ChangeFailed):
    """The path of the journal holds the journal of another file."""

    kind = "journal-in-the-way"

    def __init__(self, path: str, journal: str) -> None:
        super().__init__(path, f"{journal} already exists, and is the journal of another file")
        self.journal = journal


class RollbackFailed(WriteFailed):
    """An interrupted conversion in place could not be rolled back: the file is damaged.

    Attributes:
        journal: path of the journal with the original bytes.
    """

    kind = "rollback-failed"

    def __init__(self, path: str, journal: str, reason: str) -> None:
        super().__init__(path, reason)
        self.journal = journal
        self.message = f"an interrupted conversion in place cannot be rolled back with {journal}: {reason}"


class NotDurable(WriteFailed):
    """The output is complete under its name, but the system failed to make the name durable."""

    kind = "not-durable"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.message = f"is complete, but may be lost if the machine crashes now: {reason}"


class OutputIsNoReport(Refused):
    """The output of a report is an existing file that is not a report, and may be a checkpoint."""

    kind = "output-is-no-report"


class ReportFailed(WriteFailed):
    """A report could not be written to its file."""


class ArchiveOfFiles(NotACheckpoint):
    """A zip or a tar of files. ``opening`` reads it like a directory."""

    def __init__(self, path: str, found: str, form: ArchiveForm) -> None:
        super().__init__(path, found)
        self.form = form


class MustBeUnpacked(UnreadableInput):
    """An archive of files that can be read only after it is unpacked.

    Attributes:
        form: ``zip`` or ``tar``.
        locked: whether unpacking needs a password.
    """

    kind = "must-be-unpacked"

    def __init__(self, path: str, detail: str, form: ArchiveForm, *, locked: bool = False) -> None:
        super().__init__(f"must be unpacked first: {detail}", path=path)
        self.form = form
        self.locked = locked


class MissingShard(UnreadableInput):
    """Files of a sharded checkpoint do not exist, as its index, its ``.metadata`` or the number of its ranks shows.

    ``name`` is the first of them.
    """

    kind = "missing-shard"

    def __init__(
        self, path: str, name: str, others: int = 0, what: str = "a file listed in its index is missing"
    ) -> None:
        more = f", and {others:,} more" if others else ""
        super().__init__(f"{what}: '{name:.200}'{more}", path=path)
        self.name = name


class EmptyDirectory(NotACheckpoint):
    """No file of a directory or an archive is a checkpoint.

    Attributes:
        files: number of files that were checked.
        form: kind of the archive; None for a directory.
        inner: path of an archive inside it, if any.
        is_cut: whether its end is missing, which may have held more files.
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
        nested = f", which contains another archive: '{inner:.80}'" if inner else ""
        super().__init__(path, f"{described}{nested}; no file in it is a checkpoint (checked {files:,})")
        self.files = files
        self.form = form
        self.inner = inner
        self.is_cut = is_cut


class DistributedFile(UnsupportedContainer):
    """One file of a distributed checkpoint, which can be read only together with the others."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "dcp", "a file of a distributed checkpoint")
        self.message = "one file of a distributed checkpoint, which can only be read as a whole"


class OutputHoldsMore(Refused):
    """The directory to be replaced contains files that the new one does not. ``name`` is the first of them."""

    kind = "output-holds-more"

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"the output is not replaced: it contains '{name}', which would be lost", path=path)
        self.name = name


class NotGathered(Refused):
    """The files of a directory cannot become one file. ``reason`` is a clause.

    Attributes:
        folder: a folder or file in it that can; empty if none is known.
    """

    kind = "not-gathered"

    def __init__(self, path: str, reason: str, folder: str = "") -> None:
        super().__init__(f"its files cannot be written as one file: {reason}", path=path)
        self.folder = folder
