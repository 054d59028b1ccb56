"""Deflated bytes of a source, inflated while they stream.

Never holds more than a few blocks, and never gives out more than was said to be there.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CrcMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.io.contracts import ByteSource, InflateSegment

#: Deflated bytes that are read at a time.
_BLOCK: Final = 1 << 20


def inflate(blocks: Iterable[bytes | memoryview], most: int, block_bytes: int) -> Iterator[bytes]:
    """Inflate a stream of deflate, without any header around it.

    Args:
        blocks: its bytes.
        most: how many bytes are wanted at most; the rest is never made.
        block_bytes: the most that is handed out at a time.

    Yields:
        What there is: less than was wanted where the stream ends earlier, or breaks.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left = most
    for block in blocks:
        rest = bytes(block)
        # Once more without any input: the output of the last one may not have fitted.
        while left and not inflater.eof:
            try:
                data = inflater.decompress(rest, min(left, block_bytes))
            except zlib.error:
                return
            if not data:
                break
            left -= len(data)
            rest = inflater.unconsumed_tail
            yield data


def inflated_blocks(source: ByteSource, segment: InflateSegment, path: str, block_bytes: int) -> Iterator[bytes]:
    """The bytes of a segment in blocks of ``block_bytes``, of which only the last may be shorter.

    Raises:
        CrcMismatch: they are more or fewer than was said, or differ from their CRC; raised before the last block.
        DamagedArchive, SourceChanged, AccessFailed: as the source.
    """
    crc, left, held = 0, segment.nbytes, b""
    # One byte more than there should be, so that a longer stream is seen to be one.
    for data in inflate(source.blocks(segment.span, _BLOCK), segment.nbytes + 1, block_bytes):
        left -= len(data)
        crc = zlib.crc32(data, crc)
        held += data
        if left >= 0 and len(held) >= block_bytes:
            yield held[:block_bytes]
            held = held[block_bytes:]
    if left or (segment.crc and crc != segment.crc):
        raise CrcMismatch(path, segment.record)
    if held:
        yield held
