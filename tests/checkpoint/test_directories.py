"""The inventory of a directory: groups of tensors."""

from dataclasses import replace

import torch

from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.torch_facts.weights_only import SHARDED_TENSOR


def test_each_rank_with_sharded_tensors_is_a_group_of_its_own(tmp_path):
    for rank in range(2):
        torch.save({"model": {f"w{rank}": torch.zeros(2)}}, tmp_path / f"part{rank}.pt")
    with open_checkpoint(str(tmp_path), Limits()) as checkpoint:
        inventory = checkpoint.inventory
    assert [len(group) for group in inventory.by_checkpoint(inventory.tensors)] == [2]
    sharded = tuple(tensor._replace(subclass=SHARDED_TENSOR) for tensor in inventory.tensors)
    ranks = replace(inventory, tensors=sharded)
    assert [len(group) for group in ranks.by_checkpoint(ranks.tensors)] == [1, 1]
