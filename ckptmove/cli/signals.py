"""SIGTERM, as a cluster's scheduler or a CI job sends it, made an exception: whatever is open is then cleaned up.

Never takes the signal away from whoever started the program and has it ignored.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminated(BaseException):
    """SIGTERM has come; as with KeyboardInterrupt, nothing but the rim of the program catches it."""


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread, once, where SIGTERM would have ended the process."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: object) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)  # a second one must not break off the cleaning up
    raise Terminated
