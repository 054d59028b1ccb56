"""Segments: their bytes, their sizes, and their offsets in a larger file."""

from __future__ import annotations

import zlib

import pytest

from ckptmove.errors import CrcMismatch
from ckptmove.io.contracts import (
    BytesSegment,
    CastSegment,
    CheckedRange,
    CopySegment,
    FromSource,
    InflateSegment,
    LateSegment,
    RunningCrc,
    StreamSegment,
    Summed,
)
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of, length, shifted, without_checks
from ckptmove.model import Span

PLAIN = bytes(range(64))
PACKED = zlib.compress(PLAIN)[2:-4]
SOURCE = MemorySource("file", PLAIN + PACKED)
INFLATES = InflateSegment(Span(64, 64 + len(PACKED)), 64, zlib.crc32(PLAIN), "data/0")
CHECK = CheckedRange(Span(0, 64), zlib.crc32(PLAIN), "data/1")
CHECKED = CopySegment(Span(0, 64), (CHECK,))
SEGMENTS = [
    BytesSegment(b"new"),
    CHECKED,
    INFLATES,
    CastSegment(CHECKED, "float64", "float32", "little"),
    CastSegment(INFLATES, "float64", "float32", "little"),
    FromSource(MemorySource("other", PLAIN[::-1]), CopySegment(Span(3, 9))),
    StreamSegment(5, lambda: iter((b"12", b"345"))),
    LateSegment(4, lambda: b"1234"),
    Summed((CHECKED, INFLATES, BytesSegment(b"new")), RunningCrc()),
    CastSegment(CHECKED, "bfloat16", "float32", "little"),
    CastSegment(CHECKED, "float64", "float16", "big"),
]


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: type(segment).__name__)
def test_a_segment_gives_as_many_bytes_as_it_says(segment) -> None:
    assert len(b"".join(blocks_of(SOURCE, [segment]))) == length(segment)


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: type(segment).__name__)
def test_a_segment_gives_the_same_from_inside_of_another_file(segment) -> None:
    around = MemorySource("archive", bytes(10) + PLAIN + PACKED)
    moved = shifted(segment, 10, "inner.pt/")
    assert b"".join(blocks_of(around, [moved])) == b"".join(blocks_of(SOURCE, [segment]))


def test_records_are_named_by_the_file_that_they_are_in() -> None:
    assert shifted(SEGMENTS[1], 0, "a/").checks[0].record == "a/data/1"
    assert shifted(SEGMENTS[4], 0, "a/").segment.record == "a/data/0"
    assert shifted(SEGMENTS[8], 0, "a/").segments[1].record == "a/data/0"


def test_a_sum_stays_that_of_later_bytes_in_another_file() -> None:
    assert shifted(SEGMENTS[8], 10).crc is SEGMENTS[8].crc
    assert without_checks(SEGMENTS)[8].crc is SEGMENTS[8].crc


def test_what_is_inflated_is_compared_with_its_crc() -> None:
    with pytest.raises(CrcMismatch):
        list(blocks_of(SOURCE, [InflateSegment(INFLATES.span, 64, 1, "data/0")]))


def test_checks_can_be_left_out() -> None:
    assert [getattr(getattr(one, "segment", one), "checks", None) for one in without_checks(SEGMENTS)] == [
        None, (), None, (), None, (), None, None, None, (), (),
    ]  # fmt: skip
    checked = SEGMENTS[1]
    (summed,) = without_checks([Summed((FromSource(SOURCE, checked), checked), RunningCrc())])
    assert [summed.segments[0].segment.checks, summed.segments[1].checks] == [(), ()]
