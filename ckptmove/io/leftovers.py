"""Temporary files and folders beside an output: claimed while they are written, cleared up once their process is gone.

Never touches what a live process has claimed, and never removes what has not been replaced yet.

An output has up to three temporary names, which begin alike: ``.part`` while it is written, ``.old`` for a folder that
holds what it replaces, and ``.lock`` for an empty file that its process has locked. The system releases that lock
however the process ends: names whose lock nobody holds were left by a process that was killed. It is a file of its own,
because Windows can lock no folder, and can rename nothing that is open.

Not every network file system shows the locks of one machine to the others, so that the name says which machine it was,
and what another one has left must have been still for a day as well.
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

from ckptmove.io.outputs import LeftoversRemoved
from ckptmove.io.portable import UNTRUSTED, host_name, open_file, own_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Whoever makes a folder must be able to fill it, and to remove it again.
OWNER: Final = stat.S_IRWXU
_NAME: Final = re.compile(r"(?P<stem>\.ckptmove-(?P<host>[0-9a-f]{8})-[0-9a-f]{16})\.(part|old|lock)")
_DAY: Final = 24 * 60 * 60


class TemporaryNames(NamedTuple):
    """Where an output is until it has its name.

    Attributes:
        part: the output while it is written.
        old: a folder that holds what it replaces.
        lock: the file whose lock claims both.
    """

    part: Path
    old: Path
    lock: Path

    @classmethod
    def of(cls, stem: Path) -> TemporaryNames:
        """The names that begin with the path of a stem."""
        return cls(*(stem.with_name(f"{stem.name}.{kind}") for kind in ("part", "old", "lock")))

    @property
    def that_exist(self) -> list[Path]:
        """What there is of the output, without the lock; what was moved aside comes first."""
        return [path for path in (self.old, self.part) if os.path.lexists(path)]


def temporary_names(folder: Path) -> TemporaryNames:
    """New names in a folder.

    They are of fixed length, so that an output with the longest possible name has temporary ones as well.
    """
    return TemporaryNames.of(folder / f".ckptmove-{_host()}-{os.urandom(8).hex()}")


def is_temporary(name: str) -> bool:
    """Whether a name is one of :func:`temporary_names`."""
    return _NAME.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Whether a name is one of an output that is being written, or was broken off."""
    return is_temporary(name) and name.endswith((".part", ".lock"))


class Claim:
    """Temporary names that nobody takes for leftovers from :meth:`take` to :meth:`release`.

    Attributes:
        names: the names, which :meth:`take` may change.
    """

    def __init__(self, folder: Path) -> None:
        """Choose new names in a folder; nothing is made yet."""
        self.names = temporary_names(folder)
        self._fd = -1

    def take(self) -> None:
        """Claim the names: of them only the lock exists then.

        Raises:
            OSError: the system refuses; nothing is left of the claim.
        """
        while True:
            self._fd = open_file(self.names.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                with suppress(OSError):  # a file system without locks: whoever looks for leftovers gets none either
                    _lock(self._fd, wait=True)
                if _is_at(self._fd, self.names.lock):
                    return
            except BaseException:
                self.release()
                raise
            os.close(self._fd)  # another process took it for a leftover before it was locked
            self.names = temporary_names(self.names.lock.parent)

    def release(self) -> None:
        """Give the names up; what there still is of the output may be cleared from now on."""
        _remove_lock(self._fd, self.names.lock)


def clear_leftovers(folder: Path) -> None:
    """Remove what processes that are gone have left in a folder, put back what they had moved aside, and warn of it.

    What cannot be looked at or removed stays: it is in nobody's way.
    """
    found: list[re.Match[str]] = []
    with suppress(OSError, ValueError):  # a folder that is not there, or cannot be: whoever writes into it says so
        found = list(filter(None, map(_NAME.fullmatch, os.listdir(folder))))  # noqa: PTH208  # names are all it takes
    for stem, host in sorted({(match["stem"], match["host"]) for match in found}):
        names = TemporaryNames.of(folder / stem)
        with suppress(OSError), _taken(names, host) as is_taken:
            if is_taken:
                for said in filter(None, _clear(names)):
                    warnings.warn(said, LeftoversRemoved, stacklevel=2)


def _host() -> str:
    return f"{zlib.crc32(os.fsencode(host_name())):08x}"


def _lock(fd: int, *, wait: bool) -> bool:
    from filelock import lock_descriptor  # noqa: PLC0415  # only who writes waits for it to be imported

    return lock_descriptor(fd, blocking=wait)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _remove_lock(fd: int, path: Path) -> None:
    """Remove a lock's file and close it; where the lock is held, whoever waits for it sees that it has gone."""
    try:
        path.unlink()
    except OSError:
        os.close(fd)
        with suppress(OSError):  # Windows removes no file that is open: neither this one, nor one claimed meanwhile
            path.unlink()
    else:
        os.close(fd)


@contextmanager
def _taken(names: TemporaryNames, host: str) -> Iterator[bool]:
    """Whether nobody writes to an output any more; as long as this lasts, nobody else takes it.

    The lock may be missing, where a crash of the machine lost its name: it is made then.

    Raises:
        OSError: the system does not tell.
    """
    found = [path.lstat() for path in names.that_exist or [names.lock]]
    is_settled = host == _host() or time.time() - max(each.st_mtime for each in found) > _DAY
    if not is_settled or any(each.st_uid != own_user() or not _is_ours(each.st_mode) for each in found):
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


def _is_ours(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _clear(names: TemporaryNames) -> Iterator[str]:
    """Clear up what is left of one output, and say what was done."""
    for path in names.that_exist:
        yield _clear_aside(names) if path == names.old else _clear_part(names)


def _clear_part(names: TemporaryNames) -> str:
    if os.path.lexists(names.old):
        return ""  # it tells that the other one has not been replaced
    if names.part.is_dir():
        shutil.rmtree(names.part)
    else:
        names.part.unlink()
    return f"{names.part}: left by a conversion that was broken off, and removed"


def _clear_aside(names: TemporaryNames) -> str:
    """Remove a folder of what was replaced; as long as the new one has not taken the name, put it back."""
    if not os.path.lexists(names.part):
        shutil.rmtree(names.old)
        return f"{names.old}: what a conversion had replaced before it was broken off; it is removed"
    said = ""
    for old in names.old.iterdir():
        output = names.old.parent / old.name
        if os.path.lexists(output):
            return f"{old}: what {output} was before a conversion that was broken off; both are kept"
        old.rename(output)
        said = f"{output}: a conversion that was to replace it was broken off; it is again what it was"
    names.old.rmdir()
    return said
