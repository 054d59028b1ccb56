"""Define byte sources on another one: a span of it, bytes decoded from it, changed bytes, and reported progress."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Protocol

from ckptmove.errors import DamagedArchive
from ckptmove.io.contracts import ReadsInto
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.io.contracts import ByteSource, Progress


class Readable(Protocol):
    """A source of bytes."""

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive), as :class:`ckptmove.io.contracts.ByteSource` does."""
        ...


def read_into(source: Readable, start: int, memory: memoryview) -> None:
    """Read bytes of a source from ``start`` on until the memory is full, without a copy if the source can."""
    if isinstance(source, ReadsInto):
        source.read_into(start, memory)
    else:
        memory[:] = source.read(start, start + len(memory))


class BlocksByRead:
    """The blocks of a source whose ``read`` returns new bytes each time."""

    def blocks(self: Readable, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``; all of them stay valid."""
        del buffers  # no buffer is reused
        for start in range(span.start, span.end, block_bytes):
            yield memoryview(self.read(start, min(start + block_bytes, span.end)))


class PartSource:
    """A span of another source. Never reads beyond its end."""

    def __init__(self, whole: ByteSource, span: Span) -> None:
        self.path = whole.path
        self.size = span.nbytes
        self.is_remote = whole.is_remote
        self._whole = whole
        self._start = span.start

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        check_within(self, start, end)
        return self._whole.read(self._start + start, self._start + end)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start`` on until the memory is full."""
        check_within(self, start, start + len(memory))
        read_into(self._whole, self._start + start, memory)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``, as the whole source does."""
        check_within(self, span.start, span.end)
        return self._whole.blocks(Span(self._start + span.start, self._start + span.end), block_bytes, buffers)

    def close(self) -> None:
        """Do nothing: the code that opened the whole source closes it."""


class MemorySource:
    """Bytes in memory; ``path`` is the file that they come from."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        check_within(self, start, end)
        return self._data[start:end]

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``; all of them stay valid."""
        del buffers  # no buffer is reused
        check_within(self, span.start, span.end)
        view = memoryview(self._data)
        return (view[at : min(at + block_bytes, span.end)] for at in range(span.start, span.end, block_bytes))

    def close(self) -> None:
        """Do nothing."""


class ChangedSource(BlocksByRead):
    """Another source with some of its bytes replaced, and another length. The replaced bytes are in memory."""

    def __init__(self, whole: ByteSource, writes: Sequence[tuple[int, bytes]], size: int) -> None:
        """Lay writes, in their order, over a source; what is longer than both is zeros."""
        self.path, self.size, self.is_remote = whole.path, size, whole.is_remote
        self._whole, self._writes = whole, writes

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        check_within(self, start, end)
        known = self._whole.read(start, min(end, self._whole.size)) if start < self._whole.size else b""
        data = bytearray(known.ljust(end - start, b"\0"))
        for place, new in self._writes:
            first, last = max(start, place), min(end, place + len(new))
            if first < last:
                data[first - start : last - start] = new[first - place : last - place]
        return bytes(data)

    def close(self) -> None:
        """Do nothing: the code that opened the whole source closes it."""


def check_within(source: ByteSource, start: int, end: int) -> None:
    """Raise DamagedArchive if a span is invalid or not inside a source."""
    if not 0 <= start <= end <= source.size:
        raise DamagedArchive(source.path, f"bytes {start} to {end} of a part of {source.size} bytes")


class CountedSource:
    """Wraps a byte source and reports the bytes that it has yielded in blocks, to several threads too."""

    def __init__(self, source: ByteSource, progress: Progress) -> None:
        self.path = source.path
        self.size = source.size
        self.is_remote = source.is_remote
        self._source = source
        self._progress = progress
        self._done = 0
        self._lock = Lock()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        return self._source.read(start, end)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks; each counts when the next one is taken."""
        for block in self._source.blocks(span, block_bytes, buffers):
            yield block
            with self._lock:
                self._done += len(block)
                self._progress(self._done, self.size)

    def close(self) -> None:
        """Close the input."""
        self._source.close()
