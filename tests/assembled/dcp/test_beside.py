"""Distributed checkpoints as parts of directories, read and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import NotACheckpoint
from ckptmove.formats.facts import facts_of

HALVES = {"w": (torch.arange(12.0).reshape(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))])}


def read(folder):
    return ckptmove.inspect(folder).inventory


def facts(folder, **options):
    return [(one.kind, one.record, one.nbytes) for one in ckptmove.inspect(folder, **options).inventory.facts]


# --- with other files -------------------------------------------------------------------------------------------------


def shard(distributed, folder):
    """A directory of Accelerate with FSDP's sharded state_dicts."""
    tree = distributed.trained_tree()
    for name in ("pytorch_model.bin", "optimizer.pt", "optimizer.bin"):
        (folder / name).unlink(missing_ok=True)
    distributed.save(folder / "pytorch_model_fsdp_0", {"model": tree["model"]})
    distributed.save(folder / "optimizer_0", {"optimizer": tree["optimizer"]})
    return folder


@pytest.mark.parametrize("layout", ["hf-trainer", "accelerate"])
def test_a_folder_is_one_part_of_a_trainers_directory(distributed, build, layout):
    folder = shard(distributed, build.hf_trainer() if layout == "hf-trainer" else build.accelerate())
    found = ckptmove.inspect(folder, check=True)
    assert (found.inventory.container, found.inventory.layout) == ("directory", layout)
    assert {one.path: one.roles for one in found.inventory.files if one.container == "dcp"} == {
        "optimizer_0/__0_0.distcp": ("optimizer",),
        "pytorch_model_fsdp_0/__0_0.distcp": ("model",),
    }
    names = [tensor.name for tensor in found.inventory.tensors]
    assert "pytorch_model_fsdp_0.model.0.weight" in names
    assert "optimizer_0.optimizer.state.0.weight.exp_avg" in names
    # Its optimizer has groups, so a missing scheduler is reported.
    assert [finding.code for finding in found.findings] == ["R302"] * (layout == "accelerate")


def test_a_file_without_tensors_beside_it_does_not_hide_that_no_device_is_stored(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {"w": torch.ones(2)})
    torch.save({"epoch": 3}, folder / "common.pt")  # as Megatron-Core does
    result = ckptmove.convert(folder, to="cuda:0")
    assert result.output is None
    assert facts_of("dcp").why_no_devices in result.notes[0]
    torch.save({"v": torch.ones(2)}, folder / "common.pt")
    assert ckptmove.convert(folder, to="cuda:0", dry_run=True).notes == ()


def test_one_of_nothing_is_none(distributed, tmp_path):
    folder = distributed.save(tmp_path / "run", {})
    for command in (ckptmove.inspect, ckptmove.verify):
        with pytest.raises(NotACheckpoint) as caught:
            command(folder)
        assert (type(caught.value), caught.value.path) == (NotACheckpoint, str(folder))
    # An empty one does not hide other files, and objects without tensors are a checkpoint.
    distributed.save(tmp_path / "objects", {"epoch": 3}).rename(folder / "more")
    assert ckptmove.inspect(folder).inventory.tensors == ()
    torch.save({"w": torch.ones(1)}, folder / "w.pth")
    assert [tensor.name for tensor in ckptmove.inspect(folder).inventory.tensors] == ["w.pth.w"]


def test_the_name_of_its_folder_tells_what_it_is_for(distributed, tmp_path):
    distributed.save(tmp_path / "d" / "optimizer_0", {"x": torch.ones(1)})
    distributed.save(tmp_path / "d" / "pytorch_model_fsdp_0", {"x": torch.ones(1)})
    inventory = read(tmp_path / "d")
    assert [tensor.role for tensor in inventory.tensors] == ["optimizer", "model"]
    assert (inventory.container, inventory.layout) == ("directory", "dcp")


def test_megatron_has_more_beside_it(distributed, build, tmp_path):
    folder = distributed.save_ranks(tmp_path / "iter_0000010", HALVES)
    build.save(folder / "common.pt", {"args": {"seed": 1}, "lost": torch.ones(2)})
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    inventory = read(folder)
    assert (inventory.container, inventory.layout) == ("directory", "megatron")
    assert [tensor.name for tensor in inventory.tensors] == ["w", "common.pt.lost"]
    assert [storage.key for storage in inventory.storages] == ["w", "common.pt/0"]


def test_hidden_folders_are_nobodys_checkpoints(halves):
    (halves / ".old").mkdir()
    (halves / ".old" / "__0_0.distcp").write_bytes(b"x")
    assert read(halves).container == "dcp"


def test_another_file_of_that_name_says_nothing(build):
    folder = build.accelerate()
    (folder / ".metadata").write_text("author: me")
    assert read(folder).layout == "accelerate"


def test_a_tensor_in_several_files_takes_nothing_from_the_folders_after_it(distributed, build):
    model, optimizer = build.trained()
    root = build.root / "mixed"
    distributed.save_ranks(root / "aa", HALVES)
    build.save(root / "zz" / "pytorch_model.bin", model.state_dict())
    build.save(root / "zz" / "optimizer.pt", optimizer.state_dict())
    inventory, alone = read(root), read(root / "zz")
    assert [one.name for one in inventory.in_folder("aa").tensors] == ["aa.w"]
    near = inventory.in_folder("zz")
    assert [one.name for one in near.tensors] == [f"zz/{one.name}" for one in alone.tensors]
    assert {one.folder for one in near.files} == {"zz"}
    assert [one.how for one in pair_all(inventory)] == [one.how for one in pair_all(alone)] == ["order"]


def test_ranks_with_metadata_of_their_own_are_in_their_folder(distributed, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run" / "aa", HALVES)
    (folder / ".metadata").rename(folder / "__0.metadata")
    assert [one.name for one in read(tmp_path / "run").in_folder("aa").tensors] == ["aa/__0.metadata.w"]


def test_names_beside_a_distributed_checkpoint_that_begin_with_no_file(distributed, build, tmp_path):
    folder = distributed.save_ranks(tmp_path / "run", HALVES)
    build.save(folder / "deep" / "common.pt", {"lost": torch.ones(2)})
    inventory = read(folder)
    assert [one.name for one in inventory.in_folder("").tensors] == ["w"]
    assert [one.name for one in inventory.in_folder("deep").tensors] == ["deep/common.pt.lost"]


# --- convert ----------------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_convert(trained, tmp_path, snapshot):
    result = ckptmove.convert(trained, to="cuda:0")
    assert (result.output, result.plan.is_empty) == (None, True)
    (note,) = result.notes
    assert note.startswith(f"{facts_of('dcp').why_no_devices}; ")
    assert "-o OUT" in note
    output = ckptmove.convert(trained, to="cuda:0", output=tmp_path / "copy").output
    assert snapshot(output) == snapshot(trained)


def test_ranks_with_metadata_of_their_own_are_copied_too(halves, tmp_path, snapshot):
    (halves / ".metadata").rename(halves / "__0.metadata")
    output = ckptmove.convert(halves, to="cuda:0", output=tmp_path / "copy").output
    assert snapshot(output) == snapshot(halves)


def test_it_stays_as_it_is_where_other_files_change(distributed, build, snapshot):
    folder = shard(distributed, build.hf_trainer())
    build.save(folder / "ema.pt", {"ema.weight": torch.ones(2)}, "cuda:0")
    output = Path(ckptmove.convert(folder, to="cpu").output)
    before, after = snapshot(folder), snapshot(output)
    # training_args.bin names a device, and so does ema.pt; nothing else does.
    assert {name for name in before if before[name] != after[name]} == {"ema.pt", "training_args.bin"}
