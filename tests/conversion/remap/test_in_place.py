"""Keys of a file change in place, and are restored."""

from __future__ import annotations

import subprocess
import sys

import pytest
import remaps
import torch

import ckptmove
from ckptmove.conversion.remap.errors import KeysCollide
from ckptmove.errors import InPlaceImpossible
from ckptmove.io.changes import RestoresMore


def saved(path, make=remaps.zipped):
    path.write_bytes(make(remaps.run(objects=False)))
    return path


@pytest.mark.parametrize("make", [remaps.zipped, remaps.without_crcs, remaps.big_endian])
def test_keys_change_in_place_and_back(make, tmp_path, compared):
    path, copy = saved(tmp_path / "a.pth", make), saved(tmp_path / "old.pth", make)
    before = path.read_bytes()
    new = ckptmove.convert(path, output=tmp_path / "new.pth", strip_prefix=True, rename={"a.*": "b.*"})
    dry = ckptmove.convert(path, in_place=True, strip_prefix=True, rename={"a.*": "b.*"}, dry_run=True)
    assert path.read_bytes() == before
    result = ckptmove.convert(path, in_place=True, strip_prefix=True, rename={"a.*": "b.*"})
    assert result.plan == dry.plan == new.plan
    remaps.assert_equal(remaps.load(path), remaps.load(tmp_path / "new.pth"))
    assert compared(path, copy, strip_prefix=True, rename={"a.*": "b.*"}) == 0
    ckptmove.convert(path, in_place=True, add_prefix="net.", to="cuda:0")
    assert "net.b.weight" in remaps.load(path)["model"]
    with pytest.raises(RestoresMore):  # other keys
        ckptmove.undo(path)
    assert path.read_bytes() != before
    assert result.notes[-1].endswith(" --undo --force")
    ckptmove.undo(path, force=True)
    assert path.read_bytes() == before


def test_objects_become_plain_in_place(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(remaps.zipped(remaps.run()))
    ckptmove.convert(path, in_place=True, plain=True)
    assert remaps.load(path, weights_only=True)["args"] == {"lr": 0.1, "name": "x"}


@pytest.mark.parametrize("options", [{"drop": "optimizer"}, {"dtype": "bf16"}, {"as_root": "ema"}, {"only": "model"}])
@pytest.mark.parametrize("dry_run", [False, True])
def test_tensors_do_not_change_in_place(options, dry_run, tmp_path):
    path = saved(tmp_path / "a.pth")
    before = path.read_bytes()
    with pytest.raises(InPlaceImpossible):
        ckptmove.convert(path, in_place=True, dry_run=dry_run, **options)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.pth"]


@pytest.mark.parametrize("make", [remaps.legacy, remaps.deflated])
def test_other_forms_do_not_change_in_place(make, tmp_path):
    path = saved(tmp_path / "a.pth", make)
    before = path.read_bytes()
    with pytest.raises(InPlaceImpossible):
        ckptmove.convert(path, in_place=True, strip_prefix=True)
    assert path.read_bytes() == before


def test_a_refused_change_writes_nothing(tmp_path):
    path = saved(tmp_path / "a.pth")
    before = path.read_bytes()
    with pytest.raises(KeysCollide):
        ckptmove.convert(path, in_place=True, rename={"*.weight": "x*", "*.bias": "x*"})
    assert path.read_bytes() == before


def test_a_remapping_never_imports_torch(tmp_path):
    torch.save({"model": {"module.weight": torch.ones(8, 8)[:2]}, "epoch": 1}, tmp_path / "a.pth")
    code = """
import sys
import ckptmove
options = {"strip_prefix": True, "drop": "epoch", "dtype": "bf16", "compact": True, "plain": True}
ckptmove.convert("a.pth", output="b.pth", **options)
ckptmove.convert("a.pth", output="c.safetensors", as_root="model")
ckptmove.convert("a.pth", output="d", as_root="model", shard_size=100)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
