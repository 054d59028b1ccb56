"""The table of `benchmarks/device_bugs.py` for a few scripts, and its mutants."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch")

import device_bugs
from mutations import KINDS, mutants
from simulation import on_a_simulated_device

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks" / "scripts").glob("*.py"))
TRAINING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.layers[0](x * self.scale) + torch.ones(2, device=x.device)

def main(device, path):
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    if path:
        optimizer.load_state_dict(torch.load(path))
    total = torch.zeros(1, device=device)
    for x, y in ():
        x, y = x.to(device), y.to(device)
        noise = torch.randn(2, device=device)
        total += (model(x + noise) - y).cpu().numpy()
"""
MUTATED = {
    "input": "x, y = x, y.to(device)",
    "target": "x, y = x.to(device), y",
    "model": "model = Net()",
    "late_move": "        optimizer.load_state_dict(torch.load(path))\n    model.to(device)",
    "created": "torch.ones(2)",
    "noise": "noise = torch.randn(2)",
    "state": "total = torch.zeros(1)",
    "attribute": "self.scale = torch.ones(2)",
    "plain_list": "self.layers = [nn.Linear(2, 2)]",
    "cpu_forgotten": "(model(x + noise) - y).numpy()",
    "optimizer_state": "slots[key] = value.cpu()",
    "hard_coded": 'x.to("cuda:1" if torch.cuda.is_available() else "cpu")',
}


def test_one_mutant_of_each_kind_that_fits():
    found = {one.kind: one for one in mutants(TRAINING)}
    assert found.keys() == MUTATED.keys()
    for kind, text in MUTATED.items():
        assert text in found[kind].source
        assert found[kind].source != TRAINING
    changed = {
        found[kind].source.splitlines()[line - 1].strip() for kind in ("noise", "state") for line in found[kind].lines
    }
    assert changed == {MUTATED["noise"], MUTATED["state"]}
    assert "x" in found["input"].names


@pytest.mark.slow
def test_every_kind_fits_some_script():
    kinds = set()
    for path in SCRIPTS:
        source = path.read_text()
        for mutant in mutants(source):
            assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(source)), (path.stem, mutant.kind)
            kinds.add(mutant.kind)
    assert kinds == KINDS.keys()
    assert len(SCRIPTS) >= 40


@pytest.mark.slow
@on_a_simulated_device
def test_a_healthy_script_and_a_bug_that_its_fix_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(device_bugs, "_FOLDER", tmp_path)
    rows = [device_bugs.run(task) for task in (("regression", "healthy"), ("regression", "noise"))]
    assert [(row.status, row.named, row.runs) for row in rows] == [("passed", False, 1), ("failed", True, 2)]
    assert ".to(device)" in rows[1].fixes
    table = device_bugs.summary(rows)
    assert "| **all** | 1 | 1 | 1 | 1 |" in table
    assert "1 of 1 healthy scripts pass" in table
    wrong = dataclasses.replace(rows[1], named=False, runs=0)
    assert "| **all** | 1 | 1 | 0 | 0 |" in device_bugs.summary([wrong])
    assert "regression noise: not named, not fixed" in device_bugs.summary([wrong])
