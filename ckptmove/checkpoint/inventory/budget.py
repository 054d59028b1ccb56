"""Limit the work of a walk over a tree, in proportion to the size of its pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from ckptmove.limits import Limits

#: Allowed paths: a base for containers with several paths, and a number for each byte of the pickle.
_SHARED_PATHS: Final = 200_000
_PATHS_PER_BYTE: Final = 4
#: Allowed letters of all paths together: a base, and a number for each byte of the pickle.
_LETTERS: Final = 1 << 25
_LETTERS_PER_BYTE: Final = 64


class Budget:
    """Count the visited values and the letters of paths; a small file can have a very large number of paths."""

    __slots__ = ("_letters", "_most_letters", "_most_visits", "_visits")

    def __init__(self, limits: Limits, pickle_bytes: int) -> None:
        self._letters = self._visits = 0
        self._most_letters = min(limits.string_bytes, limits.factor * (_LETTERS + _LETTERS_PER_BYTE * pickle_bytes))
        self._most_visits = min(limits.visits, limits.factor * (_SHARED_PATHS + _PATHS_PER_BYTE * pickle_bytes))

    def spend(self, visits: int) -> None:
        """Count visited values; a shared value counts once for each of its paths."""
        self._visits += visits
        if self._visits > self._most_visits:
            raise LimitExceeded("paths through the pickle", limit=self._most_visits, actual=self._visits)

    def write(self, letters: int) -> None:
        """Count the letters of a path, to limit memory."""
        self._letters += letters
        if self._letters > self._most_letters:
            raise LimitExceeded("the length of all paths", limit=self._most_letters, actual=self._letters)
