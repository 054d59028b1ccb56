"""What operating systems do differently with files, asked for by the names that Python has there.

Never asks for the name of a platform: a feature that Python does not name is missing.
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

#: Windows changes line ends in what is read and written, unless a file is opened with O_BINARY.
_AS_BYTES: Final = getattr(os, "O_BINARY", 0)
#: For what others may have put into a folder: a link is not followed, and a named pipe not waited for.
UNTRUSTED: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: What a path may end in, or have between two names.
SEPARATORS: Final = os.sep + (os.altsep or "")
#: Device names of Windows in every folder, with any extension (``ntpath.isreserved``).
_DEVICES: Final = frozenset({
    "CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$",
    *(f"{port}{number}" for port in ("COM", "LPT") for number in "123456789\xb9\xb2\xb3"),
})  # fmt: skip
_NOT_IN_NAMES: Final = frozenset('"*:<>?|')


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file for bytes; no child process inherits the descriptor (PEP 446).

    Raises:
        OSError: the system refuses.
    """
    return os.open(path, flags | _AS_BYTES, mode)


@contextmanager
def syncing(folder: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """A function that makes renames within a folder durable; it does nothing where a folder cannot be opened.

    The folder is opened at once, so that one that cannot be opened fails before anything is renamed.

    Raises:
        OSError: the system refuses.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folder; NTFS keeps a journal of its names
        yield lambda: None
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lambda: _sync(opened)
    finally:
        os.close(opened)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames within a folder durable.

    Raises:
        OSError: the system refuses.
    """
    with syncing(folder) as sync:
        sync()


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to sync in a folder, and say so
            raise


def own_user() -> int:
    """The user that files of this process belong to; Windows has no such numbers, and says 0 of every file."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def host_name() -> str:
    """The name of this machine."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def shared_folder(first: str, second: str) -> str:
    """The deepest folder that two absolute paths share; empty for paths on two drives of Windows."""
    try:
        return os.path.commonpath([first, second])
    except ValueError:
        return ""


def is_reserved(path: PurePath) -> bool:
    """Whether Windows takes the last name of a path for a device, a stream of another file, or no name at all.

    False for paths of every other system. ``out:cpu.pth`` would go into a stream of the file ``out``, where nobody
    finds it, and ``run.`` would lose its dot.
    """
    if not isinstance(path, PureWindowsPath):
        return False
    name = path.name
    is_device = name.partition(".")[0].rstrip(" ").upper() in _DEVICES
    return is_device or name.endswith((".", " ")) or any(one in _NOT_IN_NAMES or one < " " for one in name)
