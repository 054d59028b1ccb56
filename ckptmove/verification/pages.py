"""Giving back memory whose bytes can be read again from the file, or that nobody will read again.

Never takes memory for a mapping of the file that is not known to be one: what is lost of that is back when it is asked
for, of any other it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.io.locations import inode_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_BATCH_BYTES: Final = 2**24
#: Windows has no madvise(2).
_CAN_DROP: Final = hasattr(mmap, "MADV_DONTNEED")
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
        inode = inode_of(path)
    except OSError:
        return False
    for region in regions:
        bounds, _, _, _, number, *_ = region.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return int(number) == inode
    return False


def drop_pages(start: int, end: int) -> None:
    """Give back the whole pages of a run of memory, where the system can.

    What a file was mapped to is read again from the file; on Linux all else reads as zeros from then on, and elsewhere
    it may stay what it is.

    Args:
        start: address of the first byte.
        end: of the byte after the last one.
    """
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _CAN_DROP:
        _c_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


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
        if not self.enabled or not _CAN_DROP:
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
        # The page that the first byte lies in is one of the mapping, too.
        drop_pages(self._lowest - self._lowest % mmap.PAGESIZE, self._highest)
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
