"""Optimizers of other libraries, imported when the user names them."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
import simulation
import torch

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.proof.step.optimizers import check_override
from ckptmove.proof.step.trial import IGNORED, UNJUDGED

STEPS = ("step", "parity", "fresh")

SOURCE = """
import os
import random

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
                self.state[parameter]["by_number"] = {1: torch.zeros(2), "1": torch.zeros(2)}


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


class Alone(torch.optim.Optimizer):
    def __init__(self):
        super().__init__([torch.zeros(1)], {})


class Unsigned(Lion):
    __signature__ = "no signature"


class Leaving(Lion):
    def step(self, closure=None):
        raise SystemExit(3)


class LeavingEarly(Lion):
    def __init__(self, params, lr):
        raise SystemExit("no GPU")


class Best(Lion):
    def __init__(self, params, lr, best=float("nan")):
        super().__init__(params, lr)
        self.defaults["best"] = self.param_groups[0]["best"] = best


class Wrapping(Lion):
    def __init__(self, params, base_optimizer):
        super().__init__(params, 0.1)
        self.base_optimizer = base_optimizer


class Grouped(Lion):
    def __init__(self, params, lr):
        if not all(isinstance(group, dict) and "role" in group for group in params):
            raise ValueError("each group needs a role")
        super().__init__(params, lr)


class Drawing(Lion):
    def noise(self):
        return torch.randn(()) + random.random()

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(self.noise(), alpha=-group["lr"])


class Shaking(Drawing):
    def noise(self):
        return int.from_bytes(os.urandom(2), "big") + 1


class Modal(Lion):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr, betas, weight_decay)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self):
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure=None):
        if not all(group["train_mode"] for group in self.param_groups):
            raise Exception("not in train mode")
        super().step()


class Growing(Lion):
    def __init__(self, params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, growth_rate=float("inf"), warm=1):
        assert warm < 9, "too warm"
        if lr <= 0:
            raise ValueError("lr has to be positive")
        super().__init__(params, lr, betas, weight_decay)
        for group in self.param_groups:
            group.update(growth_rate=growth_rate, warm=warm)
        self.defaults.update(growth_rate=growth_rate, warm=warm)


class Bounding(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("lowest", torch.full((2,), torch.inf))
            self.state[parameter].setdefault("mask", torch.ones(2, dtype=torch.bool))
            self.state[parameter]["mean"] = torch.zeros(2) / self.state[parameter].get("count", torch.ones(2))


class Waiting(Lion):
    def step(self, closure=None):
        pass


class Matrices(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("lion_avg", torch.zeros_like(parameter))
            if parameter.dim() == 2:
                mean.lerp_(parameter.grad, 0.1)
                parameter.sub_(mean, alpha=0.1)
            else:
                parameter.sub_(parameter.grad, alpha=0.1)


class Pausing(Lion):
    def step(self, closure=None):
        if self.param_groups[0]["lr"]:
            super().step()


class Half(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("lion_avg", torch.zeros_like(parameter))
            if parameter.dim() == 2:
                mean.lerp_(parameter.grad, 0.1)


class Shared(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        if self.state and "total" not in self.state and any(s.get("step", 0) > 2 for s in self.state.values()):
            raise RuntimeError("total is missing")
        super().step()
        self.state["total"] = {"count": torch.ones(2)}


class OnFirst(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]["params"][0]
        flat = torch.cat([parameter.grad.flatten() for parameter in self.param_groups[0]["params"]])
        mean = self.state[first].setdefault("mean", torch.zeros_like(flat))
        mean.add_(flat)
        first.sub_(mean.sum())


class Accelerated(Lion):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].device.type == "cpu":
            raise NotImplementedError("there is a kernel for the GPU alone")
        super().step()


def make(params):
    return Lion(params, 0.1)
"""


def statuses(found):
    return [found[name]["status"] for name in STEPS]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A user's module in the working directory, removed from this process afterwards."""
    (tmp_path / "their_optimizers.py").write_text(SOURCE)
    (tmp_path / "no_optimizers.py").write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield importlib.import_module("their_optimizers")
    sys.modules.pop("their_optimizers")
    sys.modules.pop("no_optimizers", None)


def trained(kind, steps=3, mode="train", model=None, **options):
    torch.manual_seed(0)
    model = model or torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = kind(model.parameters(), **{"lr": 1e-3, **options})
    getattr(optimizer, "train", bool)()
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    getattr(optimizer, mode, bool)()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": steps}


@pytest.mark.parametrize("target", ["cpu", "cuda:0", "mps"])
@pytest.mark.parametrize("name", ["Lion", "Factored", "Built"])
def test_one_that_the_user_names_is_stepped(make, answers, theirs, target, name):
    path = make.save(trained(getattr(theirs, name)), device=target)
    found = answers(path, target, optimizer=f"their_optimizers:{name}")
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["optimizer"] == f"their_optimizers:{name}"
    assert found["step"]["evidence"]["proven"] is True
    assert found["step"]["evidence"]["counted"] == 0, "it counts by two"
    assert statuses(answers(path, target)) == ["skipped"] * 3


def test_its_counts_are_told_where_they_are_those_of_torch(make, answers, theirs, monkeypatch):
    monkeypatch.setattr(theirs.Lion, "step", counting)
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Lion")
    assert found["step"]["evidence"]["counted"] == 4


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


@simulation.on_a_simulated_device
def test_a_kernel_of_the_gpu_alone_is_no_fault_of_the_file(make, answers, theirs, monkeypatch):
    path = make.save(trained(theirs.Lion))

    def compiled(self, closure=None):
        given = self.param_groups[0]["params"]
        torch.ops.aten._cudnn_rnn_flatten_weight(given, 1, 1, 0, 1, 1, 1, False, False)

    monkeypatch.setattr(theirs.Lion, "step", compiled)
    found = answers(path, "cuda:0", optimizer="their_optimizers:Lion")["step"]
    assert found["status"] == "skipped"
    assert "not supported by the simulation: aten::_cudnn_rnn_flatten_weight" in found["detail"]


def test_its_state_has_to_be_used(make, answers, theirs, monkeypatch):
    path = make.save(trained(theirs.Lion))
    monkeypatch.setattr(theirs.Lion, "load_state_dict", lambda self, state: None)
    assert answers(path, "cpu", optimizer="their_optimizers:Lion")["fresh"]["status"] == "failed"


def test_the_role_of_its_scalars_is_unknown(make, answers, theirs):
    model = torch.nn.Module()
    model.log_alpha = torch.nn.Parameter(torch.tensor(0.5))
    found = answers(make.save(trained(theirs.Lion, model=model)), "cpu", optimizer="their_optimizers:Lion")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f": 1 parameter {UNJUDGED}")
    assert not found["step"]["evidence"]["proven"]


def test_state_that_its_step_does_not_read(make, answers, theirs, monkeypatch):
    path = make.save(trained(theirs.Lion))

    def plain(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)

    monkeypatch.setattr(theirs.Lion, "step", plain)
    found = answers(path, "cpu", optimizer="their_optimizers:Lion")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(f"4 parameters {IGNORED}")
    evidence = found["step"]["evidence"]
    assert (evidence["moved"], evidence["not_stepped"], evidence["proven"]) == (4, 0, False)
    assert evidence["unproven"].endswith(" model.0.bias, model.0.weight, model.1.bias and 1 more")


def test_state_that_is_carried_along_is_not_read(make, answers, theirs):
    path = make.save(trained(theirs.Lion), device="cpu")
    found = answers(path, "cpu", optimizer="their_optimizers:Matrices")
    assert statuses(found) == ["passed"] * 3, found
    evidence = found["step"]["evidence"]
    assert (evidence["moved"], evidence["not_stepped"], evidence["proven"]) == (4, 0, False)
    assert evidence["unproven"] == "the step does not read the state of model.0.bias, model.1.bias"
    assert found["fresh"]["evidence"] == {"with_state": 4, "changed": 2}


@pytest.mark.parametrize(("name", "stepped"), [("Lion", 4), ("Pausing", 0), ("Half", 2)])
def test_a_learning_rate_of_zero_does_not_prove_what_a_class_does(make, answers, theirs, name, stepped):
    tree = trained(theirs.Lion)
    tree["optimizer"]["param_groups"][0]["lr"] = 0.0
    found = answers(make.save(tree, device="cpu"), "cpu", optimizer=f"their_optimizers:{name}")
    evidence = found["step"]["evidence"]
    assert (evidence["not_stepped"], evidence["proven"]) == (4 - stepped, stepped == 4), found
    assert found["step"]["status"] == ("passed" if stepped else "skipped")


def test_one_that_wants_a_closure_gets_one(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cuda:0", optimizer="their_optimizers:Following")
    assert statuses(found) == ["passed"] * 3, found


def test_what_it_raises_for_the_state_of_the_file_alone_is_the_failure(make, answers, theirs):
    tree = trained(theirs.Lion)
    del tree["optimizer"]["state"][2]["lion_avg"]
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert statuses(found) == ["failed", "skipped", "skipped"]
    assert "KeyError: 'lion_avg': " in found["step"]["detail"]
    assert " parameter 2 " in found["step"]["detail"]


@pytest.mark.parametrize(
    ("trained_with", "named", "said"),
    [
        ("Lion", "Refusing", "RuntimeError: no kernel for this device"),
        ("Lion", "Wrapping", "missing 1 required positional argument: 'base_optimizer'"),
        ("Lion", "Grouped", "ValueError: each group needs a role"),
        ("Lion", "Alone", "ValueError: "),
        ("Lion", "Unsigned", "TypeError: "),
        ("Lion", "Leaving", "SystemExit: 3"),
        ("Lion", "LeavingEarly", "SystemExit: no GPU"),
        ("Lion", "Waiting", "neither a parameter nor a moment changed"),
        ("OnFirst", "OnFirst", "it refuses to step 1 of 4 parameters, and the others have no state"),
    ],
)
def test_one_that_cannot_be_stepped_here_is_not_proven(make, answers, theirs, trained_with, named, said):
    found = answers(make.save(trained(getattr(theirs, trained_with))), "cpu", optimizer=f"their_optimizers:{named}")
    assert found["step"]["status"] == "skipped"
    assert said in found["step"]["detail"]
    assert found["step"]["evidence"]["proven"] is False
    assert "failed" not in statuses(found)


def test_one_that_cannot_begin_anew_is_not_proven(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Starting")
    assert statuses(found) == ["passed", "passed", "skipped"]
    assert found["fresh"]["detail"].endswith(" up first")
    assert found["step"]["evidence"]["proven"] is False


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_random_numbers_are_the_same_in_each_step(make, answers, theirs, target):
    found = answers(make.save(trained(theirs.Drawing), device=target), target, optimizer="their_optimizers:Drawing")
    assert statuses(found) == ["passed"] * 3, found
    assert found["parity"]["evidence"]["furthest"] == 0
    assert found["step"]["evidence"]["proven"] is True


def test_random_numbers_that_cannot_be_repeated_prove_nothing(make, answers, theirs):
    found = answers(make.save(trained(theirs.Lion)), "cpu", optimizer="their_optimizers:Shaking")
    assert found["parity"]["status"] == "skipped"
    assert " random " in found["parity"]["detail"]
    assert found["step"]["evidence"]["proven"] is False


def test_the_generators_of_the_process_stay_as_they_are(make, answers, theirs):
    path = make.save(trained(theirs.Drawing))
    before = torch.get_rng_state(), random.getstate()
    answers(path, "cpu", optimizer="their_optimizers:Drawing")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_another_state_is_no_randomness(make, answers, theirs):
    tree = trained(theirs.Lion)
    original = make.save(tree, "original.pt")
    tree["optimizer"]["state"][0]["lion_avg"].neg_()
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion", against=original)
    assert found["parity"]["status"] == "failed"


def test_one_with_modes_is_put_in_training_mode(make, answers, theirs):
    tree = trained(theirs.Lion)
    tree["optimizer"]["param_groups"][0]["train_mode"] = False
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Modal")
    assert statuses(found) == ["passed"] * 3, found


@pytest.mark.parametrize(
    ("option", "value", "status"),
    [
        ("growth_rate", float("inf"), "passed"),
        ("growth_rate", float("nan"), "failed"),
        ("lr", 0.0, "passed"),
        ("lr", -1.0, "failed"),
        ("warm", None, "passed"),
        ("warm", 9, "passed"),
    ],
)
def test_options_of_another_library(make, answers, theirs, option, value, status):
    tree = trained(theirs.Growing)
    tree["optimizer"]["param_groups"][0][option] = value
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Growing")
    assert found["step"]["status"] == status, found


@pytest.mark.parametrize(("value", "status"), [(float("nan"), "passed"), (float("inf"), "failed")])
def test_an_option_that_is_no_number_by_default(make, answers, theirs, value, status):
    tree = trained(theirs.Best)
    tree["optimizer"]["param_groups"][0]["best"] = value
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Best")
    assert found["step"]["status"] == status, found


@pytest.mark.parametrize(("key", "status"), [("lowest", "passed"), ("count", "failed")])
def test_an_infinite_value_is_a_fault_where_the_step_has_made_it(make, answers, theirs, key, status):
    tree = trained(theirs.Bounding)
    for state in tree["optimizer"]["state"].values():
        state.setdefault(key, torch.zeros(2))
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Bounding")
    assert found["step"]["status"] == status, found
    if key == "lowest":
        assert " 4 mask from bool to float32" in found["step"]["detail"]


def test_one_that_has_no_step_for_the_cpu(make, answers, theirs):
    path = make.save(trained(theirs.Lion))
    found = answers(path, "cuda:0", optimizer="their_optimizers:Accelerated")
    assert statuses(found) == ["passed", "skipped", "skipped"], found
    assert ": NotImplementedError" in found["parity"]["detail"]
    assert found["step"]["evidence"]["proven"] is False


def test_state_by_a_name_of_its_own_is_not_stepped(make, answers, theirs):
    path = make.save(trained(theirs.Shared))
    assert [one.code for one in ckptmove.inspect(path).findings if one.severity.value == "error"] == []
    found = answers(path, "cpu", optimizer="their_optimizers:Lion")
    assert found["step"]["status"] == "passed"
    assert " optimizer.state.total " in found["step"]["evidence"]["unproven"]


def test_the_named_class_is_for_the_optimizer_that_is_not_known(make, answers, theirs):
    tree = {**trained(theirs.Lion), "second": make.tree("SGD", momentum=0.9)["optimizer"]}
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert found["step"]["evidence"]["optimizer"] == "their_optimizers:Lion, SGD"


def test_slow_weights_are_not_stepped(make, answers):
    tree = make.tree("AdamW")
    slow = [torch.zeros(5, 6)]
    tree["optimizer"] = {"base_optimizer": tree["optimizer"], "slow": slow}
    found = answers(make.save(tree), "cpu")
    assert found["step"]["status"] == "passed"
    assert found["step"]["evidence"]["unproven"] == "the optimizer's own optimizer.slow.0 not stepped"
    tree["optimizer"] = {**tree["optimizer"]["base_optimizer"], "slow": slow * 2}
    found = answers(make.save(tree), "cpu")
    assert " optimizer.slow.0 and 1 more " in found["step"]["evidence"]["unproven"]


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", ["schedulefree:AdamWScheduleFree", "prodigyopt:Prodigy"])
def test_published_ones(make, answers, name, target):
    module, _, last = name.partition(":")
    tree = trained(getattr(importlib.import_module(module), last), mode="eval")
    found = answers(make.save(tree, device=target), target, optimizer=name)
    assert statuses(found) == ["passed"] * 3, found
    assert found["step"]["evidence"]["proven"] is True


def test_what_its_constructor_refuses(make, answers, theirs):
    tree = trained(theirs.Lion)
    tree["optimizer"]["param_groups"][0]["lr"] = -1.0
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert found["step"]["status"] == "failed"
    assert "Invalid lr: -1.0" in found["step"]["detail"]
    del tree["optimizer"]["param_groups"][0]["lr"]
    found = answers(make.save(tree), "cpu", optimizer="their_optimizers:Lion")
    assert "argument: 'lr'" in found["step"]["detail"]


def test_state_that_cannot_be_made_again_is_not_stepped(make, answers, theirs):
    found = answers(make.save(trained(theirs.Keyed)), "cpu", optimizer="their_optimizers:Keyed")
    assert statuses(found) == ["skipped"] * 3
    assert "by_number" in found["step"]["detail"]


def test_a_class_of_torch_may_be_named_in_full(make, answers):
    found = answers(make("AdamW"), "cpu", optimizer="torch.optim:AdamW")
    assert found["step"]["evidence"]["optimizer"] == "AdamW"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:Lion", "no module nowhere_at_all; install it"),
        ("their_optimizers.deep:Lion", "no module their_optimizers.deep"),
        (
            "their_optimizers:Tiger",
            "their_optimizers has no Tiger; its optimizers are ",
        ),
        ("no_optimizers:Lion", "no_optimizers has no Lion; it has no optimizer"),
        ("their_optimizers:make", "not a subclass of torch.optim.Optimizer"),
        ("torch.optim:Optimizer", "torch.optim:Optimizer: not a "),
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
        ("Lion", "; others as pkg.mod:CLASS"),
        ("lion_pytorch:", "; others as pkg.mod:CLASS"),
        ("a;b:C", "; others as pkg.mod:CLASS"),
    ],
)
def test_what_names_no_class(name, said):
    with pytest.raises(UsageError) as caught:
        check_override(name)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", [None, "SparseAdam", "torch.optim:LBFGS", "lion_pytorch:Lion", "a.b:C.D"])
def test_what_may_name_one(name):
    check_override(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:Lion", "no module nowhere_at_all"),
        ("breaks:Lion", "optimizer='breaks:Lion' cannot be imported: ZeroDivisionError: division by zero"),
        ("leaves:Lion", "optimizer='leaves:Lion' cannot be imported: SystemExit: 7"),
    ],
)
def test_an_optimizer_that_cannot_be_imported_is_an_error_of_usage(make, tmp_path, monkeypatch, name, said):
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        ckptmove.verify(make(), optimizer=name)
    assert said in str(caught.value)
