"""Inflate deflated bytes of a source in blocks."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CrcMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.io.contracts import ByteSource, InflateSegment

#: Deflated bytes to read at a time.
_BLOCK: Final = 1 << 20


def inflate(blocks: Iterable[bytes | memoryview], most: int, block_bytes: int) -> Iterator[bytes]:
    """Inflate a raw deflate stream, without a header around it, up to ``most`` bytes.

    They are fewer if the stream ends earlier or is damaged.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left = most
    for block in blocks:
        rest = bytes(block)
        # The last round has no input: the output of the one before may have been larger than a block.
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
    """Yield the inflated bytes of a segment in blocks of ``block_bytes``; only the last may be shorter."""
    crc, left, held = 0, segment.nbytes, b""
    # One byte more than expected, to detect a longer stream.
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
