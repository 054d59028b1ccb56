"""A new file that begins as a clone of another one: what they have in common lies on the disk once.

Never needed: where the system or the file system has no clones, bytes are copied.

From fclonefileat(2) of macOS. Linux shares blocks in copy_file_range(2), whatever their places, and is not asked here.
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

#: ``AT_FDCWD`` of macOS, and ``CLONE_NOOWNERCOPY`` in <sys/clonefile.h>: the clone is its maker's.
_HERE: Final = -2
_NO_OWNER: Final = 0x0002


def begin_as_clone(fd: int, place: Path, source: int) -> int:
    """Put a clone of an open file into the place of a new one, with the permission bits of that.

    Args:
        fd: of the new file, which is empty.
        place: where it lies.
        source: descriptor of the file to be cloned.

    Returns:
        The descriptor of what is in the place: of the clone, at its first byte, and ``fd`` is closed; or ``fd``, where
        there is no clone, also because another process took it for a leftover before it was in the place.
    """
    clone = temporary_names(place.parent).part
    if not _made(source, clone):
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
            return fd  # whatever it was, bytes can be copied
        raise
    os.close(fd)
    return new


def _made(source: int, clone: Path) -> bool:
    """Whether there is a clone of an open file under a new name now."""
    if hasattr(os, "copy_file_range"):
        return False
    import ctypes  # noqa: PLC0415  # where it is of use, it saves more time than it takes

    try:
        call = ctypes.CDLL(None).fclonefileat
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows every library has a name
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
    return bool(call(source, _HERE, os.fsencode(clone.absolute()), _NO_OWNER) == 0)
