"""Read a local file as a byte source: opened once, read at any offset, in constant memory.

The file is never memory-mapped: if a mapped file shrinks, SIGBUS kills the process; a read reports an error.
"""

from __future__ import annotations

import os
import stat
from itertools import cycle
from typing import TYPE_CHECKING, Final

from ckptmove.errors import AccessFailed, DamagedArchive, MissingFile, NotACheckpoint, SourceChanged, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO

    from ckptmove.model import Span

#: Kinds of paths that are not regular files, by the type bits of the mode.
KINDS: Final[dict[int, str]] = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class FileSource:
    """The bytes of one open regular file.

    Attributes:
        path: the file as given by the user.
        size: its length in bytes when it was opened.
    """

    def __init__(self, path: str, file: FileIO) -> None:
        self.path = path
        self._file = file
        self._stamp = self._size_and_mtime()
        self.size = self._stamp[0]

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive)."""
        self._within(start, end)
        pieces: list[bytes] = []
        try:
            self._file.seek(start)
            while start < end:
                piece = self._file.read(end - start)
                if not piece:
                    raise SourceChanged(self.path)
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            raise AccessFailed(self.path, reason_of(error)) from error
        return b"".join(pieces)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``.

        A block is valid until ``buffers`` more blocks have been taken.
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
        """Raise SourceChanged if the file was written to since it was opened; losing its name is no change."""
        if self._size_and_mtime() != self._stamp:
            raise SourceChanged(self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _size_and_mtime(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _within(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.size:
            raise DamagedArchive(self.path, f"bytes {start} to {end} of a file of {self.size} bytes")

    def _fill(self, view: memoryview, start: int) -> None:
        done = 0
        try:
            self._file.seek(start)
            while done < len(view):
                count = self._file.readinto(view[done:])
                if not count:
                    raise SourceChanged(self.path)
                done += count
        except OSError as error:
            raise AccessFailed(self.path, reason_of(error)) from error


def is_folder(path: str) -> bool:
    """Whether a path is a directory; False if it cannot be accessed."""
    return os.path.isdir(path)  # noqa: PTH112  # keeps the path as typed: a Path would drop "./" and a slash at its end


def open_source(path: str) -> FileSource:
    """Open a local file.

    Raises:
        MissingFile: if the path does not exist.
        NotACheckpoint: if it is a directory, a pipe, a socket or a device. It is not opened, because that may block.
        AccessFailed: if the system refuses.
    """
    try:
        kind = KINDS.get(stat.S_IFMT(os.stat(path).st_mode))  # noqa: PTH116  # as in `is_folder`
        if kind is not None:
            raise NotACheckpoint(path, kind)
        return FileSource(path, open(path, "rb", buffering=0))  # noqa: PTH123  # closed by `close`
    except FileNotFoundError as error:
        raise MissingFile(path) from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL, which no file system supports.
        raise AccessFailed(path, reason_of(error)) from error
