"""What is known of a file that was refused."""

from __future__ import annotations

import pytest

from ckptmove.checkpoint.parts import read_file
from ckptmove.errors import NotACheckpoint, SourceChanged
from ckptmove.formats.salvage import Salvage
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits


def test_a_file_that_changes_while_its_names_are_searched_for_keeps_its_error(monkeypatch):
    def read(*_):
        raise SourceChanged("a")

    monkeypatch.setattr(Salvage, "read", read)
    with pytest.raises(NotACheckpoint) as caught:
        read_file(MemorySource("a", b"hello, this is text"), Limits())
    assert caught.value.runs == ()
