"""Define a byte source that reports progress, for work that reads all of it.

Reads of structure (headers, directories, pickles) do not count.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.model import Span


class CountedSource:
    """Wraps a byte source and reports the bytes that it has yielded in blocks, to several threads too.

    Attributes:
        path: the input as given by the user.
        size: its length in bytes when it was opened.
        is_remote: whether the wrapped source is remote.
    """

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
