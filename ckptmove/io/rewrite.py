"""Stream segments of one or more sources to a sink, checking and computing CRCs on the way."""

from __future__ import annotations

import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

from ckptmove.errors import CrcMismatch
from ckptmove.io.at_once import Workers, go_on
from ckptmove.io.cast import cast_blocks
from ckptmove.io.contracts import (
    CastSegment,
    CopySegment,
    FileBacked,
    FromSource,
    InflateSegment,
    LateSegment,
    Summed,
    Versioned,
)
from ckptmove.io.inflate import inflated_blocks
from ckptmove.io.segments import blocks_of, elements_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from ckptmove.io.contracts import ByteSink, ByteSource, ByteWriter, CheckedRange, Progress, Segment

#: A few blocks fit the cache that the cores share; with larger blocks every step waits for memory.
BLOCK: Final = 1 << 20
#: One is read or written, one is checked, and one is in reserve for the faster side.
BUFFERS: Final = 3
#: Bytes that the kernel copies in one step. Progress and Ctrl-C are handled between steps. Steps end at multiples of
#: this size, because file systems share only whole blocks.
KERNEL_BLOCK: Final = 8 << 20

_Block = TypeVar("_Block", bytes, memoryview, "bytes | memoryview")


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


def write_segments(
    source: ByteSource,
    segments: Sequence[Segment],
    sink: ByteSink,
    path: str,
    progress: Progress | None = None,
    overflowed: Callable[[int], None] | None = None,
    jobs: int = 1,
) -> int:
    """Stream the segments of an output to a sink; return the number of bytes written.

    The kernel copies those of files without CRC checks. The code that opened the sink commits it. ``overflowed`` is
    called with the number of values that a cast made infinite. With more than one of ``jobs``, all sources can be read
    by several threads, and so can the blocks of a :class:`~ckptmove.io.contracts.StreamSegment`.
    """
    places = [0, *accumulate(map(length, segments))]
    count = _Counter(places[-1], progress)
    sink.reserve(count.total)
    if jobs > 1:
        _write_at_once(source, list(zip(segments, places, strict=False)), sink, path, jobs, count, overflowed)
        sink.skip(count.total)
    else:
        # zlib releases the GIL: blocks are checked while others are read and written.
        with ThreadPoolExecutor(max_workers=1) as worker:
            for segment in segments:
                for nbytes in _steps(source, segment, sink, path, worker, overflowed):
                    count.add(nbytes)
    for used in {id(one): one for one in (source, *_sources(segments))}.values():
        if isinstance(used, Versioned):
            used.require_unchanged()
    return count.done


class _Counter:
    """Counts the bytes that threads have written."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total = 0, total
        self._progress = progress
        self._lock = Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, and report the progress."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)


def _write_at_once(
    source: ByteSource,
    placed: Sequence[tuple[Segment, int]],
    sink: ByteSink,
    path: str,
    jobs: int,
    count: _Counter,
    overflowed: Callable[[int], None] | None,
) -> None:
    """Write segments in several threads; those that depend on others come last."""

    def write(one: tuple[Segment, int]) -> None:
        segment, place = one
        for nbytes in _steps(source, segment, sink.at(place), path, None, overflowed):
            count.add(nbytes)
            go_on()

    Workers(one for one in placed if not isinstance(one[0], LateSegment)).run(write, jobs)
    for one in placed:
        if isinstance(one[0], LateSegment):
            write(one)


def _sources(segments: Iterable[Segment]) -> Iterator[ByteSource]:
    for segment in segments:
        if isinstance(segment, FromSource):
            yield segment.source
            yield from _sources((segment.segment,))
        elif isinstance(segment, Summed):
            yield from _sources(segment.segments)


def _steps(
    source: ByteSource,
    segment: Segment,
    sink: ByteWriter,
    path: str,
    worker: ThreadPoolExecutor | None,
    overflowed: Callable[[int], None] | None,
) -> Iterator[int]:
    """Write one segment; yields the number of bytes after each step."""
    if isinstance(segment, FromSource):
        yield from _steps(segment.source, segment.segment, sink, segment.source.path, worker, overflowed)
        return
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
    worker: ThreadPoolExecutor | None,
    overflowed: Callable[[int], None] | None,
) -> Iterator[bytes | memoryview]:
    if isinstance(segment, InflateSegment):
        yield from inflated_blocks(source, segment, path, BLOCK)
    elif isinstance(segment, CastSegment):
        checker = _Checker(() if segment.check is None else (segment.check,), segment.span.start, path)
        elements = _fed(elements_of(source, segment, path), checker.feed, None, 1)
        yield from cast_blocks(elements, segment, path, overflowed)
    elif isinstance(segment, CopySegment):
        checker = _Checker(segment.checks, segment.span.start, path)
        yield from _fed(source.blocks(segment.span, BLOCK, BUFFERS), checker.feed, worker, BUFFERS)
    elif isinstance(segment, FromSource):
        yield from _blocks(segment.source, segment.segment, segment.source.path, worker, overflowed)
    elif isinstance(segment, Summed):
        segment.crc.reset()
        for one in segment.segments:
            yield from _fed(
                _blocks(source, one, path, worker, overflowed), segment.crc.feed, worker, _valid_blocks(one)
            )
    else:
        yield from blocks_of(source, (segment,))


def _valid_blocks(segment: Segment) -> int:
    # How many blocks of the segment are valid at the same time.
    if isinstance(segment, FromSource):
        return _valid_blocks(segment.segment)
    return BUFFERS if isinstance(segment, CopySegment) else 1


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
