"""Write a new file: reserve space, append bytes, and let the kernel copy if possible.

The code that opened the file renames or removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.errors import WriteFailed, reason_of
from ckptmove.io.portable import ALL

if TYPE_CHECKING:
    from pathlib import Path

#: Bytes after which the system is advised to start writing to the disk, so that it is not idle during the checks.
_WRITEBACK: Final = 4 << 20
#: Errors of a file system that can reserve space but has too little: on the disk, for this user, in one file.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NewFile:
    """An empty file opened for writing, written from start to end; errors name the path of the output."""

    def __init__(self, path: str, place: Path, fd: int = -1) -> None:
        """Take over an open file."""
        self.path = path
        self._place = place
        self._fd = fd
        self._written = 0
        self._flushed = 0

    def skip(self, nbytes: int) -> None:
        """Skip the next bytes, as :meth:`ByteSink.skip`."""
        self._written += nbytes
        try:
            os.lseek(self._fd, self._written, os.SEEK_SET)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def reserve(self, nbytes: int) -> None:
        """Reserve space for the whole file, as far as the file system can. Unused space is released at the end."""
        require_room(self.path, nbytes, self._place.parent)
        try:
            _allocate(self._fd, nbytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise write_failed(self.path, error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        try:
            while view:
                count = os.write(self._fd, view)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise write_failed(self.path, error) from error
        self._start_writeback()

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Let the kernel append bytes of an open file, as :meth:`ByteSink.copy`; shares disk blocks if possible."""
        count = 0
        with suppress(AttributeError, OSError):  # Linux only, and not between all file systems
            count = os.copy_file_range(source, self._fd, nbytes, start)
        self._written += count
        self._start_writeback()
        return count

    def at(self, start: int) -> RangeWriter:
        """Return a writer for the bytes from ``start`` on, as :meth:`ByteSink.at`; not on Windows."""
        return RangeWriter(self.path, self._fd, start)

    def make_durable(self, mode: int | None = None) -> None:
        """Set the permission bits, if given, and flush the file to the disk."""
        os.ftruncate(self._fd, self._written)
        if mode is not None:
            self._place.chmod(mode & ALL)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file if it is open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _start_writeback(self) -> None:
        self._flushed = _start_writeback(self._fd, self._flushed, self._written)


class RangeWriter:
    """Writes the bytes of an open file from an offset on, without moving the position of the file."""

    def __init__(self, path: str, fd: int, start: int) -> None:
        self._path, self._fd = path, fd
        self._written = self._flushed = start

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, self._written)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise write_failed(self._path, error) from error
        self._flushed = _start_writeback(self._fd, self._flushed, self._written)

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Let the kernel write bytes of an open file, as :meth:`ByteWriter.copy`."""
        count = 0
        with suppress(AttributeError, OSError):  # Linux only, and not between all file systems
            count = os.copy_file_range(source, self._fd, nbytes, start, self._written)
        self._written += count
        self._flushed = _start_writeback(self._fd, self._flushed, self._written)
        return count


def _start_writeback(fd: int, start: int, end: int) -> int:
    """Let the system start to write a range to the disk, if it is long enough; return where the next one starts."""
    if end - start < _WRITEBACK:
        return start
    # On Linux this starts writing dirty pages, which stay cached until they are written.
    # Other systems do not have this advice; they are only slower.
    with suppress(AttributeError, OSError):
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def require_room(path: str, nbytes: int, folder: Path) -> None:
    """Raise WriteFailed if an output is larger than the free space."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except (OSError, AttributeError):  # not every system has disk_usage
        return
    if total and nbytes > free:  # total 0: a file system in memory, without a bound
        needed = f": {nbytes:,} bytes are needed, and {free:,} are free"
        raise WriteFailed(path, os.strerror(errno.ENOSPC), needed)


def write_failed(path: str, error: OSError | ValueError) -> WriteFailed:
    """Convert an error of the system. A ValueError is a path with a NUL, which no file system supports."""
    return WriteFailed(path, reason_of(error))


def _allocate(fd: int, nbytes: int) -> None:
    """Reserve space in the file system. Raises OSError if it has too little, or cannot reserve any."""
    with suppress(ImportError, AttributeError):  # Windows has neither, macOS only fcntl
        import fcntl  # missing on Windows

        # If a file system cannot reserve space, glibc writes into every block instead, which takes as long as writing
        # the file. It does not for a file that is open for appending, see posix_fallocate(3).
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
