"""Distributed checkpoints whose optimizer is flat, as torchtitan saves it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptmove

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
#: Older torch writes the same options for these two; the report names the assumed one.
ALIKE = ("Adam", "AdamW") if "decoupled_weight_decay" not in torch.optim.Adam([torch.ones(1)]).defaults else ()
CHECKS = ("restore", "numbers", "step", "parity", "fresh")


def tree_of(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    groups = [
        {"params": list(layer.parameters()), "weight_decay": decay}
        for layer, decay in zip(model, (0, 0.1), strict=True)
    ]
    optimizer = kind(groups, lr=0.01, **options)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=OPTIONS), strict=True))


@pytest.mark.unmeasured
@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("kind", "options"), [("AdamW", {}), ("Adam", {}), ("RMSprop", {"momentum": 0.9}), ("SGD", {"momentum": 0.9})]
)
def test_every_check_is_made(distributed, tmp_path, answers, kind, options, to):
    folder = distributed.save(tmp_path / "run", tree_of(getattr(torch.optim, kind), **options))
    found = answers(folder, to)
    assert {name: found[name]["status"] for name in CHECKS} == dict.fromkeys(CHECKS, "passed"), found
    evidence = found["step"]["evidence"]
    assert (evidence["parameters"], evidence["standins"]) == (4, 0)
    assert evidence["optimizer"] in (ALIKE if kind in ALIKE else (kind,))
    assert (evidence["proven"], evidence["unproven"]) == (True, "")


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "RMSprop"])
def test_its_options_tell_which_it_is(distributed, tmp_path, kind):
    folder = distributed.save(tmp_path / "run", tree_of(getattr(torch.optim, kind)))
    found = ckptmove.inspect(folder)
    (record,) = found.inventory.optimizers
    assert (record.where, record.candidates) == ("optimizer", ALIKE if kind in ALIKE else (kind,))
    assert {finding.code for finding in found.findings} == {"R302"}


def as_torchtitan():
    """The state_dict of torchtitan: parts of the run next to the tensors of the model."""
    tree = tree_of()
    train = {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(300)}
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 2).state_dict()
    layer = {"weight": torch.ones(2), "bias": torch.ones(2)}
    return {
        **tree["model"], "norm.weight": torch.ones(2), "norm.bias": torch.ones(2),
        "optimizer": tree["optimizer"], "lr_scheduler": schedule, "train_state": train,
        "head": layer, "2._extra_state": {"amax": torch.ones(1)},
    }  # fmt: skip


@pytest.mark.parametrize("is_file", [True, False])
def test_parts_of_a_run_next_to_the_model(distributed, tmp_path, is_file):
    path = tmp_path / "run"
    if is_file:
        torch.save(as_torchtitan(), path)
    else:
        distributed.save(path, as_torchtitan())
    found = ckptmove.inspect(path)
    roles = {one.name: one.role for one in found.inventory.tensors if one.role != "optimizer"}
    model = {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
        "2._extra_state.amax",
    }
    others = {"train_state.step", "train_state.ntokens_seen"}
    assert roles == {**dict.fromkeys(model, "model"), **dict.fromkeys(others, "other")}
    assert {"scheduler", "counter"} <= found.inventory.contents
    assert found.summary.step == 3
    (finding,) = (one for one in found.findings if one.code == "R302")
    assert "scheduler" not in finding.fix
    assert "epoch" not in finding.fix


@pytest.mark.unmeasured
def test_a_lost_moment_fails(distributed, tmp_path):
    tree = tree_of()
    del tree["optimizer"]["state.1.weight.exp_avg_sq"]
    found = ckptmove.verify(distributed.save(tmp_path / "run", tree), to="cpu")
    assert not found.passed
    assert "O207" in {finding.code for finding in found.findings}


def test_a_value_that_is_not_finite_fails(distributed, tmp_path, answers):
    tree = tree_of()
    tree["optimizer"]["state.1.weight.exp_avg"][0, 0] = torch.nan
    assert answers(distributed.save(tmp_path / "run", tree), "cpu")["numbers"]["status"] == "failed"
