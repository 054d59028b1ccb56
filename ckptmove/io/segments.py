"""Measure segments, shift them into a larger file, and read their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive
from ckptmove.io.cast import CAST_BLOCK, cast_blocks
from ckptmove.io.contracts import (
    BytesSegment,
    CastSegment,
    CheckedRange,
    CopySegment,
    FromSource,
    InflateSegment,
    LateSegment,
    StreamSegment,
    Summed,
)
from ckptmove.io.inflate import inflated_blocks
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptmove.io.contracts import ByteSource, Segment

_BLOCK: Final = 1 << 20


def length(segment: Segment) -> int:
    """Return the number of output bytes of a segment."""
    if isinstance(segment, BytesSegment):
        return len(segment.data)
    if isinstance(segment, (InflateSegment, StreamSegment, LateSegment)):
        return segment.nbytes
    if isinstance(segment, FromSource):
        return length(segment.segment)
    if isinstance(segment, Summed):
        return sum(map(length, segment.segments))
    if isinstance(segment, CastSegment):
        return segment.nbytes // ITEM_BYTES[segment.source] * ITEM_BYTES[segment.target]
    return segment.span.nbytes


def shifted(segment: Segment, start: int, folder: str = "") -> Segment:
    """Convert a segment of a file inside another file to a segment of the outer file.

    Segments of other sources, and bytes that come from no source, stay the same.
    """
    if isinstance(segment, (BytesSegment, FromSource, StreamSegment, LateSegment)):
        return segment
    if isinstance(segment, Summed):
        return segment._replace(segments=tuple(shifted(one, start, folder) for one in segment.segments))
    span = _shifted(segment.span, start)
    if isinstance(segment, InflateSegment):
        return segment._replace(span=span, record=folder + segment.record)
    if isinstance(segment, CastSegment):
        check = None if segment.check is None else _checked(segment.check, start, folder)
        packed = segment.packed
        packed = None if packed is None else packed._replace(span=span, record=folder + packed.record)
        return segment._replace(span=span, check=check, packed=packed)
    return CopySegment(span, tuple(_checked(check, start, folder) for check in segment.checks))


def without_checks(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the same segments without CRC checks."""
    return tuple(_without_checks(segment) for segment in segments)


def blocks_of(
    source: ByteSource, segments: Sequence[Segment], overflowed: Callable[[int], None] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the output bytes of segments in blocks, without checking the CRC of copied bytes.

    ``overflowed`` is called with the number of values that a cast made infinite.
    """
    for segment in segments:
        if isinstance(segment, BytesSegment):
            yield segment.data
        elif isinstance(segment, InflateSegment):
            yield from inflated_blocks(source, segment, source.path, _BLOCK)
        elif isinstance(segment, CastSegment):
            yield from cast_blocks(elements_of(source, segment, source.path), segment, source.path, overflowed)
        elif isinstance(segment, FromSource):
            yield from blocks_of(segment.source, (segment.segment,), overflowed)
        elif isinstance(segment, StreamSegment):
            yield from _exactly(segment.nbytes, segment.blocks(), source.path)
        elif isinstance(segment, LateSegment):
            yield from _exactly(segment.nbytes, (segment.make(),), source.path)
        elif isinstance(segment, Summed):
            segment.crc.reset()
            for block in blocks_of(source, segment.segments, overflowed):
                segment.crc.feed(block)
                yield block
        else:
            yield from source.blocks(segment.span, _BLOCK)


def elements_of(source: ByteSource, segment: CastSegment, path: str) -> Iterator[bytes | memoryview]:
    """Return the input bytes of a cast, inflated if needed, in blocks of whole elements."""
    if segment.packed is not None:
        return inflated_blocks(source, segment.packed, path, CAST_BLOCK)
    return source.blocks(segment.span, CAST_BLOCK)


def _exactly(nbytes: int, blocks: Iterable[bytes | memoryview], path: str) -> Iterator[bytes | memoryview]:
    """Yield blocks that have a required number of bytes in total."""
    left = nbytes
    for block in blocks:
        left -= len(block)
        if left < 0:
            break
        yield block
    if left:
        raise DamagedArchive(
            path, f"the output needs {nbytes} bytes here, and {'more' if left < 0 else 'fewer'} were read"
        )


def _without_checks(segment: Segment) -> Segment:
    if isinstance(segment, FromSource):
        return segment._replace(segment=_without_checks(segment.segment))
    if isinstance(segment, Summed):
        return segment._replace(segments=without_checks(segment.segments))
    if isinstance(segment, CopySegment):
        return segment._replace(checks=())
    return segment._replace(check=None) if isinstance(segment, CastSegment) else segment


def _checked(check: CheckedRange, start: int, folder: str) -> CheckedRange:
    return CheckedRange(_shifted(check.span, start), check.crc, folder + check.record)


def _shifted(span: Span, start: int) -> Span:
    return Span(start + span.start, start + span.end)
