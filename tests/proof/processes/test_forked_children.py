"""Forked children of `verify`, as in other tests, give the same answers as started ones."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import simulation

import ckptmove
from ckptmove.proof.processes import child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are started here as by users")
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


@pytest.mark.slow
@pytest.mark.unmeasured
@simulation.on_a_simulated_device
def test_a_forked_child_answers_as_one_that_is_started(make, tmp_path, monkeypatch):
    (tmp_path / "case.py").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    path = make("AdamW")
    processes = []

    collect = child.Child.collect

    def collected(started, *rest):
        processes.append(started.process)
        return collect(started, *rest)

    monkeypatch.setattr(child.Child, "collect", collected)
    forked = ckptmove.verify(path, to="cuda:0", case="case.py:make")
    monkeypatch.setattr(child, "subprocess", subprocess)
    started = ckptmove.verify(path, to="cuda:0", case="case.py:make")
    assert [isinstance(one, subprocess.Popen) for one in processes] == [False, True]
    assert forked.proven
    assert timeless(forked) == timeless(started)
    assert forked.findings == started.findings


#: A small checkpoint has two processes too.
COMMAND = """
import sys
from ckptmove.training import run
from ckptmove.proof.processes import group

run._JOB_BYTES = 1
{patch}
sys.argv[1:] = ["verify", *{words!r}, "--to", "cpu", "--jobs", "2", "--json"]
from ckptmove.cli.app import main
main()
"""


def command(patch, *words):
    return [sys.executable, "-c", COMMAND.format(patch=patch, words=words)]


@pytest.mark.slow
def test_the_command_forks_its_children(make):
    path, original = make(device="cpu"), make(name="original.pt", device="cpu")
    made = subprocess.run(
        command("run.worker_command = None", path, "--against", original), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)["results"]
    assert found == json.loads(json.dumps(ckptmove.verify(path, to="cpu", against=original).to_dict()["results"]))


#: Names each checkpoint that is opened, and each pairing.
COUNTS = """
from ckptmove.proof import opened

def counted(function):
    def call(*args, **options):
        with open("calls", "a") as file:
            print(function.__name__, file=file)
        return function(*args, **options)
    return call

opened.open_checkpoint, opened.pair_all = counted(opened.open_checkpoint), counted(opened.pair_all)
run.worker_command = None
"""


@pytest.mark.slow
def test_forks_have_the_tree_of_their_parent(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(command(COUNTS, make(device="cpu")), capture_output=True, check=True)
    assert Path("calls").read_text().split() == ["open_checkpoint", "pair_all"]


#: The first process waits, when it has written its id and that of the other one.
WAITS = """
import os, time

def join(leader, tally):
    with open("pids.new", "w") as file:
        print(os.getpid(), *(one._child.process.pid for one in leader._others), file=file)
    os.rename("pids.new", "pids")
    time.sleep(600)

group.Leader.join = join
"""


@pytest.mark.slow
@pytest.mark.unmeasured
def test_forked_children_end_with_their_parent(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(command(WAITS, make(device="cpu"))) as process:
        while not Path("pids").exists():
            time.sleep(0.05)
        process.kill()
    for pid in Path("pids").read_text().split():
        while Path(f"/proc/{pid}/environ").exists():
            time.sleep(0.05)
