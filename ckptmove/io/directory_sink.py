"""A new directory that appears under its name only when all of it is whole and durable.

Never writes into the output itself, and never removes what it replaces before the new one stands in its place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmove.errors import OutputExists, OutputHoldsMore, WriteFailed
from ckptmove.io.leftovers import OWNER, Claim
from ckptmove.io.new_file import NewFile, require_room, write_failed
from ckptmove.io.outputs import unheard
from ckptmove.io.portable import open_file, sync_folder, syncing
from ckptmove.io.sink import require_usable, sync_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType


class DirectorySink:
    """A directory that is written beside its output and renamed onto it.

    With ``force`` a directory is replaced, if the new one holds everything that it does: it is moved aside, into a
    hidden folder, the new one takes the name, and only then is the old one removed. At every instant one of them is
    whole; what a crash leaves aside is put back by the next run. A symbolic link is replaced itself.

    Attributes:
        leftover: where the replaced directory still is, because the system refused to remove it; else None.
    """

    def __init__(self, output: str, names: frozenset[str], *, force: bool) -> None:
        """Name the directory; nothing is made yet.

        Args:
            output: its path.
            names: paths of every file and link that it will hold, seen from there.
            force: whether what is there is replaced.
        """
        self._output = Path(output)
        self._names = names
        self._force = force
        self._claim = Claim(self._output.parent)
        self._temp, self._aside, _ = self._claim.names
        self._folders: list[tuple[Path, int]] = []
        self.leftover: str | None = None

    def __enter__(self) -> DirectorySink:  # noqa: PYI034  # Self came with Python 3.11
        """Make the temporary directory.

        Raises:
            OutputExists: there is something of that name, and no ``force``.
            OutputHoldsMore: it would be replaced, and something in it lost.
            WriteFailed: what is there is no directory, or the system refuses.
        """
        with self._failing():
            self._look()
            self._claim.take()
            self._temp, self._aside, _ = self._claim.names
            try:
                self._temp.mkdir(OWNER)
            except BaseException:
                self._claim.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary directory unless :meth:`commit` has run, and put back what was moved aside."""
        if not os.path.lexists(self._temp):  # it has its name, and was interrupted while the old one was removed
            self._remove_replaced()
        with suppress(OSError, OutputExists):
            self._put_back()
            # As long as the old one is aside, this folder says that it has not been replaced.
            shutil.rmtree(self._temp, ignore_errors=True)
        self._claim.release()

    def reserve(self, nbytes: int) -> None:
        """Refuse to begin where there is no room for all of it.

        Raises:
            WriteFailed: there is none.
        """
        require_room(str(self._output), nbytes, self._temp)

    def folder(self, path: str, mode: int) -> None:
        """Make a folder in it; each after the one that it lies in.

        Args:
            path: seen from the directory; empty for the directory itself.
            mode: its permission bits; its owner may always write.

        Raises:
            WriteFailed: the system refused.
        """
        with self._failing(path):
            full = self._temp / path
            full.mkdir(OWNER, exist_ok=not path)
            self._folders.append((full, mode | OWNER))

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link in it.

        Raises:
            WriteFailed: the system refused.
        """
        with self._failing(path):
            (self._temp / path).symlink_to(target)

    @contextmanager
    def file(self, path: str, mode: int) -> Iterator[NewFile]:
        """A new file in it, made durable at the end; several may be written at a time.

        It has its own name from the beginning: nobody else looks in before :meth:`commit` has run.

        Raises:
            WriteFailed: the system refused.
        """
        with self._failing(path):
            place = self._temp / path
            fd = open_file(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = NewFile(str(self._output / path), place, fd)
            try:
                yield file
                file.make_durable(mode)
            finally:
                file.close()

    def commit(self, settle: Callable[[], None] = unheard) -> None:
        """Make everything durable and give the directory its name.

        Args:
            settle: called right before the name is taken: from then on an interruption comes too late.

        Raises:
            WriteFailed: the system failed; what was there is there again.
            NotDurable: it failed when the directory had its name.
            OutputExists: the name has been taken meanwhile, and there is no ``force``.
            OutputHoldsMore: what is to be replaced has got something else meanwhile.
        """
        with self._failing():
            for folder, mode in reversed(self._folders):
                folder.chmod(mode)
                sync_folder(folder)
            with syncing(self._output.parent) as sync:
                if self._look():
                    self._move_aside()
                settle()
                self._take_name()
                sync_name(sync, self._output)
        self._remove_replaced()

    def _move_aside(self) -> None:
        self._aside.mkdir(OWNER)
        self._output.rename(self._aside / self._output.name)
        sync_folder(self._aside)

    def _put_back(self) -> None:
        """Make what was moved aside the output again.

        Raises:
            OSError: the system refuses.
            OutputExists: something else has the name.
        """
        if not os.path.lexists(self._aside):
            return
        old = self._aside / self._output.name
        if os.path.lexists(old):  # else it had not been moved yet
            if os.path.lexists(self._output):
                raise OutputExists(str(self._output))
            old.rename(self._output)
        self._aside.rmdir()

    def _take_name(self) -> None:
        try:
            # An empty directory of that name would be replaced, and nothing lost with it.
            self._temp.rename(self._output)
        except OSError as error:
            if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR} and os.path.lexists(self._output):
                raise OutputExists(str(self._output)) from error
            raise

    def _remove_replaced(self) -> None:
        if not os.path.lexists(self._aside):
            return
        try:
            shutil.rmtree(self._aside)
        except OSError:
            self.leftover = str(self._aside)

    def _look(self) -> bool:
        """Whether there is something to replace."""
        try:
            mode = self._output.lstat().st_mode
        except FileNotFoundError:
            return False
        if not self._force:
            raise OutputExists(str(self._output))
        if stat.S_ISDIR(mode):
            self._require_names()
        elif not stat.S_ISLNK(mode):
            raise WriteFailed(str(self._output), os.strerror(errno.ENOTDIR))
        return True

    def _require_names(self) -> None:
        """Refuse to replace what holds something that the new directory does not: removing it would lose that."""
        for folder, folders, files in os.walk(self._output):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            for name in (*files, *links):
                path = (Path(folder) / name).relative_to(self._output).as_posix()
                if path not in self._names:
                    raise OutputHoldsMore(str(self._output), path)

    @contextmanager
    def _failing(self, path: str = "") -> Iterator[None]:
        try:
            require_usable(self._output / path)
            yield
        except (OSError, ValueError) as error:
            raise write_failed(str(self._output / path), error) from error
