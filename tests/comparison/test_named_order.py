"""Optimizers that list the same names in another order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckptmove


@pytest.fixture
def tree():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


@pytest.fixture
def reversed_tree(tree):
    """The same in another order: groups, their parameters, and the state."""
    groups = [{**group, "params": group["params"][::-1]} for group in tree["optim"]["param_groups"][::-1]]
    state = dict(reversed(tree["optim"]["state"].items()))
    return copy.deepcopy({**tree, "optim": {"state": state, "param_groups": groups}})


@pytest.fixture
def diff(tmp_path):
    def compare(one, other):
        torch.save(one, tmp_path / "one.pth")
        torch.save(other, tmp_path / "other.pth")
        return ckptmove.diff(tmp_path / "one.pth", tmp_path / "other.pth")

    return compare


def test_the_order_of_names_is_no_difference(diff, tree, reversed_tree):
    found = diff(tree, reversed_tree)
    assert found.same, found.changed
    assert len(found.notes) == 1
    assert diff(tree, tree).notes == ()


def test_options_and_values_are_compared_by_name(diff, tree, reversed_tree):
    reversed_tree["optim"]["param_groups"][0]["lr"] = 0.5  # of the second group of the other
    reversed_tree["optim"]["state"]["0.bias"]["exp_avg"] += 1
    changed = {(one.name, one.what) for one in diff(tree, reversed_tree).changed}
    assert changed == {("optim.param_groups.1.lr", "object"), ("optim.state.0.bias.exp_avg", "value")}


def test_another_membership_is_a_difference(diff, tree, reversed_tree):
    groups = reversed_tree["optim"]["param_groups"]
    groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]
    assert "optim.param_groups" in {one.name for one in diff(tree, reversed_tree).changed}


def test_the_order_of_numbers_counts(diff):
    state = {number: {"step": torch.tensor(1.0)} for number in range(2)}
    one, other = ({"state": state, "param_groups": [{"lr": 0.1, "params": order}]} for order in ([0, 1], [1, 0]))
    assert not diff(one, other).same
