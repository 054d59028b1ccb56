"""The command for a model whose stored keys have another prefix: run, the case then passes."""

from __future__ import annotations

import runpy
import shlex
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ckptmove import convert, verify
from ckptmove.findings.trials import Source
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.training.fixes.edits import NO_FIX
from ckptmove.training.fixes.prefixes import of_error, of_model

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_prefix_in_the_file_alone_needs_no_command(file, saved):
    assert check_of(saved("net"), f"{file}:bare").status == "passed"


def test_a_model_of_other_layers_has_no_command(file, saved):
    check = check_of(saved("bare"), f"{file}:deeper")
    assert check.status == "failed"
    assert "ckptmove convert" not in check.fix


@contextmanager
def source_of(tmp_path, tree):
    path = str(tmp_path / "run.pth")
    torch.save(tree, path)
    with open_checkpoint(path, tree="inventory") as checkpoint:
        yield Source(path, checkpoint)


def module_of(keys):
    """A module with parameters of these names."""
    root = nn.Module()
    for key in keys:
        *path, name = key.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(name, nn.Parameter(torch.ones(2)))
    return root


def error_of(module, given):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        module.load_state_dict(given)
    return raised.value


@pytest.mark.parametrize(
    ("given", "wanted", "options"),
    [
        (["module.0.weight", "module.0.bias"], ["0.weight", "0.bias"], "--strip-prefix module."),
        (["0.weight", "0.bias"], ["body.0.weight", "body.0.bias"], "--add-prefix body."),
        (["a.0.weight", "a.1.weight"], ["b.c.0.weight", "b.c.1.weight"], "--rename 'a.*=b.c.*'"),
        (["0.weight"], ["body.0.weight", "body.0.bias"], None),
        (["0.weight"], ["1.weight"], "--rename '0.*=1.*'"),
        ([f"{n}.weight" for n in range(200)], [f"net.{n}.weight" for n in range(200)], "--add-prefix net."),
    ],
)
def test_a_live_model_that_refuses_the_keys(tmp_path, given, wanted, options):
    tree = {key: torch.ones(2) for key in given}
    expected = f"ckptmove convert {tmp_path}/run.pth {options}" if options else ""
    for own in ({"model": tree}, tree, {"model": tree, "ema": tree}):
        with source_of(tmp_path, own) as source:
            command = of_error(error_of(module_of(wanted), tree), source)
            assert command.text == expected
            assert command.prefix == ("module." if "--strip-prefix" in expected else "")


@pytest.mark.parametrize(
    "others",
    [
        {"model": {"0.weight": 1, "head.weight": 1}},  # a key that fits already
        {"model": {"0.weight": 1}, "other": {"1.weight": 1}},  # another model, which would be renamed too
        {"other": {"1.weight": 1}},  # the keys are of another file
    ],
)
def test_a_command_that_would_break_other_keys_is_not_suggested(tmp_path, others):
    tree = {name: dict.fromkeys(keys, torch.ones(2)) for name, keys in others.items()}
    error = error_of(module_of(["body.0.weight"]), {"0.weight": torch.ones(2)})
    with source_of(tmp_path, tree) as source:
        assert of_error(error, source) == NO_FIX


def test_another_error_has_no_command(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    wide = {"0.weight": torch.ones(3)}
    with source_of(tmp_path, {"model": wide}) as source:
        assert of_error(error_of(module_of(["0.weight"]), wide), source) == NO_FIX
        assert of_error(error_of(module_of(["body.0.weight"]), wide), source) == NO_FIX
        assert of_error(error_of(optimizer, {"state": {}, "param_groups": []}), source) == NO_FIX
        assert of_error(RuntimeError("Missing key(s) in state_dict"), source) == NO_FIX


@pytest.mark.parametrize(
    ("part", "width", "options"),
    [(None, 3, "--add-prefix body."), ("model", 3, "--add-prefix body."), ("other", 3, ""), (None, 4, "")],
)
def test_a_model_is_compared_by_its_part_and_its_shapes(tmp_path, part, width, options):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(width, 2)})
    expected = f"ckptmove convert {tmp_path}/run.pth {options}" if options else ""
    with source_of(tmp_path, {"model": torch.nn.Linear(3, 2).state_dict()}) as source:
        assert of_model(model, part, source).text == expected
        assert of_model(torch.nn.DataParallel(model), part, source).text == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_file_with_code_has_no_command(tmp_path):
    path = str(tmp_path / "run.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), path)
    with open_checkpoint(path, tree="inventory") as checkpoint:
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 2)})
        assert of_model(model, None, Source(path, checkpoint)) == NO_FIX
