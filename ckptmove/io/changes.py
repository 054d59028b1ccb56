"""Define the patch of a change in place, and the errors of interrupted changes."""

from typing import NamedTuple

from ckptmove.errors import Refused, UnreadableInput


class Patch(NamedTuple):
    """A change of some bytes of a file, and of its length."""

    #: offsets and new bytes, in order and without overlaps; none begins after the end of the file.
    writes: tuple[tuple[int, bytes], ...]
    size: int  # new length of the file; bytes after it are cut off
    can_undo: bool = False  # whether the file can be restored afterwards

    @property
    def nbytes(self) -> int:
        """Number of bytes written."""
        return sum(len(data) for _, data in self.writes)


class InterruptedConversion(UnreadableInput):
    """A conversion in place of the file was interrupted, or a journal beside it says so."""

    kind = "interrupted-conversion"

    def __init__(self, path: str) -> None:
        super().__init__("a conversion in place was interrupted, so the file may be half changed", path=path)


class RestoresMore(Refused):
    """What an undo would restore differs from the file in more than a conversion to another device changes.

    Attributes:
        reason: the first difference, as a clause.
        journal: path of the journal with the bytes to restore; empty if they are in the file.
        is_unsafe: whether the restored file would be unsafe to load.
    """

    kind = "restores-more"

    def __init__(self, path: str, reason: str, journal: str = "", *, is_unsafe: bool = False) -> None:
        super().__init__(f"the undo would change more than devices: {reason}", path=path)
        self.reason, self.journal, self.is_unsafe = reason, journal, is_unsafe
