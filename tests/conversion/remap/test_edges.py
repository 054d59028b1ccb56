"""Rare content: old storages and modules, missing bytes, several files of one stem, and dtypes that a target lacks."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from distributed_checkpoints import HALVES, Distributed
from safetensors.torch import load_file, save_file
from storage_views import viewed

import ckptmove
from ckptmove.conversion.remap.combine import move_tree
from ckptmove.conversion.remap.errors import NothingLeft
from ckptmove.conversion.remap.kept_files import with_links
from ckptmove.errors import DamagedArchive, UncastableDtype, UnsupportedDtype, UsageError
from ckptmove.io.listing import ListedLink, Listing
from ckptmove.moves import MovePlan, MoveRequest, StorageEdit
from ckptmove.pickles.tree import List

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def without_record(path, ending):
    """Remove a record of an archive."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            if not name.endswith(ending):
                archive.writestr(name, data)


def test_views_of_storages_become_offsets(tmp_path, compared):
    source, output = SAMPLES / "legacy-shared-views.pth", tmp_path / "new.pth"
    ckptmove.convert(source, output=output, compact=True)
    before, after = load(source), torch.load(output, map_location="cpu", weights_only=True, mmap=True)
    assert list(before) == list(after)
    assert compared(output, source, compact=True) == 0


def test_a_legacy_module_becomes_a_state_dict(tmp_path, compared):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    torch.save({"net": model}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    ckptmove.convert(tmp_path / "old.pth", output=tmp_path / "new.pth", plain=True)
    assert [*load(tmp_path / "new.pth")["net"]] == ["0.weight", "0.bias"]
    assert compared(tmp_path / "new.pth", tmp_path / "old.pth", plain=True) == 0
    ckptmove.convert(tmp_path / "old.pth", output=tmp_path / "root.pth", as_root="net")
    assert torch.load(tmp_path / "root.pth", weights_only=False).state_dict().keys() == model.state_dict().keys()


def test_parameters_in_a_state_dict(tmp_path, compared):
    path, output = tmp_path / "a.pth", tmp_path / "a.safetensors"
    torch.save({"w": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(3, requires_grad=True)}, path)
    ckptmove.convert(path, output=output)
    assert [*load_file(output)] == ["b", "w"]
    assert compared(output, path) == 0


def test_missing_bytes_are_named_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"a.w": torch.ones(2), "b.w": torch.ones(3)}, path)
    without_record(path, "/data/1")
    with pytest.raises(DamagedArchive):
        ckptmove.convert(path, output=tmp_path / "new.pth", drop="a.w")
    assert [one.name for one in tmp_path.iterdir()] == ["a.pth"]
    ckptmove.convert(path, output=tmp_path / "new.pth", drop="b.w")
    assert [*load(tmp_path / "new.pth")] == ["a.w"]


def test_a_cut_off_record_is_named(tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"a.w": torch.ones(4), "b.w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data[:8] if name.endswith("/data/0") else data)
    with pytest.raises(DamagedArchive):
        ckptmove.convert(path, output=tmp_path / "new.pth", drop="b.w")


def test_an_original_without_bytes_is_not_equal(tmp_path, compared):
    path, broken = tmp_path / "a.pth", tmp_path / "broken.pth"
    torch.save({"module.w": torch.ones(2)}, path)
    ckptmove.convert(path, output=tmp_path / "new.pth", strip_prefix=True)
    shutil.copy(path, broken)
    without_record(broken, "/data/0")
    assert compared(tmp_path / "new.pth", path, strip_prefix=True) == 0
    assert compared(tmp_path / "new.pth", broken, strip_prefix=True) == 1


def test_files_of_one_stem_keep_their_names(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, key in (("model.pth", "m.w"), ("model.bin", "n.w")):
        torch.save({key: torch.ones(2)}, folder / name)
    ckptmove.convert(folder, output=tmp_path / "one.pth")
    assert {name: [*value] for name, value in load(tmp_path / "one.pth").items()} == {
        "model.bin": ["n.w"],
        "model.pth": ["m.w"],
    }


def test_an_index_without_a_size_and_a_key_that_is_no_name(tmp_path, compared):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"module.w": torch.ones(2), 7: 1}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"module.v": torch.ones(3)}, folder / "pytorch_model-00002-of-00002.bin")
    names = {key: f"pytorch_model-0000{shard}-of-00002.bin" for key, shard in (("module.w", 1), ("module.v", 2))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    ckptmove.convert(folder, output=tmp_path / "new", strip_prefix=True)
    index = json.loads((tmp_path / "new" / "pytorch_model.bin.index.json").read_text())
    assert index == {"weight_map": {key.removeprefix("module."): file for key, file in names.items()}}
    assert compared(tmp_path / "new", folder, strip_prefix=True) == 0


def test_dtypes_of_dropped_and_cast_tensors_do_not_matter(tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"model": {"a.w": torch.ones(2, dtype=torch.float64)}, "extra": torch.ones(2)}, path)
    with pytest.raises(UnsupportedDtype):
        ckptmove.convert(path, to="mps", drop="extra", dry_run=True)
    assert ckptmove.convert(path, to="mps", drop="extra", cast=True, dry_run=True).plan.edits[0].cast
    assert ckptmove.convert(path, to="mps", dtype="float32", dry_run=True).plan.edits[0].target == "mps"
    assert ckptmove.convert(path, to="mps", drop="model", dry_run=True).plan.edits[0].cast is None
    with pytest.raises(UnsupportedDtype):
        ckptmove.convert(path, to="mps", dtype="float64", drop="extra", dry_run=True)
    torch.save({"a.w": torch.ones(2).to(torch.float8_e4m3fn), "b.w": torch.ones(2)}, path)
    with pytest.raises(UncastableDtype):
        ckptmove.convert(path, to="mps", add_prefix="x.", cast=True, dry_run=True)


@pytest.mark.parametrize("options", [{"output": "new.safetensors"}, {"output": "new", "shard_size": "1GB"}])
def test_a_checkpoint_without_tensors_is_no_safetensors_file(tmp_path, options):
    torch.save({}, tmp_path / "a.pth")
    with pytest.raises(NothingLeft):
        ckptmove.convert(tmp_path / "a.pth", **{**options, "output": tmp_path / options["output"]})
    assert [one.name for one in tmp_path.iterdir()] == ["a.pth"]


def test_shards_in_place_are_refused(tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"a.w": torch.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(UsageError):
        ckptmove.convert(path, in_place=True, shard_size="1GB")
    assert path.read_bytes() == before


def test_a_move_to_the_same_device_changes_nothing():
    edit = StorageEdit("0", ("w",), "mps", "mps", 8, "target", ("float64", "float32"), (5,), ())
    root = List(["mps"], [5])
    move_tree(root, MovePlan(MoveRequest(to="mps"), edits=(edit,)))
    assert root.items == ["mps"]


def test_metadata_of_safetensors_is_kept(tmp_path):
    path, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"module.w": torch.ones(2)}, path)
    ckptmove.convert(path, output=output, strip_prefix=True)
    assert b"__metadata__" not in output.read_bytes()


def test_storage_views_of_old_torch_become_offsets(tmp_path, compared):
    source, output = viewed(tmp_path / "old.pth"), tmp_path / "new.pth"
    ckptmove.convert(source, output=output, drop="bare")
    before, after = torch.load(source, map_location="cpu", weights_only=False), load(output)
    assert all(torch.equal(before[name], one) for name, one in after.items())
    assert compared(output, source, drop=["bare"]) == 0
    table = tmp_path / "new.safetensors"
    ckptmove.convert(source, output=table, only="b.bias")
    assert torch.equal(load_file(table)["b.bias"], before["b.bias"])
    assert compared(table, source, only=["b.bias"]) == 0


def test_a_safetensors_file_is_no_copy_of_a_list(tmp_path, compared):
    paths = str(tmp_path / "a.pth"), str(tmp_path / "b.safetensors")
    torch.save([torch.ones(2)], paths[0])
    save_file({"w": torch.ones(2)}, paths[1])
    assert compared(paths[1], paths[0]) > 0


def test_a_link_is_left_out_once():
    listing = Listing("f", (), (), (ListedLink("link", "a"), ListedLink("other", "link")))
    assert with_links(listing, ["other", "a", "link"]) == {"a", "link", "other"}


@pytest.mark.parametrize("keeps", ["its size", "half"])
def test_damaged_pieces_of_a_distributed_checkpoint(tmp_path, compared, keeps):
    folder, output = tmp_path / "dcp", tmp_path / "a.pth"
    Distributed.save_ranks(folder, HALVES)
    ckptmove.convert(folder, output=output, compact=True)
    assert compared(output, folder, compact=True) == 0
    piece = folder / "__1_0.distcp"
    data = piece.read_bytes()
    piece.write_bytes(bytes(len(data)) if keeps == "its size" else data[: len(data) // 2])
    with pytest.raises(DamagedArchive):
        ckptmove.convert(folder, output=tmp_path / "b.pth")
    assert not (tmp_path / "b.pth").exists()
    assert compared(output, folder, compact=True) == 1
