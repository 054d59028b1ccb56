"""Measure segments, shift them into a larger file, and read their bytes, with a check of every CRC on the way."""

from __future__ import annotations

import zlib
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from ckptmove.errors import CrcMismatch, DamagedArchive
from ckptmove.io.cast import cast_blocks
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
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckptmove.io.contracts import ByteSource, Segment

#: A few blocks fit the cache that the cores share; with larger blocks every step waits for memory.
BLOCK: Final = 1 << 20
#: One is read or written, one is checked, and one is in reserve for the faster side.
BUFFERS: Final = 3

_Block = TypeVar("_Block", bytes, memoryview, "bytes | memoryview")


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
        return length(segment.segment) // ITEM_BYTES[segment.source] * ITEM_BYTES[segment.target]
    return segment.span.nbytes


def shifted(segment: Segment, start: int, folder: str = "") -> Segment:
    """Convert a segment of a file inside another file to a segment of the outer file.

    Segments of other sources, and bytes that come from no source, stay the same.
    """
    if isinstance(segment, (BytesSegment, FromSource, StreamSegment, LateSegment)):
        return segment
    if isinstance(segment, Summed):
        return segment._replace(segments=tuple(shifted(one, start, folder) for one in segment.segments))
    if isinstance(segment, CastSegment):
        return segment._replace(segment=shifted(segment.segment, start, folder))
    span = _shifted(segment.span, start)
    if isinstance(segment, InflateSegment):
        return segment._replace(span=span, record=folder + segment.record)
    return CopySegment(span, tuple(_checked(check, start, folder) for check in segment.checks))


def without_checks(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the same segments without CRC checks, except those of inflated bytes."""
    return tuple(_without_checks(segment) for segment in segments)


def blocks_of(
    source: ByteSource,
    segments: Iterable[Segment],
    overflowed: Callable[[int], None] | None = None,
    worker: ThreadPoolExecutor | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the output bytes of segments in blocks. A block is valid until the next one is taken.

    CRCs are computed in the worker while other blocks are read or written. ``overflowed`` is called with the number of
    values that a cast made infinite.
    """
    for segment in segments:
        if isinstance(segment, BytesSegment):
            yield segment.data
        elif isinstance(segment, CopySegment):
            checker = _Checker(segment.checks, segment.span.start, source.path)
            yield from _fed(source.blocks(segment.span, BLOCK, BUFFERS), checker.feed, worker, BUFFERS)
        elif isinstance(segment, InflateSegment):
            yield from inflated_blocks(source, segment, source.path, BLOCK)
        elif isinstance(segment, CastSegment):
            _require_whole_elements(segment, source.path)
            elements = blocks_of(source, (segment.segment,), worker=worker)
            yield from cast_blocks(elements, segment.source, segment.target, segment.byteorder, overflowed)
        elif isinstance(segment, FromSource):
            yield from blocks_of(segment.source, (segment.segment,), overflowed, worker)
        elif isinstance(segment, (StreamSegment, LateSegment)):
            made = segment.blocks() if isinstance(segment, StreamSegment) else (segment.make(),)
            yield from _exactly(segment.nbytes, made, source.path)
        else:
            segment.crc.reset()
            for one in segment.segments:
                found = blocks_of(source, (one,), overflowed, worker)
                yield from _fed(found, segment.crc.feed, worker, _valid_blocks(one))


class _Checker:
    """Checks the CRC of each record in a copied span, block by block."""

    def __init__(self, checks: Sequence[CheckedRange], start: int, path: str) -> None:
        self._checks = iter(checks)
        self._check = next(self._checks, None)
        self._position = start
        self._crc = 0
        self._path = path

    def feed(self, block: bytes | memoryview) -> None:
        """Process the next block of the span."""
        start, end = self._position, self._position + len(block)
        while self._check is not None and self._check.span.start < end:
            span = self._check.span
            self._crc = zlib.crc32(block[max(span.start - start, 0) : span.end - start], self._crc)
            if span.end > end:
                break
            if self._crc != self._check.crc:
                raise CrcMismatch(self._path, self._check.record)
            self._crc, self._check = 0, next(self._checks, None)
        self._position = end


def _fed(
    blocks: Iterable[_Block], feed: Callable[[_Block], None], worker: ThreadPoolExecutor | None, buffers: int
) -> Iterator[_Block]:
    """Yield blocks and feed them to a function in the worker: while one is read or written, earlier ones are processed.

    A block is processed before ``buffers`` more are taken: its buffer is filled then. Without a worker, it is processed
    first.
    """
    if worker is None:
        for block in blocks:
            feed(block)
            yield block
        return
    feeding: deque[Future[None]] = deque()
    for block in blocks:
        feeding.append(worker.submit(feed, block))
        yield block
        if len(feeding) == buffers:
            feeding.popleft().result()
    for one in feeding:
        one.result()


def _valid_blocks(segment: Segment) -> int:
    # How many blocks of the segment are valid at the same time.
    if isinstance(segment, FromSource):
        return _valid_blocks(segment.segment)
    return BUFFERS if isinstance(segment, CopySegment) else 1


def _require_whole_elements(segment: CastSegment, path: str) -> None:
    nbytes = length(segment.segment)
    if nbytes % ITEM_BYTES[segment.source]:
        raise DamagedArchive(path, f"{nbytes} bytes are not a whole number of {segment.source} elements")


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
    if isinstance(segment, (FromSource, CastSegment)):
        return segment._replace(segment=_without_checks(segment.segment))
    if isinstance(segment, Summed):
        return segment._replace(segments=without_checks(segment.segments))
    return segment._replace(checks=()) if isinstance(segment, CopySegment) else segment


def _checked(check: CheckedRange, start: int, folder: str) -> CheckedRange:
    return CheckedRange(_shifted(check.span, start), check.crc, folder + check.record)


def _shifted(span: Span, start: int) -> Span:
    return Span(start + span.start, start + span.end)
