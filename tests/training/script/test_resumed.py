"""What a script restores beside model and optimizer: options of groups, schedulers, scalers, averages, RNG states."""

from __future__ import annotations

import gc
import random
import sys
import types

import pytest
import torch
from torch.optim import lr_scheduler

BUILT = """
import argparse, copy, random, sys
import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
stored = torch.load(parser.parse_args().resume, map_location="cpu") if {early} else None
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
"""
LOADED = """
stored = torch.load(parser.parse_args().resume, map_location="cpu")
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
"""
LOOP = """
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 6, device=device)).square().mean().backward()
    optimizer.step()
"""
SCALER = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
CUDA = torch.zeros(16, dtype=torch.uint8)
MADE = "one = lr_scheduler.CosineAnnealingLR(optimizer, 9); "
COSINE = lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.ones(1)], lr=0.125), 9, 0.01).state_dict()
NUMPY = ("MT19937", torch.arange(624), 623, 0, 0.0)


@pytest.fixture
def ran(answers, make, tmp_path, monkeypatch):
    """The check of a script on a checkpoint with more parts."""
    monkeypatch.chdir(tmp_path)

    def ran(*parts, to="cuda:0", **more):
        gc.collect()  # objects of another script with the values of a part
        (tmp_path / "train.py").write_text("".join(parts).replace("{early}", "False"))
        tree = make.tree(lr=0.125)
        path = make.save({**tree, **more}, device="cpu", stay=())
        check = answers(path, to, script="train.py", script_args=("--resume", path))["script"]
        assert check["status"] == "passed", check["detail"]
        return check["evidence"]

    return ran


#: Lines around the load, and what they do to options: name, value at the step, and whether the stored one is lost.
OPTIONS = {
    "nothing": (LOADED, []),
    "rates that are kept": (
        LOADED + "lr_scheduler.CosineAnnealingLR(optimizer, 10); lr_scheduler.StepLR(optimizer, 3)\n",
        [],
    ),
    "a scheduler before the load": ("lr_scheduler.LinearLR(optimizer, 0.5)\n" + LOADED, []),
    "a scheduler after the load": (LOADED + "lr_scheduler.LinearLR(optimizer, 0.5)\n", [("lr", 0.0625, True)]),
    "a rate of the script": (LOADED + "optimizer.param_groups[0]['lr'] = 0.25\n", [("lr", 0.25, False)]),
    "groups that are not restored": (
        LOADED.replace(
            'load_state_dict(stored["optimizer"])',
            'load_state_dict(optimizer.state_dict() | {"state": stored["optimizer"]["state"]})',
        ),
        [("lr", 0.5, True)],
    ),
    "an optimizer of another class of the script": (
        """
class Own(torch.optim.AdamW):
    def load_state_dict(self, state):
        groups = [a | {"params": b["params"]} for a, b in zip(state["param_groups"], self.param_groups)]
        values = [p for group in groups for p in group["params"]]
        self.__setstate__({"state": {p: state["state"][i] for i, p in enumerate(values)}, "param_groups": groups})

optimizer = Own(model.parameters())
"""
        + LOADED
        + "optimizer.param_groups[0]['lr'] = 0.25\n",
        [("lr", 0.25, False)],
    ),
}


@pytest.mark.parametrize(("lines", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_is_lost_is_not_proven(ran, lines, expected):
    evidence = ran(BUILT, lines, LOOP, to="cpu")
    assert [(one["option"], one["to"], one["lost"]) for one in evidence["options"]] == expected
    assert all(one["from"] == 0.125 for one in evidence["options"])
    assert evidence["proven"] is not any(lost for _, _, lost in expected)


@pytest.mark.parametrize("is_restored", [True, False])
def test_an_option_that_is_an_object_is_compared(ran, make, is_restored):
    stored = make.tree(lr=0.125)["optimizer"]
    stored["param_groups"][0]["ranks"] = {"a": [1, (2,)]}
    lines = LOADED if is_restored else OPTIONS["groups that are not restored"][0]
    evidence = ran(BUILT, lines, LOOP, to="cpu", optimizer=stored)
    assert ("ranks" in [one["option"] for one in evidence["options"]]) is not is_restored
    assert evidence["proven"] is is_restored


#: Parts of the checkpoint, the line that takes them, and the paths that are left.
PARTS = {
    "nothing": ({"scaler": SCALER, "rng": torch.get_rng_state()}, "", ["rng", "scaler"]),
    "a scaler": ({"scaler": SCALER}, "scaler = torch.amp.GradScaler(); scaler.load_state_dict(stored['scaler'])", []),
    "by its values": ({"scaler": SCALER | {"_growth_tracker": 0}}, "scaler = torch.amp.GradScaler('cuda', 1024.0)", []),
    "RNG states": (
        {"rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": NUMPY, "cuda": [CUDA]}},
        """
rng = stored["rng"]
torch.random.set_rng_state(new_state=rng["torch"])
random.setstate(rng["python"])
torch.cuda.set_rng_state_all(rng["cuda"])
np.random.set_state((rng["numpy"][0], np.array(rng["numpy"][1].tolist(), dtype="uint32"), *rng["numpy"][2:]))
""",
        [],
    ),
    "a generator": ({"rng": torch.get_rng_state()}, "one = torch.Generator(); one.set_state(stored['rng'])", []),
    "a generator of the device": ({"rng": CUDA}, "one = torch.Generator(device); one.set_state(stored['rng'])", []),
    "a generator of Python": ({"rng": random.getstate()}, "one = random.Random(); one.setstate(stored['rng'])", []),
    "a generator that is thrown away": ({"rng": random.getstate()}, "random.Random().setstate(stored['rng'])", ["rng"]),
    "a seed after the restore": (
        {"rng": {"torch": torch.get_rng_state(), "python": random.getstate()}},
        "random.setstate(stored['rng']['python']); torch.set_rng_state(stored['rng']['torch']); torch.manual_seed(0)",
        ["rng.torch"],
    ),
    "a scaler that is disabled": (
        {"scaler": SCALER},
        "scaler = torch.amp.GradScaler(enabled=False); scaler.load_state_dict(stored['scaler'])",
        ["scaler"],
    ),
    "a scaler that is built again": (
        {"scaler": SCALER},
        "scaler = torch.amp.GradScaler(); scaler.load_state_dict(stored['scaler']); scaler = torch.amp.GradScaler()",
        ["scaler"],
    ),
    "a scheduler": ({"scheduler": COSINE}, MADE + "one.load_state_dict(stored['scheduler'])", []),
    "a scheduler of another class": (
        {"scheduler": COSINE},
        "one = lr_scheduler.StepLR(optimizer, 9); one.load_state_dict(stored['scheduler'])",
        ["scheduler"],
    ),
    "a scheduler that is built again": (
        {"scheduler": COSINE}, MADE + "one.load_state_dict(stored['scheduler']); " + MADE, ["scheduler"],
    ),
    "one of two equal schedulers": (
        {"schedulers": [dict(COSINE), dict(COSINE)]},
        MADE + "one.load_state_dict(stored['schedulers'][0])",
        ["schedulers.1"],
    ),
    "both of two equal schedulers": (
        {"schedulers": [dict(COSINE), dict(COSINE)]},
        """
both = [lr_scheduler.CosineAnnealingLR(optimizer, 9) for _ in range(2)]
for one, state in zip(both, stored["schedulers"]):
    one.load_state_dict(state)
""",
        [],
    ),
    "a part of a scheduler": (
        {"scheduler": {"last_epoch": 3, "_schedulers": [dict(COSINE)]}},
        MADE + "one.load_state_dict(stored['scheduler']['_schedulers'][0])",
        ["scheduler"],
    ),
    "a call without arguments": (
        {"scaler": SCALER},
        "class Own:\n    def load_state_dict(self):\n        pass\n\nOwn().load_state_dict()",
        ["scaler"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("more", "line", "left"), PARTS.values(), ids=PARTS)
def test_a_part_that_nothing_takes_is_not_proven(ran, more, line, left):
    evidence = ran(BUILT, LOADED, line, LOOP, **more)
    assert (sorted(evidence["not_taken"]), evidence["proven"]) == (left, not left)


EMA = {"0.weight": torch.rand(5, 6), "0.bias": torch.rand(5), "1.weight": torch.rand(3, 5), "1.bias": torch.rand(3)}
#: What a script does with an average, and whether it takes it.
AVERAGES = {
    "nothing": ("", False),
    "a variable": ("shadow = stored['ema']", False),
    "the file in an object": ("class Run: pass\nrun = Run(); run.stored = stored", False),
    "a copy in a variable": ("weight = [one.clone() for one in stored['ema'].values()][0]", False),
    "an attribute": ("class Ema: pass\nema = Ema(); ema.shadow = stored['ema']", True),
    "copies in an attribute": (
        "class Ema: pass\nema = Ema(); ema.shadow = {key: one.clone() for key, one in stored['ema'].items()}",
        True,
    ),
    "the same tensors in another dict": ("class Ema: pass\nema = Ema(); ema.shadow = dict(stored['ema'])", True),
    "values of a module": (
        """
ema = copy.deepcopy(model).requires_grad_(False)
for key, one in ema.named_parameters():
    one.copy_(stored["ema"][key])
""",
        True,
    ),
    "a module": ("ema = copy.deepcopy(model); ema.load_state_dict(stored['ema'])", True),
}


@pytest.mark.parametrize(("line", "is_taken"), AVERAGES.values(), ids=AVERAGES)
def test_an_average_is_taken_if_the_script_holds_its_values(ran, line, is_taken):
    assert ran(BUILT, LOADED, line, LOOP, ema=EMA)["not_taken"] == ([] if is_taken else ["ema"])


@pytest.mark.parametrize("name", ["values of a module", "a variable"])
def test_an_average_on_the_cpu_itself(ran, name):
    line, is_taken = AVERAGES[name]
    assert ran(BUILT, LOADED, line, LOOP, to="cpu", ema=EMA)["not_taken"] == ([] if is_taken else ["ema"])


@pytest.mark.parametrize("to", ["cuda:0", "cpu"])
def test_tensors_without_plain_memory_are_no_average(ran, to):
    lines = """
odd = [torch.empty(5, device="meta"), torch.rand(5).to_sparse()]
freed = torch.rand(5)
freed.untyped_storage().resize_(0)
"""
    assert ran(BUILT, LOADED, lines, LOOP, to=to, ema=EMA)["not_taken"] == ["ema"]


def test_a_frozen_average_is_not_taken_by_the_model(ran, make):
    average = {**make.tree(lr=0.125)["model"], "extra": torch.rand(3)}
    assert ran(BUILT, LOADED, LOOP, ema=average)["not_taken"] == ["ema"]


def test_a_class_of_the_script_is_noted(ran):
    line = "class Ema:\n    def load_state_dict(self, state):\n        self.mean = state['0.weight'].mean()\n\n"
    load = "\nema = Ema(); ema.load_state_dict(stored['ema'])\n"
    assert ran(BUILT, line, LOADED, load, LOOP, ema=EMA)["not_taken"] == []


def test_what_is_restored_before_the_load_is_not_noted(ran):
    early = "torch.manual_seed(0); torch.set_rng_state(torch.get_rng_state())\n"
    early += "optimizer.load_state_dict(optimizer.state_dict())\n"
    assert ran(BUILT, early, LOADED, LOOP)["proven"]


def test_a_second_load_and_another_file_take_nothing(ran):
    other = "torch.save([torch.rand(5)], 'data.pt'); data = torch.load('data.pt')\n"
    assert ran(BUILT, LOADED, other, LOADED, LOOP, scaler=SCALER)["not_taken"] == ["scaler"]


def test_a_class_whose_attributes_cannot_be_set_is_left_alone(ran, monkeypatch):
    class Kind(type):
        def __setattr__(cls, name, value):
            raise TypeError(name)

    frozen = Kind("Frozen", (), {"load_state_dict": lambda self, state: None})
    monkeypatch.setitem(sys.modules, "frozen", types.SimpleNamespace(Frozen=frozen))
    line = "import frozen; frozen.Frozen().load_state_dict(stored['scaler'])\n"
    assert ran(BUILT, LOADED, line, LOOP, scaler=SCALER)["not_taken"] == ["scaler"]
