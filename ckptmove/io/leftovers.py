"""Claim the temporary files and folders of an output, and remove those of processes that have ended.

What a live process has claimed is not touched, and an old output is not removed before it has been replaced.

An output has up to three temporary names with the same stem. ``.part`` is the output while it is written. ``.old`` is a
folder that contains the replaced output. ``.lock`` is an empty file that the process has locked. The system releases
the lock however the process ends: names whose ``.lock`` is not locked were left by a killed process. The lock is a
separate file, because Windows cannot lock a folder and cannot rename an open file. The stem contains a hash of the
output's name: of two processes that write one output, the second stops before it copies a byte.

Some network file systems do not share locks between machines. The name therefore contains a hash of the host name, and
leftovers of another machine must also be a day old.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
import warnings
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import OutputClaimed
from ckptmove.io.outputs import LeftoversRemoved
from ckptmove.io.portable import UNTRUSTED, host_name, open_file, own_user
from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Permission bits of a folder that this process must be able to fill and remove.
OWNER: Final = stat.S_IRWXU
_NAME: Final = re.compile(r"(?P<stem>\.ckptmove-(?P<host>[0-9a-f]{8})-[0-9a-f]{16})\.(part|old|lock)")
_RANDOM: Final = 4  # bytes
#: In place of the random part: the lock file that a process holds while it claims names for an output.
_GATE: Final = "00" * _RANDOM
_DAY: Final = 24 * 60 * 60
#: Types of what this program leaves.
_OURS: Final = frozenset({stat.S_IFREG, stat.S_IFDIR})


class TemporaryNames(NamedTuple):
    """Temporary paths of an output."""

    part: Path  # the output while it is written
    old: Path  # a folder that contains the replaced output
    lock: Path  # the file whose lock claims both

    @classmethod
    def of(cls, stem: Path) -> TemporaryNames:
        """Return the names with a given stem."""
        return cls(*(stem.with_name(f"{stem.name}.{kind}") for kind in ("part", "old", "lock")))

    @property
    def existing(self) -> list[Path]:
        """The existing paths without the lock, the replaced output first."""
        return [path for path in (self.old, self.part) if os.path.lexists(path)]


def temporary_names(output: Path) -> TemporaryNames:
    """Return new temporary names in the folder of an output.

    Their length is fixed, so that an output with the longest possible name has valid temporary names too.
    """
    return _names(output, os.urandom(_RANDOM).hex())


def _names(output: Path, own: str) -> TemporaryNames:
    stem = f".ckptmove-{_hashed(host_name())}-{_hashed(output.name)}{own}"
    return TemporaryNames.of(output.parent / stem)


def is_temporary(name: str) -> bool:
    """Whether a name has the form of :func:`temporary_names`."""
    return _NAME.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Whether a name belongs to an output that is being written, or was interrupted."""
    return is_temporary(name) and name.endswith((".part", ".lock"))


class Claim:
    """Temporary names that are no leftovers from :meth:`take`, which may change them, to :meth:`release`."""

    def __init__(self, output: Path) -> None:
        """Choose new names for an output, without creating anything."""
        self.names = temporary_names(output)
        self._output = output
        self._gate = _names(output, _GATE).lock
        self._fd = -1

    def take(self) -> None:
        """Claim the names by creating and locking the lock file."""
        with _alone(self._gate):
            self._lock_names()

    def _lock_names(self) -> None:
        while True:
            self._fd = open_file(self.names.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                with suppress(OSError):  # no locks in this file system: then leftovers are not cleared either
                    _lock(self._fd, wait=True)
                if _is_at(self._fd, self.names.lock):
                    self._require_no_other()
                    return
            except BaseException:
                self.release()
                raise
            os.close(self._fd)  # another process removed it as a leftover before it was locked
            self.names = temporary_names(self._output)

    def _require_no_other(self) -> None:
        shared = self._gate.name[: -len(f"{_GATE}.lock")]
        locks = {*self._output.parent.glob(f"{shared}*.lock")} - {self.names.lock, self._gate}
        if any(map(_is_held, locks)):
            raise OutputClaimed(str(self._output))

    def release(self) -> None:
        """Release the names. Files that still exist can be cleared from now on."""
        _remove_lock(self._fd, self.names.lock)


def clear_leftovers(folder: Path) -> None:
    """Remove the leftovers of ended processes in a folder, and warn about each and about what is kept.

    Files that cannot be accessed or removed are skipped.
    """
    found: list[re.Match[str]] = []
    with suppress(OSError, ValueError):  # writing into a missing or invalid folder reports it
        found = list(filter(None, map(_NAME.fullmatch, os.listdir(folder))))
    for stem, host in sorted({(match["stem"], match["host"]) for match in found}):
        names = TemporaryNames.of(folder / stem)
        with suppress(OSError), _taken(names, host) as is_taken:
            for path in names.existing if is_taken else ():
                message = _clear_replaced(names) if path == names.old else _clear_part(names)
                if message:
                    warnings.warn(message, LeftoversRemoved, stacklevel=2)


def _hashed(name: str) -> str:
    return f"{zlib.crc32(os.fsencode(name)):08x}"


def _is_held(lock: Path) -> bool:
    """Whether a process holds a lock file; False if that cannot be known."""
    with suppress(OSError):
        fd = open_file(lock, os.O_RDWR | UNTRUSTED)
        try:
            return not _lock(fd, wait=False)
        finally:
            os.close(fd)
    return False


@contextmanager
def _alone(gate: Path) -> Iterator[None]:
    """Let one process after the other claim an output: of two at once, each would see the other and stop.

    Without locks in the file system, nobody waits.
    """
    fd = -1
    with suppress(OSError):
        fd = _wait_for(gate)
    try:
        yield
    finally:
        if fd >= 0:
            _remove_lock(fd, gate)


def _wait_for(lock: Path) -> int:
    """The descriptor of a lock file that is locked, once no other process holds it."""
    while True:
        fd = open_file(lock, os.O_RDWR | os.O_CREAT | UNTRUSTED)
        try:
            _lock(fd, wait=True)
            if _is_at(fd, lock):
                return fd
        except BaseException:
            _remove_lock(fd, lock)
            raise
        os.close(fd)  # the process that held it has removed it


def _lock(fd: int, *, wait: bool) -> bool:
    from filelock import lock_descriptor

    return lock_descriptor(fd, blocking=wait)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _remove_lock(fd: int, path: Path) -> None:
    """Remove and close a lock file. A process that waits for the lock then notices that the file is gone."""
    try:
        path.unlink()
    except OSError:
        os.close(fd)
        with suppress(OSError):  # Windows does not remove open files, including one claimed meanwhile
            path.unlink()
    else:
        os.close(fd)


@contextmanager
def _taken(names: TemporaryNames, host: str) -> Iterator[bool]:
    """Lock the names of a process that has ended; yields False if it may still be running.

    Creates the lock file if it is missing because the machine crashed.
    """
    found = [path.lstat() for path in names.existing or [names.lock]]
    is_settled = host == _hashed(host_name()) or time.time() - max(each.st_mtime for each in found) > _DAY
    if not is_settled or any(each.st_uid != own_user() or stat.S_IFMT(each.st_mode) not in _OURS for each in found):
        yield False
        return
    is_over = not os.path.lexists(names.lock)
    fd = open_file(names.lock, os.O_RDWR | os.O_CREAT | UNTRUSTED)
    try:
        is_locked = _lock(fd, wait=False) and _is_at(fd, names.lock)
        is_over = is_over or is_locked
        yield is_locked
    finally:
        if is_over:
            _remove_lock(fd, names.lock)
        else:
            os.close(fd)


def _clear_part(names: TemporaryNames) -> str:
    if os.path.lexists(names.old):
        return ""  # it marks the other one as not replaced yet
    if names.part.is_dir():
        shutil.rmtree(names.part)
    else:
        names.part.unlink()
    return f"{names.part}: left by an interrupted conversion, and removed"


def _clear_replaced(names: TemporaryNames) -> str:
    """Remove the folder of a replaced output; if that is not replaced yet, tell how to move it back.

    It is not moved: these names may have come with the folder, and no file may appear because of its name.
    """
    if not os.path.lexists(names.part):
        shutil.rmtree(names.old)
        return f"{names.old}: already replaced by an interrupted conversion, and removed"
    old = next(names.old.iterdir(), None)
    if old is None:
        names.old.rmdir()
        return ""
    output = names.old.parent / old.name
    way = "" if os.path.lexists(output) else f"; to restore it: {command_line(['mv', str(old), str(output)])}"
    return f"{old}: the earlier content of {output}, left by an interrupted conversion; it is kept{way}"
