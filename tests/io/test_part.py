"""Sources inside a source: they read their own bytes only."""

from __future__ import annotations

import pytest

from ckptmove.errors import DamagedArchive
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import CountedSource, MemorySource, PartSource, read_into
from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.io.source import open_source
from ckptmove.model import Span

WHOLE = MemorySource("whole", bytes(range(100)))


@pytest.fixture(params=["part", "memory"])
def part(request):
    return PartSource(WHOLE, Span(10, 30)) if request.param == "part" else MemorySource("whole", bytes(range(10, 30)))


def test_it_is_its_bytes(part):
    assert (part.path, part.size) == ("whole", 20)
    assert part.read(0, 20) == bytes(range(10, 30))
    assert part.read(3, 5) == b"\x0d\x0e"
    assert [bytes(block) for block in part.blocks(Span(15, 20), 3)] == [b"\x19\x1a\x1b", b"\x1c\x1d"]
    part.close()


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_bytes_are_read_into_memory(tmp_path, kind):
    path = tmp_path / "whole"
    path.write_bytes(bytes(range(100)))
    whole = open_source(str(path)) if kind == "file" else WHOLE
    part, memory = PartSource(whole, Span(10, 30)), memoryview(bytearray(5))
    read_into(part, 4, memory)
    assert bytes(memory) == bytes(range(14, 19))
    for start in (16, -1):
        with pytest.raises(DamagedArchive):
            read_into(part, start, memory)
    whole.close()


@pytest.mark.parametrize(("start", "end"), [(0, 21), (-1, 3), (5, 4), (21, 21)])
def test_it_ends_where_it_ends(part, start, end):
    with pytest.raises(DamagedArchive, match=f"bytes {start} to {end} .* 20 "):
        part.read(start, end)
    with pytest.raises(DamagedArchive):
        list(part.blocks(Span(start, end), 3))


def test_it_is_written_like_a_file(part, tmp_path):
    with FileSink(str(tmp_path / "out"), force=False) as sink:
        assert write_segments(part, [CopySegment(Span(0, 20))], sink) == 20
        sink.commit()
    assert (tmp_path / "out").read_bytes() == bytes(range(10, 30))


def test_only_blocks_are_counted(tmp_path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    seen: list[tuple[int, int]] = []
    plain = open_source(str(path))
    source = CountedSource(plain, lambda done, total: seen.append((done, total)))
    assert (source.path, source.size) == (str(path), 10)
    assert source.read(0, 4) == b"0123"
    assert [bytes(block) for block in source.blocks(Span(0, 5), 4)] == [b"0123", b"4"]
    assert [bytes(block) for block in source.blocks(Span(8, 10), 4)] == [b"89"]
    assert seen == [(4, 10), (5, 10), (7, 10)]
    with pytest.raises(DamagedArchive):
        source.read(9, 11)
    source.close()
    with pytest.raises(ValueError, match="closed"):
        plain.read(0, 1)
