"""Cut the bytes of segments into parts and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import DamagedArchive
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, StreamSegment
from ckptmove.io.segments import blocks_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.io.contracts import ByteSource, Segment


def cut(source: ByteSource, segment: Segment, start: int, nbytes: int) -> Segment:
    """Return a segment of a part of the output bytes of another segment.

    The part of a copy is a copy. A CRC is checked only if the part is the whole record.

    Args:
        source: source of the segment.
        segment: the whole bytes, for example of a storage.
        start: first byte of the part; of a cast, the first byte of an element.
        nbytes: size of the part in bytes.

    Raises:
        DamagedArchive: if the part reaches past the end.
    """
    whole = length(segment)
    if start + nbytes > whole:
        raise DamagedArchive(source.path, f"a storage has {whole} bytes, but a tensor needs {start + nbytes}")
    if nbytes == whole:
        return segment
    if isinstance(segment, FromSource):
        return FromSource(segment.source, cut(segment.source, segment.segment, start, nbytes))
    if isinstance(segment, CopySegment):
        return CopySegment(_part(segment.span, start, nbytes))
    if isinstance(segment, CastSegment) and segment.packed is None:
        span = _part(segment.span, start * segment.nbytes // whole, nbytes * segment.nbytes // whole)
        return segment._replace(span=span, check=None)
    return StreamSegment(nbytes, lambda: _between(blocks_of(source, (segment,)), start, start + nbytes))


def in_blocks(pieces: Iterable[bytes | memoryview], nbytes: int) -> Iterator[bytes]:
    """Join and cut pieces into blocks of one length."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= nbytes:
            yield bytes(held[:nbytes])
            del held[:nbytes]
    if held:
        yield bytes(held)


def _part(span: Span, start: int, nbytes: int) -> Span:
    return Span(span.start + start, span.start + start + nbytes)


def _between(blocks: Iterator[bytes | memoryview], start: int, end: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes from ``start`` to ``end`` of blocks, and read no block after them."""
    position = 0
    while position < end:
        block = next(blocks)  # `blocks_of` raises if there are too few
        part = block[max(start - position, 0) : end - position]
        position += len(block)
        if part:
            yield part
