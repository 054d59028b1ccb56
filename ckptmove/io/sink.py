"""Write a new file that appears under its name only when it is complete and durable.

Data is written to a temporary file, which is removed on any exception.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CkptMoveError, NotDurable, OutputExists, WriteFailed, reason_of
from ckptmove.io.leftovers import Claim
from ckptmove.io.new_file import NewFile, write_failed
from ckptmove.io.outputs import do_nothing
from ckptmove.io.portable import ALL, NEW_FILE, is_reserved, open_file, syncing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

#: Errors of link(2) on file systems without hard links; EINVAL on Windows.
_NO_LINKS: Final = frozenset({
    errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EINVAL,
})  # fmt: skip


class FileSink(NewFile):
    """A file that is written next to its output and renamed to it.

    Without ``force``, the file gets its name with link(2), which fails if the name exists: a file that appears
    meanwhile is never lost. On a file system without hard links, the name is reserved with an empty file first. With
    ``force``, a regular file is replaced. A symbolic link is replaced, not its target.
    """

    def __init__(self, output: str, *, force: bool, mode: int = NEW_FILE) -> None:
        """Choose a temporary name, without opening anything.

        The umask is taken away from ``mode``, as ``cp`` does. A file that replaces another one gets no other bits than
        that one has. No byte is ever in a file with more bits.
        """
        self._output = Path(output)
        self._force = force
        self._mode = mode & ALL
        self._claim = Claim(self._output)
        super().__init__(output, self._claim.names.part)

    def __enter__(self) -> FileSink:
        """Open the temporary file."""
        with self._write_errors():
            self._check_output()
            self._claim.take()
            self._place = self._claim.names.part
            try:
                self._fd = open_file(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
            except BaseException:
                self._claim.release()
                raise
        return self

    @property
    def place(self) -> str:
        """Path of the temporary file."""
        return str(self._place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary file unless :meth:`commit` has run."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self._place.unlink()
        self._claim.release()

    def commit(self, settle: Callable[[], None] = do_nothing, *, mode: int | None = None) -> None:
        """Make the bytes durable and rename the file to its output; the temporary name stays claimed until then.

        ``settle`` is called right before the rename; an interruption after that comes too late. ``mode`` counts
        whatever the umask and an earlier file are.
        """
        with self._write_errors():
            before = self._check_output()
            self.make_durable(before & self._mode if mode is None and before is not None else mode)
            self._check_output()
            self.close()  # Windows cannot rename an open file; the claim stays valid
            # Opened before the rename, so that a folder that cannot be opened fails while there is no output yet.
            with syncing(self._output.parent) as sync:
                settle()
                if self._force:
                    self._place.replace(self._output)
                else:
                    self._take_name()
                sync_name(sync, self._output)

    def _check_output(self) -> int | None:
        """Raise an error if the output must not be replaced; return the mode of a file that is replaced."""
        require_usable(self._output)
        try:
            mode = self._output.lstat().st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not self._force:
            raise OutputExists(str(self._output))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            # Renaming to /dev/null would remove it for the whole system.
            raise WriteFailed(str(self._output), "neither a regular file nor a link to one")
        return mode if stat.S_ISREG(mode) else None

    def _take_name(self) -> None:
        try:
            os.link(self._place, self._output)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(open_file(self._output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode))
            try:
                self._place.replace(self._output)
            except BaseException:
                self._output.unlink()
                raise
        else:
            with suppress(OSError):  # the output has its name; the next run removes the temporary name
                self._place.unlink()

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except CkptMoveError:
            raise
        except FileExistsError as error:
            raise OutputExists(str(self._output)) from error
        except (OSError, ValueError) as error:
            raise write_failed(str(self._output), error) from error


def require_usable(output: Path) -> None:
    """Raise WriteFailed if Windows reserves the name."""
    if is_reserved(output):
        raise WriteFailed(str(output), f"Windows reserves the name '{output.name}'")


def sync_name(sync: Callable[[], None], output: Path) -> None:
    """Make the name of an output durable; raises NotDurable if the system fails."""
    try:
        sync()
    except OSError as error:
        raise NotDurable(str(output), reason_of(error)) from error
