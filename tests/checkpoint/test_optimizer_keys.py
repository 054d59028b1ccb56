"""The table of optimizers, compared with the real classes of ``torch.optim``."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from ckptmove.model import OPAQUE, ParamGroup
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.torch_facts.optimizers import BY_NAME, TABLE, candidates, lost_keys

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
#: Classes that are younger than the oldest torch that is supported.
YOUNG = {"Adafactor", "Muon"}
#: Options that bring further keys into groups or state.
OPTIONS = [
    *((name, {}) for name in CLASSES),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True}),
    ("Adam", {"fused": True}),
    ("Adam", {"lr": torch.tensor(0.1)}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.0}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {"decoupled_weight_decay": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("LBFGS", {"line_search_fn": "strong_wolfe"}),
]
VARIANTS = [
    (name, options)
    for name, options in OPTIONS
    if options.keys() <= inspect.signature(CLASSES[name]).parameters.keys()  # some are younger than their class
]
#: Before torch 2.6 the state_dicts of both are alike.
LOOK_ALIKES = (
    frozenset()
    if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
    else frozenset({"Adam", "AdamW"})
)
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in VARIANTS]


def stepped(
    name: str, options: dict[str, object], *, named: bool = False, device: str = "cpu"
) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(3, 4, device=device))
    second = nn.Parameter(torch.randn(4, 4, device=device))
    parameters = [("first", first), ("second", second)] if named else [first, second]
    optimizer = CLASSES[name](parameters, **{"lr": 0.1, **options})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (first @ second).square().sum()
        loss.backward()
        if name == "SparseAdam":
            for parameter in (first, second):
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return optimizer


def read(obj, folder):
    path = folder / "optimizer.pt"
    torch.save(obj, path)
    with open_checkpoint(str(path)) as checkpoint:
        return checkpoint.inventory


def plain(state: dict[str, object]) -> tuple[set[str], dict[str, object]]:
    """State keys of tensors, and the other values."""
    tensors = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in state.items() if not isinstance(value, torch.Tensor | list)}


def test_every_class_has_its_row():
    assert {row.name for row in TABLE} == set(CLASSES) | YOUNG


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_a_class_is_told_from_its_state_dict(name, options, tmp_path):
    saved = stepped(name, options).state_dict()
    inventory = read({"optimizer": saved}, tmp_path)
    (record,) = inventory.optimizers
    expected = "AdamW" if options.get("decoupled_weight_decay") and name == "Adam" else name
    assert set(record.candidates) == (LOOK_ALIKES if name in LOOK_ALIKES else {expected})
    assert record.algorithm == record.candidates[0]
    assert record.where == "optimizer"
    assert {entry.key for entry in record.state} == set(map(str, saved["state"]))
    for entry in record.state:
        tensors, scalars = plain(saved["state"][int(entry.key)])
        assert {key for key, _ in entry.tensors if "." not in key} == tensors
        assert {key: value for key, value in entry.scalars if "." not in key} == scalars
        for key, tensor in entry.tensors:
            assert tensor.name == f"optimizer.state.{entry.key}.{key}"
            assert tensor.role == "optimizer"
    (group,) = record.groups
    saved_group = saved["param_groups"][0]
    assert group.where == "optimizer.param_groups.0"
    assert group.params == ("0", "1")
    assert [key for key, _ in group.options] == [key for key in saved_group if key != "params"]
    for key, value in group.options:
        assert value == (OPAQUE if isinstance(saved_group[key], torch.Tensor) else saved_group[key])
    assert {flag.name: flag.value for flag in group.flags} == {
        key: saved_group[key] for key in ("capturable", "fused") if isinstance(saved_group.get(key), bool)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_a_fresh_state_dict_is_told_too(name, tmp_path):
    (record,) = read(CLASSES[name]([nn.Parameter(torch.ones(2, 2))], lr=0.1).state_dict(), tmp_path).optimizers
    assert record.where == ""
    assert set(record.candidates) == (LOOK_ALIKES if name in LOOK_ALIKES else {name})


@pytest.mark.parametrize("name", CLASSES)
def test_a_pickled_optimizer_object(name, tmp_path):
    optimizer = stepped(name, {})
    inventory = read({"optimizers": [optimizer]}, tmp_path)
    (record,) = inventory.optimizers
    assert (record.where, record.algorithm) == ("optimizers.0", name)
    assert record.groups[0].params == ("0", "1")
    assert {entry.key for entry in record.state} == set(map(str, optimizer.state_dict()["state"]))
    parameters = [tensor for tensor in inventory.tensors if tensor.kind == "parameter"]
    assert [tensor.name for tensor in parameters] == [f"optimizers.0.param_groups.0.params.{i}" for i in range(2)]


@pytest.mark.parametrize("name", CLASSES)
def test_scalars_are_the_bookkeeping_tensors(name):
    (row,) = [row for row in TABLE if row.name == name]
    state = stepped(name, {}).state_dict()["state"]
    shapes = {key: value.dim() for entry in state.values() for key, value in entry.items() if torch.is_tensor(value)}
    if name != "LBFGS":  # H_diag is 0-d, and belongs to the direction
        assert {key for key, dim in shapes.items() if dim == 0} == row.scalars


@pytest.mark.skipif(
    "param_names" not in inspect.getsource(torch.optim.Optimizer), reason="this torch takes no named parameters"
)
def test_several_groups_with_names(tmp_path):
    parameters = [(f"layer.{index}", nn.Parameter(torch.ones(2))) for index in range(3)]
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:], "capturable": True}]
    (record,) = read(torch.optim.AdamW(groups, lr=0.1).state_dict(), tmp_path).optimizers
    assert [group.params for group in record.groups] == [("0", "1"), ("2",)]
    assert [group.param_names for group in record.groups] == [("layer.0", "layer.1"), ("layer.2",)]
    assert [dict(group.options)["lr"] for group in record.groups] == [0.5, 0.1]
    assert [group.is_set("capturable") for group in record.groups] == [False, True]


def test_groups_and_params_may_be_tuples(tmp_path):
    optimizer = stepped("Adam", {"capturable": False})
    state_dict = optimizer.state_dict()
    (expected,) = read(state_dict, tmp_path).optimizers
    state_dict["param_groups"] = tuple(
        {**group, "params": tuple(group["params"])} for group in state_dict["param_groups"]
    )
    optimizer.load_state_dict(state_dict)  # torch accepts it
    (record,) = read(state_dict, tmp_path).optimizers
    assert [group.params for group in record.groups] == [group.params for group in expected.groups]
    assert [group.options for group in record.groups] == [group.options for group in expected.groups]
    assert (record.algorithm, len(record.state)) == ("Adam", 2)


def without(pairs, *keys):
    return {name: value for name, value in pairs.items() if name not in keys}


OLD_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (OLD_ADAM, ("Adam", "AdamW")),
        ({**OLD_ADAM, "weight_decay": 0.01}, ("AdamW", "Adam")),
        ({**OLD_ADAM, "bias_correction": True}, ("AdamW", "Adam")),  # DeepSpeedCPUAdam
        ({**without(OLD_ADAM, "amsgrad"), "bias_correction": True}, ("AdamW", "Adam")),  # FusedAdam
        ({**OLD_ADAM, "bias_correction": False}, ()),
        ({**OLD_ADAM, "bias_correction": True, "amsgrad": True}, ()),
        ({**OLD_ADAM, "bias_correction": True, "max_grad_norm": 0.0}, ()),  # FusedLamb
        (
            {**without(OLD_ADAM, "amsgrad"), "foreach": None, "maximize": False, "capturable": False},
            (),
        ),  # timm's NAdamW
        ({**without(OLD_ADAM, "amsgrad"), "foreach": None, "differentiable": False, "caution": False}, ()),
        (
            {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True},
            (),
        ),  # transformers
        ({"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, ()),
        ({"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}, ()),  # Adam's state
        ({}, ()),
    ],
)
def test_look_alikes(options, expected, tmp_path):
    state = {0: {"step": 3, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}}
    saved = {"state": state, "param_groups": [{**options, "params": [0]}]}
    (record,) = read(saved, tmp_path).optimizers
    assert record.candidates == expected
    assert record.algorithm == (expected[0] if expected else None)
    assert record.state[0].scalars == (("step", 3),)


def test_a_decay_in_any_group_is_that_of_adamw(tmp_path):
    state = {key: {"step": 3, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)} for key in range(2)}
    groups = [{**OLD_ADAM, "params": [0]}, {**OLD_ADAM, "weight_decay": 0.01, "params": [1]}]
    (record,) = read({"state": state, "param_groups": groups}, tmp_path).optimizers
    assert record.candidates == ("AdamW", "Adam")


def test_a_stranger_is_not_named(tmp_path):
    state = {0: {"momentum_buffer": torch.zeros(2), "curvature": torch.zeros(2)}}
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False, "params": [0]}
    (record,) = read({"state": state, "param_groups": [group]}, tmp_path).optimizers
    assert record.algorithm is None


MODERN = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
WHOLE = {"step": 3, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}


@pytest.mark.parametrize(
    ("groups", "entries", "algorithm", "lost"),
    [
        ([MODERN], [WHOLE, WHOLE], "AdamW", []),
        ([MODERN], [WHOLE, WHOLE, without(WHOLE, "exp_avg_sq")], "AdamW", ["state.2.exp_avg_sq"]),
        ([MODERN], [without(WHOLE, "step"), WHOLE, WHOLE], "AdamW", ["state.0.step"]),
        ([MODERN], [without(WHOLE, "exp_avg_sq")] * 2, "AdamW", ["state.0.exp_avg_sq", "state.1.exp_avg_sq"]),
        ([MODERN], [WHOLE, {}], "AdamW", []),
        ([MODERN, without(MODERN, "betas")], [WHOLE], "AdamW", ["param_groups.1.betas"]),
        ([without(MODERN, "betas")], [WHOLE], "AdamW", ["param_groups.0.betas"]),
        ([without(MODERN, "lr")], [WHOLE], "AdamW", ["param_groups.0.lr"]),
        ([{**MODERN, "amsgrad": True}], [WHOLE], "AdamW", ["state.0.max_exp_avg_sq"]),
        ([without(OLD_ADAM, "betas")], [WHOLE], None, []),  # no trace of torch's own groups
        ([without(MODERN, "betas", "eps")], [WHOLE], None, []),
        ([{**without(MODERN, "betas"), "bias_correction": True}], [WHOLE], None, []),
        ([without(MODERN, "betas")], [], None, []),
    ],
)
def test_a_lost_key_is_named_and_makes_no_stranger(groups, entries, algorithm, lost, tmp_path):
    listed = [{**group, "params": [index]} for index, group in enumerate(groups)]
    listed[0]["params"] += range(len(groups), len(entries))
    (record,) = read({"state": dict(enumerate(entries)), "param_groups": listed}, tmp_path).optimizers
    assert record.algorithm == algorithm
    assert lost_keys(record.algorithm, record.groups, record.state) == lost


@pytest.mark.parametrize("name", CLASSES)
def test_nothing_is_lost_of_what_torch_writes(name, tmp_path):
    for options in [options for variant, options in VARIANTS if variant == name]:
        (record,) = read(stepped(name, options).state_dict(), tmp_path).optimizers
        assert lost_keys(record.algorithm, record.groups, record.state) == []


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"LBFGS"}))
def test_what_begins_at_zero_and_what_is_never_negative(name):
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = CLASSES[name]([parameter], lr=0.1)
    for sign in (-1, 1):
        parameter.grad = torch.full((2, 2), sign * 1e-30)
        parameter.grad = parameter.grad.to_sparse() if name == "SparseAdam" else parameter.grad
        optimizer.step()
    for key, value in optimizer.state[parameter].items():
        # ASGD's average starts as the parameter; Adamax uses the maximum of the gradient and eps.
        if torch.is_tensor(value) and key not in {"step", "ax"} | BY_NAME[name].nonzero_initial:
            assert value.abs().max() < 1e-7, key
        if key in BY_NAME[name].magnitudes:
            assert value.min() >= 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (row.name, key)
        for row in TABLE
        for key in sorted(row.group | {"lr"})
        if row.update != "model" and row.gradients == "dense" and row.name in CLASSES
    ],
)
def test_a_lost_option_is_one_without_which_torch_cannot_step(name, key, tmp_path):
    saved = stepped(name, {}).state_dict()
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})  # identifies the class
    whole = dict(saved["param_groups"][0])
    del saved["param_groups"][0][key]
    (record,) = read(saved, tmp_path).optimizers
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4))]
    optimizer = CLASSES[name]([{"params": parameters}, {"params": []}], lr=0.1)
    optimizer.load_state_dict(saved)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    lost = lost_keys(name, record.groups, record.state)
    if lost:
        with pytest.raises(KeyError, match=key):
            optimizer.step()
    else:
        optimizer.step()
    assert whole.keys() - saved["param_groups"][0].keys() == {key}


def test_no_groups_name_no_class():
    assert candidates((), ()) == ()
    group = ParamGroup("g", ("0",), (), (("lr", 0.1),), ())
    assert candidates((group,), ()) == ()
