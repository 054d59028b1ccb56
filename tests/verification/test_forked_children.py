"""Forked children of `verify`, as in other tests, give the same answers as started ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import simulation

import ckptmove
from ckptmove.verification import child, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="children are started here as by users"),
    pytest.mark.no_cover,
]
CASE = """
import torch
from ckptmove import Case

def make(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to(device)
    batch = torch.ones(4, 6, device=device), torch.ones(4, 3, device=device)
    return Case(model, torch.optim.AdamW(model.parameters()), torch.nn.MSELoss(), batch)
"""


def timeless(result):
    return [
        one._replace(evidence=tuple(fact for fact in one.evidence if fact[0] != "seconds")) for one in result.checks
    ]


@pytest.mark.parametrize(
    ("to", "case"), [("cpu", None), pytest.param("cuda:0", "case.py:make", marks=simulation.on_a_simulated_device)]
)
def test_a_forked_child_answers_as_one_that_is_started(make, tmp_path, monkeypatch, to, case):
    (tmp_path / "case.py").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    path = make("AdamW", device=to)
    processes = []

    def collected(process, *rest):
        processes.append(process)
        return child.collect(process, *rest)

    monkeypatch.setattr(run, "collect", collected)
    forked = ckptmove.verify(path, to=to, case=case)
    monkeypatch.setattr(child, "subprocess", subprocess)
    started = ckptmove.verify(path, to=to, case=case)
    assert [isinstance(one, subprocess.Popen) for one in processes] == [False, True]
    assert forked.proven
    assert timeless(forked) == timeless(started)
    assert forked.findings == started.findings
