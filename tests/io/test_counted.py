from __future__ import annotations

import pytest

from ckptmove.errors import DamagedArchive
from ckptmove.io.part import CountedSource
from ckptmove.io.source import open_source
from ckptmove.model import Span


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
