"""Segments of a source to a sink, checked while they pass.

Never knows a format: what stands where, and what its CRC must be, is in the segments.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from ckptmove.cast import CAST_BLOCK, SHRINK, cast_blocks
from ckptmove.contracts import BytesSegment, CastSegment, CheckedRange, CopySegment
from ckptmove.errors import CrcMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.contracts import ByteSink, ByteSource, Progress, Segment

#: Fits the caches of a core with the block before it; from 2 MiB on every block costs fresh pages as well.
BLOCK: Final = 1 << 20


class _Checker:
    """Follows the records of a copied span, block by block."""

    def __init__(self, checks: Sequence[CheckedRange], start: int, path: str) -> None:
        self._checks = iter(checks)
        self._check = next(self._checks, None)
        self._position = start
        self._crc = 0
        self._path = path

    def feed(self, block: memoryview) -> None:
        """Take the next block of the span.

        Raises:
            CrcMismatch: a record ends in it whose bytes differ from their CRC.
        """
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


def write_segments(
    source: ByteSource,
    segments: Sequence[Segment],
    sink: ByteSink,
    path: str,
    progress: Progress | None = None,
    overflowed: Callable[[int], None] | None = None,
) -> int:
    """Stream segments from a source to a sink.

    Args:
        source: gives the bytes that are kept.
        segments: the output from its first byte to its last.
        sink: takes them; whoever opened it commits it.
        path: the source, for errors.
        progress: told after each block.
        overflowed: told of values that a cast made infinite, as :func:`ckptmove.cast.cast_blocks` says.

    Returns:
        Bytes written.

    Raises:
        CrcMismatch: a record's bytes differ from their CRC; raised at most one block behind the record's end.
        DamagedArchive, SourceChanged, AccessFailed: as the source.
        WriteFailed: as the sink.
    """
    total = sum(length(segment) for segment in segments)
    done = 0
    # zlib lets go of the GIL: checking a block while it is written and the next is read saves a quarter of the time.
    with ThreadPoolExecutor(max_workers=1) as worker:
        for segment in segments:
            for block in _blocks(source, segment, path, worker, overflowed):
                sink.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
    return done


def length(segment: Segment) -> int:
    """The number of bytes that a segment gives."""
    if isinstance(segment, BytesSegment):
        return len(segment.data)
    return segment.span.nbytes // SHRINK if isinstance(segment, CastSegment) else segment.span.nbytes


def _blocks(
    source: ByteSource,
    segment: Segment,
    path: str,
    worker: ThreadPoolExecutor,
    overflowed: Callable[[int], None] | None,
) -> Iterator[bytes | memoryview]:
    if isinstance(segment, BytesSegment):
        yield segment.data
    elif isinstance(segment, CastSegment):
        yield from cast_blocks(_checked_here(source, segment, path), segment, path, overflowed)
    elif segment.checks:
        yield from _checked_beside(source, segment, path, worker)
    else:
        yield from source.blocks(segment.span, BLOCK)


def _checked_here(source: ByteSource, segment: CastSegment, path: str) -> Iterator[memoryview]:
    checker = _Checker(() if segment.check is None else (segment.check,), segment.span.start, path)
    for block in source.blocks(segment.span, CAST_BLOCK):
        checker.feed(block)
        yield block


def _checked_beside(
    source: ByteSource, segment: CopySegment, path: str, worker: ThreadPoolExecutor
) -> Iterator[memoryview]:
    """Blocks of their own memory, for each is still being checked while the next one is read."""
    checker = _Checker(segment.checks, segment.span.start, path)
    checking = worker.submit(checker.feed, memoryview(b""))
    for start in range(segment.span.start, segment.span.end, BLOCK):
        block = memoryview(source.read(start, min(start + BLOCK, segment.span.end)))
        checking.result()
        checking = worker.submit(checker.feed, block)
        yield block
    checking.result()
