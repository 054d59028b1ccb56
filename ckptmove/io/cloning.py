"""Create a new file as a clone of another one, so that common blocks are on the disk once. macOS only.

Without support of the system or the file system, bytes are copied.

From fclonefileat(2) of macOS. On Linux, copy_file_range(2) shares blocks at any offset, so that no clone is needed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.io.leftovers import temporary_names
from ckptmove.io.portable import open_file

if TYPE_CHECKING:
    from pathlib import Path

#: Values of macOS, the second from <sys/clonefile.h>: the clone belongs to the current user.
_AT_FDCWD: Final = -2
_CLONE_NOOWNERCOPY: Final = 0x0002


def begin_as_clone(fd: int, place: Path, source: int) -> int:
    """Replace a new, empty file by a clone of an open file, keeping the permission bits of the new file.

    Returns:
        The descriptor of the clone, at its first byte, with ``fd`` closed. Without a clone, ``fd``: also if another
        process removed the clone as a leftover before it was renamed.
    """
    clone = temporary_names(place).part
    if not _cloned(source, clone):
        return fd
    new = -1
    try:
        clone.chmod(stat.S_IMODE(os.fstat(fd).st_mode))
        new = open_file(clone, os.O_WRONLY)
        clone.replace(place)
    except BaseException as error:
        with suppress(OSError):
            clone.unlink()
        if new >= 0:
            os.close(new)
        if isinstance(error, OSError):
            return fd  # after any error, bytes can still be copied
        raise
    os.close(fd)
    return new


def _cloned(source: int, clone: Path) -> bool:
    """Clone an open file under a new name; return whether that worked."""
    if hasattr(os, "copy_file_range"):
        return False
    import ctypes  # needed on macOS only

    try:
        call = ctypes.CDLL(None).fclonefileat
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows every library has a name
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
    return bool(call(source, _AT_FDCWD, os.fsencode(clone.absolute()), _CLONE_NOOWNERCOPY) == 0)
