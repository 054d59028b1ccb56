"""A distributed checkpoint as a container, whose storages are in pieces."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from older_torch import IN_ONE_PROCESS

from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits
from ckptmove.model import Span


def test_it_has_no_pickle_of_its_own_and_no_storage_in_one_place(tmp_path, recwarn):
    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, **IN_ONE_PROCESS)
    assert [type(warning.message) for warning in recwarn] == [UserWarning]
    data = (tmp_path / ".metadata").read_bytes()
    sizes = {"__0_0.distcp": (tmp_path / "__0_0.distcp").stat().st_size}
    container = DistributedCheckpoint(MemorySource(str(tmp_path), data), sizes, Limits())
    assert (container.object_pickle(), container.has_checksums(), container.check()) == (b"", False, ())
    assert container.storage_span("w") is None
    assert container.locate(()) == ()
    assert container.lay_out(b"", {}) == (CopySegment(Span(0, len(data))),)
