"""Segments that are produced once and read in parts."""

from __future__ import annotations

import errno
import zlib
from contextlib import closing

import pytest

from ckptmove.errors import CrcMismatch, WriteFailed
from ckptmove.io import spool as spool_module
from ckptmove.io.contracts import BytesSegment, CastSegment, CopySegment, FromSource, InflateSegment, StreamSegment
from ckptmove.io.cut import cut
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of
from ckptmove.io.spool import Spool, is_streamed
from ckptmove.model import Span

DATA = bytes(range(256)) * 8
DEFLATED = zlib.compress(DATA, wbits=-15)
PACKED = InflateSegment(Span(0, len(DEFLATED)), len(DATA), zlib.crc32(DATA), "r")
SOURCE = MemorySource("a", DEFLATED)
WHOLE = Span(0, len(DATA))


@pytest.fixture
def spool():
    with closing(Spool()) as opened:
        yield opened


def read(segment):
    return b"".join(map(bytes, blocks_of(SOURCE, (segment,))))


@pytest.mark.parametrize("most", [100, 1 << 20])
def test_parts_of_several_segments(monkeypatch, most) -> None:
    monkeypatch.setattr(spool_module, "_MOST_IN_MEMORY", most)
    with closing(Spool()) as spool:
        held = [spool.hold(SOURCE, PACKED), spool.hold(SOURCE, BytesSegment(DATA[::-1]))]
        for start in (2000, 0, 700):
            assert read(cut(SOURCE, held[0], start, 48)) == DATA[start : start + 48]
            assert read(cut(SOURCE, held[1], start, 48)) == DATA[::-1][start : start + 48]
        assert read(held[0]) == DATA


def test_a_segment_is_produced_once(spool) -> None:
    made = []

    def blocks():
        made.append(1)
        yield DATA[:1000]
        yield DATA[1000:]

    held = spool.hold(SOURCE, StreamSegment(len(DATA), blocks))
    assert not made
    assert [read(cut(SOURCE, held, start, 8)) for start in range(0, 2000, 8)] == [
        DATA[start : start + 8] for start in range(0, 2000, 8)
    ]
    assert len(made) == 1


def test_an_empty_segment(spool) -> None:
    assert read(spool.hold(SOURCE, StreamSegment(0, lambda: iter(())))) == b""
    held = spool.hold(SOURCE, StreamSegment(0, lambda: iter(())))
    assert held.source.read(0, 0) == b""
    held.source.close()


def test_the_source_stays_known(spool) -> None:
    other = MemorySource("b", DEFLATED)
    held = spool.hold(SOURCE, FromSource(other, PACKED))
    assert held.source is other
    assert read(held) == DATA


def test_a_damaged_segment_is_detected(spool) -> None:
    held = spool.hold(SOURCE, PACKED._replace(crc=1))
    for _ in range(2):
        with pytest.raises(CrcMismatch):
            read(cut(SOURCE, held, 0, 4))


def test_a_full_disk_is_an_error(spool, monkeypatch) -> None:
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool._file, "write", full)
    with pytest.raises(WriteFailed):
        read(spool.hold(SOURCE, PACKED))


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        (PACKED, True),
        (StreamSegment(1, lambda: iter((b"a",))), True),
        (FromSource(SOURCE, PACKED), True),
        (CastSegment(PACKED, "float32", "float16", "little"), True),
        (CastSegment(CopySegment(WHOLE), "float32", "float16", "little"), False),
        (CopySegment(WHOLE), False),
    ],
)
def test_which_segments_are_streamed(segment, expected) -> None:
    assert is_streamed(segment) is expected
