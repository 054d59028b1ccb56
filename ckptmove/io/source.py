"""Open the bytes of a local file, to be read at any offset in constant memory.

The file is never mapped: a mapped file that shrinks kills the process with SIGBUS, a read reports it.
"""

from __future__ import annotations

import os
import stat
from itertools import cycle
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeAlias

from ckptmove.errors import AccessFailed, DamagedArchive, MissingFile, NotACheckpoint, SourceChanged, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

    from ckptmove.model import Span

#: Device, inode, size and time of the last write of a file: one of them changes when it is written or replaced.
Stamp: TypeAlias = tuple[int, int, int, int]

#: Whether several threads can read one open file at once; Windows has no preadv(2), and its files one position.
READS_AT_ONCE: Final = hasattr(os, "preadv")

#: Kinds of paths that are not regular files, by the type bits of their mode.
KINDS: Final[dict[int, str]] = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class DiskPlace(NamedTuple):
    """Place of bytes in a file on the disk."""

    path: str  # the file
    start: int  # offset of the first byte
    stamp: Stamp  # stamp of the file when it was read

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes when it was read."""
        return self.stamp[2]

    def require_unchanged(self, descriptor: int | None = None) -> None:
        """Raise SourceChanged if the open file, or else the one that has the path now, is not the one that was read."""
        try:
            same = stamp_of(os.stat(self.path if descriptor is None else descriptor)) == self.stamp
        except OSError:
            same = False
        if not same:
            raise SourceChanged(self.path)

    def open(self) -> FileIO:
        """Open the file, to be read or mapped."""
        try:
            return open(self.path, "rb", buffering=0)  # closed by the caller
        except OSError as error:
            raise AccessFailed(self.path, reason_of(error)) from error


class FileSource:
    """Bytes of an open regular file; ``place`` is that of the first."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: str, file: FileIO) -> None:
        self.path = path
        self._file = file
        found = os.fstat(file.fileno())
        self.place = DiskPlace(path, 0, stamp_of(found))
        self.size = found.st_size

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive)."""
        self._within(start, end)
        data = bytearray(end - start)
        self._fill(memoryview(data), start)
        return bytes(data)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start`` on until the memory is full; errors as of :meth:`read`."""
        self._within(start, start + len(memory))
        self._fill(memory, start)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``.

        A block is valid until ``buffers`` more were read.
        """
        self._within(span.start, span.end)
        rotating = cycle([memoryview(bytearray(min(block_bytes, span.nbytes))) for _ in range(buffers)])
        for start in range(span.start, span.end, block_bytes):
            block = next(rotating)[: min(block_bytes, span.end - start)]
            self._fill(block, start)
            yield block

    def fileno(self) -> int:
        """Return the file descriptor, from which the kernel can copy."""
        return self._file.fileno()

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the file was written to since it was opened; it may be renamed or removed."""
        self.place.require_unchanged(self.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _within(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.size:
            raise DamagedArchive(self.path, f"bytes {start} to {end} of a file of {self.size} bytes")

    def _fill(self, view: memoryview, start: int) -> None:
        done = 0
        try:
            while done < len(view):
                if hasattr(os, "preadv"):  # the position, which a fork of this process shares, does not move
                    count = os.preadv(self.fileno(), [view[done:]], start + done)
                else:
                    self._file.seek(start + done)
                    count = self._file.readinto(view[done:])
                if not count:
                    raise SourceChanged(self.path)
                done += count
        except OSError as error:
            raise AccessFailed(self.path, reason_of(error)) from error


def read_exactly(read: Callable[[int, int], bytes], path: str, start: int, end: int) -> bytes:
    """Read the bytes from ``start`` to ``end`` (exclusive) by calls that may return fewer, none at the end of file."""
    pieces: list[bytes] = []
    while start < end:
        piece = read(start, end)
        if not piece:
            raise SourceChanged(path)
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def stamp_of(found: os.stat_result) -> Stamp:
    """Stamp of a file, from what the system reports of it."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_source(path: str) -> FileSource:
    """Open a local file."""
    try:
        kind = KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind is not None:
            raise NotACheckpoint(path, kind)
        return FileSource(path, open(path, "rb", buffering=0))  # closed by `close`
    except FileNotFoundError as error:
        raise MissingFile(path) from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL, which no file system supports.
        raise AccessFailed(path, reason_of(error)) from error
