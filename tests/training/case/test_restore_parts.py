"""A case with a scheduler, a scaler, an average and other parts."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from ckptmove.case import Case
from ckptmove.errors import CaseUnusable
from ckptmove.training.case.parts import require_usable_case

HEAD = """
import torch
from torch import nn
import ckptmove

class Part:
    def load_state_dict(self, state):
        self.state = state

class Generators(Part):
    def load_state_dict(self, state):
        self.state = state
        torch.set_rng_state(state)

class Refusing:
    def load_state_dict(self, state):
        raise KeyError("last_epoch")

def case(device):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    batch = torch.randn(4, 6), torch.randn(4, 3)

    def made(**parts):
        return ckptmove.Case(model, optimizer, nn.MSELoss(), batch, **parts)

"""
SCHEDULER = {"last_epoch": 4, "base_lrs": [0.1]}
SCALER = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
EMA = {"weight": torch.rand(3)}


@pytest.fixture
def case_check(answers, make, tmp_path, monkeypatch):
    """The check of a case on a checkpoint with more parts."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def case_check(body, to="cuda:0", **more):
        (tmp_path / "train.py").write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
        path = make.save({**make.tree(lr=0.125), **more}, stay=("step", "rng"))
        return answers(path, to, case="train.py:case")["case"]

    return case_check


@pytest.mark.parametrize("to", ["cuda:0", "cpu"])
def test_every_part_is_restored_before_the_step(case_check, to):
    body = """
    scheduler, scaler, ema, rng = Part(), Part(), Part(), Generators()

    def step(batch):
        assert scheduler.state == {"last_epoch": 4, "base_lrs": [0.1]}
        assert scaler.state["scale"] == 1024.0
        assert ema.state["weight"].device == device and rng.state.device.type == "cpu"
        return nn.functional.mse_loss(model(batch[0].to(device)), batch[1].to(device))

    return made(step=step, scheduler=scheduler, scaler={"scaler": scaler}, ema=ema, extra={"rng": rng})
    """
    check = case_check(body, to, scheduler=SCHEDULER, scaler=SCALER, ema=EMA, rng=torch.get_rng_state())
    assert check["status"] == "passed", check["detail"]
    assert (check["evidence"]["proven"], check["evidence"]["not_taken"]) == (True, [])


#: Objects of a case that do not have the state that they were given.
REFUTED = {
    "another class": ("scheduler", "torch.optim.lr_scheduler.StepLR(optimizer, 9)"),
    "disabled": ("scaler", "torch.amp.GradScaler(enabled=False)"),
    "not set": ("rng", "Part()"),
}


@pytest.mark.parametrize(("field", "built"), REFUTED.values(), ids=REFUTED)
def test_an_object_without_the_state_has_not_taken_it(case_check, field, built):
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9).state_dict()
    part = {"scheduler": cosine, "scaler": SCALER, "rng": torch.Generator().manual_seed(5).get_state()}[field]
    given = f"extra={{'rng': {built}}}" if field == "rng" else f"{field}={built}"
    evidence = case_check(f"return made({given})", **{field: part})["evidence"]
    assert (evidence["not_taken"], evidence["proven"]) == ([field], False)


def test_a_model_of_another_dtype_is_not_proven(case_check):
    body = "model.bfloat16(); batch = [one.bfloat16() for one in batch]\nreturn made()"
    evidence = case_check(body)["evidence"]
    assert (evidence["proven"], len(evidence["cast"])) == (False, 4)


#: More parts of the checkpoint, those of the case, and the outcome with the parts that are left or to choose from.
CASES = {
    "parts without an object": ({"scheduler": SCHEDULER, "scaler": SCALER}, "scaler=Part()", "passed", ["scheduler"]),
    "no part for an object": ({}, "scheduler=Part()", "failed", None),
    "no key for an object": ({}, "extra={'loader': Part()}", "failed", ["model", "optimizer", "epoch"]),
    "a number": ({"seed": 3}, "extra={'seed': Part(), 'epoch': Part()}", "passed", []),
    "several parts": (
        {"lr_schedulers": [SCHEDULER, SCHEDULER | {"last_epoch": 5}]},
        "scheduler=Part()",
        "skipped",
        ["lr_schedulers.0", "lr_schedulers.1"],
    ),
    "one of several parts": (
        {"lr_schedulers": [SCHEDULER, SCHEDULER | {"last_epoch": 5}]},
        "scheduler={'lr_schedulers.1': Part()}",
        "passed",
        ["lr_schedulers.0"],
    ),
    "a list of parts": ({"lr_schedulers": [SCHEDULER]}, "scheduler={'lr_schedulers': Part()}", "passed", []),
    "an object that refuses it": ({"scheduler": SCHEDULER}, "scheduler=Refusing()", "failed", None),
    "an object of Python": ({"scheduler": {"fn": torch.nn.ReLU(), "gamma": 0.1}}, "scheduler=Part()", "skipped", None),
}


@pytest.mark.parametrize(("more", "parts", "status", "named"), CASES.values(), ids=CASES)
def test_the_parts_of_a_case_and_of_its_checkpoint(case_check, more, parts, status, named):
    check = case_check(f"return made({parts})", **more)
    evidence = check["evidence"]
    assert (check["status"], evidence["proven"]) == (status, status == "passed" and not named)
    if status == "passed":
        assert evidence["not_taken"] == named
    elif named:
        assert evidence["candidates"] == named


@pytest.mark.parametrize(
    ("line", "to", "lost"),
    [
        ("optimizer.param_groups[0]['lr'] = 0.25", [0.25], False),
        ("torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)", [0.0625], True),
        ("", [], False),
    ],
)
def test_the_options_of_a_case_are_compared_at_its_step(case_check, line, to, lost):
    check = case_check(f"""
    def step(batch):
        {line or "pass"}
        return nn.functional.mse_loss(model(batch[0].to(device)), batch[1].to(device))

    return made(step=step)
    """)
    assert [one["to"] for one in check["evidence"]["options"]] == to
    assert check["evidence"]["proven"] is not lost


@pytest.mark.parametrize(
    "parts", [{"scheduler": 3}, {"ema": {"ema": 3}}, {"extra": torch.nn.Linear(1, 1)}, {"extra": {"rng": 3}}]
)
def test_an_object_without_load_state_dict_is_a_mistake_of_usage(parts):
    model = torch.nn.Linear(1, 1)
    case = Case(model, torch.optim.SGD(model.parameters()), **parts)
    with pytest.raises(CaseUnusable, match=next(iter(parts))):
        require_usable_case(case, "train.py:case")
