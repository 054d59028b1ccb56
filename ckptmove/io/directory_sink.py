"""Write a new directory that appears under its name only when it is complete and durable.

Nothing is written into the output itself. The replaced directory is removed only after the new one has its name.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError, OutputExists, OutputHoldsMore, WriteFailed
from ckptmove.io.leftovers import OWNER, Claim
from ckptmove.io.new_file import NewFile, require_room, write_failed
from ckptmove.io.outputs import do_nothing
from ckptmove.io.portable import ALL, open_file, sync_folder, syncing, without_umask
from ckptmove.io.sink import require_usable, sync_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType


class DirectorySink:
    """A directory that is written next to its output and renamed to it.

    With ``force``, an existing directory is replaced if the new one has all of its files. It is moved into a hidden
    folder, the new one is renamed, and then the old one is removed. One of them is complete at any time; after a crash
    in between, the next run tells how to move the old one back. A symbolic link is replaced, not its target.
    """

    def __init__(self, output: str, names: frozenset[str], *, force: bool) -> None:
        """Choose temporary names, without creating anything; ``names`` are the paths of all its files and links."""
        self._output = Path(output)
        self._names = names
        self._force = force
        self._claim = Claim(self._output)
        self._temp, self._aside, _ = self._claim.names
        self._folders: list[tuple[Path, int]] = []
        self.leftover: str | None = None  # path of the replaced directory if the system refused to remove it

    def __enter__(self) -> DirectorySink:
        """Create the temporary directory."""
        with self._write_errors():
            self._check_output()
            self._claim.take()
            self._temp, self._aside, _ = self._claim.names
            try:
                self._temp.mkdir(OWNER)
            except BaseException:
                self._claim.release()
                raise
        return self

    @property
    def place(self) -> str:
        """Path of the temporary directory."""
        return str(self._temp)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary directory unless :meth:`commit` has run, and move the old directory back."""
        if not os.path.lexists(self._temp):  # renamed, then interrupted while the old one was removed
            self._remove_replaced()
        with suppress(OSError, OutputExists):
            self._put_back()
            # This folder marks the old one as not replaced yet, so it is removed only after the old one is back.
            shutil.rmtree(self._temp, ignore_errors=True)
        self._claim.release()

    def reserve(self, nbytes: int) -> None:
        """Raise WriteFailed if there is not enough space for the directory."""
        require_room(str(self._output), nbytes, self._temp)

    def folder(self, path: str, mode: int) -> None:
        """Create a folder in it, after its parent; the directory itself has an empty path.

        ``mode`` is before the umask; write permission for the owner is added.
        """
        with self._write_errors(path):
            full = self._temp / path
            full.mkdir(OWNER, exist_ok=not path)
            self._folders.append((full, without_umask(mode) | OWNER))

    def link(self, path: str, target: str) -> None:
        """Create a symbolic link in it."""
        with self._write_errors(path):
            (self._temp / path).symlink_to(target)

    @contextmanager
    def file(self, path: str, mode: int) -> Iterator[NewFile]:
        """Create a file in it, durable on exit; several files may be written at a time.

        It has its final name from the start: the directory is hidden until :meth:`commit` has run. ``mode`` is before
        the umask.
        """
        with self._write_errors(path):
            place = self._temp / path
            fd = open_file(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & ALL)
            file = NewFile(str(self._output / path), place, fd)
            try:
                yield file
                file.make_durable()
            finally:
                file.close()

    def commit(self, settle: Callable[[], None] = do_nothing) -> None:
        """Make everything durable and rename the directory to its output.

        ``settle`` is called right before the rename; an interruption after that comes too late.
        """
        with self._write_errors():
            before = self._output.stat().st_mode if self._output.is_dir() else ALL
            for folder, mode in reversed(self._folders):
                folder.chmod(mode & (before | OWNER) if folder == self._temp else mode)
                sync_folder(folder)
            with syncing(self._output.parent) as sync:
                if self._check_output():
                    self._aside.mkdir(OWNER)
                    self._output.rename(self._aside / self._output.name)
                    sync_folder(self._aside)
                settle()
                self._take_name()
                sync_name(sync, self._output)
        self._remove_replaced()

    def _put_back(self) -> None:
        """Move the old directory back to the output, unless something else has the name."""
        if not os.path.lexists(self._aside):
            return
        old = self._aside / self._output.name
        if os.path.lexists(old):  # else it was not moved yet
            if os.path.lexists(self._output):
                raise OutputExists(str(self._output))
            old.rename(self._output)
        self._aside.rmdir()

    def _take_name(self) -> None:
        try:
            # This replaces an empty directory, which loses nothing.
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

    def _check_output(self) -> bool:
        """Raise an error if the output must not be replaced; return whether it exists."""
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
        """Raise OutputHoldsMore if the old directory contains a file that the new one does not."""
        for folder, folders, files in os.walk(self._output):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            for name in (*files, *links):
                path = (Path(folder) / name).relative_to(self._output).as_posix()
                if path not in self._names:
                    raise OutputHoldsMore(str(self._output), path)

    @contextmanager
    def _write_errors(self, path: str = "") -> Iterator[None]:
        try:
            require_usable(self._output / path)
            yield
        except CkptMoveError:
            raise
        except (OSError, ValueError) as error:
            raise write_failed(str(self._output / path), error) from error
