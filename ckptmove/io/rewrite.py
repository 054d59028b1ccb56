"""Segments of a source to a sink, checked while they pass.

Never knows a format: what stands where, and what its CRC must be, is in the segments.
"""

from __future__ import annotations

import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CrcMismatch
from ckptmove.io.cast import cast_blocks
from ckptmove.io.contracts import BytesSegment, CastSegment, CopySegment, FileBacked, InflateSegment
from ckptmove.io.inflate import inflated_blocks
from ckptmove.io.segments import elements_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from ckptmove.io.contracts import ByteSink, ByteSource, CheckedRange, Progress, Segment

#: A few of them fit the cache that the cores share; with larger ones every step of the way waits for memory.
BLOCK: Final = 1 << 20
#: One is read or written, one is being checked, and one lies between for whoever is ahead.
BUFFERS: Final = 3
#: What the kernel copies in one step; after each one there is progress, and Ctrl-C is heard. Steps end at multiples of
#: it: blocks on the disk are shared in whole ones.
KERNEL_BLOCK: Final = 8 << 20


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
    """Stream segments from a source to a sink; the kernel copies those in which there is nothing to check.

    Args:
        source: gives the bytes that are kept.
        segments: the output from its first byte to its last.
        sink: takes them; whoever opened it commits it.
        path: the source, for errors.
        progress: told after each block.
        overflowed: told of values that a cast made infinite, as :func:`ckptmove.io.cast.cast_blocks` says.

    Returns:
        Bytes written.

    Raises:
        CrcMismatch: a record's bytes differ from their CRC; raised a few blocks behind the record's end.
        DamagedArchive, SourceChanged, AccessFailed: as the source.
        WriteFailed: as the sink, which is asked for room before the first byte is read.
    """
    places = [0, *accumulate(map(length, segments))]
    total, done = places[-1], 0
    is_clone = isinstance(source, FileBacked) and any(map(_stays, segments, places)) and sink.clone(source.fileno())
    if not is_clone:
        sink.reserve(total)
    # zlib lets go of the GIL: blocks are checked while others are read and written.
    with ThreadPoolExecutor(max_workers=1) as worker:
        for segment, place in zip(segments, places, strict=False):
            stays = is_clone and _stays(segment, place)
            steps = _steps(source, segment, sink, path, worker, overflowed)
            for count in _passed_over(segment, sink) if stays else steps:
                done += count
                if progress is not None:
                    progress(done, total)
    if isinstance(source, FileBacked):
        source.require_unchanged()
    return done


def _stays(segment: Segment, place: int) -> bool:
    """Whether bytes come to lie where the source has them, and are compared with nothing."""
    return isinstance(segment, CopySegment) and not segment.checks and segment.span.start == place


def _passed_over(segment: Segment, sink: ByteSink) -> Iterator[int]:
    sink.pass_over(length(segment))
    yield length(segment)


def _steps(
    source: ByteSource,
    segment: Segment,
    sink: ByteSink,
    path: str,
    worker: ThreadPoolExecutor,
    overflowed: Callable[[int], None] | None,
) -> Iterator[int]:
    """Write one segment; gives the bytes of each step when it is done."""
    if isinstance(segment, CopySegment) and not segment.checks and isinstance(source, FileBacked):
        start, end = segment.span.start, segment.span.end
        while count := sink.copy(source.fileno(), start, min(KERNEL_BLOCK - start % KERNEL_BLOCK, end - start)):
            start += count
            yield count
        segment = CopySegment(Span(start, end))  # what the kernel could not copy
    for block in _blocks(source, segment, path, worker, overflowed):
        sink.write(block)
        yield len(block)


def _blocks(
    source: ByteSource,
    segment: Segment,
    path: str,
    worker: ThreadPoolExecutor,
    overflowed: Callable[[int], None] | None,
) -> Iterator[bytes | memoryview]:
    if isinstance(segment, BytesSegment):
        yield segment.data
    elif isinstance(segment, InflateSegment):
        yield from inflated_blocks(source, segment, path, BLOCK)
    elif isinstance(segment, CastSegment):
        yield from cast_blocks(_checked_here(source, segment, path), segment, path, overflowed)
    else:
        yield from _checked_beside(source, segment, path, worker)


def _checked_here(source: ByteSource, segment: CastSegment, path: str) -> Iterator[bytes | memoryview]:
    checker = _Checker(() if segment.check is None else (segment.check,), segment.span.start, path)
    for block in elements_of(source, segment, path):
        checker.feed(memoryview(block))
        yield block


def _checked_beside(
    source: ByteSource, segment: CopySegment, path: str, worker: ThreadPoolExecutor
) -> Iterator[memoryview]:
    """Blocks of a few buffers in turn: while one is read or written, those before it are still being checked."""
    checker = _Checker(segment.checks, segment.span.start, path)
    checking: deque[Future[None]] = deque()
    for block in source.blocks(segment.span, BLOCK, BUFFERS):
        checking.append(worker.submit(checker.feed, block))
        yield block
        if len(checking) == BUFFERS:
            checking.popleft().result()  # its buffer is the next one to be filled
    for check in checking:
        check.result()
