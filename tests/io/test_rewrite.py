"""Segments of several sources in one output: their bytes, their order, their CRC-32, and sources that change."""

from __future__ import annotations

import os
import zlib

import pytest

from ckptmove.errors import CrcMismatch, DamagedArchive, SourceChanged
from ckptmove.io.contracts import (
    BytesSegment,
    CheckedRange,
    CopySegment,
    FromSource,
    LateSegment,
    RunningCrc,
    StreamSegment,
    Summed,
)
from ckptmove.io.part import MemorySource
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import BLOCK, BUFFERS, blocks_of, length, without_checks
from ckptmove.io.sink import FileSink
from ckptmove.io.source import open_source
from ckptmove.model import Span

EMPTY = MemorySource("main", b"")
#: More blocks than there are buffers.
LARGE = os.urandom((BUFFERS + 2) * BLOCK + 77)
WHOLE = Span(0, len(LARGE))


class Collected:
    """A sink in memory."""

    def __init__(self, data=None, place=0):
        self.data = bytearray() if data is None else data
        self.place = place

    def at(self, start):
        return Collected(self.data, start)

    def skip(self, nbytes):
        assert nbytes == len(self.data) == self.reserved

    def reserve(self, nbytes):
        self.reserved = nbytes

    def write(self, data):
        self.data.extend(bytes(max(0, self.place - len(self.data))))
        self.data[self.place : self.place + len(data)] = data
        self.place += len(data)

    def copy(self, *_place):
        return 0


def written(segments, source=EMPTY, jobs=1, **options):
    sink = Collected()
    written = write_segments(source, segments, sink, jobs=jobs, **options)
    assert written == len(sink.data) == sink.reserved
    return bytes(sink.data)


@pytest.fixture(params=[1, 3], ids=["in turn", "at once"])
def jobs(request):
    return request.param


def one_buffer(data, block=BLOCK):
    """The blocks of a producer that uses the same buffer for all of them."""
    buffer = bytearray(block)
    for start in range(0, len(data), block):
        part = data[start : start + block]
        buffer[: len(part)] = part
        yield memoryview(buffer)[: len(part)]


@pytest.fixture
def files(tmp_path):
    """Open files of the same bytes."""
    paths = [tmp_path / name for name in ("a.pt", "b.pt")]
    for path in paths:
        path.write_bytes(LARGE)
    sources = [open_source(str(path)) for path in paths]
    yield sources
    for source in sources:
        source.close()


def summed(crc):
    """A sum over every kind of bytes."""
    other = MemorySource("other", LARGE)
    stream = StreamSegment(len(LARGE), lambda: one_buffer(LARGE))
    inner = Summed((stream,), RunningCrc())
    return Summed((FromSource(other, CopySegment(WHOLE)), BytesSegment(b"new"), FromSource(other, stream), inner), crc)


def test_a_sum_is_that_of_the_bytes_and_known_to_those_after_it(jobs):
    crc = RunningCrc()
    segments = [summed(crc), LateSegment(4, lambda: crc.value.to_bytes(4, "little"))]
    wanted = LARGE + b"new" + LARGE + LARGE
    wanted += zlib.crc32(wanted).to_bytes(4, "little")
    assert sum(map(length, segments)) == len(wanted)
    assert written(segments, jobs=jobs) == wanted
    assert b"".join(bytes(block) for block in blocks_of(EMPTY, segments)) == wanted
    assert written(segments, jobs=jobs) == wanted


def test_late_bytes_are_made_when_all_bytes_before_them_are_written():
    sink = Collected()
    late = LateSegment(8, lambda: len(sink.data).to_bytes(8, "little"))
    segments = [BytesSegment(b"12345"), late, StreamSegment(3, lambda: iter((b"6", b"78"))), late]
    write_segments(EMPTY, segments, sink)
    numbers = [int.from_bytes(sink.data[at : at + 8], "little") for at in (5, 16)]
    assert numbers == [5, 16]


@pytest.mark.parametrize("nbytes", [0, 3, 5])
@pytest.mark.parametrize("kind", ["stream", "late"])
def test_another_number_of_bytes_than_required(kind, nbytes):
    stream = StreamSegment(nbytes, lambda: iter((b"12", b"34")))
    segment = stream if kind == "stream" else LateSegment(nbytes, lambda: b"1234")
    sink = Collected()
    with pytest.raises(DamagedArchive):
        write_segments(EMPTY, [segment], sink)
    assert len(sink.data) <= nbytes
    with pytest.raises(DamagedArchive):
        list(blocks_of(EMPTY, [segment]))


def test_no_byte_at_all_is_the_right_number_for_an_empty_stream():
    assert written([StreamSegment(0, lambda: iter(())), LateSegment(0, bytes)]) == b""


def test_progress_covers_all_sources(files, jobs):
    steps = []
    segments = [FromSource(one, CopySegment(WHOLE)) for one in files] + [summed(RunningCrc())]
    total = sum(map(length, segments))
    written(segments, jobs=jobs, progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (total, total)
    assert len(steps) > 4 * BUFFERS


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="this system copies no bytes in the kernel")
@pytest.mark.parametrize("kernel", ["copies", "cannot"])
def test_the_kernel_copies_from_every_file(files, tmp_path, monkeypatch, kernel, jobs):
    real, used = os.copy_file_range, set()

    def copy(source, *rest):
        used.add(source)
        if kernel == "cannot":
            raise OSError(22, "Invalid argument")
        return real(source, *rest)

    monkeypatch.setattr(os, "copy_file_range", copy)
    checked = CopySegment(WHOLE, (CheckedRange(WHOLE, zlib.crc32(LARGE), "data/0"),))
    segments = without_checks([FromSource(one, checked) for one in files])
    with FileSink(str(tmp_path / "out"), force=False) as sink:
        write_segments(EMPTY, segments, sink, jobs=jobs)
        sink.commit()
    assert (tmp_path / "out").read_bytes() == 2 * LARGE
    assert used == {one.fileno() for one in files}


@pytest.mark.parametrize("in_sum", [False, True])
def test_a_mismatch_names_the_file_of_the_record(files, in_sum, jobs):
    damaged = FromSource(files[1], CopySegment(WHOLE, (CheckedRange(WHOLE, 1, "data/0"),)))
    with pytest.raises(CrcMismatch) as caught:
        written([Summed((damaged,), RunningCrc()) if in_sum else damaged], jobs=jobs)
    assert (caught.value.path, caught.value.record) == (files[1].path, "data/0")


@pytest.mark.parametrize("in_sum", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_file_that_changes_in_the_meantime(files, changed, in_sum, jobs):
    def change():
        os.utime(files[changed].path, (1, 1))
        return b"."

    segments = tuple(FromSource(one, CopySegment(Span(0, 9))) for one in files)
    segments = (Summed(segments, RunningCrc()),) if in_sum else segments
    with pytest.raises(SourceChanged) as caught:
        written([*segments, LateSegment(1, change)], jobs=jobs)
    assert caught.value.path == files[changed].path


def test_each_file_is_compared_once(files, monkeypatch):
    compared = []
    for one in files:
        monkeypatch.setattr(one, "require_unchanged", lambda path=one.path: compared.append(path))
    part = [FromSource(one, CopySegment(Span(0, 9))) for one in files]
    assert written([*part, CopySegment(Span(0, 9)), *part], source=files[0]) == 5 * LARGE[:9]
    assert compared == [one.path for one in files]
