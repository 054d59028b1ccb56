"""Read a remote file in windows: one at its start, one at its end, and larger ones where bytes are read in a row."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from ckptmove.io.part import check_within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import Traffic
    from ckptmove.model import Span

#: Bytes of a window. A pickle of 2,000 tensors and the directory of 2,000 records fit in one each.
WINDOW: Final = 1 << 18
#: Bytes of one request where tensors are read.
CHUNK: Final = 1 << 23
#: Most bytes of a window that continues another one; each is twice as large as the one before.
_MOST_AHEAD: Final = CHUNK // 2
#: Bytes before and after a read that continues no other: headers and short records are neighbours.
_AROUND: Final = 1 << 12
#: Bytes of all windows that are kept for later reads, and of those of a closed file that may be opened again.
_KEPT: Final = 1 << 25
_KEPT_CLOSED: Final = 1 << 20


class RemoteFile(Protocol):
    """A file of a server, read by ranges.

    Attributes:
        path: its URL without credentials.
        size: its length in bytes.
        head: its first bytes, if opening it has read them.
        version: its size, and its ETag, generation or time, as far as the server tells them.
    """

    path: str
    size: int
    head: bytes
    version: tuple[object, ...]

    def fetch(self, start: int, end: int, *, is_bulk: bool = False) -> bytes:
        """Request the bytes from ``start`` to ``end`` (exclusive).

        A range ``is_bulk`` if it is one of many that are read one after the other, which may take minutes if the bytes
        keep coming.
        """
        ...

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the file was written since it was opened."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class _Window(NamedTuple):
    start: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class RemoteSource:
    """Bytes of a remote file. Small reads are answered from windows that earlier requests have filled."""

    is_remote: ClassVar[bool] = True

    def __init__(self, file: RemoteFile, traffic: Traffic, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared  # it stays open for those that open the file again
        self.path, self.size = file.path, file.size
        self.traffic = traffic
        self._file = file
        self._windows = [_Window(0, file.head)] if file.head else []
        self._lock = Lock()  # the files of a new directory are written in several threads

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive)."""
        return self._read(start, end)

    def _read(self, start: int, end: int, *, is_bulk: bool = False) -> bytes:
        check_within(self, start, end)
        pieces: list[bytes] = []
        with self._lock:
            while start < end:
                window = self._holding(start) or self._request(start, end, is_bulk=is_bulk)
                pieces.append(window.data[start - window.start : end - window.start])
                start += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``, all of them valid; errors as of :meth:`read`.

        A request asks for several blocks.
        """
        del buffers  # no buffer is reused
        check_within(self, span.start, span.end)
        step = max(CHUNK // block_bytes, 1) * block_bytes
        for start in range(span.start, span.end, step):
            chunk = memoryview(self._read(start, min(start + step, span.end), is_bulk=True))
            for at in range(0, len(chunk), block_bytes):
                yield chunk[at : at + block_bytes]

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the file was written to since it was opened."""
        self._file.require_unchanged()

    def close(self) -> None:
        """Close the file; keep its last windows if it is shared."""
        if not self.is_shared:
            self._file.close()
            return
        with self._lock:
            self._trim(_KEPT_CLOSED)

    def _holding(self, position: int) -> _Window | None:
        """The window that holds a byte; it becomes the last to be dropped."""
        for at, window in enumerate(self._windows):
            if window.start <= position < window.end:
                self._windows.append(self._windows.pop(at))
                return window
        return None

    def _request(self, start: int, end: int, *, is_bulk: bool) -> _Window:
        """Fetch the bytes from ``start`` on, up to the next window, with those that are probably read next."""
        last = max((window for window in self._windows if window.end <= start), default=_Window(0, b""))
        before = last.end
        after = min((window.start for window in self._windows if window.start > start), default=self.size)
        if not self._windows and self.size <= 2 * WINDOW:
            start, end = 0, self.size  # one request in place of one at the start and one at the end
        elif start == before:
            end = max(end, start + min(max(WINDOW, 2 * len(last.data)), _MOST_AHEAD))
        elif start >= self.size - WINDOW and after == self.size:
            start, end = max(before, self.size - WINDOW), self.size
        else:
            start, end = max(before, start - _AROUND), max(end, start + _AROUND)
        window = _Window(start, self._file.fetch(start, min(end, after), is_bulk=is_bulk))
        if len(window.data) < CHUNK:
            self._windows.append(window)
            self._trim(_KEPT)
        return window

    def _trim(self, most: int) -> None:
        """Drop the windows that were not read for the longest time."""
        while sum(len(one.data) for one in self._windows) > most:
            del self._windows[0]
