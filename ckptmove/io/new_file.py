"""A new file while it is written: room for it reserved, bytes appended, by the kernel alone where that is asked for.

Never gives the file a name, and never removes it: whoever opened it does.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.errors import WriteFailed, reason_of
from ckptmove.io.cloning import begin_as_clone

if TYPE_CHECKING:
    from pathlib import Path

#: After so many bytes the system is told to begin writing them: the disk is not idle while the rest is checked.
_WRITEBACK: Final = 4 << 20
#: What a file system says that can reserve, and has no room: on the disk, for this user, in one file.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NewFile:
    """The end of an empty file that has been opened for writing.

    Attributes:
        path: the output that it is or will be, for errors.
    """

    def __init__(self, path: str, place: Path, fd: int = -1) -> None:
        """Take over an open file.

        Args:
            path: the output that it is or will be.
            place: where it lies now.
            fd: its descriptor.
        """
        self.path = path
        self._place = place
        self._fd = fd
        self._written = 0
        self._handed_over = 0

    def clone(self, source: int) -> bool:
        """Begin as a clone of an open file, before the first byte, where the file system can.

        Returns:
            Whether it has: then bytes that come to lie where the source has them need not be written.
        """
        before = self._fd
        self._fd = begin_as_clone(before, self._place, source)
        return self._fd != before

    def pass_over(self, nbytes: int) -> None:
        """Leave the next bytes of a clone as they are.

        Raises:
            WriteFailed: the system failed.
        """
        self._written += nbytes
        try:
            os.lseek(self._fd, self._written, os.SEEK_SET)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def reserve(self, nbytes: int) -> None:
        """Make room for the whole file, as far as the file system can; what is left over goes back in the end.

        Raises:
            WriteFailed: there is no room for it.
        """
        require_room(self.path, nbytes, self._place.parent)
        try:
            _allocate(self._fd, nbytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise write_failed(self.path, error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            WriteFailed: the system failed to write them all.
        """
        view = memoryview(data)
        try:
            while view:
                count = os.write(self._fd, view)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise write_failed(self.path, error) from error
        self._hand_over()

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Have the kernel append bytes of an open file; it shares the blocks on the disk where the file system can.

        Args:
            source: descriptor of the file.
            start: the first byte in it.
            nbytes: how many bytes at most.

        Returns:
            How many were appended; 0 where the kernel cannot, or the file has become shorter: whoever then reads and
            writes them is told which.
        """
        count = 0
        with suppress(AttributeError, OSError):  # only Linux has it, and not between all file systems
            count = os.copy_file_range(source, self._fd, nbytes, start)
        self._written += count
        self._hand_over()
        return count

    def make_durable(self, mode: int | None) -> None:
        """Set the permission bits, if they are given, and have everything written to the disk.

        Raises:
            OSError: the system failed.
        """
        os.ftruncate(self._fd, self._written)
        if mode is not None:
            self._place.chmod(mode)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it, unless that is done.

        Raises:
            OSError: the system failed.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _hand_over(self) -> None:
        if self._written - self._handed_over < _WRITEBACK:
            return
        # Linux starts to write dirty pages that are not needed any more, and keeps them cached until that is done.
        # Elsewhere there is no such advice, and nothing but time is lost.
        with suppress(AttributeError, OSError):
            os.posix_fadvise(self._fd, self._handed_over, self._written - self._handed_over, os.POSIX_FADV_DONTNEED)
        self._handed_over = self._written


def require_room(path: str, nbytes: int, folder: Path) -> None:
    """Refuse an output that is larger than what is free where it goes.

    Args:
        path: the output, for errors.
        nbytes: its size.
        folder: one on the file system that it goes to.

    Raises:
        WriteFailed: it is.
    """
    with suppress(OSError, AttributeError):  # not every system has disk_usage
        total, _, free = shutil.disk_usage(folder)
        if total and nbytes > free:  # none in all: a file system in memory, without bounds
            needed = f": {nbytes:,} bytes are needed, and {free:,} are free"
            raise WriteFailed(path, os.strerror(errno.ENOSPC), needed)


def write_failed(path: str, error: OSError | ValueError) -> WriteFailed:
    """What the system said, as an error of ours; a ValueError is a path with a NUL, which no file system can hold."""
    return WriteFailed(path, reason_of(error))


def _allocate(fd: int, nbytes: int) -> None:
    """Reserve room in the file system.

    Raises:
        OSError: it has none, or it cannot reserve.
    """
    with suppress(ImportError, AttributeError):  # Windows has neither, macOS only the first
        import fcntl  # noqa: PLC0415  # not everywhere

        # Where a file system cannot reserve, glibc writes into every block instead, as slowly as if it were the work
        # itself; but, posix_fallocate(3), not in a file that is open for appending.
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
