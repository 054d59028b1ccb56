"""``convert --verify``: what is compared, in place too, and what happens to an output that differs."""

from __future__ import annotations

import builtins

import pytest
import remaps
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmove
from ckptmove.conversion.conversion import ConvertRequest
from ckptmove.conversion.remap import rename
from ckptmove.conversion.remap.errors import KeysCollide, PartialPrefix
from ckptmove.errors import UsageError
from ckptmove.io import patch
from ckptmove.moves import MoveRequest, Remap
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.errors import ConversionDiffers, PackageMissing, TorchBroken
from ckptmove.proof.original.names import new_keys, wanted
from ckptmove.proof.original.written import _Comparison
from ckptmove.proof.tensors.stored import StoredTensors


@pytest.fixture
def source(tmp_path):
    torch.save(remaps.run(objects=False), tmp_path / "run.pth")
    return tmp_path / "run.pth"


_PARTS = st.sampled_from(["module", "_orig_mod", "a", "b", "weight", "n_averaged", "é"])
_KEYS = st.lists(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=5, unique=True)
_PREFIXES = st.sampled_from([None, (), ("module.",), ("_orig_mod.", "a."), ("a.", "a.")])
_RENAMES = st.sampled_from([(), (("a.*", "x.*"),), (("*.weight", "*.w"), ("a.*", "y.*")), (("*.*", "*-*"),)])


@given(_KEYS, _PREFIXES, _RENAMES, st.sampled_from(["", "net."]))
def test_the_names_are_those_that_a_conversion_gives(keys, prefixes, renames, added):
    remap = Remap(strip_prefix=prefixes, rename=renames, add_prefix=added)
    try:
        given_by_it = rename.KeyMap(remap, keys)
    except (KeysCollide, PartialPrefix, UsageError):
        return
    assert new_keys(keys, remap) == {key: given_by_it(key) for key in keys}


def test_the_number_of_tensors_is_told(source, tmp_path):
    result = ckptmove.convert(source, to="cuda:0", output=tmp_path / "new.pth", verify=True)
    assert result.verified == result.to_dict()["verified"] == len(ckptmove.inspect(source).inventory.tensors)
    assert ckptmove.convert(source, to="mps", cast=True, verify=True, output=tmp_path / "mps.pth").verified
    for options in ({}, {"verify": True, "dry_run": True}):
        assert ckptmove.convert(source, to="cuda:1", output=tmp_path / "none.pth", **options).verified is None


def test_a_file_is_proven_in_place(source, monkeypatch):
    before = source.read_bytes()
    assert ckptmove.convert(source, to="cuda:0", in_place=True, verify=True).verified
    moved = source.read_bytes()
    changed = patch._change

    def damaged(fd, writes, size):
        monkeypatch.undo()  # what is rolled back is not damaged
        changed(fd, [(start, data.replace(b"ema", b"eme")) for start, data in writes], size)

    monkeypatch.setattr(patch, "_change", damaged)
    with pytest.raises(ConversionDiffers, match="cannot be read"):
        ckptmove.convert(source, to="cuda:1", in_place=True, verify=True)
    assert source.read_bytes() == moved
    assert sorted(path.name for path in source.parent.iterdir()) == ["run.pth"]
    ckptmove.undo(source)
    assert source.read_bytes() == before


@pytest.mark.parametrize("change", ["shape", "bits"])
def test_values_from_before_count_in_place(source, monkeypatch, change):
    """A change of bytes that no plan has is found by the digests from before."""
    changed = patch._change
    if change == "shape":
        tree = remaps.run(objects=False)
        tree["ema"]["module.a.bias"] = tree["ema"]["module.a.bias"][:3].clone()
    else:
        tree = remaps.run(objects=False)
        tree["ema"]["module.a.bias"][0] += 1
    other = remaps.zipped(tree)

    def replaced(fd, writes, size):
        del writes, size
        changed(fd, [(0, other)], len(other))

    original = source.read_bytes()
    with monkeypatch.context() as inside:
        inside.setattr(patch, "_change", replaced)
        inside.setattr(patch, "_restore", lambda path, fd, journal, journal_file: None)
        with pytest.raises(ConversionDiffers, match=r"ema\.module\.a\.bias"):
            ckptmove.convert(source, to="cuda:1", in_place=True, verify=True)
    assert source.read_bytes() != original


def test_a_directory_is_proven_before_it_has_its_name(tmp_path, source):
    (tmp_path / "run").mkdir()
    for name in "ab":
        torch.save({name: torch.ones(3)}, tmp_path / "run" / f"{name}.pth")
    result = ckptmove.convert(tmp_path / "run", to="cuda:0", output=tmp_path / "out", verify=True)
    assert result.verified == 2


def test_tensors_of_a_directory_have_the_roles_of_their_files(tmp_path):
    """The folder ``models/`` does not make state of an optimizer a model."""
    (tmp_path / "run" / "models").mkdir(parents=True)
    tree = {"model": torch.nn.Linear(3, 2).state_dict(), "opt": {"state": [{"grad_avg": torch.ones(2, 3)}]}}
    torch.save(tree, tmp_path / "run" / "models" / "m.pth")
    result = ckptmove.convert(tmp_path / "run", dtype="bf16", output=tmp_path / "out", verify=True)
    assert result.verified == 3
    found = torch.load(tmp_path / "out" / "models" / "m.pth", weights_only=True)
    assert found["opt"]["state"][0]["grad_avg"].dtype == torch.float32
    assert found["model"]["weight"].dtype == torch.bfloat16


def test_what_a_module_keeps_beside_its_state_is_no_part_of_its_state_dict(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    module.grid = [torch.ones(3)]
    pairs = {"model": {"weight": torch.ones(2), "packed": (torch.ones(1), torch.zeros(2))}}
    torch.save({"model": module, "metrics": [module], "other": pairs}, tmp_path / "run.pth")
    for options in ({"plain": True}, {"plain": True, "drop": "mod?l"}, {"drop": "mod?l"}):
        name = "-".join(options)
        assert ckptmove.convert(tmp_path / "run.pth", output=tmp_path / f"{name}.pth", verify=True, **options).verified


def test_a_tensor_of_an_object_is_found_by_the_end_of_its_name(tmp_path):
    """An object in several places has one name in the inventory, which may be that of a place that is gone."""
    torch.save({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(3)}}, tmp_path / "run.pth")
    torch.save({"z": {"w": torch.ones(3)}}, tmp_path / "new.pth")
    request = ConvertRequest(path=str(tmp_path / "run.pth"), move=MoveRequest(None))
    with open_checkpoint(str(tmp_path / "run.pth")) as run, open_checkpoint(str(tmp_path / "new.pth")) as new:
        sources = [one._replace(is_kept=False, is_inside=True) for one in wanted(run, request.move, is_joined=True)]
        (record,) = new.inventory.tensors
        with StoredTensors(new.parts) as values:
            comparison = _Comparison(new, sources, request, lambda *_: "")
            assert comparison._compared(record, record.name, values) == ""


def test_a_broken_torch_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    real = builtins.__import__

    def broken(name, *args, **kwds):
        if name.startswith("ckptmove.proof.original.written"):
            raise OSError("libtorch.so: file too short")
        return real(name, *args, **kwds)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(TorchBroken):
        ckptmove.convert(source, to="cuda:0", output=tmp_path / "new.pth", verify=True)
    assert not (tmp_path / "new.pth").exists()


def test_without_torch_it_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
    real = builtins.__import__

    def without_torch(name, *args, **kwds):
        if name.startswith("ckptmove.proof.original.written"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwds)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(PackageMissing):
        ckptmove.convert(source, to="cuda:0", output=tmp_path / "new.pth", verify=True)
    assert not (tmp_path / "new.pth").exists()
