"""Files of the ranks of FSDP1, whose tensors are ShardedTensors: each has a part of every parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.checkpoint.summary import counted_parameters

NAME = f"{ShardedTensor.__module__}.{ShardedTensor.__qualname__}"


@pytest.fixture
def inventory(tmp_path):
    """A ShardedTensor is saved with the groups of its processes, so the class of plain tensors is changed."""
    for rank in range(2):
        state = {"w": {"exp_avg": torch.ones(4)}}
        groups = [{"lr": 0.1, "params": ["w", "v"]}]
        tree = {"model": {"_flat_param": torch.ones(3)}, "optim": {"state": state, "param_groups": groups}}
        torch.save(tree, tmp_path / f"local_{rank}.pth")
    return ckptmove.inspect(tmp_path).inventory


def test_ranks_are_no_checkpoints_of_their_own(inventory):
    assert len(inventory.checkpoints) == 2
    sharded = replace(inventory, tensors=tuple(one._replace(subclass=NAME) for one in inventory.tensors))
    assert (sharded.checkpoints, bool(sharded.sharding)) == ((), True)
    assert {(pairing.how, pairing.reason) for pairing in pair_all(sharded)} == {("none", sharded.sharding)}
    assert len(counted_parameters(sharded)) == 1
