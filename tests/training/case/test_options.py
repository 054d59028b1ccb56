"""The options of an optimizer at its step, against those of the file."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from ckptmove.proof.place import TorchDevice
from ckptmove.training.case.options import (
    AtStep,
    differing_options,
    options_at_step,
    record_options,
)
from ckptmove.training.code.source import line_of

CPU = TorchDevice("cpu")
TENSOR = torch.tensor(1e-3)


def place(frame):
    return line_of(frame.f_code.co_filename, frame.f_lineno)


@pytest.fixture
def optimizer():
    """One that was restored, with two groups."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    made = torch.optim.AdamW(groups, lr=1e-3)
    record_options(made, place)
    return made


def stored(optimizer):
    return copy.deepcopy(optimizer.state_dict()["param_groups"])


def differing(theirs, optimizer):
    return differing_options(theirs, options_at_step(optimizer, CPU))


@pytest.mark.parametrize(
    ("file", "step", "is_equal"),
    [
        (1e-3, 1e-3, True),
        (1e-3, 1e-4, False),
        (1e-3, TENSOR, True),
        (TENSOR, 1e-3, True),
        (TENSOR, TENSOR.clone(), True),
        (TENSOR, torch.tensor([1e-3]), True),
        (TENSOR, torch.tensor([1e-3, 1e-3]), False),
        (TENSOR, torch.tensor(2e-3), False),
        (TENSOR, None, False),
        ("exp", TENSOR, False),
        ((0.9, 0.99), [0.9, 0.99], True),
        ({"a": TENSOR, "b": [1]}, {"b": [1], "a": TENSOR.clone()}, True),
        ({"a": TENSOR}, {"a": torch.zeros(2)}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, 1, False),
        (torch.float32, torch.float32, True),
        ((0.9, TENSOR), (0.9, 1e-3), True),
        ((0.9, 0.99), (0.9,), False),
        ((0.9, 0.99), 0.9, False),
        (None, None, True),
        (None, False, False),
        (True, True, True),
        (math.nan, math.nan, True),
        (math.nan, torch.tensor(math.nan), True),
        pytest.param(10**400, TENSOR, False, id="a huge integer"),
        (1.0, np.ones(2), False),
    ],
)
def test_options_are_compared_by_value(file, step, is_equal):
    found = differing_options([{"option": file}], [AtStep({"option": step}, {})])
    assert (not found) == is_equal
    for one in found:
        assert one.is_lost
        assert one.figures["option"] == "option"


@pytest.mark.parametrize(
    ("key", "at_step", "is_equal"),
    [
        ("foreach", {"foreach": True}, True),
        ("params", {}, True),
        ("param_names", {}, True),
        ("initial_lr", {}, True),
        ("max_lr", {}, True),
        ("initial_lr", {"initial_lr": 1.0}, False),
        ("weight_decay", {}, False),
    ],
)
def test_options_that_no_step_reads_may_be_absent(key, at_step, is_equal):
    assert (not differing_options([{key: None}], [AtStep(at_step, {})])) == is_equal


def test_without_a_stored_optimizer_nothing_differs(optimizer):
    assert differing([], optimizer) == []
    assert differing_options([{"lr": 1.0}], []) == []


def test_an_option_of_several_groups_is_one_item(optimizer):
    theirs = stored(optimizer)
    for group in theirs:
        group["lr"] = 0.1
    theirs[1]["weight_decay"] = 0.5
    lr, decay = differing(theirs, optimizer)
    assert (lr.option, lr.groups, decay.option, decay.groups) == ("lr", (0, 1), "weight_decay", (1,))
    assert str(lr).startswith("lr of all 2 groups is 0.001 at the step, and 0.1 in the file")
    assert str(decay).startswith("weight_decay of group 1 is ")
    some = decay._replace(groups=(1, 3, 4), of_groups=9)
    assert str(some).startswith("weight_decay of group 1 and 2 more is ")
    assert str(decay._replace(of_groups=1)).startswith("weight_decay is ")


def test_values_that_look_alike_are_written_out():
    (one,) = differing_options([{"lr": 0.00065450849718}], [AtStep({"lr": 0.00065450850000}, {})])
    assert "0.0006545085 at the step, and 0.00065450849718 in the file" in str(one)
    (one,) = differing_options([{"betas": (0.9, 0.99)}], [AtStep({"betas": (0.8, 0.99)}, {})])
    assert "(0.8, 0.99) at the step" in str(one)
    assert one.figures == {
        "option": "betas", "groups": [0], "from": [0.9, 0.99], "to": [0.8, 0.99], "at": None, "lost": True,
    }  # fmt: skip
    (one,) = differing_options([{"lr": TENSOR, "fn": "f"}], [AtStep({"lr": TENSOR + 1, "fn": "f"}, {})])
    assert one.figures["from"] == pytest.approx(1e-3)
    (one,) = differing_options([{"fn": "f"}], [AtStep({"fn": print}, {})])
    assert one.figures["to"] == str(print)


class Warmup:
    def __init__(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e-6


@pytest.mark.parametrize(
    ("change", "constructor"),
    [
        (lambda one: one.param_groups[0].update(lr=0.5), ""),
        (lambda one: one.param_groups[0].__setitem__("lr", 0.5), ""),
        (lambda one: one.param_groups[0].__ior__({"lr": 0.5}), ""),
        (lambda one: torch.optim.lr_scheduler.LinearLR(one, start_factor=0.5), "LinearLR"),
        (Warmup, "Warmup"),
    ],
    ids=["update", "item", "union", "a scheduler of torch", "one of the script"],
)
def test_what_sets_an_option_after_the_load_is_known(optimizer, change, constructor):
    theirs = stored(optimizer)
    change(optimizer)
    first = differing(theirs, optimizer)[0]
    assert (first.option, first.setter.constructor, first.is_lost) == ("lr", constructor, bool(constructor))
    assert first.figures["at"]
    assert str(first.setter.line) in str(first)


@pytest.mark.parametrize(
    "build",
    [
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=10),
        lambda one: torch.optim.lr_scheduler.StepLR(one, 5),
        lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
    ],
    ids=["cosine", "step", "exponential"],
)
def test_a_scheduler_that_keeps_the_rate_is_no_difference(optimizer, build):
    theirs = [{**group, "lr": 3e-4} for group in stored(optimizer)]
    for group in optimizer.param_groups:
        group["lr"] = 3e-4
    build(optimizer)
    assert differing(theirs, optimizer) == []


class Trainer:
    """Restores an optimizer and sets a rate in its constructor."""

    def __init__(self, optimizer):
        record_options(optimizer, place)
        optimizer.param_groups[0]["lr"] = 0.5


def test_a_constructor_that_restores_may_set_an_option(optimizer):
    theirs = stored(optimizer)
    Trainer(optimizer)
    (one,) = differing(theirs, optimizer)
    assert one.setter.constructor == ""


def test_a_group_is_copied_and_pickled_as_a_dict(optimizer):
    group = optimizer.param_groups[0]
    assert type(copy.deepcopy(group)) is type(pickle.loads(pickle.dumps(group))) is dict
    assert copy.copy(group) == group
    optimizer.load_state_dict(optimizer.state_dict())
    assert {type(one) for one in optimizer.param_groups} == {dict}


def test_a_rate_that_is_a_tensor_is_copied_at_the_step(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    (first, _) = options_at_step(optimizer, CPU)
    optimizer.param_groups[0]["lr"].fill_(0)
    assert first.values["lr"] == 0.5
