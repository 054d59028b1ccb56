"""Deflated records of a zip archive, inflated block by block.

Never gives more bytes than a record says that it has, but for one that shows the lie.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK: Final = 1 << 20


def inflated(blocks: Iterable[memoryview], nbytes: int) -> Iterator[bytes]:
    """The bytes of a deflated record: as many as there are, at most one more than it says.

    What cannot be inflated ends them: their number or their CRC tells.

    Args:
        blocks: the record as it lies in the archive.
        nbytes: its length once inflated, as the directory has it.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left = nbytes + 1
    for block in blocks:
        if not left or inflater.eof:
            return
        rest = bytes(block)
        # Once more without any input: the output of the last one may not have fitted.
        while left and not inflater.eof:
            try:
                data = inflater.decompress(rest, min(left, _BLOCK))
            except zlib.error:
                return
            if not data:
                break
            left -= len(data)
            rest = inflater.unconsumed_tail
            yield data
