"""Optimizers in one flat dict, from torch and made by hand."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckptmove.checkpoint.inventory.flattened import split_by_parameter
from ckptmove.errors import LimitExceeded
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.pickles.tree import Dict

RATE = "param_groups.w.lr"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(kind=torch.optim.AdamW, *, named=False, **options):
    """A model and a flat optimizer of two groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    first, second = [list(layer.named_parameters("01"[at])) for at, layer in enumerate(model)]
    groups = [pairs if named else [parameter for _, parameter in pairs] for pairs in (first, second)]
    optimizer = kind([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.5}], lr=0.1, **options)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return get_state_dict(model, optimizer, options=FLAT)


def told(inventory):
    (record,) = inventory.optimizers
    return {entry.key: [key for key, _ in (*entry.tensors, *entry.scalars)] for entry in record.state}


def tensor():
    return torch.zeros(2)


def test_every_parameter_has_its_state_and_its_options(inventory_of):
    model, flat = trained(capturable=False, amsgrad=True)
    inventory = inventory_of({"model": model, "optimizer": flat})
    (record,) = inventory.optimizers
    assert (record.where, record.algorithm, record.is_flat) == ("optimizer", "AdamW", True)
    assert told(inventory) == {key: ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"] for key in model}
    assert [group.params for group in record.groups] == [(name,) for name in model]
    for group in record.groups:
        options = {f"{group.where}.{key}": value for key, value in group.options}
        begin = f"optimizer.param_groups.{group.params[0]}."
        assert options == {f"optimizer.{key}": value for key, value in flat.items() if f"optimizer.{key}" in options}
        assert len(options) == sum(f"optimizer.{key}".startswith(begin) for key in flat)


def test_tensors_have_the_names_and_the_roles_that_their_keys_give(inventory_of):
    model, flat = trained()
    inventory = inventory_of({"model": model, "optimizer": flat})
    wanted = {f"optimizer.{key}": "optimizer" for key, value in flat.items() if torch.is_tensor(value)}
    assert {one.name: one.role for one in inventory.tensors} == {f"model.{key}": "model" for key in model} | wanted


def test_an_optimizer_without_state_has_groups(inventory_of):
    model, flat = trained(torch.optim.SGD)
    inventory = inventory_of({"model": model, "optimizer": flat})
    (record,) = inventory.optimizers
    assert (record.algorithm, len(record.groups), record.state) == ("SGD", 4, ())


def test_names_that_the_optimizer_was_given_are_no_option(inventory_of):
    model, flat = trained(named=True)
    if "param_groups.0.weight.param_names" not in flat:
        pytest.skip("this torch gives an optimizer no names")
    (record,) = inventory_of({"model": model, "optimizer": flat}).optimizers
    assert {group.param_names for group in record.groups} == {()}
    assert "param_names" not in dict(record.groups[0].options)


def test_a_rate_that_is_a_tensor_has_its_name(inventory_of):
    inventory = inventory_of({RATE: torch.tensor(0.1), "state.w.exp_avg": tensor()})
    assert [one.name for one in inventory.tensors] == ["state.w.exp_avg", RATE]
    assert {one.role for one in inventory.tensors} == {"optimizer"}


def test_a_dict_in_a_state_is_one_again(inventory_of):
    keys = ["state.w.blocks.0.l", "state.w.blocks.0.r", "state.w.blocks.n", "state.w.step"]
    inventory = inventory_of({RATE: 0.1, **{key: tensor() for key in keys}})
    assert [one.name for one in inventory.tensors] == keys
    (entry,) = inventory.optimizers[0].state
    assert [key for key, _ in entry.tensors] == ["blocks.0.l", "blocks.0.r", "blocks.n", "step"]
    assert entry.nested == (("blocks", "dict"), ("blocks.0", "dict"))


def test_a_path_that_has_a_value_is_no_dict(inventory_of):
    inventory = inventory_of({RATE: 0.1, "state.w.a": tensor(), "state.w.a.b": tensor()})
    assert told(inventory) == {"w": ["a", "a.b"]}
    assert inventory.optimizers[0].state[0].nested == ()


def test_a_key_belongs_to_the_longest_name_that_it_begins_with(inventory_of):
    flat = {
        RATE: 0.1,
        "param_groups.w.lr.lr": 0.1,
        "param_groups.w.lr.eps": 1.0,
        "state.w.lr.step": 1,
        "state.w.step": 2,
    }
    inventory = inventory_of(flat)
    assert told(inventory) == {"w.lr": ["step"], "w": ["step"]}
    assert [(group.where, dict(group.options)) for group in inventory.optimizers[0].groups] == [
        ("param_groups.w", {"lr": 0.1}),
        ("param_groups.w.lr", {"lr": 0.1, "eps": 1.0}),
    ]


def test_a_parameter_without_a_rate_or_without_options_is_told(inventory_of):
    flat = {**trained()[1], "state.stray.exp_avg": tensor()}
    del flat["param_groups.0.weight.lr"]
    inventory = inventory_of({"optimizer": flat})
    found = {finding.code: finding for finding in find_all(inventory, Context())}
    assert found["O206"].where == ("optimizer.state.stray",)
    assert found["O207"].where[0] == "optimizer.param_groups.0.weight.lr"


def test_weights_beside_it_are_the_models(inventory_of):
    model, flat = trained()
    inventory = inventory_of({**model, **flat})
    assert {one.name for one in inventory.tensors if one.role == "model"} == model.keys()
    assert inventory.optimizers[0].where == ""


@pytest.mark.parametrize(
    "key", ["param_groups.lr", "param_groups..lr", "param_groups.w.eps", "state.w.step", "groups.w.lr"]
)
def test_without_the_rate_of_a_parameter_it_is_no_optimizer(key, inventory_of):
    assert inventory_of({key: 0.1, "state.w.exp_avg": tensor()}).optimizers == ()


def test_keys_of_any_kind_lose_no_tensor(inventory_of):
    odd = [
        "state.",
        "state",
        "state.x",
        "state..",
        "state..x",
        "param_groups.",
        "param_groups.x",
        "param_groups..",
        5,
        (1, 2),
    ]
    flat = {RATE: 0.1, **{key: tensor() for key in odd}, b"state.w.bytes": tensor(), None: tensor()}
    assert len(inventory_of(flat).tensors) == len(flat) - 1


def test_a_key_that_comes_twice_counts_with_its_last_value():
    pairs = Dict([RATE, 0.1, "state.w.a", 1, "state.w.a", 2], [-1, 3, -1, 4, -1, 5])
    flat = split_by_parameter(pairs)
    (entry,) = flat.state.flat[1::2]
    assert (entry.flat, entry.starts) == (["a", 2], [-1, 5])


def test_a_key_of_nothing_but_dots_takes_no_time(inventory_of):
    dots = "." * 300_000
    inventory = inventory_of({RATE: 0.1, f"state.{dots}": 1, f"param_groups.{dots}": 1, f"state.w{dots}x": 1})
    assert len(inventory.optimizers) == 1


@pytest.mark.unmeasured
def test_many_names_take_time_in_proportion(inventory_of):
    flat = {f"param_groups.{number}.lr": 0.1 for number in range(20_000)}
    flat |= {f"state.{number}.{number}": number for number in range(20_000)}
    (record,) = inventory_of(flat).optimizers
    assert (len(record.groups), len(record.state)) == (20_000, 20_000)


def test_a_dict_that_hangs_in_many_places_is_not_cut_for_each(inventory_of):
    flat = {RATE: 0.1, "state." + "x" * 200_000: 1}
    with pytest.raises(LimitExceeded, match="length"):
        inventory_of([flat] * 2000)


def test_lists_that_options_share_are_not_copied_for_each(inventory_of):
    shared = [0] * 20_000
    with pytest.raises(LimitExceeded, match="paths through"):
        inventory_of(
            {
                key: value
                for n in range(2000)
                for key, value in ((f"param_groups.{n}.lr", 0.1), (f"param_groups.{n}.a", shared))
            }
        )


def test_objects_among_the_options_are_walked(inventory_of):
    inventory = inventory_of(
        {RATE: 0.1, "param_groups.w.device": torch.device("cuda:1"), "args": argparse.Namespace(a=1)}
    )
    assert [mention.where for mention in inventory.mentions] == ["param_groups.w.device"]


@pytest.mark.parametrize("key", ["state.w.again", "param_groups.w.again", "again"])
def test_a_dict_that_holds_itself_is_entered_once(key, inventory_of):
    flat = {RATE: 0.1, "state.w.exp_avg": tensor()}
    flat[key] = flat
    inventory = inventory_of(flat)
    assert ([one.name for one in inventory.tensors], len(inventory.optimizers)) == (["state.w.exp_avg"], 1)
