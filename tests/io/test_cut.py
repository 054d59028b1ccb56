"""Parts of the bytes of segments."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import CrcMismatch, DamagedArchive
from ckptmove.io.contracts import (
    BytesSegment,
    CastSegment,
    CheckedRange,
    CopySegment,
    FromSource,
    InflateSegment,
    StreamSegment,
)
from ckptmove.io.cut import cut
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of, length, without_checks
from ckptmove.model import Span

VALUES = torch.arange(50, dtype=torch.float64)
DATA = bytes(range(100)) * 2
DEFLATED = zlib.compress(DATA, wbits=-15)
NUMBERS = VALUES.numpy().tobytes()
SOURCE = MemorySource("a", b"head" + DATA + DEFLATED + NUMBERS)
COPIED = Span(4, 4 + len(DATA))
PACKED = Span(COPIED.end, COPIED.end + len(DEFLATED))
WIDE = Span(PACKED.end, PACKED.end + len(NUMBERS))
CHECK = CheckedRange(COPIED, zlib.crc32(DATA), "r")
SEGMENTS = {
    "copied": (CopySegment(COPIED, (CHECK,)), DATA),
    "inflated": (InflateSegment(PACKED, len(DATA), zlib.crc32(DATA), "r"), DATA),
    "new": (BytesSegment(DATA), DATA),
    "other": (FromSource(MemorySource("b", DATA), CopySegment(Span(0, len(DATA)))), DATA),
    "cast": (
        CastSegment(CopySegment(WIDE, (CheckedRange(WIDE, zlib.crc32(NUMBERS), "r"),)), "float64", "float32", "little"),
        VALUES.float().numpy().tobytes(),
    ),
}


@pytest.mark.parametrize("kind", SEGMENTS)
@given(start=st.integers(0, 49), count=st.integers(0, 50))
def test_a_part_has_these_bytes(kind, start, count) -> None:
    whole, data = SEGMENTS[kind]
    start, nbytes = 4 * start, 4 * min(count, 50 - start)
    part = cut(SOURCE, whole, start, nbytes)
    assert length(part) == nbytes
    assert b"".join(map(bytes, blocks_of(SOURCE, (part,)))) == data[start : start + nbytes]


def test_a_whole_keeps_its_check_and_a_part_without_one_is_a_copy() -> None:
    whole, _ = SEGMENTS["copied"]
    assert cut(SOURCE, whole, 0, len(DATA)) is whole
    assert cut(SOURCE, CopySegment(COPIED), 8, 4) == CopySegment(Span(12, 16))
    assert isinstance(cut(SOURCE, SEGMENTS["other"][0], 8, 4).segment, CopySegment)
    (unchecked,) = without_checks([SEGMENTS["cast"][0]])
    part = CopySegment(Span(WIDE.start + 16, WIDE.start + 24))
    assert cut(SOURCE, unchecked, 8, 4) == unchecked._replace(segment=part)


@pytest.mark.parametrize("kind", ["copied", "inflated", "cast"])
def test_a_part_is_written_only_if_the_whole_has_its_crc(kind) -> None:
    whole, _ = SEGMENTS[kind]
    wrong = 1 + zlib.crc32(DATA)
    if isinstance(whole, CopySegment):
        whole = whole._replace(checks=(whole.checks[0]._replace(crc=wrong),))
    elif isinstance(whole, CastSegment):
        whole = whole._replace(segment=CopySegment(WIDE, (whole.segment.checks[0]._replace(crc=wrong),)))
    else:
        whole = whole._replace(crc=wrong)
    part = cut(SOURCE, FromSource(SOURCE, whole), 0, 4)
    with pytest.raises(CrcMismatch):
        b"".join(map(bytes, blocks_of(SOURCE, (part,))))


@pytest.mark.parametrize("kind", SEGMENTS)
def test_a_part_ends_with_the_whole(kind) -> None:
    with pytest.raises(DamagedArchive):
        cut(SOURCE, SEGMENTS[kind][0], 197, 4)


def test_nothing_after_the_part_is_read() -> None:
    def blocks():
        yield b"abc"
        yield b"def"
        pytest.fail("read on")

    part = cut(SOURCE, StreamSegment(9, blocks), 2, 4)
    assert b"".join(blocks_of(SOURCE, (part,))) == b"cdef"
