"""The layout of a directory, detected from its content and not from its name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import ckptmove
from ckptmove.errors import DamagedArchive, LimitExceeded, MissingShard
from ckptmove.io.listing import list_directory
from ckptmove.limits import Limits
from ckptmove.opening import detect


def layout_of(folder):
    return ckptmove.inspect(folder).inventory.layout


def test_each_layout_by_its_files(build):
    assert layout_of(build.hf_trainer("a")) == "hf-trainer"
    assert layout_of(build.hf_trainer("b", ranks=3, shards=2)) == "hf-trainer"
    assert layout_of(build.accelerate("c")) == "accelerate"
    assert layout_of(build.deepspeed("d")) == "deepspeed"
    assert layout_of(build.megatron("e")) == "megatron"
    assert layout_of(build.sharded("f")) == "sharded"


def test_the_name_of_the_directory_says_nothing(build):
    folder = build.accelerate("global_step2")
    assert layout_of(folder) == "accelerate"
    assert layout_of(folder.rename(folder.with_name("checkpoint-500"))) == "accelerate"


@pytest.mark.parametrize("inner", ["global_step2", "global_step2/mp_rank_00_model_states.pt"])
def test_a_part_of_a_deepspeed_directory_is_one(build, tmp_path, inner):
    part = build.deepspeed() / inner
    (tmp_path / "part").mkdir()
    shutil.move(part, tmp_path / "part")
    assert layout_of(tmp_path / "part") == "deepspeed"


def test_what_a_file_says_of_itself_counts_where_its_name_does_not(build, tmp_path):
    build.save(tmp_path / "d" / "states.pt", {"python": (1,), "numpy": (2,), "cpu": torch.get_rng_state()})
    assert layout_of(tmp_path / "d") == "hf-trainer"


def test_the_topmost_folder_decides(build):
    folder = build.hf_trainer()
    shutil.move(build.deepspeed() / "global_step2", folder)
    assert layout_of(folder) == "hf-trainer"


def test_accelerate_without_random_states(build):
    folder = build.accelerate()
    (folder / "random_states_0.pkl").unlink()
    assert layout_of(folder) == "accelerate"
    (folder / "pytorch_model.bin").unlink()
    assert layout_of(folder) == "other"


@pytest.mark.parametrize(
    ("tree", "layout"),
    [
        ({"meta": {"epoch": 2}, "state_dict": {"a.b": torch.ones(1)}}, "mmengine"),
        ({"model": {"a.b": torch.ones(1)}, "iteration": 2, "scheduler": {}}, "detectron2"),
        ({"a.b": torch.ones(1)}, "other"),
    ],
)
@pytest.mark.parametrize("pointer", ["/gone/work_dir/epoch_2.pth", "epoch_2.pth\n", "C:\\runs\\epoch_2.pth"])
def test_last_checkpoint_names_the_file_that_tells(build, tree, layout, pointer):
    assert layout_of(build.pointed(tree, pointer)) == layout


def test_a_pointer_to_another_file_tells_nothing(build):
    assert layout_of(build.pointed({"meta": {}, "state_dict": {"a.b": torch.ones(1)}}, "epoch_9.pth")) == "other"


def test_a_pointer_is_a_line_and_no_book(build):
    folder = build.pointed({"a.b": torch.ones(1)}, "x" * 5000)
    with pytest.raises(LimitExceeded, match="last_checkpoint"):
        layout_of(folder)


def test_loose_files_are_of_no_layout(build, tmp_path):
    build.save(tmp_path / "d" / "netG.pth", {"a.b": torch.ones(1)})
    assert layout_of(tmp_path / "d") == "other"


# --- models in several files ------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(build):
    folder = build.sharded()
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(MissingShard, match=r"is missing: 'pytorch_model-00002-of-00002\.bin'") as caught:
        layout_of(folder)
    assert caught.value.path == str(folder / "pytorch_model.bin.index.json")


def test_shards_lie_beside_their_index(build):
    folder = build.sharded("outer/inner").parent
    assert layout_of(folder) == "sharded"
    shard = folder / "inner" / "pytorch_model-00002-of-00002.bin"
    shard.rename(folder / shard.name)
    with pytest.raises(MissingShard):
        layout_of(folder)


def test_a_shard_may_be_a_link(build):
    folder = build.sharded()
    shard = folder / "pytorch_model-00002-of-00002.bin"
    shard.rename(folder / "blob.bin")
    shard.symlink_to("blob.bin")
    assert layout_of(folder) == "sharded"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("\xff", "JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
    ],
)
def test_an_index_that_is_none(build, text, reason):
    folder = build.sharded()
    (folder / "pytorch_model.bin.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(DamagedArchive, match=reason):
        layout_of(folder)


def test_an_index_is_bounded(build, monkeypatch):
    monkeypatch.setattr(detect, "_MOST_INDEX_BYTES", 10)
    with pytest.raises(LimitExceeded, match=r"pytorch_model\.bin\.index\.json"):
        layout_of(build.sharded())


def test_other_json_is_not_read_as_an_index(build):
    folder = build.sharded()
    (folder / "search.index.json").write_text("{")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "model.bin.index.json").write_text("{")
    assert layout_of(folder) == "sharded"


def test_json_of_an_index_names_each_shard_once(build):
    folder = build.sharded(shards=4)
    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    listing = list_directory(str(folder), Limits())
    assert detect._shards(listing, "pytorch_model.bin.index.json") == sorted(set(index["weight_map"].values()))
