"""A file object for a byte source: ``torch.load`` takes it in place of a path."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ckptmove.io.part import read_into

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource

_BUFFER_BYTES = 1 << 16
#: Most bytes of one read; the caller of ``readinto`` repeats it for the rest.
_BLOCK_BYTES = 1 << 20


def as_file(source: ByteSource) -> io.BufferedReader:
    """A buffered file object that reads a source. Errors are the source's."""
    return io.BufferedReader(_Raw(source), _BUFFER_BYTES)


class _Raw(io.RawIOBase):
    """A source with a position."""

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

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any writable buffer
        start = min(self._at, self._source.size)
        end = min(start + min(len(buffer), _BLOCK_BYTES), self._source.size)
        read_into(self._source, start, memoryview(buffer)[: end - start])
        self._at += end - start
        return end - start
