"""What a change of the file itself has besides a new file: values, and ways to say no.

Never touches a file: ``streams`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ckptmove.model import OneLine

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
