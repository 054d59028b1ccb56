"""Shards of torch's HuggingFaceStorageWriter; the oracles are torch's reader and torch's consolidation."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hf_shards import MODEL, write
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.api.hints import hint_for
from ckptmove.errors import CkptMoveError, DamagedArchive, MissingShard
from ckptmove.formats.safetensors_shards import ShardName, shard_name
from ckptmove.opening.checkpoint import open_checkpoint


@pytest.fixture
def shards(tmp_path):
    return write(tmp_path / "run")


@pytest.fixture(scope="module")
def consolidate():
    return pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors").consolidate_safetensors_files


@pytest.mark.parametrize("options", [{"add_prefix": "x."}, {"shard_size": 10**6}], ids=["same", "new"])
def test_shards_that_repeat_what_has_changed_are_left_out(shards, tmp_path, options):
    folder = tmp_path / "model"
    shutil.copytree(shards, folder / "sharded")
    save_file({name: tensor for name, (tensor, _, _) in MODEL.items()}, folder / "model.safetensors")
    count = len(ckptmove.inspect(folder).inventory.tensors)
    result = ckptmove.convert(folder, output=tmp_path / "new", verify=True, **options)
    assert result.verified == count
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    assert any("sharded/" in note for note in result.notes) == ("add_prefix" in options)
    ckptmove.convert(folder, output=tmp_path / "copy", to="cuda:0")
    assert (tmp_path / "copy" / "sharded").exists()


def damaged(path, offsets):
    notes = {"DCP_SHARDING_INFO": offsets if isinstance(offsets, str) else json.dumps(offsets)}
    save_file(load_file(path), path, metadata=notes)


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_names_are_those_of_torch():
    hf_utils = pytest.importorskip("torch.distributed.checkpoint._hf_utils")
    assert ShardName(3, 2, 11).text == hf_utils._gen_file_name(2, 11, 3)
    assert shard_name(hf_utils._gen_file_name(2, 11, 3)) == ShardName(3, 2, 11)
    assert shard_name(hf_utils._gen_file_name(2, 11)) is None


def test_torch_reads_the_same(shards):
    storage = pytest.importorskip("torch.distributed.checkpoint").__dict__.get("HuggingFaceStorageReader")
    if storage is None:
        pytest.skip("this torch has no reader of shards")
    theirs = {name: torch.zeros_like(tensor) for name, (tensor, _, _) in MODEL.items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        torch.distributed.checkpoint.load(theirs, storage_reader=storage(str(shards)), no_dist=True)
    assert same(ckptmove.load(shards), theirs)


def test_a_new_file_equals_the_consolidated_one(shards, tmp_path, consolidate):
    (tmp_path / "whole").mkdir()
    consolidate(str(shards), str(tmp_path / "whole"), dict.fromkeys(MODEL, 1))
    (whole,) = (tmp_path / "whole").glob("*.safetensors")
    result = ckptmove.convert(shards, output=tmp_path / "run.pth")
    theirs = load_file(whole)
    theirs["scale"] = MODEL["scale"][0]  # torch 2.13 leaves zeros in place of a tensor without axes
    assert same(torch.load(tmp_path / "run.pth", weights_only=True), theirs)
    assert ckptmove.diff(shards, tmp_path / "run.pth").same
    save_file(theirs, whole)
    assert ckptmove.diff(shards, whole).same
    assert any("CRC" in note for note in result.notes)
    ckptmove.convert(shards, output=tmp_path / "run.safetensors")
    assert same(load_file(tmp_path / "run.safetensors"), theirs)
    # Metadata about chunks would be wrong of whole tensors.
    assert ckptmove.verify(tmp_path / "run.safetensors", against=shards).ok


def test_consolidated_files_count_once(tmp_path, consolidate):
    folder = write(tmp_path / "run" / "sharded").parent
    alone = ckptmove.inspect(folder)
    assert {one.name for one in alone.inventory.tensors} == {f"sharded.{name}" for name in MODEL}
    consolidate(str(folder / "sharded"), str(folder), dict.fromkeys(MODEL, 1))
    found = ckptmove.inspect(folder)
    assert len(found.inventory.tensors) == len(MODEL)
    assert all("sharded/" not in file.path for file in found.inventory.files)
    assert ckptmove.verify(folder).ok
    (folder / "other").mkdir()
    save_file({"w": torch.ones(1)}, folder / "other" / "m.safetensors")
    assert len(ckptmove.inspect(folder).inventory.tensors) == len(MODEL) + 1
    # A consolidated file that lacks a tensor is another model.
    (whole,) = folder.glob("*.safetensors")
    tensors = load_file(whole)
    del tensors["scale"]
    save_file(tensors, whole)
    assert len(ckptmove.inspect(folder).inventory.tensors) == 2 * len(MODEL)


def test_next_to_other_checkpoints(shards):
    torch.save({"optimizer": 1}, shards / "extra.pt")
    inventory = ckptmove.inspect(shards).inventory
    assert {file.path for file in inventory.files} == {path.name for path in shards.iterdir()}
    assert {file.roles for file in inventory.files if file.path.startswith("shard-")} == {("model",)}


def test_every_piece_is_compared(shards):
    checks = {check.name: check for check in ckptmove.verify(shards).checks}
    assert checks["restore"].status == "passed"
    assert dict(checks["file"].evidence)["checksums"] is False
    unchecked = ckptmove.inspect(shards, check=True).unchecked
    assert unchecked == (str(shards),)


@pytest.mark.parametrize(
    "name",
    ["shard-00001-model-00001-of-00002", "shard-00002-model-00002-of-00002"],
)
def test_a_missing_shard_is_an_error(shards, name):
    (shards / f"{name}.safetensors").unlink()
    with pytest.raises(MissingShard) as caught:
        ckptmove.inspect(shards)
    assert caught.value.name == f"{name}.safetensors"
    assert str(shards) in hint_for(caught.value)


@pytest.mark.parametrize(("ranks", "rank", "index"), [(3, 3, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("inside", ["", "sharded"])
def test_a_shard_that_may_be_missing_at_the_end_is_a_warning(tmp_path, ranks, rank, index, inside):
    folder = write(tmp_path / "run" / inside, ranks=ranks)
    lost = folder / ShardName(rank, index, 2).text
    lost.unlink()
    (finding,) = ckptmove.inspect(tmp_path / "run").findings
    assert (finding.code, finding.severity) == ("F809", "warning")
    assert finding.where == (str(lost.relative_to(tmp_path / "run")),)
    result = ckptmove.convert(tmp_path / "run", output=tmp_path / "run.safetensors")
    (warning,) = result.warnings
    assert lost.name in warning


def test_tensors_that_one_rank_saves_whole_are_no_error(tmp_path):
    """As of torch with a ``fqn_to_index_mapping``: a file of chunks, and one of plain tensors."""
    plain = torch.arange(12.0)
    notes = {"DCP_SHARDING_INFO": json.dumps({"plain": {"saved_offsets": [0]}})}
    save_file({"plain": plain}, tmp_path / ShardName(1, 2, 2).text, metadata=notes)
    for rank in range(2):
        notes = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [rank * 2, 0]}})}
        save_file({"w": torch.ones(2, 4)}, tmp_path / ShardName(rank + 1, 1, 2).text, metadata=notes)
    assert same(ckptmove.load(tmp_path), {"plain": plain, "w": torch.ones(4, 4)})
    assert ckptmove.verify(tmp_path).ok


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_file_of_torch_with_the_name_of_a_shard_is_an_error(tmp_path, is_legacy):
    path = tmp_path / ShardName(1, 1, 1).text
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=not is_legacy)
    with pytest.raises(DamagedArchive) as caught:
        ckptmove.inspect(tmp_path)
    assert path.name in str(caught.value)
    with pytest.raises(DamagedArchive):
        ckptmove.convert(tmp_path, output=tmp_path / "new.pth")
    assert ckptmove.inspect(path).inventory.tensors  # by itself it is a checkpoint


def test_a_file_missing_for_all_ranks_is_an_error(shards):
    for path in shards.glob("*-model-00002-*"):
        path.unlink()
    with pytest.raises(MissingShard):
        ckptmove.inspect(shards)


def test_a_rank_without_a_chunk_writes_no_file(tmp_path):
    folder = write(tmp_path / "run", ranks=7)  # the bias has 5 chunks, and the weight of the head 7
    assert not ckptmove.inspect(folder).findings
    name = ShardName(4, 1, 2).text
    (folder / name).unlink()
    with pytest.raises(MissingShard):
        ckptmove.inspect(folder)


def test_small_tensors_need_no_shard_of_every_rank(tmp_path):
    notes = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})}
    save_file({"w": torch.ones(1)}, tmp_path / ShardName(1, 1, 2).text, metadata=notes)
    for rank in range(2):
        notes = {"DCP_SHARDING_INFO": json.dumps({"v": {"saved_offsets": [rank * 2]}})}
        save_file({"v": torch.ones(2)}, tmp_path / ShardName(rank + 1, 2, 2).text, metadata=notes)
    assert {one.name: one.shape for one in ckptmove.inspect(tmp_path).inventory.tensors} == {"w": (1,), "v": (4,)}


@pytest.mark.parametrize(
    "offsets",
    [
        "not json",
        "[]",
        "[" * 100_000,
        {"emb.weight": {"saved_offsets": [0, 0]}},
        {"emb.weight": {"saved_offsets": [4]}, "seen": {"saved_offsets": [0]}},
        {"emb.weight": {"saved_offsets": [-4, 0]}, "seen": {"saved_offsets": [0]}},
        {"emb.weight": {"saved_offsets": ["4", 0]}, "seen": {"saved_offsets": [0]}},
        {"emb.weight": {"saved_offsets": [3, 0]}, "seen": {"saved_offsets": [0]}},
        {"emb.weight": {"saved_offsets": [1 << 70, 0]}, "seen": {"saved_offsets": [0]}},
        {"emb.weight": {"saved_offsets": [100, 0]}, "seen": {"saved_offsets": [0]}},
    ],
)
def test_damaged_offsets(shards, offsets):
    damaged(shards / ShardName(1, 1, 2).text, offsets)
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(shards)


def test_different_dtypes(shards):
    path = shards / ShardName(2, 1, 2).text
    notes = {"DCP_SHARDING_INFO": json.dumps({"emb.weight": {"saved_offsets": [4, 0]}})}
    save_file({"emb.weight": torch.ones(4, 4, dtype=torch.float64)}, path, metadata=notes)
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(shards)


def test_without_metadata_a_tensor_begins_at_zero(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / ShardName(1, 1, 1).text)
    assert ckptmove.inspect(tmp_path).inventory.tensors[0].shape == (2,)


def test_shards_are_left_out_with_their_reason(shards):
    torch.save({"w": torch.ones(1)}, shards / "other.pt")
    (shards / ShardName(1, 1, 2).text).unlink()
    with open_checkpoint(str(shards), keep_going=True) as checkpoint:
        assert [type(error) for error in checkpoint.unreadable] == [MissingShard]
        assert [one.name for one in checkpoint.inventory.tensors] == ["other.pt.w"]


def test_a_new_directory_is_refused_where_keys_change(shards, tmp_path):
    torch.save({"w": torch.ones(1)}, shards / "other.pt")
    with pytest.raises(CkptMoveError):
        ckptmove.convert(shards, output=f"{tmp_path / 'new'}/", rename={"emb.*": "x.*"})


def test_an_archive_has_files(shards, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", shards)
    assert len(ckptmove.inspect(archive).inventory.files) == 6


def test_a_hole_without_an_absent_file_is_damage(shards):
    path = shards / ShardName(2, 1, 2).text
    notes = {"DCP_SHARDING_INFO": json.dumps({"emb.weight": {"saved_offsets": [4, 0]}})}
    save_file({"emb.weight": torch.ones(3, 4)}, path, metadata=notes)
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(shards)


def test_many_files_in_a_name_take_no_time(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "shard-900000000-model-00001-of-900000000.safetensors")
    with pytest.raises(MissingShard):
        ckptmove.inspect(tmp_path)
