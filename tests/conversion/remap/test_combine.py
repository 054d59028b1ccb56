"""Devices change together with keys, parts and dtypes, as they do alone."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import remaps
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.conversion.plan import plan_move
from ckptmove.conversion.remap.combine import move_tree
from ckptmove.errors import UneditablePickle
from ckptmove.moves import MoveRequest
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Dict


def tree():
    found = remaps.run(objects=False)
    found["optimizer"]["param_groups"][0]["capturable"] = True
    config = {"device": torch.device("cuda:0"), "place": "cuda:0", "other": torch.device("cuda")}
    return {**found, "config": config, "places": ["cuda:0", ("cuda:0", 1)]}


@pytest.fixture
def source(tmp_path):
    """A checkpoint on ``cuda:0``."""
    torch.save(tree(), tmp_path / "cpu.pth")
    ckptmove.convert(tmp_path / "cpu.pth", to="cuda:0", output=tmp_path / "cuda.pth")
    return tmp_path / "cuda.pth"


def devices(path):
    return {one.name: one.device for one in ckptmove.inspect(path).inventory.tensors}


@pytest.mark.parametrize(
    "move",
    [
        {"to": "cpu"},
        {"to": "cuda:1"},
        {"to": "mps", "cast": True},
        {"to": "cpu", "keep": ["ema.*"]},
        {"to": "cuda:2", "rewrite_strings": True},
        {"map_location": {"cuda:*": "xpu:1"}},
    ],
    ids=["cpu", "cuda", "cast", "keep", "strings", "map"],
)
def test_a_move_with_a_change_of_keys_is_one_after_the_other(source, move, tmp_path):
    ckptmove.convert(source, output=tmp_path / "moved.pth", **move)
    ckptmove.convert(tmp_path / "moved.pth", output=tmp_path / "wanted.pth", strip_prefix=True, drop="epoch")
    result = ckptmove.convert(source, output=tmp_path / "found.pth", strip_prefix=True, drop="epoch", **move)
    assert devices(tmp_path / "found.pth") == devices(tmp_path / "wanted.pth")
    found, wanted = remaps.load(tmp_path / "found.pth"), remaps.load(tmp_path / "wanted.pth")
    remaps.assert_equal(found, wanted)
    assert found["config"] == wanted["config"]
    assert (move.get("to") or "xpu:1") in {edit.target for edit in result.plan.edits}


def test_a_dtype_replaces_the_cast_of_a_move(source, tmp_path):
    result = ckptmove.convert(source, output=tmp_path / "a.pth", to="mps", cast=True, dtype="bf16")
    casts = [(edit.storage, edit.cast) for edit in result.plan.edits if edit.cast is not None]
    assert len(dict(casts)) == len(casts)
    assert remaps.load(tmp_path / "a.pth")["model"]["module.double"].dtype == torch.bfloat16


@pytest.mark.parametrize(("to", "device"), [("cuda:1", "cuda:1"), ("cpu", "cpu"), (None, "cpu")])
def test_tensors_of_safetensors_get_a_device(to, device, tmp_path):
    save_file({"a.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    ckptmove.convert(tmp_path / "a.safetensors", to=to, output=tmp_path / "a.pth")
    assert devices(tmp_path / "a.pth") == {"a.weight": device}


def test_a_value_that_moves_must_be_in_the_tree(source):
    with open_checkpoint(str(source), keep_trees=True) as checkpoint:
        plan = plan_move(checkpoint.inventory, MoveRequest("cpu"))
    with pytest.raises(UneditablePickle):
        move_tree(Dict([], []), plan)
    move_tree(Dict([], []), plan._replace(edits=(), flags=()))


def test_pickled_modules_move(tmp_path):
    module = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(2, 2)))
    module.register_buffer("place", torch.ones(1))
    torch.save({"model": module, "epoch": 1}, tmp_path / "a.pth")
    ckptmove.convert(tmp_path / "a.pth", to="cuda:0", drop="epoch", plain=True, output=tmp_path / "b.pth")
    assert set(devices(tmp_path / "b.pth").values()) == {"cuda:0"}
    found = remaps.load(tmp_path / "b.pth", weights_only=True)["model"]
    assert {key: remaps.bits(one) for key, one in found.items()} == {
        key: remaps.bits(one) for key, one in module.state_dict().items()
    }
