"""A distributed checkpoint that is complete."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from older_torch import IN_ONE_PROCESS

from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
from ckptmove.io.part import MemorySource
from ckptmove.limits import Limits


def test_every_piece_of_a_save_is_there(tmp_path, recwarn):
    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, **IN_ONE_PROCESS)
    assert [type(warning.message) for warning in recwarn] == [UserWarning]
    data = (tmp_path / ".metadata").read_bytes()
    sizes = {"__0_0.distcp": (tmp_path / "__0_0.distcp").stat().st_size}
    container = DistributedCheckpoint(MemorySource(str(tmp_path), data), sizes, Limits())
    assert container.facts() == ()
