"""Temporary files and folders beside an output: claimed while they are written, cleared up once their process is gone.

Never touches what a live process has claimed, and never removes what has not been replaced yet.

Whoever writes one holds its lock (flock), which the system releases however the process ends: what nobody has locked
was left by one that was killed. Not every network file system shows the locks of one machine to the others, so that
the name says which machine it was, and what another one has left must have been still for a day as well.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
import warnings
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ckptmove.outputs import LeftoversRemoved

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Whoever makes a folder must be able to fill it, and to remove it again.
OWNER: Final = stat.S_IRWXU
_NAME: Final = re.compile(r"\.ckptmove-(?P<host>[0-9a-f]{8})-[0-9a-f]{16}\.(part|old)")
_DAY: Final = 24 * 60 * 60


def temporary_names(folder: Path) -> tuple[Path, Path]:
    """New names in a folder: for an output while it is written, and for a folder that holds what it replaces.

    They are of fixed length, so that an output with the longest possible name has temporary ones as well.
    """
    stem = f".ckptmove-{_host()}-{os.urandom(8).hex()}"
    return folder / f"{stem}.part", folder / f"{stem}.old"


def is_temporary(name: str) -> bool:
    """Whether a name is one of :func:`temporary_names`."""
    return _NAME.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Whether a name is one of an output that is being written, or was broken off."""
    return is_temporary(name) and name.endswith(".part")


def claim(fd: int, path: Path) -> bool:
    """Claim what was opened; whether it is still what the path names, or was cleared up in between."""
    with suppress(OSError):  # a file system without locks: nobody who looks for leftovers gets one there either
        fcntl.flock(fd, fcntl.LOCK_EX)
    return _is_at(fd, path)


def claimed_file(path: Path) -> int:
    """Open a new file for writing; it is claimed until the descriptor, and every copy of it, is closed.

    Raises:
        OSError: the system refuses; nothing is left of it.
    """
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if claim(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        os.close(fd)


def claimed_folder(path: Path) -> int:
    """Open a new folder, which is claimed until the descriptor is closed.

    Raises:
        OSError: the system refuses; nothing is left of it.
    """
    while True:
        path.mkdir(OWNER)
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if claim(fd, path):
                return fd
        except FileNotFoundError:
            continue  # another process took it for a leftover, before it was claimed
        except BaseException:
            if fd >= 0:
                os.close(fd)
            path.rmdir()
            raise
        os.close(fd)


def clear_leftovers(folder: Path) -> None:
    """Remove what processes that are gone have left in a folder, put back what they had moved aside, and warn of it.

    What cannot be looked at or removed stays: it is in nobody's way.
    """
    names: list[str] = []
    with suppress(OSError, ValueError):  # a folder that is not there, or cannot be: whoever writes into it says so
        names = sorted(filter(is_temporary, os.listdir(folder)))  # noqa: PTH208  # names are all it takes
    for name in names:  # of one conversion, what was moved aside comes before what was to take its place
        path = folder / name
        with suppress(OSError), _abandoned(path) as is_abandoned:
            if not is_abandoned:
                continue
            said = _clear_aside(path) if path.suffix == ".old" else _clear_part(path)
            if said:
                warnings.warn(said, LeftoversRemoved, stacklevel=2)


def _host() -> str:
    return f"{zlib.crc32(os.fsencode(os.uname().nodename)):08x}"


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Whether nobody writes to it any more; as long as this lasts, nobody else takes it.

    Raises:
        OSError: somebody does, or the system does not tell.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # Over NFS a file is locked only by who may write to it.
    fd = os.open(path, flags | (os.O_RDONLY if stat.S_ISDIR(path.lstat().st_mode) else os.O_WRONLY))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        match = _NAME.fullmatch(path.name)
        is_settled = (match is not None and match["host"] == _host()) or time.time() - found.st_mtime > _DAY
        yield is_settled and found.st_uid == os.geteuid() and _is_at(fd, path)
    finally:
        os.close(fd)


def _clear_part(path: Path) -> str:
    if os.path.lexists(path.with_suffix(".old")):
        return ""  # it tells that the other one has not been replaced
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return f"{path}: left by a conversion that was broken off, and removed"


def _clear_aside(path: Path) -> str:
    """Remove a folder of what was replaced; as long as the new one has not taken the name, put it back."""
    if not os.path.lexists(path.with_suffix(".part")):
        shutil.rmtree(path)
        return f"{path}: what a conversion had replaced before it was broken off; it is removed"
    said = ""
    for old in path.iterdir():
        output = path.parent / old.name
        if os.path.lexists(output):
            return f"{old}: what {output} was before a conversion that was broken off; both are kept"
        old.rename(output)
        said = f"{output}: a conversion that was to replace it was broken off; it is again what it was"
    path.rmdir()
    return said
