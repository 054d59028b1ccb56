"""Files of ranks that are missing in a DeepSpeed directory."""

from __future__ import annotations

import shutil

import pytest
import torch
import zero_runs
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptmove
from ckptmove.cli.app import app
from ckptmove.errors import DamagedArchive, MissingShard
from ckptmove.opening.checkpoint import open_checkpoint


def missing(folder):
    with pytest.raises(MissingShard) as caught, open_checkpoint(str(folder)):
        pass
    return caught.value


@pytest.fixture(params=["stage2-frozen", "stage3-frozen", "bf16-optimizer", "experts-stage1", "experts-stage2"])
def run(request, tmp_path):
    return zero_runs.real(request.param, tmp_path / "run")[0]


@pytest.mark.unmeasured
def test_each_missing_file_is_named(run, tmp_path):
    for path in sorted(run.glob("*/*.pt")):
        copy = shutil.copytree(run, tmp_path / "copy", dirs_exist_ok=True)
        (copy / path.relative_to(run)).unlink()
        error = missing(copy)
        assert error.name == path.name
        assert error.path.startswith(str(copy / "global_step3"))
        shutil.rmtree(copy)
    with open_checkpoint(str(run)) as found:
        assert len(found.parts) == len(list(run.glob("*/*.pt")))


@pytest.mark.parametrize("name", [name for name in zero_runs.REAL if not name.startswith("experts")])
def test_the_parameters_are_those_of_the_gathered_model(tmp_path, name):
    folder, _ = zero_runs.real(name, tmp_path / "run")
    whole = ckptmove.convert(folder, output=tmp_path / "whole.pth").output
    found = ckptmove.inspect(folder).summary
    assert found.parameters == ckptmove.inspect(whole).num_parameters == sum(count for _, count in found.dtypes)


def test_parameters_in_another_file_are_not_counted_again(tmp_path):
    shapes = ({"a": (3, 5), "b": (7,)},)
    for step in (1, 2):
        zero_runs.made(tmp_path / "run" / f"global_step{step}", stage=3, shapes=shapes)
    assert ckptmove.inspect(tmp_path / "run").num_parameters == 22
    zero_runs.made(tmp_path / "run" / "global_step3", stage=3)
    assert ckptmove.inspect(tmp_path / "run").num_parameters == 22 + 22 + 27
    run = zero_runs.made(tmp_path / "hf" / "global_step1", stage=3, shapes=shapes).parent
    save_file({name: torch.ones(shape) for name, shape in shapes[0].items()}, run / "model.safetensors")
    (run / "trainer_state.json").write_text("{}")
    assert ckptmove.inspect(run).num_parameters == 22


@pytest.mark.parametrize("shapes", [None, [{"a": "3, 5", "b": torch.Size((7,)), "e": torch.Size((9,))}]])
def test_only_known_shapes_of_partitions_are_counted(tmp_path, shapes):
    def change(name, tree):
        if "param_shapes" in tree:
            tree["param_shapes"] = shapes

    folder = zero_runs.made(tmp_path / "run", stage=3, change=change)
    assert ckptmove.inspect(folder).num_parameters == (0 if shapes is None else 7)


def test_several_missing_files_are_counted(tmp_path):
    folder = zero_runs.made(tmp_path / "run", stage=3, ranks=6)
    for rank in range(1, 6):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert "zero_pp_rank_3_mp_rank_00_optim_states.pt', and 2 more" in str(missing(folder))


@pytest.mark.parametrize("counted", [None, 10**18])
def test_the_number_of_ranks_may_only_be_in_the_names_or_absurd(tmp_path, counted):
    def change(name, tree):
        if "optimizer_state_dict" in tree:
            tree["optimizer_state_dict"]["partition_count"] = counted
        tree.pop("dp_world_size", None)

    folder = zero_runs.made(tmp_path / "run", ranks=3, change=change)
    if counted is None:
        with open_checkpoint(str(folder)):
            pass
        (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        assert missing(folder).name == "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    else:
        assert missing(folder).name.startswith("zero_pp_rank_3_mp_rank_00_optim_states.pt")


def test_a_missing_rank_of_model_parallelism(tmp_path):
    folder = zero_runs.made(tmp_path / "run", change=lambda _, tree: tree.update(mp_world_size=2))
    assert "mp_rank_01" in missing(folder).name
    for rank in (0, 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shutil.copy(folder / name, folder / name.replace("mp_rank_00", "mp_rank_01"))
    assert missing(folder).name == "mp_rank_01_model_states.pt"


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_a_missing_expert_is_an_error_of_every_command(tmp_path, command):
    folder, _ = zero_runs.real("experts-stage2", tmp_path / "run")
    lost = folder / "global_step3" / "layer_0_expert_2_mp_rank_00_model_states.pt"
    lost.unlink()
    output = ["-o", str(tmp_path / "run.pth")] if command == "convert" else []
    found = CliRunner().invoke(app, [command, str(folder), *output])
    assert found.exit_code == 3
    assert f"files of other ranks are missing: '{lost.name}'" in found.stderr
    assert not (tmp_path / "run.pth").exists()


def test_all_experts_may_be_missing(tmp_path):
    folder, _ = zero_runs.real("experts-stage2", tmp_path / "run")
    for path in folder.glob("*/layer_*"):
        path.unlink()
    said = str(missing(folder))
    assert "'layer_0_expert_0_mp_rank_00_model_states.pt', 'layer_0_expert_1_mp_rank_00_model_states.pt'" in said
    assert said.endswith("and 3 more")


@pytest.mark.parametrize("is_any_left", [False, True])
def test_model_states_without_the_optimizer_need_all_experts_or_none(tmp_path, is_any_left):
    folder, _ = zero_runs.real("experts-stage2", tmp_path / "run")
    left = "layer_1_expert_1" if is_any_left else "mp_rank_00"
    for path in folder.glob("*/*.pt"):
        if not path.name.startswith(("mp_rank_00", left)):
            path.unlink()
    if is_any_left:
        assert missing(folder).name.startswith("layer_0_expert_0_mp_rank_00_model_states.pt")
    else:
        with open_checkpoint(str(folder)) as found:
            assert len(found.parts) == 1


@pytest.mark.parametrize(
    "stated",
    [
        {"num_experts": [1, None, -2]},
        {"num_experts": 5},
        {"num_experts": "many"},
        {"num_experts": [9], "ds_autoep_layers": {"a": 1}},
        {},
    ],
)
def test_an_unknown_number_of_experts_lacks_none(tmp_path, stated):
    folder = zero_runs.made(tmp_path / "run", change=lambda _, tree: tree.update(stated))
    for number in (0, 1):  # one more than stated
        torch.save({"w": torch.ones(1)}, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    with open_checkpoint(str(folder)) as found:
        assert len(found.parts) == 5


def test_an_expert_may_be_in_the_file_of_any_model_parallel_rank(tmp_path):
    folder = zero_runs.made(tmp_path / "run", change=lambda _, tree: tree.update(num_experts=[2]))
    for number in (0, 1):
        torch.save({"w": torch.ones(1)}, folder / f"layer_0_expert_{number}_mp_rank_0{number}_model_states.pt")
    with open_checkpoint(str(folder)) as found:
        assert len(found.parts) == 5


def test_an_absurd_number_of_experts_is_missing(tmp_path):
    folder = zero_runs.made(tmp_path / "run", change=lambda _, tree: tree.update(num_experts=[10**18]))
    assert missing(folder).name.startswith("layer_0_expert_0_mp_rank_00_model_states.pt")


def test_a_model_without_its_optimizer_is_whole(tmp_path):
    folder = zero_runs.made(tmp_path / "run", stage=3)
    for path in folder.glob("*optim*"):
        path.unlink()
    with open_checkpoint(str(folder)) as found:
        assert len(found.parts) == 2


def test_a_file_that_is_damaged_is_not_missing(tmp_path):
    folder = zero_runs.made(tmp_path / "run")
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"PK\3\4" + bytes(100))
    with open_checkpoint(str(folder), keep_going=True) as found:
        assert [type(error) for error in found.unreadable] == [DamagedArchive]


def test_other_files_of_that_name(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "mp_rank_00_model_states.pt")
    with open_checkpoint(str(tmp_path)) as found:
        assert len(found.inventory.tensors) == 1
