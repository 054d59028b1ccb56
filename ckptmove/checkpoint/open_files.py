"""Read the files of a directory or an archive, with only a few open at a time: there may be thousands.

Several threads can read them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from itertools import cycle
from threading import Lock
from typing import TYPE_CHECKING, Final

from ckptmove.io.at_once import go_on
from ckptmove.io.part import check_within, read_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource
    from ckptmove.io.listing import Listing
    from ckptmove.model import Span

#: A tensor that is split by columns over this many ranks is read from all of their files in turn.
_MOST_OPEN: Final = 32
#: Blocks of one request to a server.
_REMOTE_BLOCKS: Final = 8


class OpenFiles:
    """Files of a listing; the most recently read ones are open."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self._listed = {file.path: file for file in listing.files}
        self._open: dict[str, ByteSource] = {}
        self._reads: Counter[str] = Counter()
        self._lock = Lock()

    def source(self, path: str) -> ByteSource:
        """Bytes of a file, which need not be closed."""
        return _Reopened(self, path)

    @contextmanager
    def reading(self, path: str) -> Iterator[ByteSource]:
        """Open a file and keep it open during the block; errors as of :meth:`source`."""
        go_on()
        with self._lock:
            source = self._open.pop(path, None)
            if source is None:
                idle = [name for name in self._open if not self._reads[name]]
                for name in idle[: max(0, len(self._open) - _MOST_OPEN + 1)]:
                    self._open.pop(name).close()
                source = self.listing.open(path)
            self._open[path] = source
            self._reads[path] += 1
        try:
            if path in self._listed:  # a link to a file of the directory is not listed itself
                self.listing.require_unchanged(self._listed[path])
            yield source
        finally:
            with self._lock:
                self._reads[path] -= 1

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()


class _Reopened:
    """A file that is opened when it is read."""

    def __init__(self, files: OpenFiles, path: str) -> None:
        with files.reading(path) as source:
            self.path, self.size, self.is_remote = source.path, source.size, source.is_remote
        self._files, self._name = files, path

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive); errors as of the file."""
        with self._files.reading(self._name) as source:
            return source.read(start, end)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start`` on until the memory is full; errors as of the file."""
        with self._files.reading(self._name) as source:
            read_into(source, start, memory)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``, valid as those of a file; errors as of the file."""
        check_within(self, span.start, span.end)
        if not self.is_remote:
            rotating = cycle([memoryview(bytearray(min(block_bytes, span.nbytes))) for _ in range(buffers)])
            for start in range(span.start, span.end, block_bytes):
                block = next(rotating)[: span.end - start]
                self.read_into(start, block)
                yield block
            return
        step = block_bytes * _REMOTE_BLOCKS
        for start in range(span.start, span.end, step):
            read = memoryview(self.read(start, min(start + step, span.end)))
            for at in range(0, len(read), block_bytes):
                yield read[at : at + block_bytes]

    def close(self) -> None:
        """Do nothing: the files are closed together."""
