"""Cut the bytes of segments into parts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptmove.errors import DamagedArchive
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, StreamSegment
from ckptmove.io.segments import blocks_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource, Segment


def cut(source: ByteSource, segment: Segment, start: int, nbytes: int) -> Segment:
    """Return a segment of a part of the output bytes of another segment.

    The part of a copy without a CRC is a copy. With a CRC, all bytes are read to check it, although only the part is
    written; see :func:`ckptmove.io.segments.without_checks`. The part of a cast begins at the first byte of an element.
    """
    whole = length(segment)
    if start + nbytes > whole:
        raise DamagedArchive(source.path, f"a storage has {whole} bytes, but a tensor needs {start + nbytes}")
    if nbytes == whole:
        return segment
    if isinstance(segment, FromSource):
        return FromSource(segment.source, cut(segment.source, segment.segment, start, nbytes))
    if isinstance(segment, CopySegment) and not segment.checks:
        return CopySegment(_part(segment.span, start, nbytes))
    if isinstance(segment, CastSegment):
        wide = length(segment.segment)
        return segment._replace(segment=cut(source, segment.segment, start * wide // whole, nbytes * wide // whole))
    ends_early = isinstance(segment, StreamSegment)  # it has no CRC
    found = partial(blocks_of, source, (segment,))
    return StreamSegment(nbytes, lambda: _between(found(), start, start + nbytes, ends_early=ends_early))


def _part(span: Span, start: int, nbytes: int) -> Span:
    return Span(span.start + start, span.start + start + nbytes)


def _between(
    blocks: Iterator[bytes | memoryview], start: int, end: int, *, ends_early: bool
) -> Iterator[bytes | memoryview]:
    """Yield the bytes from ``start`` to ``end`` of blocks; unless ``ends_early``, read the others too to check them."""
    position = 0
    for block in blocks:
        part = block[max(start - position, 0) : max(end - position, 0)]
        position += len(block)
        if part:
            yield part
        if ends_early and position >= end:
            return
