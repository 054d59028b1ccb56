"""The command for a model whose stored keys have another prefix: run, the case then passes."""

from __future__ import annotations

import runpy
import shlex

import pytest
import torch

import ckptmove
from ckptmove import convert, verify
from ckptmove.verification.case.fixes.prefixes import of_message, of_model

CASES = """
import torch
from torch import nn
from ckptmove import Case

def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, layers())

    def forward(self, x):
        return getattr(self, self.name)(x)

def of(model, device):
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return Case(model, optimizer, nn.MSELoss(), (torch.ones(5, 3), torch.ones(5, 2)))

def bare(device):
    return of(layers(), device)

def body(device):
    return of(Net("body"), device)

def net(device):
    return of(Net("net"), device)

def deeper(device):
    return of(nn.Sequential(Net("body"), nn.Linear(2, 2)), device)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cases.py"
    path.write_text(CASES)
    return str(path)


@pytest.fixture
def saved(file, tmp_path):
    def save(name):
        case = runpy.run_path(file)[name]("cpu")
        case.criterion(case.model(case.batch[0]), case.batch[1]).backward()
        case.optimizer.step()
        path = str(tmp_path / "run.pth")
        torch.save({"model": case.model.state_dict(), "optimizer": case.optimizer.state_dict()}, path)
        return path

    return save


def check_of(path, case):
    return next(one for one in verify(path, case=case).checks if one.name == "case")


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("stored", "option", "value"), [("bare", "--add-prefix", "body."), ("net", "--rename", "net.*=body.*")]
)
def test_the_case_passes_after_the_command(file, saved, stored, option, value, tmp_path):
    path = saved(stored)
    check = check_of(path, f"{file}:body")
    assert check.status == "failed"
    assert shlex.split(check.fix) == ["ckptmove", "convert", path, option, value]
    moved = str(tmp_path / "moved.pth")
    convert(path, output=moved, **{option[2:].replace("-", "_"): value})
    assert check_of(moved, f"{file}:body").status == "passed"


def test_a_prefix_in_the_file_alone_needs_no_command(file, saved):
    assert check_of(saved("net"), f"{file}:bare").status == "passed"


def test_a_model_of_other_layers_has_no_command(file, saved):
    check = check_of(saved("bare"), f"{file}:deeper")
    assert check.status == "failed"
    assert "ckptmove convert" not in check.fix


def inventory_of(tmp_path, tree):
    torch.save(tree, tmp_path / "run.pth")
    return ckptmove.inspect(tmp_path / "run.pth").inventory


def message_of(wanted, given):
    def quoted(keys):
        return ", ".join(f'"{key}"' for key in keys)

    return (
        "Error(s) in loading state_dict for Net:\n"
        f"\tMissing key(s) in state_dict: {quoted(wanted)}.\n\tUnexpected key(s) in state_dict: {quoted(given)}."
    )


@pytest.mark.parametrize(
    ("given", "wanted", "options"),
    [
        (["module.0.weight", "module.0.bias"], ["0.weight", "0.bias"], "--strip-prefix module."),
        (["0.weight", "0.bias"], ["body.0.weight", "body.0.bias"], "--add-prefix body."),
        (["a.0.weight", "a.1.weight"], ["b.c.0.weight", "b.c.1.weight"], "--rename 'a.*=b.c.*'"),
        (["0.weight"], ["body.0.weight", "body.0.bias"], None),
        (["0.weight"], ["1.weight"], "--rename '0.*=1.*'"),
    ],
)
def test_the_message_of_load_state_dict(tmp_path, given, wanted, options):
    tree = {key: torch.ones(2) for key in given}
    expected = f"ckptmove convert {tmp_path}/run.pth {options}" if options else ""
    for own in ({"model": tree}, tree, {"model": tree, "ema": tree}):
        assert of_message(message_of(wanted, given), inventory_of(tmp_path, own)) == expected


@pytest.mark.parametrize(
    "others",
    [
        {"model": {"0.weight": 1, "head.weight": 1}},  # a key that fits already
        {"model": {"0.weight": 1}, "other": {"1.weight": 1}},  # another model, which would be renamed too
        {"other": {"1.weight": 1}},  # the message is of another file
    ],
)
def test_a_command_that_would_break_other_keys_is_not_suggested(tmp_path, others):
    tree = {name: dict.fromkeys(keys, torch.ones(2)) for name, keys in others.items()}
    assert not of_message(message_of(["body.0.weight"], ["0.weight"]), inventory_of(tmp_path, tree))


def test_another_message_has_no_command(tmp_path):
    assert not of_message("size mismatch for 0.weight", inventory_of(tmp_path, {"model": {"0.weight": torch.ones(2)}}))


@pytest.mark.parametrize(
    ("part", "width", "options"),
    [(None, 3, "--add-prefix body."), ("model", 3, "--add-prefix body."), ("other", 3, ""), (None, 4, "")],
)
def test_a_model_is_compared_by_its_part_and_its_shapes(tmp_path, part, width, options):
    inventory = inventory_of(tmp_path, {"model": torch.nn.Linear(3, 2).state_dict()})
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(width, 2)})
    expected = f"ckptmove convert {tmp_path}/run.pth {options}" if options else ""
    assert of_model(model, part, inventory) == expected
    assert of_model(torch.nn.DataParallel(model), part, inventory) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_file_with_code_has_no_command(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), tmp_path / "run.pt")
    inventory = ckptmove.inspect(tmp_path / "run.pt").inventory
    assert not of_model(torch.nn.ModuleDict({"body": torch.nn.Linear(3, 2)}), None, inventory)
