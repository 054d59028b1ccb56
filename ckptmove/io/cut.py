"""Cut the bytes of segments into parts and blocks."""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING

from ckptmove.errors import CrcMismatch, DamagedArchive
from ckptmove.io.cast import cast_blocks
from ckptmove.io.contracts import CastSegment, CopySegment, FromSource, StreamSegment
from ckptmove.io.segments import blocks_of, elements_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.io.contracts import ByteSource, CheckedRange, Segment


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
    if isinstance(segment, CastSegment) and segment.packed is None and segment.check is None:
        span = _part(segment.span, start * segment.nbytes // whole, nbytes * segment.nbytes // whole)
        return segment._replace(span=span)
    ends_early = isinstance(segment, StreamSegment)  # it has no CRC
    found = partial(checked_blocks, source, segment)
    return StreamSegment(nbytes, lambda: _between(found(), start, start + nbytes, ends_early=ends_early))


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


def checked_blocks(
    source: ByteSource, segment: Segment, overflowed: Callable[[int], None] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the output bytes of a segment of this source, whose only check covers all its bytes; compare their CRC.

    ``overflowed`` is called with the number of values that a cast made infinite.
    """
    if isinstance(segment, CopySegment):
        return _summed(blocks_of(source, (segment,)), segment.checks, source.path)
    if isinstance(segment, CastSegment):
        checks = () if segment.check is None else (segment.check,)
        elements = _summed(elements_of(source, segment, source.path), checks, source.path)
        return cast_blocks(elements, segment, source.path, overflowed)
    return blocks_of(source, (segment,), overflowed)


def _summed(
    blocks: Iterable[bytes | memoryview], checks: tuple[CheckedRange, ...], path: str
) -> Iterator[bytes | memoryview]:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc) if checks else 0
        yield block
    for check in checks:
        if crc != check.crc:
            raise CrcMismatch(path, check.record)


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
