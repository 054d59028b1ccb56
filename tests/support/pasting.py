"""Scripts with device bugs, and the fixes for them."""

from __future__ import annotations

import runpy
import sys
import textwrap

import pytest
import torch

from ckptmove.proof.source_edits import Edit


def fix_of(detail):
    """The text after ``fix:`` in the detail of a check."""
    return detail.partition("; fix: ")[2]


HEAD = """
import functools
import numpy
import torch
from torch import nn
import ckptmove

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        self.prepare()

    def prepare(self):
        pass

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.prepare()

    def forward(self, x):
        return self.body(x)

def batch():
    return torch.randn(4, 6), torch.randn(4, 3)
"""
MANY = 8


@pytest.fixture
def fault_of(answers, make, tmp_path, monkeypatch):
    """Return the detail and the evidence of the failed check of a script."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def fault_of(*parts):
        (tmp_path / "train.py").write_text(HEAD + "".join(textwrap.dedent(part) for part in parts))
        check = answers(make(), "cuda:0", case="train.py:case")["case"]
        assert check["status"] == "failed", check["detail"]
        where, fix = (check["evidence"].get(key, "") for key in ("fix_at", "fix"))
        assert check["detail"].partition("; fix: ")[2] == (f"{where}: {fix}" if where else fix)
        assert "\\x0a" not in check["detail"]
        return check["detail"], check["evidence"]

    return fault_of


@pytest.fixture
def mended(answers, make, tmp_path, monkeypatch):
    """Apply the fixes of a script as `--fix` does until its case passes; return them."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def mended(body, path=None, to="cuda:0", *, trains=False):
        source, fixes = (HEAD + textwrap.dedent(body)).encode(), []
        for attempt in range(MANY):
            folder = tmp_path / str(attempt)  # Python caches the files that it has read
            folder.mkdir()
            (folder / "train.py").write_bytes(source)
            monkeypatch.chdir(folder)
            path = path or (trained(folder, make) if trains else make())
            check = answers(path, to, case="train.py:case")["case"]
            fix = fix_of(check["detail"])
            if not fix:
                assert check["status"] == "passed", (check["detail"], fixes)
                return fixes
            fixes.append(fix)
            assert fixes.count(fix) == 1, (check["detail"], fixes)
            if trains and check["detail"].startswith("the model does not fit"):
                path = trained(folder, make)
            else:
                edit = Edit(**check["evidence"]["edit"])
                assert edit.path == str(folder / "train.py"), (check["detail"], fixes)
                source = edit.applied(source)
        raise AssertionError(fixes)

    return mended


def trained(folder, make):
    """The checkpoint that the current version of a script writes."""
    made = runpy.run_path(str(folder / "train.py"))["case"](torch.device("cpu"))
    for _ in range(2):
        loss = made.criterion(made.model(made.batch[0]), made.batch[1])
        made.optimizer.zero_grad()
        loss.backward()
        made.optimizer.step()
    return make.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}, f"{folder.name}.pt")


def case(model="Net().to(device)", criterion="nn.MSELoss()", batch="batch()", step="None", given="criterion"):
    """The function of a case, with some parts replaced."""
    step = step if step.startswith("def") else f"step = {step}"
    lines = [
        f"model = {model}",
        "optimizer = torch.optim.AdamW(model.parameters())",
        f"criterion = {criterion}",
        f"pair = {batch}",
        step,
        f"return ckptmove.Case(model, optimizer, {given}, pair, step)",
    ]
    return "def case(device):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def mine(forward, init="pass", base="Net"):
    """A user's model and its case."""
    prepare, forward = (textwrap.indent(textwrap.dedent(one), " " * 8) for one in (init, forward))
    head = f"class Mine({base}):\n    def prepare(self):\n{prepare}\n    def forward(self, x):\n{forward}\n"
    return head + case("Mine().to(device)")
