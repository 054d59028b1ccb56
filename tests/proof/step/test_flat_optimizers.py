"""Checkpoints whose optimizer is one flat dict: converted, checked, stepped, and restored by torch."""

from __future__ import annotations

import sys

import pytest
import torch
import zero_runs
from simulation import on_a_simulated_device
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckptmove
from ckptmove.opening.checkpoint import open_checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def optimizer_of(model, kind="AdamW", **options):
    *rest, last = model
    groups = [{"params": [one for part in rest for one in part.parameters()]}]
    groups.append({"params": list(last.parameters()), "weight_decay": 0.5})
    return getattr(torch.optim, kind)(groups, lr=0.01, **options)


def step(model, optimizer, seed=1):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()


def trained(kind="AdamW", **options):
    model = network()
    optimizer = optimizer_of(model, kind, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer


def tree(kind="AdamW", **options):
    return dict(zip(("model", "optimizer"), get_state_dict(*trained(kind, **options), options=FLAT), strict=True))


def codes(path):
    return {finding.code for finding in ckptmove.inspect(path).findings}


def devices(path, key):
    with open_checkpoint(str(path)) as checkpoint:
        return {one.device for one in checkpoint.inventory.tensors if one.name.endswith(key)}


def test_the_steps_stay_on_the_cpu_and_torch_resumes_from_the_file(make, tmp_path):
    moved, back = tmp_path / "moved.pt", tmp_path / "back.pt"
    ckptmove.convert(make.save(tree(), device="cpu"), to="cuda:0", output=moved)
    assert (devices(moved, ".step"), devices(moved, ".exp_avg")) == ({"cpu"}, {"cuda:0"})
    assert codes(moved) == {"R302"}
    ckptmove.convert(moved, to="cpu", output=back)
    saved = torch.load(back, weights_only=True)
    model = network()
    optimizer = optimizer_of(model)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=FLAT)
    resumed, went_on = (model, optimizer), trained()
    for pair in (resumed, went_on):
        step(*pair, seed=9)
    one, other = resumed[0].state_dict(), went_on[0].state_dict()
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_steps_that_were_dragged_along_are_found_and_mended(make, tmp_path):
    dragged = make.save(tree(), stay=())
    assert "O201" in codes(dragged)
    ckptmove.convert(dragged, to="cuda:0", output=tmp_path / "mended.pt")
    assert devices(tmp_path / "mended.pt", ".step") == {"cpu"}
    assert "O201" not in codes(tmp_path / "mended.pt")


def test_the_options_of_every_parameter_follow(make, tmp_path):
    flat = tree()
    flags = [key for key in flat["optimizer"] if key.endswith(".capturable")]
    flat["optimizer"].update(dict.fromkeys(flags, True))
    path = make.save(flat, stay=())
    assert "O201" not in codes(path)
    ckptmove.convert(path, to="cpu", output=tmp_path / "moved.pt")
    saved = torch.load(tmp_path / "moved.pt", weights_only=True)["optimizer"]
    assert [saved[key] for key in flags] == [False] * 6


@pytest.mark.parametrize("to", ["cpu", pytest.param("cuda:0", marks=on_a_simulated_device)])
@pytest.mark.parametrize(("kind", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9})])
def test_every_check_is_made(make, kind, options, to):
    result = ckptmove.verify(make.save(tree(kind, **options), device=to), to=to)
    assert (result.passed, result.proven) == (True, True)
    assert {check.status for check in result.checks} == {"passed"}
    (evidence,) = (dict(check.evidence) for check in result.checks if check.name == "step")
    assert (evidence["optimizer"], evidence["parameters"], evidence["standins"]) == (kind, 6, 0)


def test_a_lost_moment_and_one_that_is_not_finite_fail(make, answers):
    lost, broken = tree(), tree()
    del lost["optimizer"]["state.0.weight.exp_avg_sq"]
    broken["optimizer"]["state.0.weight.exp_avg"][0, 0] = torch.nan
    path = make.save(lost, device="cpu")
    found = ckptmove.verify(path, to="cpu")
    assert not found.passed
    (structure,) = (check for check in found.checks if check.name == "structure")
    assert structure.status == "failed"
    assert " optimizer.state.0.weight.exp_avg_sq" in structure.detail
    found = answers(make.save(broken, device="cpu"), "cpu")
    assert found["numbers"]["status"] == "failed"


def test_a_parameter_without_state_beside_others_is_found(make):
    flat = tree()
    for key in ("step", "exp_avg", "exp_avg_sq"):
        del flat["optimizer"][f"state.2.bias.{key}"]
    (finding,) = (one for one in ckptmove.inspect(make.save(flat, device="cpu")).findings if one.code == "O205")
    assert finding.message.startswith("1 of 6 parameters ")
    assert finding.where == ("optimizer.param_groups.2.bias",)


# --- a case ----------------------------------------------------------------------------------------------------------


SCRIPT = """
import torch
import zero_runs
from torch import nn
import ckptmove

def case(device):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(device)
    first, batch, last = model
    groups = {groups}
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    return ckptmove.Case(model, optimizer, nn.MSELoss(), (torch.randn(8, 6), torch.randn(8, 3)))
"""
AS_TRAINED = """[
        {"params": [*first.parameters(), *batch.parameters()]},
        {"params": list(last.parameters()), "weight_decay": 0.1},
    ]"""


@pytest.fixture
def case_check(make, answers, tmp_path, monkeypatch):
    """The case check of an optimizer of some groups, on a flat checkpoint of two or on another tree."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def case_check(groups, saved=None):
        (tmp_path / "train.py").write_text(SCRIPT.replace("{groups}", groups))
        return answers(make.save(saved or tree(), device="cpu"), "cpu", case="train.py:case")["case"]

    return case_check


def test_a_case_gets_the_groups_that_it_has_by_name(case_check):
    check = case_check(AS_TRAINED)
    assert check["status"] == "passed", check
    assert "the state of 6 parameters restored from optimizer" in check["detail"]


def test_the_names_go_before_the_order_of_a_case(case_check):
    backward = """[
        {"params": list(last.parameters())[::-1]},
        {"params": [*batch.parameters(), *first.parameters()]},
    ]"""
    assert case_check(backward)["status"] == "passed"


def test_one_group_of_a_case_has_the_options_of_all_its_parameters(case_check):
    check = case_check("model.parameters()")
    assert check["status"] == "failed"
    assert "optimizer.param_groups.0.weight and optimizer.param_groups.2.weight " in check["detail"]
    assert "are one group in the case's optimizer" in check["detail"]


def test_a_case_of_other_parameters_is_told_the_sizes(case_check):
    saved = tree()
    for key in [key for key in saved["optimizer"] if ".2.bias." in key]:
        del saved["optimizer"][key]
    check = case_check(AS_TRAINED, saved)
    assert check["status"] == "failed"
    found = check["detail"].partition("the optimizer does not fit the checkpoint; ")[2]
    assert found == ("in the checkpoint: 5 groups of 1 parameter each; in the case: 2 groups of 4 and 2 parameters")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("key", ["", "optimizer_state_dict", "optimizer", "engine.optimizer"])
@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_the_zero_state_of_some_ranks_proves_nothing(answers, tmp_path, stage, key, ranks, together):
    folder = zero_runs.made(tmp_path / "run", stage=stage, ranks=ranks)
    states = [torch.load(path)["optimizer_state_dict"] for path in sorted(folder.glob("*_optim_states.pt"))]
    with pytest.raises(KeyError, match="param_groups"):
        optimizer_of(network()).load_state_dict(states[0])
    (tmp_path / "by_hand").mkdir()
    for rank, state in enumerate(states[:together]):
        tree = state
        for one in filter(None, reversed(key.split("."))):
            tree = {one: tree}
        torch.save(tree, tmp_path / "by_hand" / f"saved_{rank}.pt")
    found = answers(str(tmp_path / "by_hand"), "cpu")["step"]
    is_whole = together == ranks
    assert ("KeyError: 'param_groups'" in found["detail"]) == (not is_whole)
    if not is_whole:
        assert (found["status"], f"{together} of {ranks} ranks" in found["detail"]) == ("skipped", True)
