"""A new file that appears under its name only when it is whole and durable.

Never writes to the output's own name, and never leaves its temporary file behind an exception.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.errors import NotDurable, OutputExists, WriteFailed, reason_of
from ckptmove.io.leftovers import Claim
from ckptmove.io.new_file import NewFile, write_failed
from ckptmove.io.outputs import unheard
from ckptmove.io.portable import is_reserved, open_file, syncing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

#: What file systems without hard links answer to link(2); EINVAL on Windows.
_NO_LINKS: Final = frozenset({
    errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EINVAL,
})  # fmt: skip


class FileSink(NewFile):
    """A file that is written beside its output and renamed onto it.

    Without ``force`` the name is taken with link(2), which fails where the name exists: what appears there meanwhile is
    never lost. Where the file system has no hard links, the name is reserved with an empty file first. With ``force``
    a regular file is replaced; a symbolic link is replaced itself, not what it points to.
    """

    def __init__(self, output: str, *, force: bool) -> None:
        """Name the file; nothing is opened yet.

        Args:
            output: its path.
            force: whether what is there is replaced.
        """
        self._output = Path(output)
        self._force = force
        self._claim = Claim(self._output.parent)
        super().__init__(output, self._claim.names.part)

    def __enter__(self) -> FileSink:  # noqa: PYI034  # Self came with Python 3.11
        """Open the temporary file.

        Raises:
            OutputExists: there is something of that name, and no ``force``.
            WriteFailed: what is there cannot be replaced (a directory, a device), or the system refuses.
        """
        with self._failing():
            self._look()
            self._claim.take()
            self._place = self._claim.names.part
            try:
                self._fd = open_file(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except BaseException:
                self._claim.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary file unless :meth:`commit` has run."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self._place.unlink()
        self._claim.release()

    def commit(self, settle: Callable[[], None] = unheard) -> None:
        """Make the bytes durable and give the file its name; until then, nobody takes it for a leftover.

        Args:
            settle: called right before the name is taken: from then on an interruption comes too late.

        Raises:
            WriteFailed: the system failed.
            NotDurable: it failed when the file had its name.
            OutputExists: the name has been taken meanwhile, and there is no ``force``.
        """
        with self._failing():
            self.make_durable(None)
            self._look()
            self.close()  # Windows renames no open file; the claim holds without it
            # Opened before the name is taken: a folder that cannot be opened must fail while nothing is there yet.
            with syncing(self._output.parent) as sync:
                settle()
                if self._force:
                    self._place.replace(self._output)
                else:
                    self._take_name()
                sync_name(sync, self._output)

    def _look(self) -> None:
        require_usable(self._output)
        try:
            mode = self._output.lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not self._force:
            raise OutputExists(str(self._output))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            # Renaming onto /dev/null would take it away from the whole system.
            raise WriteFailed(str(self._output), "neither a regular file nor a link to one")

    def _take_name(self) -> None:
        try:
            os.link(self._place, self._output)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(open_file(self._output, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            try:
                self._place.replace(self._output)
            except BaseException:
                self._output.unlink()
                raise
        else:
            with suppress(OSError):  # the file has its name; what is left of the other one, the next run removes
                self._place.unlink()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise OutputExists(str(self._output)) from error
        except (OSError, ValueError) as error:
            raise write_failed(str(self._output), error) from error


def require_usable(output: Path) -> None:
    """Refuse a name that Windows reserves.

    Raises:
        WriteFailed: it does.
    """
    if is_reserved(output):
        raise WriteFailed(str(output), f"Windows reserves the name '{output.name}'")


def sync_name(sync: Callable[[], None], output: Path) -> None:
    """Make the name durable that an output has taken.

    Raises:
        NotDurable: the system failed.
    """
    try:
        sync()
    except OSError as error:
        raise NotDurable(str(output), reason_of(error)) from error
