"""Stream segments of one or more sources to a sink, checking and computing CRCs on the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Final

from ckptmove.io.at_once import Workers, go_on
from ckptmove.io.contracts import (
    CopySegment,
    FileBacked,
    FromSource,
    LateSegment,
    Summed,
    Versioned,
)
from ckptmove.io.segments import blocks_of, length
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptmove.io.contracts import ByteSink, ByteSource, ByteWriter, Progress, Segment

#: Bytes that the kernel copies in one step. Progress and Ctrl-C are handled between steps. Steps end at multiples of
#: this size, because file systems share only whole blocks.
KERNEL_BLOCK: Final = 8 << 20


def write_segments(
    source: ByteSource,
    segments: Sequence[Segment],
    sink: ByteSink,
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
        _write_at_once(source, list(zip(segments, places, strict=False)), sink, jobs, count, overflowed)
        sink.skip(count.total)
    else:
        # zlib releases the GIL: blocks are checked while others are read and written.
        with ThreadPoolExecutor(max_workers=1) as worker:
            for segment in segments:
                for nbytes in _steps(source, segment, sink, worker, overflowed):
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
    jobs: int,
    count: _Counter,
    overflowed: Callable[[int], None] | None,
) -> None:
    """Write segments in several threads; those that depend on others come last."""

    def write(one: tuple[Segment, int]) -> None:
        segment, place = one
        for nbytes in _steps(source, segment, sink.at(place), None, overflowed):
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
    worker: ThreadPoolExecutor | None,
    overflowed: Callable[[int], None] | None,
) -> Iterator[int]:
    """Write one segment; yields the number of bytes after each step."""
    if isinstance(segment, FromSource):
        yield from _steps(segment.source, segment.segment, sink, worker, overflowed)
        return
    if isinstance(segment, CopySegment) and not segment.checks and isinstance(source, FileBacked):
        start, end = segment.span.start, segment.span.end
        while count := sink.copy(source.fileno(), start, min(KERNEL_BLOCK - start % KERNEL_BLOCK, end - start)):
            start += count
            yield count
        segment = CopySegment(Span(start, end))  # what the kernel could not copy
    for block in blocks_of(source, (segment,), overflowed, worker):
        sink.write(block)
        yield len(block)
