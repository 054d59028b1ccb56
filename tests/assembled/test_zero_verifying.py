"""Steps of the fp32 partitions of DeepSpeed ZeRO, each with the state next to it."""

from __future__ import annotations

import shutil

import pytest
import torch
import zero_runs

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import NotGathered
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.file_checks import check_structure

STEPS = ("step", "parity", "fresh")


def statuses(found):
    return [found[name]["status"] for name in STEPS]


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", zero_runs.REAL)
def test_real_partitions_are_stepped(name, tmp_path, answers):
    folder, reference = zero_runs.real(name, tmp_path / "run")
    found = answers(folder, "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["proven"]
    assert found["step"]["evidence"]["moved"] == found["step"]["evidence"]["parameters"]
    if reference is not None:  # padding is part of the step if it is saved
        numel = {name: value.numel() for name, value in reference["exp_avg"].items() if name != "head.weight"}
        assert found["step"]["evidence"]["elements"] >= sum(numel.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_each_partition_is_paired_with_its_own_state(tmp_path, stage):
    folder = zero_runs.made(tmp_path / "run", stage=stage, ranks=3)
    with open_checkpoint(str(folder)) as found:
        inventory = found.inventory
        pairings = pair_all(inventory)
    assert [pairing.how for pairing in pairings] == ["flat"] * 3
    for optimizer, pairing in zip(inventory.optimizers, pairings, strict=True):
        for entry in optimizer.state:
            partition = pairing.by_key()[entry.key]
            assert partition.name.rpartition(".")[0].endswith(("fp32_groups", "fp32_flat_groups"))
            assert partition.name.rpartition(".")[2] == entry.key
            assert entry.tensor("exp_avg").shape == partition.shape
    names = {finding.code for finding in find_all(inventory, Context())}
    assert not names & {"O204", "O206"}


def test_a_large_partition_of_zeros_is_no_padding(tmp_path, answers, monkeypatch):
    monkeypatch.setattr("ckptmove.proof.step.resume._MOST_PADDING", 0)
    folder = zero_runs.made(tmp_path / "run", ranks=3)
    found = answers(folder, "cpu")
    assert found["step"]["evidence"]["parameters"] == 6


def test_a_file_of_one_of_several_ranks_is_not_proven(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run", ranks=3)
    found = answers(folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt", "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert "of 1 of 3 ranks" in found["step"]["detail"]


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["stage2-frozen", "stage2-fused-adam", "stage3-frozen"])
def test_one_file_is_verified_against_the_run(name, tmp_path, answers):
    folder, _ = zero_runs.real(name, tmp_path / "run")
    output = tmp_path / "run.pth"
    ckptmove.convert(folder, output=output)
    found = answers(output, against=str(folder))
    assert statuses(found) == ["passed"] * 3
    assert found["restore"]["status"] == "passed"
    tree = torch.load(output, weights_only=True)
    tree["optimizer"]["state"][0]["exp_avg"].view(-1)[0] += 1e-3
    torch.save(tree, output)
    assert answers(output, against=str(folder))["restore"]["status"] == "failed"


def test_one_file_of_two_ranks_of_model_parallelism_is_verified(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run")
    for path in sorted(folder.iterdir()):
        shutil.copy(path, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    ckptmove.convert(folder, output=tmp_path / "run.pth")
    found = answers(tmp_path / "run.pth", against=str(folder))
    assert statuses(found) == ["passed"] * 3
    assert (found["step"]["evidence"]["parameters"], found["step"]["evidence"]["proven"]) == (8, True)


def test_diff_compares_one_file_with_the_run(tmp_path):
    folder, _ = zero_runs.real("stage2-frozen", tmp_path / "run")
    output = tmp_path / "run.pth"
    ckptmove.convert(folder, output=output)
    assert ckptmove.diff(folder, output).same
    assert ckptmove.diff(output, folder).same
    tree = torch.load(output, weights_only=True)
    tree["module"]["scale"] += 1
    torch.save(tree, output)
    (change,) = ckptmove.diff(folder, output).changed
    assert (change.name, change.what) == ("module.scale", "value")
    shutil.copytree(folder / "global_step3", folder / "global_step4")
    assert not ckptmove.diff(folder, output).same
    rank = next(folder.glob("*/zero_pp_rank_0*"))
    assert not ckptmove.diff(folder, rank).same


def test_a_file_of_a_rank_is_no_gathered_run(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run")
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(folder / path.name, path)
    assert answers(path, against=str(folder / path.name))["restore"]["status"] == "passed"
    assert answers(path, against=str(folder))["restore"]["status"] == "failed"


def test_a_converted_run_makes_the_same_step(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run", ranks=3)
    ckptmove.convert(folder, to="cuda:0", output=tmp_path / "out")
    found = answers(tmp_path / "out", "cuda:0", against=str(folder))
    assert statuses(found) == ["passed"] * 3


@pytest.mark.parametrize("ranks", [3, 5, 12])
def test_padding_may_be_longer_than_a_partition(tmp_path, answers, ranks):
    assert statuses(answers(zero_runs.made(tmp_path / "run", ranks=ranks), "cpu")) == ["passed"] * 3


def test_a_simulated_target(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run")
    assert statuses(answers(folder, "cuda:0")) == ["passed"] * 3


def changed(key, value):
    """Change a value of the optimizer in each file of a rank; ``value`` is called with the old value."""

    def change(name, tree):
        state = tree.get("optimizer_state_dict", {})
        if "base_optimizer_state" in state:
            for entry in state["base_optimizer_state"]["state"].values():
                entry[key] = value(entry[key])

    return change


def test_state_of_another_length_fails(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run", change=changed("exp_avg", lambda old: old[:-1]))
    assert statuses(answers(folder, "cpu"))[0] == "failed"


def test_lost_state_fails(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run", change=changed("exp_avg_sq", torch.zeros_like))
    assert "failed" in statuses(answers(folder, "cpu"))


def options(**new):
    def change(name, tree):
        state = tree.get("optimizer_state_dict", {})
        for group in state.get("base_optimizer_state", {}).get("param_groups", ()):
            kept = {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
            group.clear()
            group |= {**kept, **new}

    return change


def test_classes_of_deepspeed_are_those_of_torch(tmp_path, answers):
    folder = zero_runs.made(tmp_path / "run", change=options(bias_correction=True, amsgrad=False))
    found = answers(folder, "cpu")
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["optimizer"] == "AdamW"
    assert "adam_w_mode" in found["step"]["detail"]
    folder = zero_runs.made(tmp_path / "other", change=options(bias_correction=False))
    assert statuses(answers(folder, "cpu")) == ["skipped"] * 3


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_an_optimizer_that_is_not_elementwise_is_named(tmp_path, answers, name):
    def change(_, tree):
        state = tree.get("optimizer_state_dict")
        if state is not None:
            own = state["base_optimizer_state"]
            values = [torch.nn.Parameter(one.clone()) for one in state["single_partition_of_fp32_groups"]]
            optimizer = getattr(torch.optim, name)(values)
            optimizer.step(lambda: sum((one**2).sum() for one in values))
            own.update(optimizer.state_dict())

    found = answers(zero_runs.made(tmp_path / "run", ranks=1, shapes=zero_runs.SHAPES[:1], change=change), "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert name in found["step"]["detail"]
    assert "elementwise" in found["step"]["detail"]


def test_state_without_partitions_is_not_stepped(tmp_path, answers):
    def change(_, tree):
        tree.get("optimizer_state_dict", {}).pop("single_partition_of_fp32_groups", None)

    found = answers(zero_runs.made(tmp_path / "run", change=change), "cpu")
    assert statuses(found) == ["skipped"] * 3
    assert "ZeRO" in found["step"]["detail"]


@pytest.mark.parametrize("listed", [[torch.ones(2, 2)] * 2, [torch.ones(8)] * 3, [torch.ones(8)]])
def test_other_partitions_than_parameters_are_not_paired(tmp_path, listed):
    def change(_, tree):
        tree.get("optimizer_state_dict", {})["single_partition_of_fp32_groups"] = listed

    with open_checkpoint(str(zero_runs.made(tmp_path / "run", change=change))) as found:
        assert {pairing.how for pairing in pair_all(found.inventory)} == {"none"}


def test_paddings_that_are_no_numbers_cut_nothing(tmp_path):
    def change(_, tree):
        tree.get("optimizer_state_dict", {})["group_paddings"] = ["1", None]

    with open_checkpoint(str(zero_runs.made(tmp_path / "run", change=change))) as found:
        lengths = [entry.tensor("exp_avg").shape for one in found.inventory.optimizers for entry in one.state]
    assert len(set(lengths[::2])) == 1


def test_a_universal_checkpoint_is_not_one_of_whole_files(tmp_path, answers):
    folder = tmp_path / "run" / "global_step2_universal"
    for name in ("a", "b.weight"):
        (folder / "zero" / name).mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq", "step"):
            value = torch.tensor(2.0) if key == "step" else torch.ones(3)
            torch.save({"param": value} if value.dim() else value, folder / "zero" / name / f"{key}.pt")
    state = {"module": {"a": torch.ones(3), "b.weight": torch.ones(3)}, "ds_version": "0.15", "global_steps": 2}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    found = ckptmove.inspect(tmp_path / "run")
    assert found.inventory.layout == "deepspeed"
    assert {tensor.role for tensor in found.inventory.tensors if "/zero/" in tensor.name} == {"optimizer"}
    assert found.num_parameters == 6
    checks = answers(tmp_path / "run", "cpu")
    assert statuses(checks) == ["skipped"] * 3
    assert "universal" in checks["step"]["detail"]
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        assert "universal" in check_structure(checkpoint.inventory, []).detail
    with pytest.raises(NotGathered):
        ckptmove.convert(tmp_path / "run", output=tmp_path / "run.pth")
