"""A local copy of a remote checkpoint with holes: it has only the bytes that were read.

A hole takes no space on file systems with sparse files, and is read as zeros.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from ckptmove.errors import reason_of
from ckptmove.io.remote.errors import CopyFailed
from ckptmove.io.remote.source import CHUNK
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.io.listing import Listing
    from ckptmove.io.remote.address import Address
    from ckptmove.io.remote.source import RemoteFile

#: Bytes between two spans that cost less to read than another request.
_GAP: Final = 1 << 12


@contextmanager
def partial_copy(address: Address) -> Iterator[PartialCopy]:
    """A copy in a temporary folder, under the name of the checkpoint.

    Raises:
        CopyFailed: if the system refuses.
    """
    try:
        folder = TemporaryDirectory(prefix="ckptmove-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CopyFailed(str(address), reason_of(error)) from error
    with folder as path:
        yield PartialCopy(os.path.join(path, address.name), str(address))


class PartialCopy:
    """A copy of a file or a directory.

    Attributes:
        path: its path; nothing is there before the first file is opened.
    """

    def __init__(self, path: str, url: str) -> None:
        """Name the copy and the URL of the checkpoint, which errors name."""
        self.path, self._url = path, url
        self._kept: dict[str, list[Span]] = {}

    def keep(self, file: RemoteFile, name: str = "") -> RemoteFile:
        """The same file, whose bytes are written to the copy when they are read.

        Args:
            file: a file of the checkpoint.
            name: its path in a directory; empty if it is the checkpoint.

        Raises:
            CopyFailed: if the system refuses.
        """
        self._make(name, file.size)
        if file.head:
            self._write(name, [(0, file.head)])
            self._kept[name].append(Span(0, len(file.head)))
        return _KeptFile(file, self, name)

    def add(self, name: str, start: int, data: bytes) -> None:
        """Write bytes that were read; errors as of :meth:`keep`."""
        self._write(name, [(start, data)])
        self._kept[name].append(Span(start, start + len(data)))

    def missing(self, name: str, wanted: Iterable[Span]) -> list[Span]:
        """What must be read so that a file has some spans, in requests of at most 8 MiB."""
        kept = joined(self._kept[name])
        left = [gap for span in joined(wanted) for gap in _without(span, kept)]
        return [
            Span(start, min(start + CHUNK, span.end))
            for span in joined(left, _GAP)
            for start in range(span.start, span.end, CHUNK)
        ]

    def stand_in(self, name: str, pieces: Iterable[tuple[int, bytes]]) -> list[Span]:
        """Write bytes where the file has none that were read; errors as of :meth:`keep`.

        Returns:
            The places that are read in part. The caller has to read the rest.
        """
        kept, left = joined(self._kept[name]), []
        ends = [span.end for span in kept]

        def empty() -> Iterator[tuple[int, bytes]]:
            for start, data in pieces:
                at, span = bisect_right(ends, start), Span(start, start + len(data))
                if at == len(kept) or kept[at].start >= span.end:
                    yield start, data
                elif kept[at].start > start or kept[at].end < span.end:
                    left.append(span)

        self._write(name, empty())
        return left

    def complete(self, listing: Listing) -> None:
        """Make the files of a directory that were not opened, each as one hole; errors as of :meth:`keep`."""
        for file in listing.files:
            if file.path not in self._kept:
                self._make(file.path, file.size_bytes)

    def _full(self, name: str) -> Path:
        return Path(self.path, *name.split("/"))

    def _make(self, name: str, nbytes: int) -> None:
        self._kept.setdefault(name, [])
        path = self._full(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(nbytes)
        except (OSError, ValueError) as error:
            raise CopyFailed(self._url, reason_of(error)) from error

    def _write(self, name: str, pieces: Iterable[tuple[int, bytes]]) -> None:
        path = self._full(name)
        try:
            with path.open("r+b") as file:
                for start, data in pieces:
                    file.seek(start)
                    file.write(data)
        except OSError as error:
            raise CopyFailed(self._url, reason_of(error)) from error


class _KeptFile:
    """A remote file whose bytes are kept when they are read."""

    def __init__(self, file: RemoteFile, copy: PartialCopy, name: str) -> None:
        self.path, self.size, self.head, self.version = file.path, file.size, file.head, file.version
        self._file, self._copy, self._name = file, copy, name

    def fetch(self, start: int, end: int, *, is_bulk: bool = False) -> bytes:
        data = self._file.fetch(start, end, is_bulk=is_bulk)
        self._copy.add(self._name, start, data)
        return data

    def require_unchanged(self) -> None:
        self._file.require_unchanged()

    def close(self) -> None:
        self._file.close()


def joined(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Spans in order, with those joined that overlap or have at most ``gap`` bytes between them."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end + gap:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def _without(span: Span, kept: Sequence[Span]) -> Iterator[Span]:
    """The parts of a span that are in none of some spans, which are in order and apart."""
    start = span.start
    for one in kept:
        if start < one.start < span.end:
            yield Span(start, one.start)
        if one.start < span.end:
            start = max(start, one.end)
    if start < span.end:
        yield Span(start, span.end)
