"""Sources inside of a source: a span of its bytes, and bytes that were decoded out of it.

Never reads past its own end, whatever lies behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import DamagedArchive
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource


class PartSource:
    """A span of another source.

    Attributes:
        path: the file that it is in.
        size: its length in bytes.
    """

    def __init__(self, whole: ByteSource, span: Span) -> None:
        self.path = whole.path
        self.size = span.nbytes
        self._whole = whole
        self._start = span.start

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive).

        Raises:
            DamagedArchive: the span reaches past ``size``, or is none.
            SourceChanged, AccessFailed: as the whole.
        """
        check_within(self, start, end)
        return self._whole.read(self._start + start, self._start + end)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``.

        A block is valid until ``buffers`` more have been asked for.

        Raises:
            As :meth:`read`.
        """
        check_within(self, span.start, span.end)
        return self._whole.blocks(Span(self._start + span.start, self._start + span.end), block_bytes, buffers)

    def close(self) -> None:
        """Nothing: whoever opened the whole closes it."""


class MemorySource:
    """Bytes at hand.

    Attributes:
        path: the file that they come from.
        size: their number.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive).

        Raises:
            DamagedArchive: the span reaches past ``size``, or is none.
        """
        check_within(self, start, end)
        return self._data[start:end]

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``; all of them stay valid.

        Raises:
            As :meth:`read`.
        """
        del buffers  # the bytes are at hand
        check_within(self, span.start, span.end)
        view = memoryview(self._data)
        return (view[at : min(at + block_bytes, span.end)] for at in range(span.start, span.end, block_bytes))

    def close(self) -> None:
        """Nothing."""


def check_within(source: ByteSource, start: int, end: int) -> None:
    """Refuse a span that is not inside of a source.

    Raises:
        DamagedArchive: it is not.
    """
    if not 0 <= start <= end <= source.size:
        raise DamagedArchive(source.path, f"bytes {start} to {end} of a part that has {source.size}")
