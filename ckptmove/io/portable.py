"""Wrap file operations that differ between operating systems.

Features are detected by the names that Python defines, not by the name of the platform.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import PurePath

#: Windows translates line ends unless a file is opened with O_BINARY.
_AS_BYTES: Final = getattr(os, "O_BINARY", 0)
#: Flags for files that others may have created: do not follow links, do not wait for named pipes.
UNTRUSTED: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: Separators in paths.
SEPARATORS: Final = os.sep + (os.altsep or "")
#: Device names of Windows in every folder, with any extension (``ntpath.isreserved``).
_DEVICES: Final = frozenset({
    "CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$",
    *(f"{port}{number}" for port in ("COM", "LPT") for number in "123456789\xb9\xb2\xb3"),
})  # fmt: skip
#: Permission bits of a new file before the umask, and all that a file can get: no copy inherits setuid and the like.
NEW_FILE: Final = 0o666
ALL: Final = 0o777
_NOT_IN_NAMES: Final = frozenset('"*:<>?|')


def open_file(path: str | os.PathLike[str], flags: int, mode: int = NEW_FILE) -> int:
    """Open a file in binary mode; child processes do not inherit the descriptor (PEP 446)."""
    return os.open(path, flags | _AS_BYTES, mode)


def without_umask(mode: int) -> int:
    """Return the permission bits that a new folder gets. For an instant, other threads create private files."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mode & ALL & ~mask


@contextmanager
def syncing(folder: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Yield a function that makes renames in a folder durable; it does nothing on systems that cannot open folders.

    The folder is opened at once: if that fails, nothing has been renamed yet.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders; NTFS has a journal for names
        yield lambda: None
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lambda: _sync(opened)
    finally:
        os.close(opened)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames in a folder durable."""
    with syncing(folder) as sync:
        sync()


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise


def own_user() -> int:
    """Return the user id of files that this process creates; 0 on Windows, which reports 0 for every file."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def host_name() -> str:
    """Return the name of this machine."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def shared_folder(first: str, second: str) -> str:
    """Return the deepest folder that contains two absolute paths; empty for paths on different drives of Windows."""
    try:
        return os.path.commonpath([first, second])
    except ValueError:
        return ""


def is_reserved(path: PurePath) -> bool:
    """Whether Windows interprets the name of a path as a device or as a stream of another file, or does not allow it.

    False for paths of other systems. ``out:cpu.pth`` would write to a hidden stream of the file ``out``, and ``run.``
    would lose its dot.
    """
    if not isinstance(path, PureWindowsPath):
        return False
    name = path.name
    is_device = name.partition(".")[0].rstrip(" ").upper() in _DEVICES
    return is_device or name.endswith((".", " ")) or any(one in _NOT_IN_NAMES or one < " " for one in name)
