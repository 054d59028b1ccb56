"""Ctrl-C, SIGTERM and SIGHUP made exceptions, so that whatever is open is cleaned up, until it is too late for them.

Never takes a signal away from whoever started the program and has it ignored.

A cluster's scheduler or a CI job sends SIGTERM, a terminal that is closed SIGHUP.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)  # Windows has no SIGHUP, and Ctrl-Break alone has SIGBREAK
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
def signals_raised(*, ends: bool = False) -> Iterator[None]:
    """Raise in the main thread what would have ended the process: KeyboardInterrupt, or :class:`Terminated` once.

    Args:
        ends: whether the process ends with it: what was settled then stays so while Python leaves.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = {number: found for number, found in before.items() if found in _ENDING}
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, found in taken.items():
            is_settled = ends and signal.getsignal(number) is _pass_over
            signal.signal(number, signal.SIG_IGN if is_settled else found)


def settle() -> None:
    """Pass over the next signal of each kind: what was asked for is done, or is about to be, and will be told."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _raise:
            signal.signal(number, _pass_over)


def _raise(number: int, frame: object) -> None:
    del frame
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_IGN)  # a second one must not break off the cleaning up
    raise Terminated(number)


def _pass_over(number: int, frame: object) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)  # who insists is heard


#: What the handlers are where a signal ends the process.
_ENDING: Final = (signal.SIG_DFL, signal.default_int_handler)
