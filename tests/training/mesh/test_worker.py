from __future__ import annotations

import pytest
import torch
from distributed_checkpoints import Distributed

from ckptmove.errors import DamagedArchive
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.mesh import worker
from ckptmove.training.mesh.group import collective_timeout, is_lost
from ckptmove.training.mesh.stored import Region, StoredState


def test_an_error_outside_of_the_users_code_has_no_line(tmp_path):
    (tmp_path / "train.py").write_text("def case(device): ...\n")
    rank = worker._Rank(VerifyRequest("x", case=f"{tmp_path}/train.py:case"), print)
    check = rank._fault(RuntimeError("Connection closed by peer"))
    assert dict(check.evidence) == {"check": "case", "lost": True}


def test_errors_of_a_lost_rank():
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error"))
    assert not is_lost(ValueError("Connection closed by peer"))
    assert not is_lost(RuntimeError("shape mismatch"))


def test_collectives_outlast_the_timeout():
    assert collective_timeout(None).total_seconds() == 600
    assert collective_timeout(7200).total_seconds() == 14400


def test_regions_of_stored_tensors(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    Distributed.save(tmp_path / "ckpt", {"w": whole})
    with open_checkpoint(str(tmp_path / "ckpt"), keep_trees=True) as checkpoint:
        stored = StoredState(checkpoint, ["w"])
        for region in (Region((1, 2), (2, 3)), Region((4, 0), (0, 6)), Region((0, 5), (4, 1))):
            assert torch.equal(stored.region("w", region), region.cut(whole))
        assert torch.equal(stored.region("w"), whole)


def test_a_tensor_without_all_bytes_is_damaged(tmp_path):
    Distributed.save(tmp_path / "ckpt", {"w": torch.arange(24.0)})
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with open_checkpoint(str(tmp_path / "ckpt"), keep_trees=True) as checkpoint:
        stored = StoredState(checkpoint, ["w"])
        with pytest.raises(DamagedArchive):
            stored.region("w")
