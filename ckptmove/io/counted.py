"""A source that tells how far it has been read, for work that reads all of it.

Never reads ahead, and never counts what is read for its structure: headers, directories, pickles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.model import Span


class CountedSource:
    """Another source, and whom to tell of the bytes that it has given in blocks.

    Attributes:
        path: the input as it was named.
        size: its length in bytes when it was opened.
    """

    def __init__(self, source: ByteSource, progress: Progress) -> None:
        self.path = source.path
        self.size = source.size
        self._source = source
        self._progress = progress
        self._done = 0

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive).

        Raises:
            As the other source.
        """
        return self._source.read(start, end)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks, each told of when the next one is asked for.

        Raises:
            As the other source.
        """
        for block in self._source.blocks(span, block_bytes, buffers):
            yield block
            self._done += len(block)
            self._progress(self._done, self.size)

    def close(self) -> None:
        """Let go of the input."""
        self._source.close()
