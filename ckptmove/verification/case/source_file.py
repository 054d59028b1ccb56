"""A source as the file object that ``torch.load`` takes where there is no path to open.

Never holds more of it than a buffer.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource

_BUFFER_BYTES = 1 << 16
#: As much is read at once into a larger buffer, whose owner asks again for the rest.
_BLOCK_BYTES = 1 << 20


def as_file(source: ByteSource) -> io.BufferedReader:
    """A source, to be read like a file; errors as of the source."""
    return io.BufferedReader(_Raw(source), _BUFFER_BYTES)


class _Raw(io.RawIOBase):
    """A source with a place in it."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # whatever can be written to
        start = min(self._at, self._source.size)
        end = min(start + min(len(buffer), _BLOCK_BYTES), self._source.size)
        buffer[: end - start] = self._source.read(start, end)
        self._at += end - start
        return end - start
