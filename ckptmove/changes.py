"""What a change of the file itself has besides a new file: values, and ways to say no.

Never touches a file: ``streams`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import Refused, WriteFailed
from ckptmove.model import OneLine

if TYPE_CHECKING:
    from ckptmove.model import ContainerName

#: Of a file that was taken back nothing is left to tell it from one that was never changed.
_NEVER: Final = "it was never converted in place, or it is as it was before that again"
#: Why a journal cannot be used that this version of ckptmove did not write.
UNKNOWN_JOURNAL: Final = "it is none of this version of ckptmove"


class Patch(NamedTuple):
    """A change of some bytes of a file, and of its length.

    Attributes:
        writes: offsets and what is written there, in order, none over another; none begins behind the file's end.
        size: length of the file afterwards; what was behind is gone.
        can_undo: whether the file then says what it was.
    """

    writes: tuple[tuple[int, bytes], ...]
    size: int
    can_undo: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes are written."""
        return sum(len(data) for _, data in self.writes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult(OneLine):
    """What an undo did.

    Attributes:
        path: the file.
        size: its length in bytes, as it was before its first conversion in place.
        removed: bytes that it was longer.
        is_done: whether it was written; a dry run does not.
        seconds: wall time.
        notes: what the user should know besides.
    """

    path: str
    size: int
    removed: int
    is_done: bool
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """What came of it, in one line."""
        return f"{self.path}: {'as it was' if self.is_done else 'dry run'}, {self.size:,} bytes"


class RolledBack(UserWarning):
    """An interrupted conversion in place was found beside a checkpoint, and taken back before it was read."""


class InPlaceImpossible(Refused):
    """A conversion would have to move bytes of the file that it is to change, or to lose some.

    Attributes:
        reason: why, as a clause.
    """

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
