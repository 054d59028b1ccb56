"""Optimizers of other libraries, imported because the user has named them."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from ckptmove.errors import UsageError
from ckptmove.verification.optimizers import check_override

STEPS = ("step", "parity", "fresh")

SOURCE = """
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        if lr < 0:
            raise ValueError(f"Invalid lr: {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["lion_avg"] = torch.zeros_like(parameter)
                    state["step"] = 0
                state["step"] += 2
                mean = state["lion_avg"]
                parameter.add_((mean * first + parameter.grad * (1 - first)).sign(), alpha=-group["lr"])
                mean.mul_(second).add_(parameter.grad, alpha=1 - second)


class Factored(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("factors", [(torch.zeros(()), None), []])
                state.setdefault("extra", {"rows": torch.zeros(2), "names": ["a", None]})
                state["factors"][0][0].add_(1)
                parameter.add_(state["factors"][0][0], alpha=-group["lr"])


class Keyed(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["by_number"] = {1: torch.zeros(2)}


class Refusing(Lion):
    def step(self, closure=None):
        raise RuntimeError("no kernel for this device")


class Built(Lion):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr, betas, weight_decay)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(lion_avg=torch.zeros_like(parameter), step=0)

    def step(self, closure=None):
        assert all(self.state[parameter] for group in self.param_groups for parameter in group["params"])
        super().step()


class Starting(Lion):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    raise ValueError("warm it up first")
        super().step()


class Following(Lion):
    def step(self, closure):
        closure()
        super().step()


def make(params):
    return Lion(params, 0.1)
"""


def statuses(found):
    return [found[name]["status"] for name in STEPS]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A module of somebody's in the folder at hand, gone from this process afterwards."""
    (tmp_path / "their_optimizers.py").write_text(SOURCE)
    (tmp_path / "no_optimizers.py").write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield importlib.import_module("their_optimizers")
    sys.modules.pop("their_optimizers")
    sys.modules.pop("no_optimizers", None)


def trained(kind, steps=3, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": steps}


@pytest.mark.parametrize("target", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("name", ["Lion", "Factored", "Built"])
def test_one_that_the_user_names_is_stepped(make, answers, theirs, target, name):
    path = make.save(trained(getattr(theirs, name)), device=target)
    found = answers(path, target, optimizer=f"their_optimizers:{name}")
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["optimizer"] == f"their_optimizers:{name}"
    assert found["step"]["evidence"]["proven"] is True
    assert "step counts" not in found["step"]["detail"], "it counts by two"
    assert statuses(answers(path, target)) == ["skipped"] * 3


def test_its_counts_are_told_where_they_are_those_of_torch(make, answers, theirs, monkeypatch):
    monkeypatch.setattr(theirs.Lion, "step", counting)
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Lion")
    assert "step counts went up by one to 4" in found["step"]["detail"]


@torch.no_grad()
def counting(self, closure=None):
    for group in self.param_groups:
        for parameter in group["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
            parameter.sub_(state["mean"])


def test_all_its_parameters_are_stepped_at_once(make, answers, theirs, monkeypatch):
    seen = []
    path = make.save(trained(theirs.Lion))
    monkeypatch.setattr(
        theirs.Lion, "step", lambda self, closure=None: seen.append(len(self.param_groups[0]["params"]))
    )
    answers(path, "cpu", optimizer="their_optimizers:Lion")
    assert set(seen) == {4}


def test_its_state_has_to_be_used(make, answers, theirs, monkeypatch):
    path = make.save(trained(theirs.Lion))
    monkeypatch.setattr(theirs.Lion, "load_state_dict", lambda self, state: None)
    assert answers(path, "cpu", optimizer="their_optimizers:Lion")["fresh"]["status"] == "failed"


def test_state_that_its_step_does_not_read(make, answers, theirs, monkeypatch):
    path = make.save(trained(theirs.Lion))

    def plain(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)

    monkeypatch.setattr(theirs.Lion, "step", plain)
    found = answers(path, "cpu", optimizer="their_optimizers:Lion")
    assert found["fresh"]["detail"].endswith("4 parameters whose options make the step read no state")


def test_one_that_wants_a_closure_gets_one(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cuda:0", optimizer="their_optimizers:Following")
    assert statuses(found) == ["passed"] * 3, found


def test_what_it_raises_is_the_failure(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Refusing")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert "RuntimeError: no kernel for this device" in found["step"]["detail"]


def test_one_that_cannot_begin_anew(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Starting")
    assert found["step"]["status"] == "failed"
    assert "without the stored state it is refused: ValueError: warm it up first" in found["step"]["detail"]


def test_what_its_constructor_refuses(make, answers, theirs):
    tree = trained(theirs.Lion)
    tree["optimizer"]["param_groups"][0]["lr"] = -1.0
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert "their_optimizers:Lion cannot be made: ValueError: Invalid lr: -1.0" in found["step"]["detail"]
    del tree["optimizer"]["param_groups"][0]["lr"]
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert "missing 1 required positional argument: 'lr'" in found["step"]["detail"]


def test_state_that_cannot_be_made_again_is_not_stepped(make, answers, theirs):
    found = answers(make.save(trained(theirs.Keyed)), "cpu", optimizer="their_optimizers:Keyed")
    assert statuses(found) == ["skipped"] * 3
    assert "by_number (a dict with keys that are not text)" in found["step"]["detail"]


def test_a_class_of_torch_may_be_named_in_full(make, answers):
    found = answers(make("AdamW"), "cpu", optimizer="torch.optim:AdamW")
    assert found["step"]["evidence"]["optimizer"] == "AdamW"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:Lion", "there is no module nowhere_at_all; install it beside torch, or run ckptmove in"),
        ("their_optimizers.deep:Lion", "there is no module their_optimizers.deep"),
        (
            "their_optimizers:Tiger",
            "their_optimizers has no Tiger; its optimizers are Built, Factored, Following, Keyed",
        ),
        ("no_optimizers:Lion", "no_optimizers has no Lion; it has no optimizer"),
        ("their_optimizers:make", "that is no torch.optim.Optimizer; name a class that is derived from it"),
        ("torch.optim:Optimizer", "that is no torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_imported_is_an_error_of_usage(make, answers, theirs, name, said):
    with pytest.raises(UsageError, match=r"^--optimizer ") as caught:
        answers(make("AdamW"), "cpu", optimizer=name)
    assert said in str(caught.value)


def test_the_folder_at_hand_comes_after_everything_that_is_installed(make, answers, theirs, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Lion")
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adamw", "did you mean AdamW?"),
        ("lion_pytorch.Lion", "did you mean lion_pytorch:Lion?"),
        ("Lion", "and any as pkg.mod:CLASS"),
        ("lion_pytorch:", "and any as pkg.mod:CLASS"),
        ("a;b:C", "and any as pkg.mod:CLASS"),
    ],
)
def test_what_names_no_class(name, said):
    with pytest.raises(UsageError) as caught:
        check_override(name)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", [None, "SparseAdam", "torch.optim:LBFGS", "lion_pytorch:Lion", "a.b:C.D"])
def test_what_may_name_one(name):
    check_override(name)
