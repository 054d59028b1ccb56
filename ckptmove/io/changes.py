"""Define the values of a change in place: the patch, the result of an undo, and a warning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ckptmove.model import OneLine


class Patch(NamedTuple):
    """A change of some bytes of a file, and of its length.

    Attributes:
        writes: offsets and new bytes, in order and without overlaps; none begins after the end of the file.
        size: new length of the file; bytes after it are cut off.
        can_undo: whether the file can be restored afterwards.
    """

    writes: tuple[tuple[int, bytes], ...]
    size: int
    can_undo: bool = False

    @property
    def nbytes(self) -> int:
        """Number of bytes written."""
        return sum(len(data) for _, data in self.writes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult(OneLine):
    """The result of an undo.

    Attributes:
        path: the file.
        size: its original length in bytes, before the first conversion in place.
        removed: number of bytes cut off.
        is_done: whether the file was written; False for a dry run.
        seconds: wall time.
        notes: further information for the user.
    """

    path: str
    size: int
    removed: int
    is_done: bool
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """Return the path, the outcome and the size in one line."""
        return f"{self.path}: {'restored' if self.is_done else 'dry run'}, {self.size:,} bytes"


class RolledBack(UserWarning):
    """An interrupted conversion in place was rolled back before the checkpoint was read."""
