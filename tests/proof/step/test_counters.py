from __future__ import annotations

import pytest
import torch


def numbers(make, answers, change, optimizer="AdamW", **options):
    tree = make.tree(optimizer, **options)
    change(tree["optimizer"]["state"])
    return answers(make.save(tree), "cpu")["numbers"]


def set_step(value, *keys):
    def change(state):
        for key in keys or state:
            state[key]["step"] = value

    return change


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor(0.0), "optimizer.state.1.step is 0, but exp_avg of the same parameter is not zero: "),
        (0, "optimizer.state.1.step is 0, but exp_avg of the same parameter is not zero: "),
        (torch.tensor(2.5), "optimizer.state.1.step is 2.5, "),
        (2.5, "optimizer.state.1.step is 2.5, "),
        (float("nan"), "optimizer.state.1.step is nan, "),
        (10**400, "optimizer.state.1.step is inf, "),
        (-(10**400), "below zero: optimizer.state.1.step holds -inf"),
        (-3, "below zero: optimizer.state.1.step holds -3"),
        (torch.tensor(-3.0), "below zero: optimizer.state.1.step holds -3"),
    ],
)
def test_counts_that_no_training_writes(make, answers, value, said):
    found = numbers(make, answers, set_step(value, 1))
    assert found["status"] == "failed"
    assert said in found["detail"]


@pytest.mark.parametrize("optimizer", ["Adam", "Adamax", "NAdam", "RMSprop", "Rprop", "Adadelta", "Adafactor"])
def test_a_count_of_zero_beside_moments(make, answers, optimizer):
    found = numbers(make, answers, set_step(torch.tensor(0.0)), optimizer)
    assert found["status"] == "failed"
    assert found["evidence"]["wrong_counts"] == 4


@pytest.mark.parametrize(("optimizer", "key"), [("Adagrad", "sum"), ("Rprop", "step_size")])
def test_what_does_not_begin_at_zero_may_stand_beside_a_count_of_zero(make, answers, optimizer, key):
    def change(state):
        for entry in state.values():
            for name, value in entry.items():
                if name != key:
                    entry[name] = torch.zeros_like(value)

    assert numbers(make, answers, change, optimizer)["status"] == "passed"


@pytest.mark.parametrize(
    ("optimizer", "key", "value"), [("NAdam", "mu_product", 5.0), ("ASGD", "eta", -5.0), ("ASGD", "mu", -1.0)]
)
def test_scalars_that_the_optimizer_never_makes_so(make, answers, optimizer, key, value):
    def change(state):
        state[2][key] = torch.tensor(value)

    found = numbers(make, answers, change, optimizer)
    assert found["status"] == "failed"
    assert f"optimizer.state.2.{key} is {value:g}, " in found["detail"]


def test_an_optimizer_that_is_built_and_not_stepped(make, answers):
    found = numbers(make, answers, lambda state: None, "Adagrad", steps=0, initial_accumulator_value=0.1)
    assert found["status"] == "passed"


@pytest.mark.parametrize(
    ("at", "behind"),
    [(range(1, 4), "optimizer.state.0.step was"), ((1,), "optimizer.state.0.step and 2 more were")],
)
def test_counts_that_differ_are_said_with_what_to_do(make, answers, at, behind):
    def change(state):
        for index in at:
            set_step(torch.tensor(9.0), index)(state)

    found = numbers(make, answers, change)
    assert found["status"] == "passed"
    said = "; step counts from 3 to 9 in optimizer.param_groups.0 (O209): nothing to do if "
    assert found["detail"].endswith(f"{said}{behind} frozen for a time; otherwise use another checkpoint")


@pytest.mark.parametrize("counts", [(3, 3, 3, 3), (3, 3, 9, 3), (1, 9, 9, 2)])
def test_those_behind_the_others_are_a_note(make, answers, counts):
    tree = make.tree()
    for index, count in enumerate(counts):
        set_step(torch.tensor(float(count)), index)(tree["optimizer"]["state"])
    findings = answers(make.save(tree), "cpu")["findings"]
    behind = [index for index, count in enumerate(counts) if count < max(counts)]
    assert [(one["code"], one["severity"]) for one in findings] == [("O209", "info")] * bool(behind)
    for one in findings:
        assert one["where"] == [f"optimizer.state.{index}.step" for index in behind]
        assert f"from {min(counts)} to {max(counts)} in optimizer.param_groups.0: {len(behind)} param" in one["message"]


def test_groups_are_not_held_against_each_other(make, answers):
    tree = make.tree()
    (group,) = tree["optimizer"]["param_groups"]
    tree["optimizer"]["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]
    for index in (0, 1):
        set_step(torch.tensor(9.0), index)(tree["optimizer"]["state"])
    assert answers(make.save(tree), "cpu")["findings"] == []


def test_the_counts_of_a_stranger_are_its_own(make, answers):
    tree = make.tree("AdamW")
    tree["optimizer"]["param_groups"][0]["correct_bias"] = True
    set_step(torch.tensor(2.5), 1)(tree["optimizer"]["state"])
    assert answers(make.save(tree), "cpu")["numbers"]["status"] == "passed"


def test_counts_that_are_no_numbers_are_left_to_the_step(make, answers):
    assert numbers(make, answers, set_step("three", 0))["status"] == "passed"


def test_state_of_no_group_has_a_count_too(make, answers):
    def change(state):
        state[9] = {**state[0], "step": torch.tensor(-1.0)}

    assert "optimizer.state.9.step holds -1" in numbers(make, answers, change)["detail"]
