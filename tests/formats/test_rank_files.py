"""The container of a checkpoint in files of several ranks."""

from __future__ import annotations

import pytest

from ckptmove.errors import DistributedFile
from ckptmove.formats.opening import container_class
from ckptmove.formats.rank_files import RankFiles
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.model import Span


def test_it_is_no_format_of_a_file() -> None:
    source = MemorySource("rank_0.pt", b"abc")
    assert container_class("rank-files") is RankFiles
    with pytest.raises(DistributedFile):
        RankFiles.open(source, None, Limits())
    container = RankFiles(source, Limits())
    assert container.object_pickle() == b""
    assert container.locate(()) == ()
    assert container.storage_span("shards/0") is None
    assert container.lay_out(b"", {}) == (CopySegment(Span(0, 3)),)
