"""Raise Ctrl-C, SIGTERM and SIGHUP as exceptions, so that open files are cleaned up.

A scheduler or a CI job sends SIGTERM, a closed terminal SIGHUP. A signal that the parent process ignores stays ignored.
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
    if hasattr(signal, name)  # Windows has no SIGHUP; only Windows has SIGBREAK
)


class Terminated(BaseException):
    """A signal was received. Like KeyboardInterrupt, only :mod:`ckptmove.cli` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_raised(*, ends: bool = False) -> Iterator[None]:
    """Raise signals that would end the process in the main thread: KeyboardInterrupt, or :class:`Terminated` once.

    Args:
        ends: whether the process exits afterwards; settled signals then stay ignored while Python exits.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = {number: found for number, found in before.items() if found in _ENDING}
    for number in taken:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, found in taken.items():
            is_settled = ends and signal.getsignal(number) is _ignore_once
            signal.signal(number, signal.SIG_IGN if is_settled else found)


def settle() -> None:
    """Ignore the next signal of each kind: the work is done, and its report follows."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _raise:
            signal.signal(number, _ignore_once)


@contextmanager
def signals_held() -> Iterator[None]:
    """Raise a signal after the block, so that a line that the block writes is whole. A second one is raised at once."""
    held: list[int] = []

    def hold(number: int, frame: object) -> None:
        if held:
            _raise(number, frame)
        held.append(number)

    numbers = [number for number in _SIGNALS if signal.getsignal(number) is _raise]
    for number in numbers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is hold:
                signal.signal(number, _raise)
    for number in held:
        _raise(number, None)


def _raise(number: int, frame: object) -> None:
    del frame
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleanup
    raise Terminated(number)


def _ignore_once(number: int, frame: object) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process


#: Handlers with which a signal ends the process.
_ENDING: Final = (signal.SIG_DFL, signal.default_int_handler)
