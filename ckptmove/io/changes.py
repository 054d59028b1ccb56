"""Define the values of a change in place: the patch, and a warning."""

from typing import NamedTuple


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


class RolledBack(UserWarning):
    """An interrupted conversion in place was rolled back before the checkpoint was read."""
