"""SIGTERM and SIGHUP made exceptions, so that whatever is open is cleaned up.

Never takes a signal away from whoever started the program and has it ignored.

A cluster's scheduler or a CI job sends the one, a terminal that is closed the other.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)


class Terminated(BaseException):
    """A signal has come; as with KeyboardInterrupt, nothing but the rim of the program catches it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread, once, where a signal would have ended the process."""
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: object) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)  # a second one must not break off the cleaning up
    raise Terminated(number)
