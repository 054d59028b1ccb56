"""Release memory pages that can be read again from a file, or that are no longer needed.

Only memory known to be a mapping of the file may be released: its pages are read again from the file on access. Other
memory would lose its values.
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
#: Memory regions of this process, one a line (``man 5 proc_pid_maps``). Only Linux has it.
_REGIONS = Path("/proc/self/maps")


def is_mapping(address: int, path: str) -> bool:
    """Whether memory is a mapping of a file; False if the system does not report it."""
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
    """Release the whole pages of a memory range, if the system supports it.

    Pages of a mapped file are read again from the file on access. Other memory reads as zeros afterwards on Linux, and
    may keep its values elsewhere.

    Args:
        start: address of the first byte.
        end: address after the last byte.
    """
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _CAN_DROP:
        _c_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@dataclass(slots=True)
class PageRelease:
    """Release the clean pages of torch's mapping of a file, which torch holds until the last tensor is freed.

    The pages are read from the file again on access. A tensor counts as mapped only if its address minus its offset in
    the file is the same page-aligned base as for all tensors before it.
    """

    enabled: bool  # whether torch mapped the file, in this machine's byte order
    _base: int | None = None
    _lowest: int = sys.maxsize
    _highest: int = 0
    _bytes: int = 0

    def seen(self, address: int, offset: int, nbytes: int) -> None:
        """Mark bytes as not needed again soon.

        Args:
            address: address of the first byte.
            offset: offset of this byte in the file.
            nbytes: number of bytes.
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
            # The page that contains the first byte belongs to the mapping, too.
            drop_pages(self._lowest - self._lowest % mmap.PAGESIZE, self._highest)
            self._lowest, self._highest, self._bytes = sys.maxsize, 0, 0


class PagesOfFiles:
    """Release the pages of several mapped files."""

    def __init__(self, files: Iterable[str]) -> None:
        """Begin with nothing seen.

        Args:
            files: names of the files that torch mapped, in this machine's byte order.
        """
        self._releases = {file: PageRelease(enabled=True) for file in files}

    def seen(self, file: str, address: int, offset: int, nbytes: int) -> None:
        """Mark bytes of a file as not needed again soon; nothing happens if the file is not mapped."""
        if file in self._releases:
            self._releases[file].seen(address, offset, nbytes)
