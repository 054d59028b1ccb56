"""Files of the ranks of FSDP1, whose tensors are ShardedTensors, are one checkpoint with full tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.assembled.rank_shards import read_rank_file, shard_calls
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import NotGathered
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Tuple

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of one kind, to be damaged."""
    return lambda kind: Path(shutil.copytree(saved / kind, tmp_path / kind))


def codes(result):
    return {one.code for one in result.findings} - {"R302"}


def fix_of_s701(result):
    return next(one.fix for one in result.findings if one.code == "S701")


def test_weights_only_mode_refuses_the_class(saved):
    """Some ranks have no row of the embedding, which has three."""
    found = ckptmove.inspect(saved / "fsdp1_sharded")
    assert codes(found) == {"S701"}
    assert fix_of_s701(found).startswith("ckptmove convert")
    assert found.inventory.layout == "sharded"


@pytest.mark.parametrize("kind", ["local", "local_numbered", "sharded_numbered"])
def test_what_has_no_whole_parameters_is_named(saved, tmp_path, answers, kind):
    folder = saved / f"fsdp1_{kind}"
    found = ckptmove.inspect(folder)
    assert codes(found) == {"S701"}
    assert {(pairing.how, pairing.reason) for pairing in pair_all(found.inventory)} == {
        ("none", found.inventory.sharding)
    }
    assert ("optimizer.state_dict()" in found.inventory.sharding) == kind.endswith("numbered")
    with pytest.raises(NotGathered) as refused:
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert found.inventory.sharding in str(refused.value)
    assert answers(folder)["step"]["status"] == "skipped"
    assert fix_of_s701(found) == ""


@pytest.mark.parametrize("kind", ["sharded", "local", "sharded_numbered"])
def test_the_file_of_one_rank_is_a_part(saved, kind):
    found = ckptmove.inspect(saved / f"fsdp1_{kind}" / "rank2.pt")
    assert codes(found) == {"S701"}
    assert all(pairing.reason for pairing in pair_all(found.inventory))


def test_a_missing_rank_is_found(copy):
    folder = copy("fsdp1_sharded")
    (folder / "rank1.pt").unlink()
    lost = [one for one in ckptmove.inspect(folder).findings if one.severity == "error"]
    assert [one.where for one in lost] == [("rank1.pt",)]


def member(value, name):
    """The value of an attribute of a call, and the list and place that hold it."""
    state = value.state if not isinstance(value.state, Tuple) else value.state.items[1]
    place = state.flat.index(name) + 1
    return state.flat, place


def twice(shards, metadata, group):
    shards.items.extend(shards.items)


def no_object(shards, metadata, group):
    shards.items[:] = [0]


def no_axes(shards, metadata, group):
    flat, place = member(metadata, "size")
    flat[place] = Tuple((), ())


def many_ranks(shards, metadata, group):
    flat, place = member(group, "global_world_size")
    flat[place] = 1 << 20


def other_axes(shards, metadata, group):
    flat, place = member(metadata, "shards_metadata")
    flat, place = member(flat[place].items[0], "shard_sizes")
    flat[place] = Tuple((1,), (0,))


@pytest.mark.parametrize("change", [twice, no_object, no_axes, many_ranks, other_axes])
def test_what_torch_does_not_write_is_no_file_of_a_rank(saved, change):
    with open_checkpoint(str(saved / "fsdp1_sharded" / "rank0.pt"), keep_trees=True) as checkpoint:
        (part,) = checkpoint.parts
        assert read_rank_file(part) is not None
        call = dict(shard_calls(part.tree()))["model.block.up.weight"]
        change(*call.arguments[3].items[:3])
        assert read_rank_file(part) is None
