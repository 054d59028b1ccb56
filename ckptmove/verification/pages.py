"""Giving back the memory of a mapped file while a comparison walks along it.

Never touches memory that is not known to be a mapping of the file: advice on anything else would lose data.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_BATCH_BYTES: Final = 2**24
#: What the memory of this process is, a line for each region: Linux alone tells (``man 5 proc_pid_maps``).
_REGIONS = Path("/proc/self/maps")


def is_mapping(address: int, path: str) -> bool:
    """Whether memory is a mapping of a file; False, too, where the system does not tell.

    Args:
        address: of a byte in memory.
        path: of the file.
    """
    try:
        regions = _REGIONS.read_text(errors="replace").splitlines()
        inode = os.stat(path).st_ino  # noqa: PTH116  # a path of a checkpoint stays text
    except OSError:
        return False
    for region in regions:
        bounds, _, _, _, number, *_ = region.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return int(number) == inode
    return False


@dataclass(slots=True)
class PageRelease:
    """Drops the clean pages of torch's mapping of a file, which torch holds until the last tensor is gone.

    The pages come back from the file when they are read again. A tensor is taken for mapped only where its address
    less its offset in the file is the same page-aligned base as that of all before it.

    Attributes:
        enabled: whether torch mapped the file, in this machine's byte order.
    """

    enabled: bool
    _base: int | None = None
    _lowest: int = sys.maxsize
    _highest: int = 0
    _bytes: int = 0

    def seen(self, address: int, offset: int, nbytes: int) -> None:
        """Note bytes that will not be needed again soon.

        Args:
            address: of the first byte in memory.
            offset: of the same byte in the file.
            nbytes: how many.
        """
        if not self.enabled or sys.platform == "win32":
            return
        base = address - offset
        if base % mmap.PAGESIZE or base != (self._base or base):
            self.enabled = False
            return
        self._base = base
        self._lowest = min(self._lowest, address)
        self._highest = max(self._highest, address + nbytes)
        self._bytes += nbytes
        if self._bytes >= _BATCH_BYTES:
            self._release()

    def _release(self) -> None:
        start = self._lowest - self._lowest % mmap.PAGESIZE
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(self._highest - start), mmap.MADV_DONTNEED)
        self._lowest, self._highest, self._bytes = sys.maxsize, 0, 0


class PagesOfFiles:
    """The same for several mapped files side by side."""

    def __init__(self, files: Iterable[str]) -> None:
        """Begin with nothing seen.

        Args:
            files: names of those that torch mapped, in this machine's byte order.
        """
        self._releases = {file: PageRelease(enabled=True) for file in files}

    def seen(self, file: str, address: int, offset: int, nbytes: int) -> None:
        """Note bytes of a file that will not be needed again soon; nothing where it is not mapped."""
        if file in self._releases:
            self._releases[file].seen(address, offset, nbytes)
