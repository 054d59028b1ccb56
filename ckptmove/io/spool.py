"""Keep bytes that can only be read in order, in memory or in a temporary file."""

from __future__ import annotations

import os
from contextlib import contextmanager
from tempfile import SpooledTemporaryFile
from threading import RLock
from typing import IO, TYPE_CHECKING, Final

from ckptmove.errors import WriteFailed, reason_of
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, InflateSegment, StreamSegment
from ckptmove.io.part import BlocksByRead, check_within
from ckptmove.io.segments import blocks_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.io.contracts import ByteSource, Segment

#: Bytes that all segments of a spool may have before they move to a temporary file.
_MOST_IN_MEMORY: Final = 16 << 20


def is_streamed(segment: Segment) -> bool:
    """Whether a segment produces its bytes from the first to the last, so that each part of it costs the whole."""
    if isinstance(segment, (FromSource, CastSegment)):
        return is_streamed(segment.segment)
    return isinstance(segment, (InflateSegment, StreamSegment))


class Spool:
    """Bytes of segments in one temporary file. It is removed by :meth:`close`, or when the process ends."""

    def __init__(self) -> None:
        #: Held by the thread that reads or writes: the bytes of a segment are written one after the other.
        self.lock = RLock()
        self._file: IO[bytes] = SpooledTemporaryFile(_MOST_IN_MEMORY)  # noqa: SIM115  # closed by `close`

    def hold(self, source: ByteSource, segment: Segment, overflowed: Callable[[int], None] | None = None) -> FromSource:
        """Return a segment with the same bytes. Any part of it can be read; its check covers all its bytes.

        The whole segment is read when the first part is. ``overflowed`` is called with the number of values that a cast
        made infinite.
        """
        if isinstance(segment, FromSource):  # the original source stays known, because it must not change
            return FromSource(segment.source, self.hold(segment.source, segment.segment, overflowed))
        return FromSource(_HeldSource(self, source, segment, overflowed), CopySegment(Span(0, length(segment))))

    def append(self, block: bytes | memoryview) -> int:
        """Write bytes at the end and return their offset."""
        with self.lock, _writing():
            self._file.seek(0, os.SEEK_END)
            start = self._file.tell()
            self._file.write(block)
        return start

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive), which were written before."""
        with self.lock, _writing():
            self._file.seek(start)
            return self._file.read(end - start)

    def close(self) -> None:
        """Remove the bytes."""
        self._file.close()


class _HeldSource(BlocksByRead):
    """The output bytes of a segment, which are written to a spool when the first of them is read."""

    def __init__(
        self, spool: Spool, source: ByteSource, segment: Segment, overflowed: Callable[[int], None] | None
    ) -> None:
        self.path, self.is_remote = source.path, source.is_remote
        self.size = length(segment)
        self._spool, self._source, self._segment, self._overflowed = spool, source, segment, overflowed
        self._start: int | None = None

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        check_within(self, start, end)
        with self._spool.lock:
            if self._start is None:
                found = blocks_of(self._source, (self._segment,), self._overflowed)
                places = [self._spool.append(block) for block in found]
                self._start = places[0] if places else 0
        return self._spool.read(self._start + start, self._start + end)

    def close(self) -> None:
        """Do nothing: the spool has the bytes."""


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed("temporary file", reason_of(error)) from error
