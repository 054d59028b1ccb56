"""Limit the time that a server may take, so that one that stalls or sends a byte a second is an error.

Metadata is read within a time in all. Where tensors are read one after the other, or a file is downloaded, the bytes
have to keep coming: a healthy server may take minutes for them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from ckptmove.io.at_once import started
from ckptmove.io.remote.errors import RemoteFailed
from ckptmove.text import size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptmove.io.remote.address import Address

_Result = TypeVar("_Result")

#: Seconds for a range of metadata with all attempts, and for the beginning of any other answer.
SECONDS: Final = 60.0
#: Largest range that has this time in all.
MOST_TIMED: Final = 1 << 23
#: Bytes that have to come within some seconds where more are read: an average of 1 KiB/s.
PACE_SECONDS: Final = 30.0
PACE_BYTES: Final = 30 << 10
#: Seconds for each MiB of those, from a file system that tells only when all bytes have come.
MIB_SECONDS: Final = 60.0
_MIB: Final = 1 << 20
#: Seconds for a listing, with all its pages.
LISTING_SECONDS: Final = 300.0
#: Longest wait: a signal that comes just before a wait is raised only at its end.
_LONGEST_WAIT: Final = 0.2


class TimeLimit:
    """The time that a web server has for one range, with all attempts.

    The bytes of one of many ranges that are read one after the other have to keep coming, in place of a time in all.
    """

    def __init__(self, address: Address, nbytes: int, *, is_bulk: bool) -> None:
        self.is_bulk = is_bulk or nbytes > MOST_TIMED
        self._address, self._nbytes, self._received = address, nbytes, 0
        self._end = monotonic() + SECONDS

    async def wait(self, work: Awaitable[_Result]) -> _Result:
        """The result of a part of the request."""
        try:
            return await asyncio.wait_for(work, self._end - monotonic())
        except asyncio.TimeoutError:
            if monotonic() < self._end:  # that of the client for a connection
                raise
            raise _too_slow(self._address, self._received, self._nbytes) from None

    def receive(self, nbytes: int) -> None:
        """Count bytes; enough of them extend the time."""
        earlier, self._received = self._received, self._received + nbytes
        if self.is_bulk and earlier // PACE_BYTES < self._received // PACE_BYTES:
            self._end = monotonic() + PACE_SECONDS


def range_seconds(nbytes: int, *, is_bulk: bool) -> float:
    """The seconds for a range of a file system; ``is_bulk`` as of :class:`TimeLimit`."""
    return max(SECONDS, MIB_SECONDS * nbytes / _MIB) if is_bulk or nbytes > MOST_TIMED else SECONDS


def timed(address: Address, call: Callable[[], _Result], seconds: float | None = None) -> _Result:
    """Call a function of a file system in a thread, left alone if it takes too long: ``SECONDS`` by default."""
    end = monotonic() + (SECONDS if seconds is None else seconds)
    result = started(lambda _: call(), None)
    while not wait([result], max(0, min(_LONGEST_WAIT, end - monotonic()))).done:
        if monotonic() >= end:
            raise _too_slow(address)
    return result.result()


def _too_slow(address: Address, received: int = 0, nbytes: int = 0) -> RemoteFailed:
    reason = (
        f"the server sent {size(received)} of {size(nbytes)} in time"
        if received
        else "the server did not answer in time"
    )
    return RemoteFailed(str(address), reason, address.scheme)
