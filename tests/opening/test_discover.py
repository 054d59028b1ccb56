from __future__ import annotations

import pytest

from ckptmove.io.walk import WalkedFile
from ckptmove.opening.discover import find_checkpoints

TRAINER = ("trainer_state.json", "optimizer.pt", "model.safetensors")


def found(*paths):
    """The checkpoints below a folder with these files: the files of each by its path; and the number left out."""
    result = find_checkpoints([WalkedFile(path, 1, "v") for path in paths])
    return {one.path: {file.path for file in one.files} for one in result.checkpoints}, result.left_out


def within(folder, *names):
    return [f"{folder}/{name}" for name in names]


@pytest.mark.parametrize(
    "name", ["a.pt", "a.pth", "a.pth.tar", "a.ckpt", "a.safetensors", "pytorch_model.bin", "a.pkl", "a.nemo", "a.pt2"]
)
def test_a_file_is_a_checkpoint_by_its_ending(name) -> None:
    assert found(f"x/{name}") == ({f"x/{name}": {""}}, 0)


@pytest.mark.parametrize("name", ["config.json", "log.txt", "events.out.tfevents.1", "data.tar", "a.zip", "README"])
def test_other_files_are_left_out(name) -> None:
    assert found(f"x/{name}", "y/a.pth") == ({"y/a.pth": {""}}, 1)


@pytest.mark.parametrize(
    "names",
    [
        (".metadata", "__0_0.distcp", "__1_0.distcp"),
        ("__0_0.distcp",),
        ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json"),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        TRAINER,
        ("random_states_0.pkl", "unet/diffusion_pytorch_model.safetensors"),
        ("optimizer.bin", "pytorch_model.bin"),
        ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt", "huggingface/config.json"),
        ("rank0.pth", "rank1.pth"),
        ("trainer_state.json", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
        ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
        ("trainer_state.json", "global_step5/mp_rank_00_model_states.pt", "latest"),
        ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
    ],
    ids=lambda names: names[0],
)
def test_a_folder_with_the_files_of_one_checkpoint(names) -> None:
    for folder in ("runs/5", "5"):
        assert found(*within(folder, *names), "other.pth") == ({folder: {*names}, "other.pth": {""}}, 0)
    assert found(*names) == ({"": {*names}}, 0)


def test_the_results_of_a_run_next_to_its_checkpoints() -> None:
    paths = [*TRAINER, *within("checkpoint-5", *TRAINER, "adapter/a.safetensors"), "plots/a.png", "best/model.pth"]
    folders = {"": {*TRAINER}, "checkpoint-5": {*TRAINER, "adapter/a.safetensors"}, "best/model.pth": {""}}
    assert found(*paths) == (folders, 1)


def test_a_part_of_the_results_belongs_to_them() -> None:
    part = within("pytorch_model_fsdp_0", ".metadata", "__0_0.distcp")
    assert found(*TRAINER, *part, *within("checkpoint-5", *TRAINER, *part)) == (
        {"": {*TRAINER, *part}, "checkpoint-5": {*TRAINER, *part}},
        0,
    )


def test_distributed_checkpoints_next_to_shards_are_their_own() -> None:
    shard = "model-00001-of-00001.safetensors"
    assert found(shard, "step-1/.metadata", "step-2/.metadata")[0] == {
        "": {shard},
        "step-1": {".metadata"},
        "step-2": {".metadata"},
    }
