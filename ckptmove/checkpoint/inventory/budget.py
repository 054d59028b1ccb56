"""What the walk over a tree may ask for, by the size of the pickle that the tree comes from.

Never looks at a value: it counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from ckptmove.limits import Limits

#: Paths beyond those that a pickle's own bytes make, for containers that several paths share.
_SHARED_PATHS: Final = 200_000
_PATHS_PER_BYTE: Final = 4
#: Letters of all paths together that a pickle may ask for: some, and a number for each of its bytes.
_LETTERS: Final = 1 << 25
_LETTERS_PER_BYTE: Final = 64


class Budget:
    """Counts what is looked at and written out; a small file can hold a great many paths."""

    __slots__ = ("_letters", "_most_letters", "_most_visits", "_visits")

    def __init__(self, limits: Limits, pickle_bytes: int) -> None:
        """Begin at nothing.

        Args:
            limits: bounds for a pickle of any size.
            pickle_bytes: size of this one.
        """
        self._letters = self._visits = 0
        self._most_letters = min(limits.string_bytes, limits.factor * (_LETTERS + _LETTERS_PER_BYTE * pickle_bytes))
        self._most_visits = min(limits.visits, limits.factor * (_SHARED_PATHS + _PATHS_PER_BYTE * pickle_bytes))

    def spend(self, visits: int) -> None:
        """Count what is looked at, a shared value once for each path to it.

        Raises:
            LimitExceeded: it is too much.
        """
        self._visits += visits
        if self._visits > self._most_visits:
            raise LimitExceeded("paths through the pickle", limit=self._most_visits, actual=self._visits)

    def write(self, letters: int) -> None:
        """Count letters that are written out once for each path: they must not fill the memory.

        Raises:
            LimitExceeded: they are too many.
        """
        self._letters += letters
        if self._letters > self._most_letters:
            raise LimitExceeded("the length of all paths", limit=self._most_letters, actual=self._letters)
